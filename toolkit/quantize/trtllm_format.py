"""Write the TRT-LLM format: config.json and one file per rank, as `trtllm-build --checkpoint_dir`
reads them.

The tensors equal those of ModelOpt's own `export_tensorrt_llm_checkpoint`, with one exception:
W8A16 weights stay float, and the builder quantizes them. (ModelOpt's export holds the whole model
while it splits it, and leaves the model unusable.)

config.json has fields that ModelOpt leaves out if TensorRT-LLM cannot be imported. Without RoPE's
base and scaling the engine would compute with base 10000; without qwen_type and attn_bias a Qwen
engine would be a different model or would not build. They are the fields that TensorRT-LLM's own
`from_hugging_face` writes (tensorrt_llm/models/{llama,qwen}/config.py).
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
from toolkit.facts.trtllm_build import LOGITS_DTYPE
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
    "sliced_weight",
    "trtllm_config",
    "trtllm_dtype",
    "write_trtllm",
]

# ModelOpt raises smaller FP8 KV scales to this value, but only in the TRT-LLM format.
KV_SCALE_FLOOR = 1.0
# TensorRT-LLM's default if the model's config has no seq_length; used by Qwen 1's logn attention.
QWEN_SEQ_LENGTH_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear of TensorRT-LLM.

    members: the linears of the source that it is made of.
    axis: 0 if its rows are divided among the ranks, 1 if its columns are.
    shares_scales: the linears of the source that must have one common FP8 scale, since the engine
    may compute them as one product.
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
    """The slice of each member that `part` holds, along the linear's axis."""
    if linear.name == "attention.qkv":
        return (part.q, part.kv, part.kv)
    return (part.q if linear.name == "attention.dense" else part.mlp,)


def trtllm_dtype(source_dtype: str) -> str:
    """The dtype of the engine: the source's if TensorRT-LLM has engines of it, otherwise float16,
    as ModelOpt chooses.
    """
    return source_dtype if source_dtype in ("float16", "bfloat16") else "float16"


def write_trtllm(
    calibrated: Calibrated, ranks: Ranks, out_dir: Path, done: Callable[[int], None]
) -> None:
    """Write config.json and rank{N}.safetensors. done: called with the number of ranks written.

    Raises UsageError if the model cannot be divided among the ranks, and CheckpointError if linears
    cannot be fused.
    """
    parts = partition(calibrated.source.shape, ranks)
    out_dir.mkdir(parents=True, exist_ok=True)
    config = trtllm_config(calibrated, ranks)
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for part in parts:
        write_shard(out_dir / f"rank{part.rank}.safetensors", _plans(calibrated, part))
        done(part.rank + 1)


def trtllm_config(calibrated: Calibrated, ranks: Ranks) -> dict[str, Any]:
    """The contents of config.json."""
    shape, algorithm = calibrated.source.shape, calibrated.algorithm
    family = FAMILIES[shape.architecture].model_type
    is_qwen = family.startswith("qwen")
    dtype = trtllm_dtype(calibrated.source.dtype)
    scaling = shape.rope_scaling
    return {
        "producer": {"name": "modelopt", "version": version("nvidia-modelopt")},
        "architecture": shape.architecture,
        "dtype": dtype,
        "logits_dtype": LOGITS_DTYPE,
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
        "decoder": "qwen" if is_qwen else "llama",
        "rmsnorm": True,
        "lm_head_bias": False,
        "rotary_base": shape.rope_theta,
        "rotary_scaling": None if scaling is None else {"type": scaling["rope_type"], **scaling},
        "attn_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        **(
            {
                "qwen_type": family,
                "seq_length": QWEN_SEQ_LENGTH_TOKENS,
                "qk_layernorm": shape.qk_norm,
            }
            if is_qwen
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
        for norm, source_norm in (
            ("input_layernorm", "input_layernorm"),
            ("post_layernorm", "post_attention_layernorm"),
        ):
            yield plain(
                f"{ours}.{norm}.weight",
                [f"{theirs}.{source_norm}.weight"],
                [slice(None)],
                shape.hidden_size,
            )
        if shape.qk_norm:
            for letter in "qk":
                yield plain(
                    f"{ours}.attention.{letter}_layernorm.weight",
                    [f"{theirs}.self_attn.{letter}_norm.weight"],
                    [slice(None)],
                    shape.head_dim,
                )
        for linear in LINEARS:
            yield from _linear_plans(calibrated, linear, part, f"{ours}.{linear.name}", theirs)
        yield from _kv_plans(calibrated, layer, f"{ours}.attention")


def _plain_plan(
    calibrated: Calibrated, name: str, sources: list[str], slices: list[slice], rows: int
) -> TensorPlan:
    """The plan of an unquantized tensor: slices of the source's tensors, concatenated in the
    engine's dtype and filled up with zeros to `rows` rows.
    """
    source, dtype = calibrated.source, trtllm_dtype(calibrated.source.dtype)

    def make() -> Tensor:
        import torch

        pieces = [
            read_source(source, source_name)[source_rows].to(getattr(torch, dtype))
            for source_name, source_rows in zip(sources, slices, strict=True)
        ]
        whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        missing = rows - len(whole)
        if not missing:
            return whole
        return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])

    return TensorPlan(
        name, SOURCE_DTYPES[dtype], (rows, *source.tensors[sources[0]].shape[1:]), make
    )


def _linear_plans(
    calibrated: Calibrated, linear: Linear, part: Part, ours: str, theirs: str
) -> Iterator[TensorPlan]:
    """The plans of one linear: its weight, its bias and its scales."""
    source, algorithm = calibrated.source, calibrated.algorithm
    members = [f"{theirs}.{member}" for member in linear.members]
    slices = member_slices(linear, part)
    whole_extents = [source.tensors[f"{member}.weight"].shape for member in members]
    slice_lengths = [
        len(range(*member_slice.indices(whole_extent[linear.axis])))
        for member_slice, whole_extent in zip(slices, whole_extents, strict=True)
    ]
    if linear.axis == 0:
        extent = (sum(slice_lengths), whole_extents[0][1])
    else:
        extent = (whole_extents[0][0], slice_lengths[0])
    if f"{members[0]}.bias" in source.tensors:
        # If the ranks divide the columns, every rank has the whole bias.
        bias_slices = list(slices) if linear.axis == 0 else [slice(None)]
        yield _plain_plan(
            calibrated,
            f"{ours}.bias",
            [f"{member}.bias" for member in members],
            bias_slices,
            extent[0],
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
    input_scale = _input_scale(calibrated, algorithm, linear, theirs)
    if input_scale is not None:
        yield fixed_plan(f"{ours}.activation_scaling_factor", input_scale)
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
    return torch.cat(
        [
            sliced_weight(calibrated, member, axis, member_slice).to(dtype)
            for member, member_slice in zip(members, slices, strict=True)
        ]
    )


def sliced_weight(calibrated: Calibrated, member: str, axis: int, member_slice: slice) -> Tensor:
    """The rows (axis 0) or columns (axis 1) `member_slice` of a member's weight."""
    weight = calibrated.weight(member)
    return weight[member_slice] if axis == 0 else weight[:, member_slice]


def _weight_scale(
    calibrated: Calibrated, algorithm: Algorithm, linear: Linear, layer: str, member: str
) -> Tensor:
    """float32: [out] for the member alone, or [1] that it shares with all linears that the engine
    may fuse it with.
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
    present = [scale for scale in shared if scale is not None]
    return torch.stack(present).max().reshape(1) if present else None


def _smoothing(calibrated: Calibrated, members: list[str]) -> Tensor | None:
    """The smoothing vector of all members; they have the same input. Raises CheckpointError if
    their vectors differ.
    """
    import torch

    vectors = [calibrated.linears[member].pre_quant for member in members]
    if vectors[0] is None:
        return None
    if any(other is None or not torch.equal(other, vectors[0]) for other in vectors):
        raise CheckpointError(
            f"{members[0]} and the linears of the same input are smoothed differently, so they"
            " cannot be fused",
            where=calibrated.source.path,
            hint="name the unquantized checkpoint instead, and let this stage quantize it",
        )
    dtype = getattr(torch, trtllm_dtype(calibrated.source.dtype))
    return vectors[0].to(dtype)


def _joined_scale(scales: list[Tensor], axis: int, slices: tuple[slice, ...]) -> Tensor:
    import torch

    if scales[0].numel() == 1 or axis == 1:
        return scales[0]
    return torch.cat([scale[rows] for scale, rows in zip(scales, slices, strict=True)])


def _codes(
    calibrated: Calibrated,
    algorithm: Algorithm,
    members: list[str],
    axis: int,
    slices: tuple[slice, ...],
    scales: list[Tensor],
) -> Tensor:
    import torch

    pieces = []
    for member, member_slice, scale in zip(members, slices, scales, strict=True):
        weight = sliced_weight(calibrated, member, axis, member_slice)
        has_sliced_scale = axis == 0 and scale.numel() > 1
        piece_scale = scale[member_slice] if has_sliced_scale else scale
        pieces.append(encode_weight(weight, piece_scale, algorithm))
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([codes.view(torch.uint8) for codes in pieces]).view(pieces[0].dtype)


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
