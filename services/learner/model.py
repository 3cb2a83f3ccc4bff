"""The tiny model: a Llama of two layers with random weights, as the trainer holds it and as a folder for an engine.

Invariants: float32 throughout, in the trainer and in the engine, so that both choose the same token wherever the two
best differ by more than rounding; a seed gives the same weights; names are those of a Hugging Face checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from services.learner import alphabet

LAYERS: Final = 2
HEADS: Final = 2
HIDDEN: Final = 64
INITIALIZER_RANGE: Final = 0.08
POSITIONS: Final = 128
"""Longest prompt and answer together, in tokens."""


def make_model(seed: int) -> Any:
    """Return a model with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=alphabet.SIZE,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=POSITIONS,
        # An answer ends with its length: the model has nothing to say by ending early.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=alphabet.PAD,
        tie_word_embeddings=False,
        # Wide enough that tokens and places are told apart from the first step on.
        initializer_range=INITIALIZER_RANGE,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).to(torch.float32)


def checkpoint_bytes(model: Any) -> bytes:
    """Return all weights as one safetensors file."""
    return save({name: tensor.detach().contiguous() for name, tensor in model.named_parameters()})


def write_model(model: Any, directory: Path) -> Path:
    """Write weights and configuration where an engine can load them; return the folder."""
    # A bar for a file that is written in a millisecond would only tear the command's own.
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory)
    return directory


def greedy(model: Any, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Return the tokens that the model finds most probable, `length` for each prompt."""
    answers = []
    with torch.no_grad():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(length):
                logits = model(torch.tensor([tokens])).logits[0, -1]
                tokens.append(int(logits.argmax()))
            answers.append(tokens[len(prompt) :])
    return answers
