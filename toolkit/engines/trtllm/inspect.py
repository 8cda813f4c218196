"""Open a finished engine with TensorRT and report its tensors, precisions and fused layers.

The module `tensorrt` is an argument, since it is installed only on machines with a GPU. It is an
error if an engine cannot be deserialized where it was built, since no server could load it either.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.facts.trtllm_build import ENGINE_INPUTS, ENGINE_OUTPUTS, HIDDEN_STATES
from toolkit.records.build import LayerCounts
from toolkit.records.measured import Finding

__all__ = ["count_layers", "inspect_engine", "tensor_findings"]


def inspect_engine(
    file: Path, trt: Any, *, first: bool, last: bool
) -> tuple[list[Finding], LayerCounts | None]:
    """Deserialize one rank's engine.

    first, last: whether the rank is the first or last of its pipeline, which decides its tensors.
    """
    logger = trt.Logger(trt.Logger.ERROR)
    trt.init_libnvinfer_plugins(logger, "")
    engine = trt.Runtime(logger).deserialize_cuda_engine(file.read_bytes())
    if engine is None:
        detail = f"TensorRT {trt.__version__} cannot read {file.name}"
        return [Finding("deserialization", "error", detail)], None
    inputs: set[str] = set()
    outputs: set[str] = set()
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        (inputs if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else outputs).add(name)
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    read = Finding("deserialization", "ok", f"{file.name} with TensorRT {trt.__version__}")
    return [read, *tensor_findings(inputs, outputs, first=first, last=last)], count_layers(text)


def tensor_findings(
    inputs: set[str], outputs: set[str], *, first: bool, last: bool
) -> Iterator[Finding]:
    """Check that the engine has all tensors that the runtime needs."""
    needed_in = (set(ENGINE_INPUTS) - ({"input_ids"} if not first else set())) | (
        set() if first else {HIDDEN_STATES[0]}
    )
    needed_out = set(ENGINE_OUTPUTS) if last else {HIDDEN_STATES[1]}
    needed_in -= set() if last else {"last_token_ids"}
    missing = sorted(needed_in - inputs) + sorted(needed_out - outputs)
    if missing:
        yield Finding("tensors", "error", f"the engine lacks {', '.join(missing)}")
    else:
        yield Finding("tensors", "ok", f"{len(inputs)} inputs, {len(outputs)} outputs")


def count_layers(text: str) -> LayerCounts:
    """Count the layers in the inspector's JSON.

    Layers are names, or objects in an engine built with detailed verbosity. A layer counts as fused
    if its name joins several names with ` + `, or if the compiler made it of a subgraph
    (ForeignNode).
    """
    layers = json.loads(text).get("Layers", [])
    names = [layer if isinstance(layer, str) else str(layer.get("Name", "")) for layer in layers]
    detailed = [layer for layer in layers if isinstance(layer, dict)]
    plugins = Counter(
        _plugin(layer)
        for layer in detailed
        if layer.get("LayerType") in ("PluginV2", "PluginV3", "Plugin")
    )
    if not detailed:
        plugins = Counter("unnamed" for name in names if "PLUGIN" in name)
    precisions = Counter(_precision(layer) for layer in detailed if layer.get("Outputs"))
    fused = sum(" + " in name or "ForeignNode" in name for name in names)
    return LayerCounts(
        len(layers), fused, dict(sorted(plugins.items())), dict(sorted(precisions.items()))
    )


def _plugin(layer: dict[str, Any]) -> str:
    return str(layer.get("PluginType") or layer.get("PluginName") or "unnamed")


def _precision(layer: dict[str, Any]) -> str:
    """`Row major linear FP8 format` -> FP8; newer versions print `Datatype` alone."""
    output = layer["Outputs"][0]
    text = str(output.get("Format/Datatype") or output.get("Datatype") or "unknown")
    for word in (
        "FP8",
        "FP4",
        "INT8",
        "INT4",
        "BF16",
        "BFloat16",
        "FP16",
        "Float16",
        "Half",
        "FP32",
        "Float",
        "INT64",
        "INT32",
        "Int",
        "Bool",
    ):
        if word.lower() in text.lower():
            return {
                "BFloat16": "BF16",
                "Float16": "FP16",
                "Half": "FP16",
                "Float": "FP32",
                "Int": "INT32",
                "Bool": "BOOL",
            }.get(word, word)
    return text
