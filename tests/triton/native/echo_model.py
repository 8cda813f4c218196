"""A model for tests of the backend. What a request wants is in its text, as JSON."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._name = json.loads(args["model_config"])["name"]
        if os.environ.get("ECHO_FAILS") == "model":
            raise pb_utils.TritonModelException("this model cannot be loaded")
        if os.environ.get("ECHO_FAILS") == "exit":
            os._exit(3)
        kinds = pb_utils.MetricFamily
        self._counted = kinds("echo_requests", "Requests", kinds.COUNTER).Metric(
            labels={"model": self._name}
        )
        self._open = kinds("echo_open", "Open requests", kinds.GAUGE).Metric(labels={"model": "m"})
        self._sizes = kinds("echo_size", "Sizes", kinds.HISTOGRAM).Metric(
            labels={"model": "m"}, buckets=[1.0, 10.0]
        )
        pb_utils.Logger.log_info(f"echo in {Path.cwd()}")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            threading.Thread(target=self._answer, args=[request], daemon=True).start()

    def finalize(self) -> None:
        pb_utils.Logger.log_info("echo was finalized")

    def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        wish = json.loads(tensors["text_input"].reshape(-1)[0])
        self._counted.increment(1)
        self._sizes.observe(float(len(tensors)))
        if "die" in wish:
            os._exit(9)
        if "error" in wish:
            error = pb_utils.TritonError(wish["error"], pb_utils.TritonError.UNAVAILABLE)
            sender.send(
                pb_utils.InferenceResponse(error=error),
                pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
            return
        if "wait" in wish:  # until its client is gone
            self._open.set(1)
            while not sender.is_cancelled():
                time.sleep(0.005)
            self._open.set(0)
        while "flood" in wish and not sender.is_cancelled():  # so many chunks at a time
            for _ in range(wish["flood"]):
                sender.send(self._response(""))
            time.sleep(0.001)
        for number in range(wish.get("chunks", 0)):
            sender.send(self._response(f"{number}"))
        seen = {
            "id": request.request_id(),
            "parameters": json.loads(request.parameters()),
            "inputs": {name: array.reshape(-1)[:4].tolist() for name, array in tensors.items()},
            "sizes": {name: len(tensors[name].reshape(-1)[0]) for name in ("text_input",)},
            "libraries": os.environ.get("LD_LIBRARY_PATH"),
        }
        seen["inputs"].pop("text_input")
        seen["inputs"] = {name: repr(values) for name, values in seen["inputs"].items()}
        text = "é" * wish.get("size", 0) or json.dumps(seen)
        sender.send(self._response(text), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _response(self, text: str) -> Any:
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("text_output", np.array([text.encode()], dtype=np.object_)),
                pb_utils.Tensor("output_ids", np.array([[1, 2], [3, 4]], dtype=np.int32)),
                pb_utils.Tensor("cumulative_logprob", np.array([-0.5], dtype=np.float32)),
            ]
        )
