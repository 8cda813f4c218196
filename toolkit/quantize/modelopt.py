"""The only module that talks to ModelOpt: load a model, quantize it in place, compare it with its
source.

Memory is what decides how. Weights are memory-mapped from the source's files; those that
SmoothQuant rewrites are mapped from unlinked files of our own, so that the kernel can put them back
on the disk, and a model of 140 GB does not need 140 GB.

ModelOpt and transformers print, warn and draw bars a great deal; all of it goes to this package's
logger instead. That redirection is of the whole process, so one thread quantizes at a time.
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
from toolkit.quantize.source import Source, read_source
from toolkit.words import KvCacheQuantAlgo

__all__ = [
    "as_source",
    "load_model",
    "loudly",
    "quantization_configs",
    "quantize_model",
    "quantized_linears",
    "quiet",
    "reserve",
]

logger = logging.getLogger(__name__)
CHATTY = ("transformers", "modelopt", "accelerate")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send prints, warnings and log lines of the libraries to this module's logger, at debug
    level.
    """
    levels = {name: logging.getLogger(name).level for name in CHATTY}
    printed = io.StringIO()
    try:
        for name in CHATTY:
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


def loudly(progress: Progress) -> Progress:
    """The same progress, drawn on the streams that were there before `quiet` took them."""
    out, err = sys.stdout, sys.stderr

    def report(done: int, total: int | None, what: str) -> None:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            progress(done, total, what)

    return report


def load_model(source: Source) -> Any:
    """The source as a transformers model on the CPU, in its own dtype: offline, none of the
    checkpoint's code.

    It is built without storage, then each parameter becomes a view of the source's files; padding
    rows are left out.
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
            config.pad_token_id = None  # it stood in a padding row
        config.architectures = [source.shape.architecture]
        dtype = getattr(torch, source.dtype)
        with accelerate.init_empty_weights(
            include_buffers=False
        ):  # RoPE's buffers are computed, not stored
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
        model.tie_weights()
        for name in [name for name, _ in model.named_parameters()]:
            module, _, parameter = name.rpartition(".")
            value = torch.nn.Parameter(read_source(source, name).to(dtype), requires_grad=False)
            setattr(model.get_submodule(module), parameter, value)
        model.tie_weights()
    except (
        Exception
    ) as exc:  # config validators, key errors, allocation: all kinds, and all about this checkpoint
        raise CheckpointError(f"transformers cannot load it ({exc})", where=source.path) from exc
    return model.eval()


def quantize_model(
    model: Any,
    algorithm: Algorithm,
    kv_cache_quant_algo: KvCacheQuantAlgo | None,
    forward_loop: Callable[[Any], None],
    scratch: Path | None = None,
) -> None:
    """Insert quantizers and calibrate them, in place. Without a forward loop FP8 would lose its
    activation scales in silence.

    scratch: a folder on the disk for weights that the algorithm rewrites; None keeps them in
    memory. Nothing is left in it. A row of zeros has amax 0, which no scale can be made of; it
    becomes 1, under which the row is still all zeros.
    """
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.nn import TensorQuantizer

    config, *more = (
        copy.deepcopy(getattr(mtq, name)) for name in presets(algorithm, kv_cache_quant_algo)
    )
    for other in more:
        config["quant_cfg"] += other["quant_cfg"]
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


def _smooth_together(layer: Any) -> None:
    """Average the smoothing of linears that share an input, as ModelOpt's export would; so what is
    measured is what is written.

    ModelOpt puts a new weight in the place of the old one; its values go back to where the old one
    was mapped.
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


def _linears(layer: Any) -> list[Any]:
    import torch

    return [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]


def _parameter(tensor: Any) -> Any:
    import torch

    return torch.nn.Parameter(tensor, requires_grad=False)


def _writable(tensor: Any, scratch: Path | None) -> Any:
    """A copy that may be written to: mapped from a file that has no name any more, so that
    nothing outlives the process.
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
    """Make a file whose blocks are all there. Where a mapped page finds none, on a full disk, the
    process dies of SIGBUS and says nothing; here it is an OSError.
    """
    with file.open("wb") as empty:
        os.posix_fallocate(empty.fileno(), 0, size)


def quantization_configs(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ModelOpt says of a quantized model: (hf_quant_config.json, quantization_config of
    config.json).
    """
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.export.quant_utils import get_quant_config

    own = get_quant_config(model)
    return own, convert_hf_quant_config_format(own)


def quantized_linears(model: Any) -> dict[str, Any]:
    """Name -> module of every linear whose weight quantizer is on."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
    }


@contextlib.contextmanager
def as_source(model: Any, source: Source, part: str = "") -> Iterator[None]:
    """Within, the model computes exactly what its source does: quantizers off, and weights as they
    stand in the source's files.

    SmoothQuant has rewritten the weights, so switching quantizers off would not be enough. The
    originals are memory-mapped and cost no memory of their own. part: name of the submodule that is
    meant, `model.layers.3`; all of the model without.
    """
    import torch
    from modelopt.torch.quantization.nn import TensorQuantizer

    from toolkit.checkpoints.reader import read_tensor

    within = model.get_submodule(part)
    quantizers = [
        module
        for module in within.modules()
        if isinstance(module, TensorQuantizer) and module.is_enabled
    ]
    linears = {
        f"{part}.{name}" if part else name: module
        for name, module in quantized_linears(within).items()
    }
    present = {}
    with contextlib.ExitStack() as stack:
        try:
            for name, module in linears.items():
                stack.enter_context(module.input_quantizer.disable_pre_quant_scale())
                weight = module._parameters["weight"]
                present[name] = weight.data
                weight.data = read_tensor(source.tensors[f"{name}.weight"]).to(
                    getattr(torch, source.dtype)
                )
            for quantizer in quantizers:
                quantizer.disable()
            yield
        finally:
            for quantizer in quantizers:
                quantizer.enable()
            for name, data in present.items():
                linears[name]._parameters["weight"].data = data
