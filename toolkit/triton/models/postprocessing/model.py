"""Token ids to text, with TensorRT-LLM's tensors: one row of ids per beam, and the number of valid
ids in each row.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# This path is for the process that loads this file; its children must not inherit it.
os.environ.pop("LD_LIBRARY_PATH", None)

from toolkit.errors import ToolkitError
from toolkit.speculative.text import TextCodec
from toolkit.triton.tensors.backend import folder_of, parameters_of


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = parameters_of(args)
        skip = parameters.get("skip_special_tokens", "true").lower() not in ("false", "0")
        try:
            self._codec = TextCodec.from_file(
                folder_of(args) / Path(parameters["tokenizer_dir"]) / "tokenizer.json",
                skip_special_tokens=skip,
            )
        except ToolkitError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        tensor = pb_utils.get_input_tensor_by_name
        tokens = tensor(request, "TOKENS_BATCH").as_numpy()  # [batch, beams, tokens]
        lengths = tensor(request, "SEQUENCE_LENGTH").as_numpy()  # [batch, beams]
        rows = tokens.reshape(-1, tokens.shape[-1]).tolist()
        texts = self._codec.decode_many(
            [row[:length] for row, length in zip(rows, lengths.reshape(-1), strict=True)]
        )
        out = np.array([text.encode("utf-8") for text in texts], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", out)])
