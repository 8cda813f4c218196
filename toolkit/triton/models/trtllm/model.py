"""TensorRT-LLM's `LLM` with the tensors of its `llmapi` template, plus token ids, counts and
acceptance, which TensorRT-LLM's own model leaves out.

`execute` checks a request and hands it to an event loop in a thread of its own. The runtime's
outputs arrive in that loop and are sent from it.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
import yaml

from toolkit.engines.trtllm.speculative_config import with_speculative_config
from toolkit.errors import RequestError
from toolkit.triton.tensors.backend import ERROR_CODES, folder_of, traceback_of
from toolkit.triton.tensors.requests import Limits, Request, parse
from toolkit.triton.tensors.trtllm_tensors import (
    REQUEST_FORMAT,
    Responses,
    output_types,
    sampling_arguments,
)
from toolkit.words import RequestOutcome

CLIENT_CHECK_INTERVAL_S = 0.1  # between two checks whether the client is gone


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        # Imported here because the import looks for devices.
        from tensorrt_llm import LLM, SamplingParams
        from tensorrt_llm.llmapi import llm_args

        if _is_worker():
            return
        path = os.environ.get("LLM_CONFIG_PATH") or str(folder_of(args) / "model.yaml")
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        triton = settings.pop("triton_config", {})
        our_settings = settings.pop("toolkit", {})
        decoupled = bool(
            json.loads(args["model_config"])
            .get("model_transaction_policy", {})
            .get("decoupled", False)
        )
        if decoupled != bool(triton.get("decoupled", False)):
            raise pb_utils.TritonModelException(
                f"decoupled is {decoupled} in config.pbtxt and {not decoupled} in {path}; set both"
                " to the same value"
            )
        self._limits = Limits(decoupled=decoupled, max_draft_len=0)
        self._max_tokens = int(our_settings.get("default_max_tokens", 128))
        self._log_probs = int(our_settings.get("log_probs", 0))
        self._ignored = tuple(our_settings.get("ignored", ()))
        self._types = {
            name: pb_utils.triton_string_to_numpy(dtype) for name, dtype in output_types().items()
        }
        self._parameters = SamplingParams
        self._running: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests")
        self._thread.start()
        self._llm = LLM(**with_speculative_config(settings, llm_args), **_session())

    def execute(self, requests: list[Any]) -> None:
        for triton_request in requests:
            sender = triton_request.get_response_sender()
            try:
                # tolist copies, because the memory belongs to Triton after execute returns.
                tensors = {
                    tensor.name(): tensor.as_numpy().reshape(-1).tolist()
                    for tensor in triton_request.inputs()
                }
                parameters = json.loads(triton_request.parameters() or "{}")
                request = parse(tensors, parameters, self._limits, REQUEST_FORMAT)
                name = triton_request.request_id()
                if request.cancels:
                    self._cancel(name)
                    sender.send(
                        pb_utils.InferenceResponse([self._tensor("text_output", [""])]),
                        flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                    )
                    continue
                task = asyncio.run_coroutine_threadsafe(
                    self._serve(request, name, sender), self._loop
                )
                task.add_done_callback(_log_failure)
            except RequestError as error:
                self._refuse(sender, "refused", str(error))

    def finalize(self) -> None:
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _refuse(self, sender: Any, outcome: RequestOutcome, message: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, ERROR_CODES[outcome]))
        sender.send(
            pb_utils.InferenceResponse(error=error),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    def _cancel(self, name: str) -> None:
        if name not in self._running:
            raise RequestError(
                f"stop: no request with id {name!r} is running",
                hint="Send the id of the request to cancel.",
            )
        self._loop.call_soon_threadsafe(self._running[name].abort)

    # The event loop's thread.

    async def _serve(self, request: Request, name: str, sender: Any) -> None:
        try:
            parameters = self._parameters(
                **sampling_arguments(request, self._max_tokens, self._log_probs, self._ignored)
            )
            stream = self._llm.generate_async(
                request.prompt, sampling_params=parameters, streaming=request.streaming
            )
        except Exception as error:  # the runtime refused the request
            self._refuse(sender, "refused", str(error) or repr(error))
            return
        if name:
            self._running[name] = stream
        watcher = asyncio.ensure_future(_watch(stream, sender))
        try:
            await self._answer(request, stream, sender)
        except Exception as error:
            pb_utils.Logger.log_error(traceback_of(error))
            self._refuse(sender, "error", str(error) or repr(error))
        finally:
            watcher.cancel()
            self._running.pop(name, None)

    async def _answer(self, request: Request, stream: Any, sender: Any) -> None:
        responses, last = Responses(request), None
        if request.streaming:
            async for last in stream:
                values = None if last.finished else responses.of(last, final=False)
                if values is not None:
                    sender.send(self._response(values))
        else:
            last = await stream.aresult()
        if last is None or getattr(last, "aborted", lambda: False)():
            self._refuse(sender, "cancelled", "cancelled by the client")
            return
        values = responses.of(last, final=True)
        sender.send(
            self._response(values or {}), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )

    def _response(self, values: dict[str, list[Any]]) -> Any:
        return pb_utils.InferenceResponse(
            [self._tensor(name, tensor_values) for name, tensor_values in values.items()]
        )

    def _tensor(self, name: str, values: list[Any]) -> Any:
        data = [value.encode("utf-8") if isinstance(value, str) else value for value in values]
        return pb_utils.Tensor(name, np.array(data, dtype=self._types[name]))


def _session() -> dict[str, Any]:
    """The argument of LLM() that uses the ranks that a launcher started together with this one.
    Empty if there are none: the runtime then starts its own.
    """
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))) == 1:
        return {}
    from mpi4py.MPI import COMM_WORLD
    from tensorrt_llm.llmapi import MpiCommSession

    return {"_mpi_session": MpiCommSession(comm=COMM_WORLD, n_workers=COMM_WORLD.Get_size())}


def _is_worker() -> bool:
    """Whether this is one of several ranks and not the first. Such a rank works for the runtime
    inside this function, and returns when the runtime ends.
    """
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))) == 1:
        return False
    from mpi4py.futures import MPICommExecutor
    from mpi4py.MPI import COMM_WORLD

    if COMM_WORLD.Get_rank() == 0:
        return False
    with MPICommExecutor(COMM_WORLD):
        pass
    return True


async def _watch(stream: Any, sender: Any) -> None:
    while not sender.is_cancelled():
        await asyncio.sleep(CLIENT_CHECK_INTERVAL_S)
    stream.abort()


def _log_failure(task: Future[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        pb_utils.Logger.log_error(traceback_of(error))
