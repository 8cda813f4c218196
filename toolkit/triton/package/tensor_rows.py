"""The tables of tensors in a repository's README.md, made from the configuration that Triton reads:
a README names no tensor or type that the model does not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolkit.triton.tensors.contract import (
    BLS_INPUTS,
    BLS_OUTPUTS,
    INPUTS,
    LOG_PROB_INPUTS,
    LOG_PROB_OUTPUTS,
    OUTPUTS,
)

__all__ = ["tensor_rows"]

MEANINGS = {
    spec.name: spec.meaning
    for spec in (*INPUTS, *OUTPUTS, *LOG_PROB_INPUTS, *LOG_PROB_OUTPUTS, *BLS_INPUTS, *BLS_OUTPUTS)
}


def tensor_rows(tensors: Iterable[Any]) -> list[str]:
    """A Markdown row for each input or output of a ModelConfig. Tensors that only TensorRT-LLM
    describes have no meaning in theirs.
    """
    return [_row(tensor) for tensor in tensors]


def _row(tensor: Any) -> str:
    from tritonclient.grpc import model_config_pb2 as pb

    dtype = pb.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    return f"| `{tensor.name}` | {dtype} | {MEANINGS.get(tensor.name, '').replace('|', 'or')} |"
