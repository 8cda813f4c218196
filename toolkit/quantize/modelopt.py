"""The only module that talks to ModelOpt: quantize a loaded model, compare it with its source in place, export it.

ModelOpt and transformers print, warn and draw bars a great deal; all of it goes to this package's logger instead. That
redirection is of the whole process, so one thread quantizes at a time.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError
from toolkit.interfaces import Progress
from toolkit.quantize.algorithms import Algorithm
from toolkit.quantize.source import Source

__all__ = ["as_source", "export", "load_model", "loudly", "quantize_model", "quantized_linears", "quiet"]

logger = logging.getLogger(__name__)
CHATTY = ("transformers", "modelopt", "accelerate")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send prints, warnings and log lines of the libraries to this module's logger, at debug level."""
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
    """The source as a transformers model on the CPU, in its own dtype: one copy, offline, none of the checkpoint's code."""
    import torch
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(source.path),
            dtype=getattr(torch, source.dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            low_cpu_mem_usage=True,
        )
    except Exception as exc:  # config validators, key errors, allocation: all kinds, and all about this checkpoint
        raise CheckpointError(f"transformers cannot load it ({exc})", where=source.path) from exc
    model.config.architectures = [source.shape.architecture]  # the export fails without it
    if source.is_trimmed:
        _trim(model, source.shape.vocab_size)
    return model.eval()


def _trim(model: Any, vocab_size: int) -> None:
    """Cut padding rows off embedding and LM head: views, no copies, and tied weights stay tied."""
    import torch

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    embedding.weight = torch.nn.Parameter(embedding.weight.data[:vocab_size], requires_grad=False)
    head.weight = embedding.weight if tied else torch.nn.Parameter(head.weight.data[:vocab_size], requires_grad=False)
    if embedding.padding_idx is not None and embedding.padding_idx >= vocab_size:
        embedding.padding_idx = None  # it matters to gradients alone, and torch checks it
    embedding.num_embeddings = head.out_features = model.config.vocab_size = vocab_size


def quantize_model(
    model: Any, algorithm: Algorithm, kv_cache_quant_algo: str | None, forward_loop: Callable[[Any], None]
) -> None:
    """Insert quantizers and calibrate them, in place. Without a forward loop FP8 would lose its activation scales in silence.

    A row of zeros has amax 0, which the export refuses; its scale becomes 1, under which it is still all zeros.
    """
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
    from modelopt.torch.quantization.nn import TensorQuantizer

    config = copy.deepcopy(getattr(mtq, algorithm.preset))
    if kv_cache_quant_algo == "FP8":
        config["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG)["quant_cfg"]
    mtq.quantize(model, config, forward_loop)
    # The export averages the smoothing of linears that share an input. Done here, what is measured is what is written.
    requantize_resmooth_fused_llm_layers(model)
    for module in model.modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled and module.amax is not None:
            module._amax[module._amax == 0] = module.maxbound


def quantized_linears(model: Any) -> dict[str, Any]:
    """Name -> module of every linear whose weight quantizer is on."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
    }


@contextlib.contextmanager
def as_source(model: Any, source: Source) -> Iterator[None]:
    """Within, the model computes exactly what its source does: quantizers off, and weights as they stand in the source's files.

    SmoothQuant has rewritten the weights, so switching quantizers off would not be enough. The originals are memory-mapped and
    cost no memory of their own.
    """
    import torch
    from modelopt.torch.quantization.nn import TensorQuantizer

    from toolkit.checkpoints.reader import read_tensor

    quantizers = [module for module in model.modules() if isinstance(module, TensorQuantizer) and module.is_enabled]
    linears = quantized_linears(model)
    present = {}
    with contextlib.ExitStack() as stack:
        try:
            for name, module in linears.items():
                stack.enter_context(module.input_quantizer.disable_pre_quant_scale())
                weight = module._parameters["weight"]
                present[name] = weight.data
                weight.data = read_tensor(source.tensors[f"{name}.weight"]).to(getattr(torch, source.dtype))
            for quantizer in quantizers:
                quantizer.disable()
            yield
        finally:
            for quantizer in quantizers:
                quantizer.enable()
            for name, data in present.items():
                linears[name]._parameters["weight"].data = data


def export(model: Any, dtype: str, out_dir: Path) -> None:
    """Write ModelOpt's unified form. The model is changed by this and must not be run afterwards."""
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    export_hf_checkpoint(model, dtype=getattr(torch, dtype), export_dir=out_dir)
