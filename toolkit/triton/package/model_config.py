"""Triton's configuration of our model, as a protobuf message: built, written as text, read back and
compared.

The message type is Triton's own, from `tritonclient`, so a misspelt field cannot be written.
`contract` defines the tensors; this module only puts them into the format that Triton reads.
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
    VLLM_MODEL,
)

__all__ = ["build", "build_trtllm", "build_vllm", "read", "render", "write"]


def build(*, decoupled: bool, backend: str = "python") -> Any:
    """The ModelConfig message of the `llmapi` model. backend: what runs it in Triton.

    max_batch_size is 0: the runtime batches requests between steps, not Triton. There is one
    instance, which is the runtime itself. Its kind is CPU; the engines' own config states their
    device.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    config = pb.ModelConfig(name=MODEL, backend=backend, max_batch_size=0)
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
    """The ModelConfig of TensorRT-LLM's own `llmapi` model. ours: add the optional tensors of our
    model.py.
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


def build_vllm() -> Any:
    """The ModelConfig for Triton's vLLM backend, which adds its tensors when it loads the model.

    KIND_MODEL leaves the choice of devices to vLLM. The backend refuses a model that is not
    decoupled.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    config = pb.ModelConfig(name=VLLM_MODEL, backend="vllm", max_batch_size=0)
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_MODEL)
    config.model_transaction_policy.decoupled = True
    return config


def render(config: Any) -> str:
    """The message as text, as config.pbtxt holds it."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(config))


def read(path: Path) -> Any:
    """Read the message from a config.pbtxt. Raises StageError with the position of anything that
    Triton would not understand.
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
    """Write config.pbtxt and read it back. Raises StageError if it reads back differently."""
    path.write_text(render(config), encoding="utf-8")
    if read(path) != config:
        raise StageError(
            "package", "config.pbtxt reads back differently from what was written", where=path
        )
