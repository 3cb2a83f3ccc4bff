"""The depth at which GPUs come back.

Invariant: the result lies in [1, batch] for every ratio. Halves round to the even neighbour, as Python's `round` does.
"""


def switch_threshold(ratio: float, batch: int, mini_batch: int) -> int:
    """Sampleable groups that end a lend: clamp(round_half_even(ratio x batch), mini_batch, batch), never below 1.

    Source: verl 0.9.1, PPOTrainerSeparateAsync._switch_threshold; there a batch smaller than its number of mini-batches
    gives 0, and a lend would end before anything was generated.
    """
    return max(1, min(max(round(ratio * batch), mini_batch), batch))
