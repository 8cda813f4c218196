"""Text to token ids, with TensorRT-LLM's tensors. It reads a tokenizer.json, so it never runs code
from a checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# This path is for the process that loads this file; its children must not inherit it.
os.environ.pop("LD_LIBRARY_PATH", None)

from toolkit.errors import RequestError, ToolkitError
from toolkit.speculative.text import TextCodec
from toolkit.triton.tensors.backend import folder_of, parameters_of
from toolkit.triton.tensors.preprocessing import Preprocessor


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = parameters_of(args)
        try:
            codec = TextCodec.from_file(
                folder_of(args) / Path(parameters["tokenizer_dir"]) / "tokenizer.json"
            )
        except ToolkitError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        end_ids = parameters.get("end_ids", "").split(",")
        max_input_len = parameters.get("max_input_len")
        add_special_tokens = parameters.get("add_special_tokens", "true").lower()
        self._preprocessor = Preprocessor(
            codec,
            end_ids=tuple(int(end_id) for end_id in end_ids if end_id),
            add_special_tokens=add_special_tokens not in ("false", "0"),
            max_input_len=None if max_input_len is None else int(max_input_len),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            tensors = self._preprocessor.run(arrays)
        except RequestError as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            )
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor(name, np.ascontiguousarray(array))
                for name, array in tensors.items()
                if name in wanted
            ]
        )
