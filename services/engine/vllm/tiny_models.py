"""Writes tiny models with real weights and a tokenizer, for tests and demos that have no hub.

    python -P -m services.engine.vllm.tiny_models DIRECTORY [NAME]

Invariant: the same name, size and seed give the same weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 1024
"""Room for the 256 byte tokens, the special ones and some fillers; small, so that a sampled text stays readable."""

SPECIAL: Final = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}
CHAT_TEMPLATE: Final = "{% for m in messages %}{{m['role']}}: {{m['content']}}\n{% endfor %}assistant: "
NAMES: Final = ("tiny-llama", "tiny-qwen2")


def write_tiny_model(directory: Path, name: str = "tiny-llama", *, hidden: int = 64, seed: int = 0) -> Path:
    """Write a model of two layers into `directory`/`name` and return that path. ValueError for an unknown name."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    kinds: dict[str, tuple[Any, Any]] = {
        "tiny-llama": (LlamaConfig, LlamaForCausalLM),
        "tiny-qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }
    if name not in kinds:
        raise ValueError(f"no tiny model {name!r}; there are {', '.join(NAMES)}")
    make_config, make_model = kinds[name]
    torch.manual_seed(seed)
    config = make_config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=SPECIAL["<bos>"],
        eos_token_id=SPECIAL["<eos>"],
        pad_token_id=SPECIAL["<pad>"],
        tie_word_embeddings=False,
    )
    path = directory / name
    make_model(config).to(torch.bfloat16).save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = dict(SPECIAL)
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary.setdefault(character, len(vocabulary))
    fillers = VOCABULARY - len(vocabulary)
    vocabulary.update({f"w{index}": len(vocabulary) + index for index in range(fillers)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def main(arguments: list[str]) -> None:
    """Write the models and print where they are."""
    directory = Path(arguments[0])
    for name in arguments[1:] or NAMES:
        print(write_tiny_model(directory, name))


if __name__ == "__main__":
    main(sys.argv[1:])
