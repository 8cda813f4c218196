"""TensorRT-LLM's `LLM` in its `llmapi` form: its tensors, plus token ids, counts and acceptance
that its own model leaves out.

`execute` checks a request and hands it to an event loop of its own, where the runtime's outputs
arrive and are sent.
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

from toolkit.errors import RequestError
from toolkit.triton.tensors.backend import CODES, folder_of, traceback_of
from toolkit.triton.tensors.requests import Limits, Request, parse
from toolkit.triton.tensors.trtllm_tensors import FORM, Responses, output_types, sampling_arguments
from toolkit.words import RequestOutcome

WATCH_S = 0.1  # between two looks at whether the client is still there


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        # Imported here: TensorRT-LLM looks at the devices when it is.
        from tensorrt_llm import LLM, SamplingParams

        if _is_worker():
            return
        path = os.environ.get("LLM_CONFIG_PATH") or str(folder_of(args) / "model.yaml")
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        triton = settings.pop("triton_config", {})
        own = settings.pop("toolkit", {})
        decoupled = bool(
            json.loads(args["model_config"])
            .get("model_transaction_policy", {})
            .get("decoupled", False)
        )
        if decoupled != bool(triton.get("decoupled", False)):
            raise pb_utils.TritonModelException(
                f"decoupled is {decoupled} in config.pbtxt and not so in {path}; write it equal"
            )
        self._limits = Limits(decoupled=decoupled, max_draft_len=0)
        self._max_tokens = int(own.get("default_max_tokens", 128))
        self._log_probs = int(own.get("log_probs", 0))
        self._types = {
            name: pb_utils.triton_string_to_numpy(dtype) for name, dtype in output_types().items()
        }
        self._parameters = SamplingParams
        self._running: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests")
        self._thread.start()
        self._llm = LLM(**settings, **_session())

    def execute(self, requests: list[Any]) -> None:
        for triton_request in requests:
            sender = triton_request.get_response_sender()
            try:
                # Copied: the memory belongs to Triton again once execute has returned.
                tensors = {
                    tensor.name(): tensor.as_numpy().reshape(-1).tolist()
                    for tensor in triton_request.inputs()
                }
                parameters = json.loads(triton_request.parameters() or "{}")
                request = parse(tensors, parameters, self._limits, FORM)
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
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, CODES[outcome]))
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

    # On the loop.

    async def _serve(self, request: Request, name: str, sender: Any) -> None:
        try:
            parameters = self._parameters(
                **sampling_arguments(request, self._max_tokens, self._log_probs)
            )
            stream = self._llm.generate_async(
                request.prompt, sampling_params=parameters, streaming=request.streaming
            )
        except Exception as error:  # whatever the runtime refuses is the request's own
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
            [self._tensor(name, each) for name, each in values.items()]
        )

    def _tensor(self, name: str, values: list[Any]) -> Any:
        data = [value.encode("utf-8") if isinstance(value, str) else value for value in values]
        return pb_utils.Tensor(name, np.array(data, dtype=self._types[name]))


def _session() -> dict[str, Any]:
    """The ranks that were started with this one, if they were; else the runtime starts its own."""
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))) == 1:
        return {}
    from mpi4py.MPI import COMM_WORLD
    from tensorrt_llm.llmapi import MpiCommSession

    return {"_mpi_session": MpiCommSession(comm=COMM_WORLD, n_workers=COMM_WORLD.Get_size())}


def _is_worker() -> bool:
    """Of several ranks, all but the first hand themselves to the runtime and come back when it
    ends.
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
        await asyncio.sleep(WATCH_S)
    stream.abort()


def _log_failure(task: Future[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        pb_utils.Logger.log_error(traceback_of(error))
