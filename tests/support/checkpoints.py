"""Small seeded checkpoints in Hugging Face form, made in a second: every family, with a
byte-level tokenizer beside them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BYTE_VOCAB = 256
BOS_ID, EOS_ID = 256, 257
CONFIG_CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
}


def write_byte_tokenizer(directory: Path, *, bos: bool = True) -> None:
    """A tokenizer with one id per byte below 256, then <|bos|> and <|eos|>; with `bos`, encoding
    begins with <|bos|>.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|bos|>", special=True), AddedToken("<|eos|>", special=True)]
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", BOS_ID)]
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def write_checkpoint(
    directory: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    dtype: str = "bfloat16",
    max_shard_size: str = "10GB",
    init_scale: float = 1.0,
    **overrides: Any,
) -> Path:
    """A random two-layer model of `family` with its tokenizer. overrides go to the transformers
    config class.

    init_scale above 1 sharpens the logits, so that greedy text does not sit on near-ties.
    """
    import torch
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": BYTE_VOCAB + 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": False,
        "initializer_range": 0.08 * init_scale,
        **overrides,
    }
    config = getattr(transformers, CONFIG_CLASSES[family])(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        if settings["tie_word_embeddings"]:
            model.tie_weights()
        # Biases and norms start at constants; random ones make a dropped term visible.
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_byte_tokenizer(directory)
    return directory


def write_pair(directory: Path, *, seed: int = 0, **overrides: Any) -> tuple[Path, Path]:
    """A target and a one-layer draft that share a tokenizer."""
    target = write_checkpoint(directory / "target", seed=seed, **overrides)
    draft = write_checkpoint(
        directory / "draft",
        seed=seed + 1,
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=64,
        head_dim=8,
    )
    return target, draft
