"""Make the fused tensors of an engine from a checkpoint, and write and read their file.

q, k and v become one linear, gate and up another, so that there are fewer and larger products. INT8
and FP8 codes stay one byte each, so the file is as small as the checkpoint. The names in
`weights.safetensors` are:

    embed.weight  norm.weight
    lm_head.{weight,scale}      absent where tied, unless it is rounded to INT8 (`int8_head`)
    layers.{i}.{input_norm,post_norm,q_norm,k_norm}.weight
    layers.{i}.{qkv,o,gate_up,down}.{weight,scale,input_scale,pre_scale,bias}
        scale float32 [out]; input_scale float32 []
    layers.{i}.{k_scale,v_scale}    float32 [], FP8 KV cache only
        the checkpoint's, or 1 where the engine alone asks for FP8 (`unit_kv_scales`)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit.checkpoints.quantized import Checkpoint, LinearTensors
from toolkit.checkpoints.reader import read_file
from toolkit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "fuse",
    "fuse_layer",
    "fuse_outside",
    "int8_head",
    "load_weights",
    "save_weights",
    "unit_kv_scales",
]

FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}

HEAD_ROWS = 8192  # converted at a time
TINY = 1e-30  # instead of the scale of a row of zeros


def fuse(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every tensor of the engine, in the dtypes of the checkpoint. Raises CheckpointError if parts
    cannot be fused.
    """
    weights = fuse_outside(checkpoint)
    for i in range(checkpoint.shape.num_layers):
        weights |= fuse_layer(checkpoint, i)
    return weights


def fuse_outside(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors before and after the layers: embedding, last norm, LM head."""
    weights = {
        "embed.weight": checkpoint.tensor("model.embed_tokens.weight"),
        "norm.weight": checkpoint.tensor("model.norm.weight"),
    }
    if not checkpoint.shape.tie_word_embeddings:
        weights |= _join("lm_head", [checkpoint.linear("lm_head")], checkpoint.path)
    return weights


def fuse_layer(checkpoint: Checkpoint, i: int) -> dict[str, Tensor]:
    """The tensors of layer i. Raises CheckpointError if parts cannot be fused."""
    source, layer = f"model.layers.{i}", f"layers.{i}"
    weights = {
        f"{layer}.input_norm.weight": checkpoint.tensor(f"{source}.input_layernorm.weight"),
        f"{layer}.post_norm.weight": checkpoint.tensor(f"{source}.post_attention_layernorm.weight"),
    }
    if checkpoint.shape.qk_norm:
        weights[f"{layer}.q_norm.weight"] = checkpoint.tensor(f"{source}.self_attn.q_norm.weight")
        weights[f"{layer}.k_norm.weight"] = checkpoint.tensor(f"{source}.self_attn.k_norm.weight")
    for name, parts in FUSED.items():
        weights |= _join(
            f"{layer}.{name}",
            [checkpoint.linear(f"{source}.{part}") for part in parts],
            checkpoint.path,
        )
    if checkpoint.quantization.kv_cache_quant_algo == "FP8":
        key, value = checkpoint.kv_scales(i)
        weights[f"{layer}.k_scale"] = torch.tensor(key)
        weights[f"{layer}.v_scale"] = torch.tensor(value)
    return weights


def int8_head(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The LM head of these weights, tied or not, as INT8 codes with a scale for each row."""
    head = weights.get("lm_head.weight", weights["embed.weight"])
    codes = torch.empty(head.shape, dtype=torch.int8)
    scale = torch.empty(len(head))
    for start in range(0, len(head), HEAD_ROWS):  # not all of it in float32 at once
        rows = slice(start, start + HEAD_ROWS)
        part = head[rows].float()
        scale[rows] = part.abs().amax(1).clamp_min(TINY) / 127
        codes[rows] = (part / scale[rows, None]).round().to(torch.int8)
    return {"lm_head.weight": codes, "lm_head.scale": scale}


def unit_kv_scales(num_layers: int) -> dict[str, Tensor]:
    """Scales of an FP8 KV cache that nobody has calibrated. At 1, numbers beyond 448 saturate, and
    those below 2^-6 lose bits.
    """
    return {
        f"layers.{i}.{name}": torch.tensor(1.0)
        for i in range(num_layers)
        for name in ("k_scale", "v_scale")
    }


def save_weights(weights: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)


def load_weights(file: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in read_file(file) if name}


def _join(name: str, parts: list[LinearTensors], where: Path) -> dict[str, Tensor]:
    """Join linears that have the same input into one, by concatenating their rows."""
    first = parts[0]
    for part in parts[1:]:
        is_same = part.weight.dtype == first.weight.dtype and part.input_scale == first.input_scale
        if not is_same or not _equal(part.pre_quant_scale, first.pre_quant_scale):
            raise CheckpointError(
                f"{name}: its parts have the same input, but different dtypes or input scales, and"
                " cannot be fused",
                where=where,
                hint="export with ModelOpt's export_hf_checkpoint, which makes them equal",
            )
    joined = {f"{name}.weight": first.weight}  # mapped from its file
    if len(parts) > 1:
        joined[f"{name}.weight"] = torch.cat([part.weight for part in parts])
    if first.weight_scale is not None:
        rows = [
            part.weight_scale.reshape(-1).expand(part.weight.shape[0])
            for part in parts
            if part.weight_scale is not None
        ]
        joined[f"{name}.scale"] = torch.cat(rows)
    if first.input_scale is not None:
        joined[f"{name}.input_scale"] = torch.tensor(first.input_scale, dtype=torch.float32)
    if first.pre_quant_scale is not None:
        joined[f"{name}.pre_scale"] = first.pre_quant_scale.float()
    if any(part.bias is not None for part in parts):
        joined[f"{name}.bias"] = torch.cat(
            [
                (
                    torch.zeros(part.weight.shape[0], dtype=torch.float32)
                    if part.bias is None
                    else part.bias.float()
                )
                for part in parts
            ]
        )
    return joined


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
