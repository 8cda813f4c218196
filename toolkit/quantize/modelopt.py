"""The only module that talks to ModelOpt: load a model, quantize it in place, compare it with its
source.

The aim is to save memory: a model of 140 GB must not need 140 GB. So weights are memory-mapped from
the source's files. Weights that SmoothQuant rewrites are mapped from unlinked files of our own, so
that the kernel can write them back to the disk.

ModelOpt and transformers print, warn and draw bars a great deal; all of it goes to this module's
logger instead. The redirection affects the whole process, so only one thread may quantize at a
time.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError
from toolkit.interfaces import Progress
from toolkit.quantize.algorithms import Algorithm, presets
from toolkit.quantize.codes import row_slices
from toolkit.quantize.folding import INPUTS, Folding, exact_factors, rows_of_producer, why_left_out
from toolkit.quantize.source import Source, read_source
from toolkit.records.build import LeftOut
from toolkit.words import KvCacheQuantAlgo

__all__ = [
    "as_source",
    "load_model",
    "observe_again",
    "observed_by",
    "outside_quiet",
    "quantization_configs",
    "quantize_model",
    "quantized_linears",
    "quiet",
    "reserve",
    "smooth_exactly",
]

logger = logging.getLogger(__name__)
CHATTY_LIBRARIES = ("transformers", "modelopt", "accelerate")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within, the libraries' prints and warnings go to this module's logger, at debug level, and
    their own loggers pass errors only.
    """
    levels = {name: logging.getLogger(name).level for name in CHATTY_LIBRARIES}
    printed = io.StringIO()
    try:
        for name in CHATTY_LIBRARIES:
            logging.getLogger(name).setLevel(logging.ERROR)
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            warnings.simplefilter("always")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for line in printed.getvalue().splitlines():
            logger.debug("%s", line)
        for warning in caught:
            logger.debug("%s:%s: %s", warning.filename, warning.lineno, warning.message)


def outside_quiet(progress: Progress) -> Progress:
    """Wrap `progress` so that it draws on the present streams even within `quiet`. Call this before
    `quiet` redirects them.
    """
    out, err = sys.stdout, sys.stderr

    def report(done: int, total: int | None, what: str) -> None:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            progress(done, total, what)

    return report


def load_model(source: Source) -> Any:
    """Load the source as a transformers model on the CPU, in its own dtype. Nothing is downloaded,
    and none of the checkpoint's code is run.

    The model is built without storage; then each parameter becomes a view of the source's files,
    without padding rows. Raises CheckpointError if transformers cannot load it.
    """
    import accelerate
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            str(source.path), local_files_only=True, trust_remote_code=False
        )
        config.vocab_size = source.shape.vocab_size
        if (config.pad_token_id or 0) >= config.vocab_size:
            config.pad_token_id = None  # its row was padding and is gone
        config.architectures = [source.shape.architecture]
        dtype = getattr(torch, source.dtype)
        # include_buffers=False: RoPE's buffers are computed, not stored
        with accelerate.init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
        model.tie_weights()
        for name in [name for name, _ in model.named_parameters()]:
            module, _, parameter = name.rpartition(".")
            value = torch.nn.Parameter(read_source(source, name).to(dtype), requires_grad=False)
            setattr(model.get_submodule(module), parameter, value)
        model.tie_weights()
    except Exception as exc:
        # Config validators, key errors, allocation: many kinds, and all about this checkpoint.
        raise CheckpointError(f"transformers cannot load it ({exc})", where=source.path) from exc
    return model.eval()


def quantize_model(
    model: Any,
    algorithm: Algorithm,
    kv_cache_quant_algo: KvCacheQuantAlgo | None,
    forward_loop: Callable[[Any], None],
    scratch: Path | None = None,
) -> None:
    """Insert quantizers and calibrate them, in place. The forward loop is required: without one,
    ModelOpt would silently leave out the activation scales of FP8.

    scratch: a folder on the disk for weights that the algorithm rewrites; nothing is left in it.
    None keeps these weights in memory. A row of zeros has amax 0, and no scale can be made of that.
    Its amax is set so that the scale is 1; the row's codes are zeros all the same.
    """
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.nn import TensorQuantizer

    config, *additions = (
        copy.deepcopy(getattr(mtq, name)) for name in presets(algorithm, kv_cache_quant_algo)
    )
    for addition in additions:
        config["quant_cfg"] += addition["quant_cfg"]
    if algorithm.pre_quant_scale:
        for layer in model.model.layers:
            for linear in _linears(layer):
                linear.weight = _parameter(_writable(linear.weight.data, scratch))
    mtq.quantize(model, config, forward_loop)
    if algorithm.pre_quant_scale:
        for layer in model.model.layers:
            _smooth_together(layer)
    for module in model.modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled and module.amax is not None:
            module._amax[module._amax == 0] = module.maxbound


def observed_by(layer: Any) -> dict[str, Any]:
    """What the quantizers of a layer have observed of its inputs so far: name of the quantizer ->
    amax. Weights are left out: ModelOpt observes them before it runs any text.
    """
    return {
        name: calibrator._calib_amax
        for name, calibrator in _calibrators(layer)
        if calibrator._calib_amax is not None
    }


def observe_again(layer: Any, observed: dict[str, Any]) -> None:
    """Give the quantizers of a layer what `observed_by` has returned in another process."""
    for name, calibrator in _calibrators(layer):
        if name in observed:
            calibrator._calib_amax = observed[name]


def _calibrators(layer: Any) -> Iterator[tuple[str, Any]]:
    for name, module in layer.named_modules():
        calibrator = getattr(module, "_calibrator", None)
        if hasattr(calibrator, "_calib_amax") and not name.endswith("weight_quantizer"):
            yield name, calibrator


def _smooth_together(layer: Any) -> None:
    """Average the smoothing of linears that share an input. ModelOpt's export would do so later;
    done here, quality is measured on the weights that are written.

    ModelOpt replaces the weight by a new tensor in memory. The new values are copied into the old,
    mapped tensor, and the new tensor is dropped.
    """
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion

    attention, mlp = layer.self_attn, layer.mlp
    for group in (
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [mlp.gate_proj, mlp.up_proj],
    ):
        mapped = [linear._parameters["weight"] for linear in group]
        preprocess_linear_fusion(group)
        for linear, weight in zip(group, mapped, strict=True):
            if linear._parameters["weight"] is not weight:
                weight.data.copy_(linear._parameters["weight"].data)
                linear._parameters["weight"] = weight


def smooth_exactly(model: Any, source: Source) -> Folding:
    """Replace the smoothing of a calibrated SmoothQuant model by powers of two, in place, and let
    its activations have a scale per token instead of a calibrated one.

    The model then computes what the folded checkpoint does, but for the order of exact
    multiplications by powers of two; so quality can be measured on it, and `as_source` still
    switches it to its source.
    """
    import torch

    rows: dict[str, Any] = {}
    folded: list[str] = []
    left_out: list[LeftOut] = []
    for i, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{i}"
        for group in INPUTS:
            names = [f"{prefix}.{name}" for name in group.linears]
            linears = [layer.get_submodule(name) for name in group.linears]
            smoothing = linears[0].input_quantizer.pre_quant_scale
            if smoothing is None:
                left_out += [LeftOut(name, "calibration gave no smoothing") for name in names]
                factors = torch.ones(linears[0].in_features)
            else:
                factors = exact_factors(source, i, group, smoothing.squeeze())
                reason = why_left_out(group, smoothing, factors)
                if reason is not None:
                    left_out += [LeftOut(name, reason) for name in names]
                else:
                    folded += names
                    rows[f"{prefix}.{group.producer}"] = rows_of_producer(source, group, factors)
            for name, linear in zip(names, linears, strict=True):
                _smooth_again(linear, read_source(source, f"{name}.weight"), factors)
    return Folding(rows, tuple(folded), tuple(left_out))


def _smooth_again(linear: Any, original: Any, factors: Any) -> None:
    """Smooth one linear by `factors` [in] instead of by what it was smoothed with."""
    import torch

    weight = linear._parameters["weight"].data
    largest = torch.empty(len(weight), dtype=torch.float32)
    for rows in row_slices(weight):
        weight[rows] = (original[rows].to(weight.dtype).float() / factors).to(weight.dtype)
        largest[rows] = weight[rows].abs().amax(dim=1).float()
    largest[largest == 0] = linear.weight_quantizer.maxbound
    amax = linear.weight_quantizer.amax
    linear.weight_quantizer.amax = largest.reshape(amax.shape).to(amax.dtype)
    quantizer = linear.input_quantizer
    if quantizer.pre_quant_scale is not None:
        quantizer.pre_quant_scale = factors.reshape(quantizer.pre_quant_scale.shape)
    quantizer.reset_amax()
    quantizer.set_from_attribute_config({"type": "dynamic", "axis": (0, 1)})  # [batch, token]


def _linears(layer: Any) -> list[Any]:
    import torch

    return [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]


def _parameter(tensor: Any) -> Any:
    import torch

    return torch.nn.Parameter(tensor, requires_grad=False)


def _writable(tensor: Any, scratch: Path | None) -> Any:
    """A writable copy, mapped from a file that is unlinked at once, so that nothing is left on the
    disk when the process ends.
    """
    import torch

    if scratch is None:
        return tensor.clone()
    file = scratch / "weight"
    reserve(file, tensor.nbytes)
    mapped = torch.from_file(str(file), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(
        tensor.shape
    )
    file.unlink()
    return mapped.copy_(tensor)


def reserve(file: Path, size: int) -> None:
    """Create a file of `size` bytes with all its blocks allocated. Raises OSError if the disk is
    full. Without this, the first write to a mapped page without a block would kill the process
    with SIGBUS, and without a message.
    """
    with file.open("wb") as empty:
        os.posix_fallocate(empty.fileno(), 0, size)


def quantization_configs(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """ModelOpt's description of a quantized model: (hf_quant_config.json, quantization_config of
    config.json).
    """
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.export.quant_utils import get_quant_config

    quantization = get_quant_config(model)
    return quantization, convert_hf_quant_config_format(quantization)


def quantized_linears(model: Any) -> dict[str, Any]:
    """Name -> module of every linear whose weight quantizer is on."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
    }


@contextlib.contextmanager
def as_source(model: Any, source: Source, part: str = "") -> Iterator[None]:
    """Within, the model computes exactly what its source does: its quantizers are off, and its
    weights are those of the source's files.

    SmoothQuant rewrites weights, so switching quantizers off would not be enough. The original
    weights are memory-mapped and take no memory of their own. part: the name of the submodule to
    switch, such as `model.layers.3`; empty for the whole model.
    """
    import torch
    from modelopt.torch.quantization.nn import TensorQuantizer

    from toolkit.checkpoints.reader import read_tensor

    submodule = model.get_submodule(part)
    quantizers = [
        module
        for module in submodule.modules()
        if isinstance(module, TensorQuantizer) and module.is_enabled
    ]
    linears = {
        f"{part}.{name}" if part else name: module
        for name, module in quantized_linears(submodule).items()
    }
    quantized_weights = {}
    with contextlib.ExitStack() as stack:
        try:
            for name, module in linears.items():
                stack.enter_context(module.input_quantizer.disable_pre_quant_scale())
                weight = module._parameters["weight"]
                quantized_weights[name] = weight.data
                weight.data = read_tensor(source.tensors[f"{name}.weight"]).to(
                    getattr(torch, source.dtype)
                )
            for quantizer in quantizers:
                quantizer.disable()
            yield
        finally:
            for quantizer in quantizers:
                quantizer.enable()
            for name, data in quantized_weights.items():
                linears[name]._parameters["weight"].data = data
