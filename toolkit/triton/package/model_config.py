"""Triton's configuration of our model, as protobuf: built, written as text, read back, and
compared.

The message type is Triton's own, out of `tritonclient`, so a misspelt field cannot be written. What
the tensors are is said in `contract`; this module only gives it the form that Triton reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.errors import StageError
from toolkit.triton.tensors.contract import (
    INPUTS,
    MODEL,
    OUTPUTS,
    STREAM_TEXT,
    STREAM_TEXT_PARAMETER,
)

__all__ = ["build", "build_trtllm", "read", "render", "write"]


def build(*, decoupled: bool) -> Any:
    """The ModelConfig message of the `llmapi` model.

    max_batch_size is 0: requests are batched by the runtime, between steps, not by Triton. One
    instance on the CPU, since the instance is the runtime; which device the engines use is said in
    their own config.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    config = pb.ModelConfig(name=MODEL, backend="python", max_batch_size=0)
    for spec in INPUTS:
        config.input.add(
            name=spec.name,
            data_type=pb.DataType.Value(spec.dtype),
            dims=spec.dims,
            optional=spec.optional,
        )
    for spec in OUTPUTS:
        config.output.add(name=spec.name, data_type=pb.DataType.Value(spec.dtype), dims=spec.dims)
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    config.model_transaction_policy.decoupled = decoupled
    config.parameters[STREAM_TEXT_PARAMETER].string_value = STREAM_TEXT
    return config


def build_trtllm(*, decoupled: bool, ours: bool = True) -> Any:
    """The ModelConfig of TensorRT-LLM's own `llmapi` model. ours: with the optional tensors of
    our model.py.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    from toolkit.facts.triton_tensors import LLMAPI
    from toolkit.triton.tensors.trtllm_tensors import OUR_INPUTS, OUR_OUTPUTS

    config = pb.ModelConfig(name=MODEL, backend="python", max_batch_size=0)
    for fact in LLMAPI.inputs:
        config.input.add(
            name=fact.name,
            data_type=pb.DataType.Value(fact.dtype),
            dims=fact.dims,
            optional=fact.optional,
        )
    for fact in LLMAPI.outputs:
        config.output.add(name=fact.name, data_type=pb.DataType.Value(fact.dtype), dims=fact.dims)
    if ours:
        for spec in OUR_INPUTS:
            config.input.add(
                name=spec.name,
                data_type=pb.DataType.Value(spec.dtype),
                dims=spec.dims,
                optional=True,
            )
        for spec in OUR_OUTPUTS:
            config.output.add(
                name=spec.name, data_type=pb.DataType.Value(spec.dtype), dims=spec.dims
            )
        config.parameters[STREAM_TEXT_PARAMETER].string_value = STREAM_TEXT
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    config.model_transaction_policy.decoupled = decoupled
    return config


def render(config: Any) -> str:
    """The text form, as in config.pbtxt."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(config))


def read(path: Path) -> Any:
    """The message that a config.pbtxt holds. Raises StageError with the position of what Triton
    would not understand.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as pb

    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())
    except text_format.ParseError as error:
        raise StageError(
            "package", f"not a Triton model configuration: {error}", where=path
        ) from error


def write(config: Any, path: Path) -> None:
    """Write config.pbtxt and read it back. Raises StageError if the file does not say what was
    meant.
    """
    path.write_text(render(config), encoding="utf-8")
    if read(path) != config:
        raise StageError(
            "package", "config.pbtxt reads back differently from what was written", where=path
        )
