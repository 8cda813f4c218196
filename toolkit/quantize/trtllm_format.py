"""The TRT-LLM form: config.json and a file per rank, as `trtllm-build --checkpoint_dir` reads it.

Tensors are equal to ModelOpt's own `export_tensorrt_llm_checkpoint` (which holds the whole model
while it splits it, and ruins it for anything else), except that W8A16 weights stay float for the
builder to quantize. config.json says more than ModelOpt's does where TensorRT-LLM cannot be
imported: without RoPE's base and scaling the engine would compute with base 10000, without
qwen_type and attn_bias a Qwen engine is another model or none at all. These are the fields that
TensorRT-LLM's own `from_hugging_face` writes (tensorrt_llm/models/{llama,qwen}/config.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.shape import FAMILIES
from toolkit.checkpoints.writer import TensorPlan, write_shard
from toolkit.errors import CheckpointError
from toolkit.quantize.algorithms import Algorithm
from toolkit.quantize.calibrated import Calibrated
from toolkit.quantize.codes import encode_weight
from toolkit.quantize.hf_format import SOURCE_DTYPES, fixed_plan
from toolkit.quantize.partition import Part, Ranks, partition
from toolkit.quantize.source import read_source

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KV_SCALE_FLOOR",
    "LINEARS",
    "Linear",
    "member_slices",
    "trtllm_config",
    "trtllm_dtype",
    "write_trtllm",
]

KV_SCALE_FLOOR = (
    1.0  # ModelOpt clamps FP8 KV scales to at least this in the TRT-LLM form, and only there
)
# TensorRT-LLM's default where the model's config has no seq_length; used by Qwen 1's logn attention
QWEN_SEQ_LENGTH = 8192


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear of TensorRT-LLM and what it is made of. axis: 0 when ranks share its rows, 1 when
    they share its columns.

    shares_scales: sources whose FP8 scales must be one, since the engine may run them as one
    product.
    """

    name: str
    members: tuple[str, ...]
    axis: int
    shares_scales: tuple[str, ...]


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")
LINEARS = (
    Linear("attention.qkv", _QKV, 0, _QKV),
    Linear("attention.dense", ("self_attn.o_proj",), 1, ("self_attn.o_proj",)),
    Linear("mlp.fc", ("mlp.gate_proj",), 0, _GATED),
    Linear("mlp.gate", ("mlp.up_proj",), 0, _GATED),
    Linear("mlp.proj", ("mlp.down_proj",), 1, ("mlp.down_proj",)),
)


def member_slices(linear: Linear, part: Part) -> tuple[slice, ...]:
    """What `part` holds of each member, along the linear's axis."""
    if linear.name == "attention.qkv":
        return (part.q, part.kv, part.kv)
    return (part.q if linear.name == "attention.dense" else part.mlp,)


def trtllm_dtype(source_dtype: str) -> str:
    """TensorRT-LLM has engines of two dtypes; ModelOpt takes float16 for every other one."""
    return source_dtype if source_dtype in ("float16", "bfloat16") else "float16"


def write_trtllm(
    calibrated: Calibrated, ranks: Ranks, out_dir: Path, done: Callable[[int], None]
) -> None:
    """Write config.json and rank{N}.safetensors. done: called with the number of ranks written.

    Raises UsageError for a model that does not divide among the ranks, CheckpointError for linears
    that cannot be fused.
    """
    parts = partition(calibrated.source.shape, ranks)
    out_dir.mkdir(parents=True, exist_ok=True)
    config = trtllm_config(calibrated, ranks)
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for part in parts:
        write_shard(out_dir / f"rank{part.rank}.safetensors", _plans(calibrated, part))
        done(part.rank + 1)


def trtllm_config(calibrated: Calibrated, ranks: Ranks) -> dict[str, Any]:
    shape, algorithm = calibrated.source.shape, calibrated.algorithm
    family = FAMILIES[shape.architecture].model_type
    qwen = family.startswith("qwen")
    dtype = trtllm_dtype(calibrated.source.dtype)
    scaling = shape.rope_scaling
    return {
        "producer": {"name": "modelopt", "version": version("nvidia-modelopt")},
        "architecture": shape.architecture,
        "dtype": dtype,
        "logits_dtype": "float16",
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "hidden_size": shape.hidden_size,
        "norm_epsilon": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "head_size": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "position_embedding_type": "rope_gpt_neox",
        "share_embedding_table": False,
        "residual_mlp": False,
        "bias": shape.o_bias,
        "rotary_pct": 1.0,
        "rank": ranks.world_size - 1,
        "decoder": "qwen" if qwen else "llama",
        "rmsnorm": True,
        "lm_head_bias": False,
        "rotary_base": shape.rope_theta,
        "rotary_scaling": None if scaling is None else {"type": scaling["rope_type"], **scaling},
        "attn_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        **(
            {"qwen_type": family, "seq_length": QWEN_SEQ_LENGTH, "qk_layernorm": shape.qk_norm}
            if qwen
            else {}
        ),
        "mapping": {
            "world_size": ranks.world_size,
            "tp_size": ranks.tp_size,
            "pp_size": ranks.pp_size,
        },
        "quantization": {
            "quant_algo": None if algorithm is None else algorithm.name,
            "kv_cache_quant_algo": calibrated.kv_cache_quant_algo,
            "exclude_modules": None if algorithm is None else ["lm_head"],
        },
    }


def _plans(calibrated: Calibrated, part: Part) -> Iterator[TensorPlan]:
    shape = calibrated.source.shape
    plain = partial(_plain_plan, calibrated)
    vocab_rows = part.vocab.stop - part.vocab.start
    if part.first:
        yield plain(
            "transformer.vocab_embedding.weight",
            ["model.embed_tokens.weight"],
            [part.vocab],
            vocab_rows,
        )
    if part.last:
        head = "model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"
        yield plain(
            "transformer.ln_f.weight", ["model.norm.weight"], [slice(None)], shape.hidden_size
        )
        yield plain("lm_head.weight", [head], [part.vocab], vocab_rows)
    for local, layer in enumerate(part.layers):
        ours, theirs = f"transformer.layers.{local}", f"model.layers.{layer}"
        for norm, of in (
            ("input_layernorm", "input_layernorm"),
            ("post_layernorm", "post_attention_layernorm"),
        ):
            yield plain(
                f"{ours}.{norm}.weight", [f"{theirs}.{of}.weight"], [slice(None)], shape.hidden_size
            )
        if shape.qk_norm:
            for p in "qk":
                yield plain(
                    f"{ours}.attention.{p}_layernorm.weight",
                    [f"{theirs}.self_attn.{p}_norm.weight"],
                    [slice(None)],
                    shape.head_dim,
                )
        for linear in LINEARS:
            yield from _linear_plans(calibrated, linear, part, f"{ours}.{linear.name}", theirs)
        yield from _kv_plans(calibrated, layer, f"{ours}.attention")


def _plain_plan(
    calibrated: Calibrated, name: str, sources: list[str], slices: list[slice], rows: int
) -> TensorPlan:
    """Rows of the source's tensors, one after another, in the engine's dtype; rows past their
    end are zeros.
    """
    source, dtype = calibrated.source, trtllm_dtype(calibrated.source.dtype)

    def make() -> Tensor:
        import torch

        found = [
            read_source(source, of)[some].to(getattr(torch, dtype))
            for of, some in zip(sources, slices, strict=True)
        ]
        whole = torch.cat(found) if len(found) > 1 else found[0]
        missing = rows - len(whole)
        return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole

    return TensorPlan(
        name, SOURCE_DTYPES[dtype], (rows, *source.tensors[sources[0]].shape[1:]), make
    )


def _linear_plans(
    calibrated: Calibrated, linear: Linear, part: Part, ours: str, theirs: str
) -> Iterator[TensorPlan]:
    """The weight of one linear, its bias, and its scales."""
    source, algorithm = calibrated.source, calibrated.algorithm
    members = [f"{theirs}.{member}" for member in linear.members]
    slices = member_slices(linear, part)
    whole = [source.tensors[f"{member}.weight"].shape for member in members]
    taken = [
        len(range(*some.indices(extent[linear.axis])))
        for some, extent in zip(slices, whole, strict=True)
    ]
    extent = (sum(taken), whole[0][1]) if linear.axis == 0 else (whole[0][0], taken[0])
    if f"{members[0]}.bias" in source.tensors:
        kept = (
            list(slices) if linear.axis == 0 else [slice(None)]
        )  # where columns are shared, every rank has the whole bias
        yield _plain_plan(
            calibrated, f"{ours}.bias", [f"{member}.bias" for member in members], kept, extent[0]
        )
    if algorithm is None or algorithm.builder_quantizes or members[0] not in calibrated.linears:
        make = partial(_float_weight, calibrated, members, linear.axis, slices)
        yield TensorPlan(f"{ours}.weight", SOURCE_DTYPES[trtllm_dtype(source.dtype)], extent, make)
        return
    scales = [_weight_scale(calibrated, algorithm, linear, theirs, member) for member in members]
    yield TensorPlan(
        f"{ours}.weight",
        algorithm.weight_dtype,
        extent,
        partial(_codes, calibrated, algorithm, members, linear.axis, slices, scales),
    )
    yield fixed_plan(f"{ours}.weights_scaling_factor", _joined_scale(scales, linear.axis, slices))
    inputs = _input_scale(calibrated, algorithm, linear, theirs)
    if inputs is not None:
        yield fixed_plan(f"{ours}.activation_scaling_factor", inputs)
    smoothing = _smoothing(calibrated, members)
    if smoothing is not None:
        yield fixed_plan(
            f"{ours}.prequant_scaling_factor",
            smoothing if linear.axis == 0 else smoothing[slices[0]].clone(),
        )


def _float_weight(
    calibrated: Calibrated, members: list[str], axis: int, slices: tuple[slice, ...]
) -> Tensor:
    import torch

    dtype = getattr(torch, trtllm_dtype(calibrated.source.dtype))
    weights = zip((calibrated.weight(member) for member in members), slices, strict=True)
    return torch.cat(
        [(weight[some] if axis == 0 else weight[:, some]).to(dtype) for weight, some in weights]
    )


def _weight_scale(
    calibrated: Calibrated, algorithm: Algorithm, linear: Linear, layer: str, member: str
) -> Tensor:
    """float32: [out] of the member alone, or [1] that is shared with what the engine may fuse it
    with.
    """
    import torch

    if algorithm.per_channel:
        return calibrated.linears[member].weight
    shared = [calibrated.linears[f"{layer}.{name}"].weight for name in linear.shares_scales]
    return torch.stack(shared).max().reshape(1)


def _input_scale(
    calibrated: Calibrated, algorithm: Algorithm, linear: Linear, layer: str
) -> Tensor | None:
    import torch

    sharing = linear.members if algorithm.per_channel else linear.shares_scales
    shared = [calibrated.linears[f"{layer}.{name}"].input for name in sharing]
    there = [one for one in shared if one is not None]
    return torch.stack(there).max().reshape(1) if there else None


def _smoothing(calibrated: Calibrated, members: list[str]) -> Tensor | None:
    """One vector for all members: they see one input."""
    import torch

    vectors = [calibrated.linears[member].pre_quant for member in members]
    if vectors[0] is None:
        return None
    if any(other is None or not torch.equal(other, vectors[0]) for other in vectors):
        raise CheckpointError(
            f"{members[0]} and its siblings are smoothed differently, so that they cannot be fused",
            where=calibrated.source.path,
            hint="quantize the unquantized checkpoint here",
        )
    dtype = getattr(torch, trtllm_dtype(calibrated.source.dtype))
    return vectors[0].to(dtype)


def _joined_scale(scales: list[Tensor], axis: int, slices: tuple[slice, ...]) -> Tensor:
    import torch

    if scales[0].numel() == 1:
        return scales[0]
    return (
        torch.cat([scale[some] for scale, some in zip(scales, slices, strict=True)])
        if axis == 0
        else scales[0]
    )


def _codes(
    calibrated: Calibrated,
    algorithm: Algorithm,
    members: list[str],
    axis: int,
    slices: tuple[slice, ...],
    scales: list[Tensor],
) -> Tensor:
    import torch

    found = []
    for member, some, scale in zip(members, slices, scales, strict=True):
        weight = calibrated.weight(member)
        if axis == 0:
            found.append(
                encode_weight(weight[some], scale[some] if scale.numel() > 1 else scale, algorithm)
            )
        else:
            found.append(encode_weight(weight[:, some], scale, algorithm))
    if len(found) == 1:
        return found[0]
    return torch.cat([codes.view(torch.uint8) for codes in found]).view(found[0].dtype)


def _kv_plans(calibrated: Calibrated, layer: int, attention: str) -> Iterator[TensorPlan]:
    import torch

    if not calibrated.kv_scales:
        return
    key, value = (
        scale.reshape(1).clamp_min(KV_SCALE_FLOOR) for scale in calibrated.kv_scales[layer]
    )
    yield fixed_plan(f"{attention}.k_cache_scaling_factor", key)
    yield fixed_plan(f"{attention}.v_cache_scaling_factor", value)
    yield fixed_plan(f"{attention}.kv_cache_scaling_factor", torch.maximum(key, value))
