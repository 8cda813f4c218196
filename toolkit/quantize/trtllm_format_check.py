"""Does a checkpoint in TRT-LLM's form hold what was quantized?

Read from its files alone and held against the calibration and the source, rank by rank. Codes are
not compared with other codes but with the weights that they stand for: each must be the nearest one
under the scale that the file gives.
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
from toolkit.quantize.codes import row_parts
from toolkit.quantize.partition import Part, Ranks, partition
from toolkit.quantize.source import read_source
from toolkit.quantize.trtllm_format import (
    KV_SCALE_FLOOR,
    LINEARS,
    Linear,
    member_slices,
    trtllm_dtype,
)
from toolkit.records.measured import Finding

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_trtllm"]

CHECKS = ("tensors", "codes", "scales", "unquantized")


def check_trtllm(directory: Path, calibrated: Calibrated, ranks: Ranks) -> tuple[Finding, ...]:
    """Judge every rank's file and config.json. The weights that `calibrated` refers to must
    still be there.
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
    fine = {
        "tensors": f"{tensors} in {ranks.world_size} ranks, none missing and none besides",
        "codes": f"{weights} codes, each the nearest to its weight",
        "scales": "as calibrated",
        "unquantized": "equal to the source's",
    }
    findings += [verdict(f"trtllm: {check}", faults[check], fine[check]) for check in CHECKS]
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
    """An export by ModelOpt beside transformers 5.x has neither, and TensorRT-LLM then computes
    with base 10000, unscaled.
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
    """One rank's file. Faults are gathered under the name of their check; what was asked for is
    noted, the rest is too much.
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
        self._asked: set[str] = set()

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
        for name in sorted(self.tensors.keys() - self._asked):
            self._fault("tensors", f"{name} does not belong there")

    def _layer(self, ours: str, theirs: str, layer: int) -> None:
        source = self._calibrated.source
        norms = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
        if source.shape.qk_norm:
            norms |= {f"attention.{p}_layernorm": f"self_attn.{p}_norm" for p in "qk"}
        for name, of in norms.items():
            self._same(f"{ours}.{name}.weight", read_source(source, f"{theirs}.{of}.weight"))
        for linear in LINEARS:
            self._linear(linear, f"{ours}.{linear.name}", theirs)
        if self._calibrated.kv_scales:
            key, value = (
                max(float(scale), KV_SCALE_FLOOR) for scale in self._calibrated.kv_scales[layer]
            )
            for name, wanted in (("k_", key), ("v_", value), ("kv_", max(key, value))):
                found = self._read(f"{ours}.attention.{name}cache_scaling_factor")
                if found is not None and float(found) != wanted:
                    self._fault(
                        "scales",
                        f"{ours}.attention.{name}cache_scaling_factor is {float(found):g}, must be"
                        f" {wanted:g}",
                    )

    def _linear(self, linear: Linear, ours: str, theirs: str) -> None:
        import torch

        source, algorithm = self._calibrated.source, self._calibrated.algorithm
        members = [f"{theirs}.{member}" for member in linear.members]
        slices = member_slices(linear, self._part)
        if f"{members[0]}.bias" in source.tensors:
            kept = slices if linear.axis == 0 else (slice(None),)
            bias = [
                read_source(source, f"{member}.bias")[some]
                for member, some in zip(members, kept, strict=True)
            ]
            self._same(f"{ours}.bias", torch.cat(bias))
        if (
            algorithm is None
            or algorithm.builder_quantizes
            or members[0] not in self._calibrated.linears
        ):
            weights = zip(
                (self._calibrated.weight(member) for member in members), slices, strict=True
            )
            self._same(
                f"{ours}.weight",
                torch.cat(
                    [
                        weight[some] if linear.axis == 0 else weight[:, some]
                        for weight, some in weights
                    ]
                ),
            )
            return
        codes, scale = self._read(f"{ours}.weight"), self._read(f"{ours}.weights_scaling_factor")
        if codes is None or scale is None:
            return
        row = 0
        for member, some in zip(members, slices, strict=True):
            weight = self._calibrated.weight(member)
            weight = weight[some] if linear.axis == 0 else weight[:, some]
            rows = slice(row, row + len(weight))
            self._codes(
                ours, codes[rows], scale[rows] if scale.numel() > 1 else scale, weight, algorithm
            )
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
            for rows in row_parts(weight)
        )
        if wrong:
            self._fault(
                "codes", f"{wrong} codes of {name}.weight are not the nearest to their weights"
            )
        self.weights += codes.numel()

    def _activations(self, ours: str, linear: Linear, members: list[str], some: slice) -> None:
        """One scale for what all members see; none of theirs may be larger, or their inputs
        would be cut off.
        """
        import torch

        scales = [self._calibrated.linears[member] for member in members]
        if scales[0].input is not None:
            found = self._read(f"{ours}.activation_scaling_factor")
            if found is not None and not all(
                one.input is not None and float(one.input) <= float(found) for one in scales
            ):
                self._fault(
                    "scales", f"{ours}.activation_scaling_factor is below what calibration saw"
                )
        if scales[0].pre_quant is not None:
            found = self._read(f"{ours}.prequant_scaling_factor")
            wanted = scales[0].pre_quant.to(self._dtype())
            if found is not None and not torch.equal(
                found, wanted if linear.axis == 0 else wanted[some]
            ):
                self._fault(
                    "scales", f"{ours}.prequant_scaling_factor is not what calibration decided"
                )

    def _vocabulary(self, name: str) -> Tensor:
        """The rows of this rank; those past the vocabulary are zeros."""
        import torch

        rows = read_source(self._calibrated.source, name)[self._part.vocab]
        missing = self._part.vocab.stop - self._part.vocab.start - len(rows)
        return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows

    def _same(self, name: str, wanted: Tensor) -> None:
        import torch

        found = self._read(name)
        if found is None:
            return
        if found.dtype != self._dtype() or not torch.equal(found, wanted.to(self._dtype())):
            self._fault("unquantized", f"{name} differs from the source")
        elif not bool(torch.isfinite(found).all()):
            self._fault(
                "unquantized", f"{name} does not fit into {self._dtype()}".replace("torch.", "")
            )

    def _read(self, name: str) -> Tensor | None:
        self._asked.add(name)
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
    """How many codes stand further from their weights than half a step, and the rounding of the
    division, allow.

    The step of INT8 is the scale. E4M3 has 3 bits after the leading one, so half a step is at most
    2^-4 of the value, and below its smallest normal number, 2^-6, half of 2^-9.
    """
    import torch

    scale = scale.reshape(-1, 1)
    wanted = weight.float()
    away = (codes.float() * scale - wanted).abs()
    half_step = (
        scale * 0.5
        if algorithm.weight_dtype == "I8"
        else torch.maximum(wanted.abs() * 2**-4, scale * 2**-10)
    )
    return int((~(away <= half_step + wanted.abs() * 2 * torch.finfo(weight.dtype).eps)).sum())
