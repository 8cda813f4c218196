"""Write a small random EAGLE-3 head that fits a stand-in target.

It has the real head's form: which of the target's layers it reads, whether its vocabulary is a part
of the target's, its biases, norms and RoPE. Its weights are random, so its drafts mean nothing; no
engine of the toolkit runs it. The tests write heads of their own configs with the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.heads import (
    FIRST_LAYER,
    LAYER_IDS,
    LM_HEAD,
    HeadShape,
    expected_tensors,
    parse_head,
)
from toolkit.checkpoints.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "TARGET_LAYERS",
    "head_tensors",
    "scaled_head_config",
    "write_head",
    "write_stand_in_head",
]

# The least number of the target's layers: runtimes refuse to choose three among fewer than six, and
# with eight their choice has no layer twice.
TARGET_LAYERS = 8
VOCAB_SHARE = 2  # of a head that drafts a part of the ids: one in so many


def scaled_head_config(head: HeadShape, target: ModelShape) -> dict[str, Any]:
    """The config.json of a head for a stand-in target, as wide as that. head: the shape of the real
    one.
    """
    layers, drafts_all = head.layers, head.draft_vocab_size == head.layers.vocab_size
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": layers.num_layers,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size // (1 if drafts_all else VOCAB_SHARE),
        "max_position_embeddings": layers.max_position_embeddings,
        "rms_norm_eps": layers.rms_norm_eps,
        "rope_theta": layers.rope_theta,
        "rope_scaling": layers.rope_scaling,
        "attention_bias": layers.qkv_bias,
        "mlp_bias": layers.mlp_bias,
        "tie_word_embeddings": False,
        "torch_dtype": layers.dtype,
        "num_aux_hidden_states": head.num_captured,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
    }
    if head.captured_layers is not None:
        layers_read = list(range(1, head.num_captured + 1))
        config["eagle_config"] = {"use_aux_hidden_state": True, LAYER_IDS: layers_read}
    return config


def head_tensors(
    config: dict[str, Any], drafted_ids: Sequence[int], *, seed: int = 0
) -> dict[str, Tensor]:
    """Random float32 tensors for a head's config.json. drafted_ids: the target's id of each draft
    id.
    """
    import torch

    head = parse_head(config, "config.json")
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(head)
    shapes[LM_HEAD] = (head.draft_vocab_size, head.layers.hidden_size)
    tensors = {
        name.replace("layers.0.", FIRST_LAYER): (
            torch.ones(shape)
            if "norm" in name
            else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        )
        for name, shape in shapes.items()
    }
    ids = torch.tensor(list(drafted_ids))
    mask = torch.zeros(head.layers.vocab_size, dtype=torch.bool)
    mask[ids] = True
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = mask
    return tensors


def write_stand_in_head(directory: Path, config: dict[str, Any], *, seed: int) -> None:
    """Write a random head for a config.json of `scaled_head_config`, in its dtype. It drafts the
    target's first ids.
    """
    import torch

    drafted, dtype = config["draft_vocab_size"], getattr(torch, config["torch_dtype"])
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in head_tensors(config, range(drafted), seed=seed).items()
    }
    if drafted == config["vocab_size"]:
        del tensors["d2t"], tensors["t2d"]  # there is nothing to map
    write_head(directory, config, tensors)


def write_head(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a head's folder. Returns it."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors")
    return directory
