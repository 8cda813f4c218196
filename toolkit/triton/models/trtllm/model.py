"""TensorRT-LLM's `LLM` with the tensors of its `llmapi` template, plus token ids, counts,
acceptance and deadlines, which TensorRT-LLM's own model leaves out.

Threads: Triton calls `execute`, which checks a request and hands it to an event loop in a thread of
its own. The runtime's outputs arrive in that loop and are sent from it, and only the loop touches
the open requests. Another thread updates the metrics.

The runtime queues what does not fit into its batch, without a limit. So requests are counted here:
with max_batch_size and max_queue_size requests open, the next one is refused.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
import yaml

from toolkit.engines.trtllm.speculative_config import with_speculative_config
from toolkit.errors import RequestError
from toolkit.triton.tensors.backend import (
    Metrics,
    elements_of,
    error_response,
    folder_of,
    parameters_of_request,
    send_tensors,
    traceback_of,
)
from toolkit.triton.tensors.contract import MODEL
from toolkit.triton.tensors.requests import Limits, Request, check_is_only, parse
from toolkit.triton.tensors.trtllm_tensors import (
    REQUEST_FORMAT,
    Responses,
    output_types,
    sampling_arguments,
)
from toolkit.words import RequestOutcome

CLIENT_CHECK_INTERVAL_S = 0.1  # between two checks whether the client is gone
METRICS_INTERVAL_S = 0.1
DEFAULT_MAX_BATCH_SIZE = 2048  # of LLM()
UNTOLD = (
    "toolkit_reused_prompt_tokens",
    "toolkit_draft_tokens",
    "toolkit_accepted_draft_tokens",
    "toolkit_verify_steps",
    "toolkit_queue_seconds",
    "toolkit_tokens_per_step",
    "toolkit_draft_len_changes",
    "toolkit_draft_probes",
)


@dataclass(frozen=True, slots=True)
class OurSettings:
    """The section `toolkit` of model.yaml. A model.yaml of TensorRT-LLM's own has none: then there
    are no limits. log_probs: how many per token this version returns. ignored: what a request may
    not set, since this version ignores it.
    """

    default_max_tokens: int = 128
    log_probs: int = 0
    ignored: Sequence[str] = ()
    max_queue_size: float = math.inf
    request_timeout_s: float | None = None
    stream_interval_ms: float = 0.0


@dataclass(eq=False)
class Job:
    """One open request. `sender` must not be used after the last response, since Triton has freed
    it by then. ended: why it ends before the runtime is done, and the message to its client.
    """

    request: Request
    name: str  # the client's request id, possibly empty
    sender: Any
    arrival_ns: int
    timeout_ms: int | None
    responses: Responses
    task: asyncio.Task[None] | None = None
    output: Any = None  # the runtime's latest
    ended: tuple[RequestOutcome, str] | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        if self.timeout_ms is None:
            return math.inf
        return self.timeout_ms / 1e3 - (time.monotonic_ns() - self.arrival_ns) / 1e9


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
        self._settings = OurSettings(**settings.pop("toolkit", {}))
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
        timeout_s = self._settings.request_timeout_s
        self._default_timeout_ms = None if timeout_s is None else round(1000 * timeout_s)
        self._limits = Limits(
            decoupled=decoupled,
            max_draft_len=0,
            max_input_len=settings.get("max_input_len"),
            max_timeout_ms=self._default_timeout_ms,
        )
        self._slots = int(settings.get("max_batch_size", DEFAULT_MAX_BATCH_SIZE))
        self._types = {
            name: pb_utils.triton_string_to_numpy(dtype) for name, dtype in output_types().items()
        }
        self._parameters = SamplingParams
        self._jobs: set[Job] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = threading.Event()
        self._metrics = Metrics(pb_utils, MODEL, untold=UNTOLD)
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="requests"),
            threading.Thread(target=self._publish, name="metrics"),
        ]
        self._llm = LLM(**with_speculative_config(settings, llm_args), **_session())
        for thread in self._threads:
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        for triton_request in requests:
            sender, arrival_ns = triton_request.get_response_sender(), time.monotonic_ns()
            try:
                # The elements are copies: the memory belongs to Triton after execute returns.
                tensors = {tensor.name(): elements_of(tensor) for tensor in triton_request.inputs()}
                parameters = parameters_of_request(triton_request)
                request = parse(tensors, parameters, self._limits, REQUEST_FORMAT)
                name = triton_request.request_id() or str(parameters.get("id", ""))
                job = self._job(request, name, sender, arrival_ns)
                begin = self._cancel if request.cancels else self._begin
                self._loop.call_soon_threadsafe(begin, job)
            except RequestError as error:
                self._refuse(sender, "refused", str(error))

    def finalize(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _job(self, request: Request, name: str, sender: Any, arrival_ns: int) -> Job:
        timeout_ms = request.timeout_ms or self._default_timeout_ms
        interval_ns = round(1e6 * self._settings.stream_interval_ms)
        responses = Responses(request, arrival_ns, interval_ns)
        return Job(request, name, sender, arrival_ns, timeout_ms, responses)

    def _refuse(
        self, sender: Any, outcome: RequestOutcome, message: str, job: Job | None = None
    ) -> None:
        """Answer with an error. job: if the runtime has worked on the request."""
        if job is None:
            self._metrics.note(outcome)
        else:
            self._metrics.note(outcome, job.responses.stats(job.output), job.responses.gaps)
        _send_error(sender, outcome, message)

    # The metrics' thread.

    def _publish(self) -> None:
        while not self._stop.wait(METRICS_INTERVAL_S):
            requests = len(self._jobs)
            active = min(requests, self._slots)
            self._metrics.publish(active, requests - active)
        self._metrics.publish(0, 0)

    # The event loop's thread.

    def _begin(self, job: Job) -> None:
        room = self._slots + self._settings.max_queue_size
        if len(self._jobs) >= room:
            self._refuse(
                job.sender,
                "overloaded",
                f"{len(self._jobs)} requests are open, {self._slots} of them may run and"
                f" {self._settings.max_queue_size} may wait",
            )
            return
        self._jobs.add(job)
        job.task = self._loop.create_task(self._serve(job))
        job.task.add_done_callback(_log_failure)

    def _cancel(self, asking: Job) -> None:
        """Cancel the open request with the id of this `stop` request, which is answered with the
        code CANCELLED, also if the request is over: as TensorRT-LLM's own model does.
        """
        jobs = [job for job in self._jobs if job.name == asking.name]
        try:
            if not asking.name:
                raise RequestError(
                    "stop came without a request id", hint="Send the id of the request to cancel."
                )
            check_is_only(len(jobs), asking.name)
        except RequestError as error:
            self._refuse(asking.sender, "refused", str(error))
            return
        for job in jobs:
            job.ended = ("cancelled", "cancelled by the client")
        said = "cancelled by the client"
        if not jobs:
            said = f"no request with id {asking.name[:60]!r} is running"
        _send_error(asking.sender, "cancelled", said)

    async def _end_all(self) -> None:
        jobs = list(self._jobs)
        for job in jobs:
            job.ended = ("error", "the server is stopping")
        await asyncio.gather(*(job.task for job in jobs if job.task), return_exceptions=True)

    async def _serve(self, job: Job) -> None:
        settings = self._settings
        try:
            parameters = self._parameters(
                **sampling_arguments(
                    job.request, settings.default_max_tokens, settings.log_probs, settings.ignored
                )
            )
            stream = self._llm.generate_async(
                job.request.prompt, sampling_params=parameters, streaming=job.request.streaming
            )
        except Exception as error:  # the runtime refused the request
            self._jobs.discard(job)
            self._refuse(job.sender, "refused", str(error) or repr(error))
            return
        answering = asyncio.ensure_future(self._answer(job, stream))
        try:
            await _until_ended(answering, job)
            if job.ended is not None:
                stream.abort()
                self._refuse(job.sender, *job.ended, job)
            else:
                answering.result()
        except Exception as error:
            pb_utils.Logger.log_error(traceback_of(error))
            self._refuse(job.sender, "error", str(error) or repr(error), job)
        finally:
            self._jobs.discard(job)

    async def _answer(self, job: Job, stream: Any) -> None:
        """Send the answer as it comes, unless the job was ended. Raises what the runtime raises."""
        if job.request.streaming:
            async for job.output in stream:
                if not job.output.finished and job.ended is None:
                    values = job.responses.of(job.output, time.monotonic_ns(), final=False)
                    if values is not None:
                        tensors = self._tensors(values)
                        send_tensors(pb_utils, job.sender, tensors, is_final=False)
        else:
            job.output = await stream.aresult()
        if job.output is None or getattr(job.output, "aborted", lambda: False)():
            job.ended = job.ended or ("cancelled", "cancelled by the runtime")
        if job.ended is not None:
            return
        self._jobs.discard(job)  # now nobody ends it any more
        values = job.responses.of(job.output, time.monotonic_ns(), final=True)
        send_tensors(pb_utils, job.sender, self._tensors(values or {}), is_final=True)
        reason = job.output.outputs[0].finish_reason
        self._metrics.note(
            "length" if reason == "length" else "stop",
            job.responses.stats(job.output),
            job.responses.gaps,
        )

    def _tensors(self, values: dict[str, list[Any]]) -> list[Any]:
        return [self._tensor(name, tensor_values) for name, tensor_values in values.items()]

    def _tensor(self, name: str, values: list[Any]) -> Any:
        data = [value.encode("utf-8") if isinstance(value, str) else value for value in values]
        return pb_utils.Tensor(name, np.array(data, dtype=self._types[name]))


def _send_error(sender: Any, outcome: RequestOutcome, message: str) -> None:
    sender.send(
        error_response(pb_utils, outcome, message),
        flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    )


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


async def _until_ended(answering: asyncio.Future[None], job: Job) -> None:
    """Wait until the request is answered, or has to end before: its deadline has passed, its client
    is gone, or somebody else ended it. Then `job.ended` says so.
    """
    while not answering.done():
        if job.ended is None and job.left_s <= 0:
            job.ended = ("deadline", _deadline_message(job))
        elif job.ended is None and job.sender.is_cancelled():
            job.ended = ("cancelled", "cancelled by the client")
        if job.ended is not None:
            answering.cancel()
            return
        await asyncio.wait([answering], timeout=min(CLIENT_CHECK_INTERVAL_S, job.left_s))


def _deadline_message(job: Job) -> str:
    tokens = 0 if job.output is None else len(job.output.outputs[0].token_ids)
    return f"deadline of {job.timeout_ms} ms passed after {tokens} tokens; timeout_ms sets another"


def _log_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        pb_utils.Logger.log_error(traceback_of(error))
