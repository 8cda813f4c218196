"""Check that a checkpoint in the TRT-LLM format holds what was quantized.

The files are read back, rank by rank, and compared with the calibration and the source. Codes are
not compared with other codes but with the weights that they stand for: each must be the nearest
code under the scale in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.reader import TensorInfo, read_header, read_tensor
from toolkit.checkpoints.shape import ModelShape, read_json
from toolkit.errors import CheckpointError
from toolkit.quantize.algorithms import Algorithm
from toolkit.quantize.calibrated import Calibrated
from toolkit.quantize.check import verdict
from toolkit.quantize.codes import row_slices
from toolkit.quantize.partition import Part, Ranks, partition
from toolkit.quantize.source import read_source
from toolkit.quantize.trtllm_format import (
    KV_SCALE_FLOOR,
    LINEARS,
    Linear,
    member_slices,
    sliced_weight,
    trtllm_dtype,
)
from toolkit.records.measured import Finding

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_trtllm"]

CHECKS = ("tensors", "codes", "scales", "unquantized")


def check_trtllm(directory: Path, calibrated: Calibrated, ranks: Ranks) -> tuple[Finding, ...]:
    """Check every rank's file and config.json. The weights that `calibrated` refers to must still
    be readable.
    """
    try:
        config = read_json(directory / "config.json")
        findings = [
            _config(config, calibrated, ranks),
            _rope(config, calibrated.source.shape),
            _quantization(config, calibrated),
        ]
        faults: dict[str, list[str]] = {check: [] for check in CHECKS}
        tensors = weights = 0
        for part in partition(calibrated.source.shape, ranks):
            rank = _Rank(directory / f"rank{part.rank}.safetensors", part, calibrated, faults)
            rank.check()
            tensors += len(rank.tensors)
            weights += rank.weights
    except CheckpointError as exc:
        return (Finding("trtllm: readable", "error", str(exc)),)
    details = {
        "tensors": f"{tensors} in {ranks.world_size} ranks, none missing and none extra",
        "codes": f"{weights} codes, each the nearest to its weight",
        "scales": "as calibrated",
        "unquantized": "equal to the source's",
    }
    findings += [verdict(f"trtllm: {check}", faults[check], details[check]) for check in CHECKS]
    return tuple(findings)


def _config(config: dict[str, Any], calibrated: Calibrated, ranks: Ranks) -> Finding:
    shape = calibrated.source.shape
    wanted = {
        "architecture": shape.architecture,
        "dtype": trtllm_dtype(calibrated.source.dtype),
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "hidden_size": shape.hidden_size,
        "head_size": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "norm_epsilon": shape.rms_norm_eps,
        "attn_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "mapping": {
            "world_size": ranks.world_size,
            "tp_size": ranks.tp_size,
            "pp_size": ranks.pp_size,
        },
    }
    faults = [
        f"{key} is {config.get(key)!r}, must be {value!r}"
        for key, value in wanted.items()
        if config.get(key) != value
    ]
    return verdict(
        "trtllm: config",
        faults,
        f"{shape.architecture} for tp_size {ranks.tp_size}, pp_size {ranks.pp_size}",
    )


def _rope(config: dict[str, Any], shape: ModelShape) -> Finding:
    """If transformers 5.x is installed, ModelOpt's export lacks both base and scaling, and
    TensorRT-LLM then computes with base 10000, unscaled.
    """
    scaling = dict(config.get("rotary_scaling") or {})
    kind = scaling.pop("type", None)
    wanted = shape.rope_scaling or {}
    faults = []
    if config.get("rotary_base") != shape.rope_theta:
        faults.append(f"rotary_base is {config.get('rotary_base')!r}, must be {shape.rope_theta!r}")
    if scaling != wanted or kind != wanted.get("rope_type"):
        faults.append(
            f"rotary_scaling is {config.get('rotary_scaling')!r}, must be {shape.rope_scaling!r}"
        )
    return verdict(
        "trtllm: rope",
        faults,
        f"base {shape.rope_theta:g}, {wanted.get('rope_type', 'no scaling')}",
    )


def _quantization(config: dict[str, Any], calibrated: Calibrated) -> Finding:
    stated = config.get("quantization") or {}
    algorithm = None if calibrated.algorithm is None else calibrated.algorithm.name
    wanted = {"quant_algo": algorithm, "kv_cache_quant_algo": calibrated.kv_cache_quant_algo}
    faults = [
        f"{key} is {stated.get(key)!r}, must be {value!r}"
        for key, value in wanted.items()
        if stated.get(key) != value
    ]
    if algorithm is not None and "lm_head" not in (stated.get("exclude_modules") or []):
        faults.append("exclude_modules does not name lm_head")
    return verdict(
        "trtllm: quant_algo",
        faults,
        f"{algorithm}, KV cache {calibrated.kv_cache_quant_algo or 'not quantized'}",
    )


class _Rank:
    """The checks of one rank's file. Faults are gathered by the name of their check. Every tensor
    that is expected is noted; any other tensor in the file is a fault.
    """

    def __init__(
        self, file: Path, part: Part, calibrated: Calibrated, faults: dict[str, list[str]]
    ) -> None:
        self.tensors: dict[str, TensorInfo] = {info.name: info for info in read_header(file)}
        self.weights = 0
        self._file = file
        self._part = part
        self._calibrated = calibrated
        self._faults = faults
        self._expected: set[str] = set()

    def check(self) -> None:
        part, source = self._part, self._calibrated.source
        if part.first:
            self._same(
                "transformer.vocab_embedding.weight", self._vocabulary("model.embed_tokens.weight")
            )
        if part.last:
            tied = source.shape.tie_word_embeddings
            self._same(
                "lm_head.weight",
                self._vocabulary("model.embed_tokens.weight" if tied else "lm_head.weight"),
            )
            self._same("transformer.ln_f.weight", read_source(source, "model.norm.weight"))
        for local, layer in enumerate(part.layers):
            self._layer(f"transformer.layers.{local}", f"model.layers.{layer}", layer)
        for name in sorted(self.tensors.keys() - self._expected):
            self._fault("tensors", f"{name} does not belong there")

    def _layer(self, ours: str, theirs: str, layer: int) -> None:
        source = self._calibrated.source
        norms = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
        if source.shape.qk_norm:
            norms |= {f"attention.{p}_layernorm": f"self_attn.{p}_norm" for p in "qk"}
        for name, source_name in norms.items():
            self._same(
                f"{ours}.{name}.weight", read_source(source, f"{theirs}.{source_name}.weight")
            )
        for linear in LINEARS:
            self._linear(linear, f"{ours}.{linear.name}", theirs)
        if self._calibrated.kv_scales:
            key, value = (
                max(float(scale), KV_SCALE_FLOOR) for scale in self._calibrated.kv_scales[layer]
            )
            for prefix, wanted in (("k_", key), ("v_", value), ("kv_", max(key, value))):
                name = f"{ours}.attention.{prefix}cache_scaling_factor"
                written = self._read(name)
                if written is not None and float(written) != wanted:
                    self._fault("scales", f"{name} is {float(written):g}, must be {wanted:g}")

    def _linear(self, linear: Linear, ours: str, theirs: str) -> None:
        import torch

        source, algorithm = self._calibrated.source, self._calibrated.algorithm
        members = [f"{theirs}.{member}" for member in linear.members]
        slices = member_slices(linear, self._part)
        if f"{members[0]}.bias" in source.tensors:
            bias_slices = slices if linear.axis == 0 else (slice(None),)
            bias = [
                read_source(source, f"{member}.bias")[rows]
                for member, rows in zip(members, bias_slices, strict=True)
            ]
            self._same(f"{ours}.bias", torch.cat(bias))
        if (
            algorithm is None
            or algorithm.builder_quantizes
            or members[0] not in self._calibrated.linears
        ):
            weights = [
                sliced_weight(self._calibrated, member, linear.axis, member_slice)
                for member, member_slice in zip(members, slices, strict=True)
            ]
            self._same(f"{ours}.weight", torch.cat(weights))
            return
        codes, scale = self._read(f"{ours}.weight"), self._read(f"{ours}.weights_scaling_factor")
        if codes is None or scale is None:
            return
        row = 0
        for member, member_slice in zip(members, slices, strict=True):
            weight = sliced_weight(self._calibrated, member, linear.axis, member_slice)
            rows = slice(row, row + len(weight))
            member_scale = scale[rows] if scale.numel() > 1 else scale
            self._codes(ours, codes[rows], member_scale, weight, algorithm)
            row = rows.stop
        if row != len(codes):
            self._fault("codes", f"{ours}.weight has {len(codes)} rows, must have {row}")
        self._activations(ours, linear, members, slices[0])

    def _codes(
        self, name: str, codes: Tensor, scale: Tensor, weight: Tensor, algorithm: Algorithm
    ) -> None:
        import torch

        if codes.shape != weight.shape or scale.numel() not in (1, len(weight)):
            self._fault(
                "codes", f"{name}.weight is {list(codes.shape)} here, must be {list(weight.shape)}"
            )
            return
        if not bool(torch.isfinite(scale).all()) or not bool((scale > 0).all()):
            self._fault(
                "scales",
                f"{name}.weights_scaling_factor holds values that are not positive and finite",
            )
            return
        wrong = sum(
            _not_nearest(
                codes[rows], scale[rows] if scale.numel() > 1 else scale, weight[rows], algorithm
            )
            for rows in row_slices(weight)
        )
        if wrong:
            self._fault(
                "codes", f"{wrong} codes of {name}.weight are not the nearest to their weights"
            )
        self.weights += codes.numel()

    def _activations(self, ours: str, linear: Linear, members: list[str], columns: slice) -> None:
        """All members share one input scale. It must not be smaller than the scale of any member,
        or that member's inputs would be clipped.
        """
        import torch

        scales = [self._calibrated.linears[member] for member in members]
        if scales[0].input is not None:
            written = self._read(f"{ours}.activation_scaling_factor")
            if written is not None and not all(
                member.input is not None and float(member.input) <= float(written)
                for member in scales
            ):
                self._fault(
                    "scales", f"{ours}.activation_scaling_factor is below the calibrated scale"
                )
        if scales[0].pre_quant is not None:
            written = self._read(f"{ours}.prequant_scaling_factor")
            smoothing = scales[0].pre_quant.to(self._dtype())
            wanted = smoothing if linear.axis == 0 else smoothing[columns]
            if written is not None and not torch.equal(written, wanted):
                self._fault(
                    "scales",
                    f"{ours}.prequant_scaling_factor is not the vector that calibration gave",
                )

    def _vocabulary(self, name: str) -> Tensor:
        """The rows of this rank. Rows past the vocabulary are zeros."""
        import torch

        rows = read_source(self._calibrated.source, name)[self._part.vocab]
        missing = self._part.vocab.stop - self._part.vocab.start - len(rows)
        if not missing:
            return rows
        return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])

    def _same(self, name: str, wanted: Tensor) -> None:
        import torch

        written = self._read(name)
        if written is None:
            return
        if written.dtype != self._dtype() or not torch.equal(written, wanted.to(self._dtype())):
            self._fault("unquantized", f"{name} differs from the source")
        elif not bool(torch.isfinite(written).all()):
            self._fault(
                "unquantized", f"{name} does not fit into {self._dtype()}".replace("torch.", "")
            )

    def _read(self, name: str) -> Tensor | None:
        self._expected.add(name)
        if name in self.tensors:
            return read_tensor(self.tensors[name])
        self._fault("tensors", f"{name} is missing")
        return None

    def _dtype(self) -> Any:
        import torch

        return getattr(torch, trtllm_dtype(self._calibrated.source.dtype))

    def _fault(self, check: str, text: str) -> None:
        self._faults[check].append(f"{self._file.name}: {text}")


def _not_nearest(codes: Tensor, scale: Tensor, weight: Tensor, algorithm: Algorithm) -> int:
    """How many codes are further from their weights than half a step plus the rounding of the
    division.

    The step of INT8 is the scale. E4M3 has 3 bits after the leading one, so half a step is at most
    2^-4 of the value; below E4M3's smallest normal number, 2^-6, it is half of 2^-9.
    """
    import torch

    scale = scale.reshape(-1, 1)
    wanted = weight.float()
    distance = (codes.float() * scale - wanted).abs()
    if algorithm.weight_dtype == "I8":
        half_step = scale * 0.5
    else:
        half_step = torch.maximum(wanted.abs() * 2**-4, scale * 2**-10)
    rounding = wanted.abs() * 2 * torch.finfo(weight.dtype).eps
    return int((~(distance <= half_step + rounding)).sum())
