"""The model of the `llmapi` layout: requests in, token events out, as responses in TensorRT-LLM's
`llmapi` format. Our backend runs it (toolkit.triton.native), or Triton's Python backend.

Threads: `execute`, which the backend calls, checks a request, submits it and returns at once. One
thread runs the speculative runtime. Behind each step the events that make a response due go to a
second, the sender, which makes responses of them and sends them (0.05 to 0.1 ms each); a forward
does not hold the interpreter's lock, so the two work side by side. To wake another thread takes
0.1 ms, so the one that reads the steps of a burst sends them, too, and the runtime's own does where
nothing is left to compute. Events that come while their thread is busy are sent together, a
response per request, so that it never falls behind. A last thread cancels requests whose clients
are gone, and updates the metrics.
`toolkit.triton.tensors.requests` holds everything about the content of requests; this file is only
Triton's side.

A fault of one request is answered to that request, and the server goes on. If the runtime itself
fails, every open request is answered with the reason, and later ones are refused with it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# This path is for the process that loads this file; its children must not inherit it.
os.environ.pop("LD_LIBRARY_PATH", None)

try:
    from toolkit.errors import RequestError, ToolkitError
    from toolkit.inprocess import load_runtime
    from toolkit.interfaces import GenerationRequest, TokenEvent
    from toolkit.process.placement import (
        Crowding,
        claim_cores,
        give_way,
        keep_off,
        let_on,
        move_thread,
        times_of_thread,
        tritonserver_above,
    )
    from toolkit.speculative.runtime import QueueFull
    from toolkit.triton.tensors.backend import (
        Metrics,
        elements_of,
        error_response,
        parameters_of_request,
        send_tensors,
        traceback_of,
    )
    from toolkit.triton.tensors.contract import MODEL, OUTPUTS, PACKAGE_VERSION
    from toolkit.triton.tensors.requests import (
        Answer,
        Limits,
        Request,
        check_is_only,
        joined,
        parse,
    )
    from toolkit.words import FinishReason, RequestOutcome
except ImportError as error:
    import sys

    raise ImportError(
        f"{error}: tritonserver runs Python {sys.version.split()[0]} at {sys.prefix} for this"
        " model, which needs the toolkit installed. Launch with the repository's"
        " launch.sh, or install the toolkit there."
    ) from error

NUMPY_TYPES = {
    "TYPE_STRING": np.dtype(np.object_),
    "TYPE_INT32": np.dtype(np.int32),
    "TYPE_INT64": np.dtype(np.int64),
    "TYPE_FP32": np.dtype(np.float32),
}
WAITING_ASKED = 4  # waiting requests whose clients are asked for in each period
# Makes of elements what a tensor holds. Our backend takes them as they are, and no array: see
# toolkit.triton.native.wire.
VALUES_OF = getattr(pb_utils, "values_of", lambda dtype: functools.partial(np.array, dtype=dtype))
OUTPUTS_OF = {spec.name: VALUES_OF(NUMPY_TYPES[spec.dtype]) for spec in OUTPUTS}


@dataclass
class Job:
    """One running request. `sender` must not be used after the last response, since Triton has
    freed it by then.
    """

    id: str
    name: str  # the client's own id of the request, possibly empty
    sender: Any
    answer: Answer
    timeout_ms: int
    held: deque[TokenEvent] = field(default_factory=deque)  # events that were not answered
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False  # its last event is there
    done: bool = False  # its last response was sent


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"]) / args["model_version"]
        settings = _settings(folder / "model.yaml", json.loads(args["model_config"]))
        our_settings = settings["toolkit"]
        speculative = settings.get("speculative_config")
        self._max_seq_len = int(settings["max_seq_len"])
        self._default_max_tokens = int(our_settings["default_max_tokens"])
        self._default_timeout_ms = int(1000 * our_settings["request_timeout_s"])
        max_draft_len = 0 if speculative is None else int(speculative["max_draft_len"])
        draft = (speculative or {}).get("speculative_model")
        self._limits = Limits(
            decoupled=bool(settings["triton_config"]["decoupled"]),
            max_draft_len=max_draft_len,
            max_input_len=int(settings["max_input_len"]),
            max_timeout_ms=self._default_timeout_ms,
        )
        try:
            self._runtime = load_runtime(
                folder / settings["model"],
                folder / draft if draft else None,
                threads=our_settings["threads"],
                max_draft_len=max_draft_len,
                acceptance=our_settings["acceptance"],
                max_queue_size=int(our_settings["max_queue_size"]),
                draft_len_schedule=[
                    (requests, length) for requests, length in our_settings["draft_len_schedule"]
                ],
                ngram_size=(speculative or {}).get("max_matching_ngram_size"),
                max_prompt_tokens=our_settings["max_prompt_tokens"],
                adaptive=our_settings["adaptive"],
                reuse_prefixes=our_settings["enable_prefix_caching"],
            )
        except ToolkitError as error:
            raise pb_utils.TritonModelException(str(error)) from error

        # Threads that are started from here on, and those of Triton, leave the computing cores.
        threads = our_settings["threads"]
        allowed = os.sched_getaffinity(0)
        computing = len(allowed) if threads is None else int(threads)
        self._placement = claim_cores(computing, allowed)
        if self._placement is not None:
            for process in _placed_processes():
                keep_off(process, self._placement.computing)
        self._crowding = Crowding()
        self._computing_thread: int | None = None  # its id in the system

        self._jobs: dict[str, Job] = {}
        self._jobs_lock = threading.Lock()
        self._last_job_number = 0
        self._next_waiting = 0  # where the watcher goes on among the waiting requests
        self._broken: str | None = None
        self._stop = threading.Event()
        self._metrics = Metrics(pb_utils, MODEL)
        self._period_s = settings["triton_config"]["cancellation_check_period_ms"] / 1000
        self._stream_interval_ns = int(1e6 * our_settings["stream_interval_ms"])
        self._due: deque[Job] = deque()  # jobs with a response to send, until the step is over
        self._sending = threading.Lock()  # held by the one thread that answers
        self._outbox: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()
        self._runtime_thread = threading.Thread(target=self._run, name="runtime")
        self._watcher = threading.Thread(target=self._watch, name="watcher")
        self._sender = threading.Thread(target=self._send, name="sender")
        # Where all cores compute, a thread that gives way would wait for a forward.
        self._gives_way = computing < len(allowed)
        self._reader_gives_way = False
        for thread in (self._runtime_thread, self._watcher, self._sender):
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._accept(request)

    def finalize(self) -> None:
        self._stop.set()
        for thread in (self._runtime_thread, self._watcher):
            thread.join()
        self._fail_all("the server is stopping")
        self._outbox.put(None)
        self._sender.join()
        self._runtime.close()
        self._give_up_cores()

    # Called by Triton: check a request, then submit or refuse it.

    def _accept(self, triton_request: Any) -> None:
        sender = triton_request.get_response_sender()
        arrival_ns = time.monotonic_ns()
        try:
            if self._broken is not None:
                raise RuntimeError(self._broken)
            tensors = {tensor.name(): elements_of(tensor) for tensor in triton_request.inputs()}
            parameters = parameters_of_request(triton_request)
            request = parse(tensors, parameters, self._limits)
            name = triton_request.request_id() or str(parameters.get("id", ""))
            if request.cancels:
                message = self._cancel(name)
                sender.send(
                    _error("cancelled", message),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                )
            else:
                self._submit(request, name, sender, arrival_ns)
        except QueueFull as error:
            self._refuse(sender, "overloaded", str(error))
        except RequestError as error:
            self._refuse(sender, "refused", str(error))
        except Exception as error:  # without an answer the request would stay open in Triton
            pb_utils.Logger.log_error(f"request failed: {error!r}")
            self._refuse(sender, "error", str(error) or repr(error))

    def _refuse(self, sender: Any, outcome: RequestOutcome, message: str) -> None:
        self._metrics.note(outcome)
        sender.send(_error(outcome, message), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _submit(self, request: Request, name: str, sender: Any, arrival_ns: int) -> None:
        prompt_ids = tuple(self._runtime.codec.encode(request.prompt))
        room = self._max_seq_len - len(prompt_ids)
        timeout_ms = request.timeout_ms or self._default_timeout_ms
        with self._jobs_lock:
            self._last_job_number += 1
            answer = Answer(request, self._stream_interval_ns)
            job = Job(str(self._last_job_number), name, sender, answer, timeout_ms)
            self._jobs[job.id] = job
        generation = GenerationRequest(
            request_id=job.id,
            prompt_ids=prompt_ids,
            max_tokens=request.max_tokens or max(1, min(self._default_max_tokens, room)),
            sampling=request.sampling,
            stop=request.stop,
            draft_len=request.draft_len,
            acceptance=request.acceptance,
            deadline_ns=arrival_ns + timeout_ms * 1_000_000,
            cumulative_logprob="return_cumulative_logprob" in request.returns,
            running_stats=request.repeats_figures,
            cache_salt=request.cache_salt,
        )
        try:
            self._runtime.submit(generation, lambda event: self._take(job, event))
        except BaseException:
            self._forget(job)
            raise
        if self._broken is not None:  # the runtime failed after the check in _accept
            self._fail_all(self._broken)

    def _forget(self, job: Job) -> None:
        with self._jobs_lock:
            self._jobs.pop(job.id, None)

    def _cancel(self, name: str) -> str:
        """Cancel the running request with this id. Returns what the `stop` request is answered.
        As in TensorRT-LLM (triton_backend/tools/tests/test_llmapi_cancel.py) that is an error with
        the code CANCELLED, also if the request is over or was never there.
        """
        if not name:
            raise RequestError(
                "stop came without a request id", hint="Send the id of the request to cancel."
            )
        with self._jobs_lock:
            jobs = [job for job in self._jobs.values() if job.name == name]
        check_is_only(len(jobs), name)
        for job in jobs:
            self._runtime.cancel(job.id)
        return "cancelled by the client" if jobs else f"no request with id {name[:60]!r} is running"

    # The runtime's thread.

    def _run(self) -> None:
        if self._placement is not None:
            move_thread(self._placement.computing)
            self._computing_thread = threading.get_native_id()
        try:
            self._runtime.run(self._stop, self._send_due)
        except Exception as error:
            self._broken = (
                f"the runtime failed and serves no more requests: {error!r}; the server's log has"
                " the traceback"
            )
            pb_utils.Logger.log_error(traceback_of(error))
            self._fail_all(self._broken)

    def _fail_all(self, reason: str) -> None:
        with self._jobs_lock:
            open_jobs = list(self._jobs.values())
        for job in open_jobs:
            job.held.append(TokenEvent(job.id, (), "", finish_reason="error", error=reason))
        self._outbox.put(open_jobs)

    def _take(self, job: Job, event: TokenEvent) -> None:
        """Called by the runtime with each event of a request."""
        job.held.append(event)
        job.is_over = event.finish_reason is not None
        if job.is_over or job.answer.is_due(time.monotonic_ns()):
            self._due.append(job)

    def _send_due(self) -> None:
        """Called by the runtime behind events, before it goes on. The thread that computes leaves
        the responses to the sender, but for one behind which there is nothing left to compute. The
        one that reads while it does sends them itself. Either spares waking another.
        """
        jobs: list[Job] = []
        with contextlib.suppress(IndexError):  # two threads may take from it at a time
            while True:
                jobs.append(self._due.popleft())
        if not jobs:
            return
        if threading.current_thread() is self._runtime_thread:
            # A second answer, or the lock, would take longer than to wake the sender.
            if len(jobs) > 1 or self._sending.locked() or not self._is_idle():
                self._outbox.put(jobs)
                return
        elif self._gives_way and not self._reader_gives_way:
            self._reader_gives_way = True
            give_way()
        self._answer_all(jobs)

    def _is_idle(self) -> bool:
        """Whether no request is left that the runtime has to go on with."""
        with self._jobs_lock:
            return all(job.is_over for job in self._jobs.values())

    # The sender's thread.

    def _send(self) -> None:
        if self._gives_way:
            give_way()
        while (jobs := self._outbox.get()) is not None:
            self._answer_all(jobs)

    # On the sender's thread, on the reader's of a burst, or on the runtime's.

    def _answer_all(self, jobs: list[Job]) -> None:
        """Answer the events of these requests that were not answered. The lock keeps the responses
        to a request in their order, until they are on their way.
        """
        # Our backend can send them at once: see toolkit.triton.native.worker.
        together = getattr(pb_utils, "together", contextlib.nullcontext)
        with self._sending, together():
            for job in jobs:
                self._answer(job)

    def _answer(self, job: Job) -> None:
        events = [job.held.popleft() for _ in range(len(job.held))]
        try:
            for event in joined(events) if events else ():
                self._deliver(job, event)
        # Sending has to go on, or no request would be answered any more.
        except Exception as error:
            pb_utils.Logger.log_error(traceback_of(error))
            self._runtime.cancel(job.id)

    def _deliver(self, job: Job, event: TokenEvent) -> None:
        """Send the response to an event. A fault here ends only this request."""
        if job.done:
            return
        try:
            tensors = self._tensors(job, event)  # live until they are sent: see send_tensors
            if event.finish_reason is None:
                if tensors:
                    send_tensors(pb_utils, job.sender, tensors, is_final=False)
                return
            outcome = event.finish_reason
            response = self._last_response(job, event, outcome, tensors)
        except Exception as error:
            pb_utils.Logger.log_error(traceback_of(error))
            self._runtime.cancel(job.id)
            outcome, response = "error", _error("error", str(error) or repr(error))
        self._close(job, response)
        if event.stats is not None and (failure := event.stats.draft_failure) is not None:
            pb_utils.Logger.log_warn(f"decoded without drafts, since the draft failed: {failure}")
        self._metrics.note(outcome, event.stats, job.answer.gaps)

    def _tensors(self, job: Job, event: TokenEvent) -> list[Any]:
        """What the response to an event holds; empty if none is due."""
        if event.finish_reason not in ("stop", "length", None):
            return []
        values = job.answer.add(event, time.monotonic_ns()) or {}
        return [_tensor(name, of_tensor) for name, of_tensor in values.items()]

    def _last_response(
        self, job: Job, event: TokenEvent, reason: FinishReason, tensors: list[Any]
    ) -> Any:
        if reason in ("stop", "length"):
            return pb_utils.InferenceResponse(tensors)
        if reason == "deadline":
            tokens = 0 if event.stats is None else event.stats.output_tokens
            message = f"deadline of {job.timeout_ms} ms passed after {tokens} tokens"
            return _error("deadline", f"{message}; timeout_ms sets another")
        return _error(reason, event.error or "cancelled by the client")

    def _close(self, job: Job, response: Any) -> None:
        """Send the last response, which frees the request in Triton. The lock keeps the watching
        thread from asking Triton about a freed request.
        """
        self._forget(job)
        with job.lock:
            if not job.done:
                job.done = True
                job.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    # The watching thread: clients that went away, and the metrics.

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._cancel_abandoned()
                self._leave_crowded_cores()
                counters = self._runtime.counters()
                self._metrics.publish(counters.active, counters.queued)
            # The watch has to go on, or abandoned requests would never be cancelled.
            except Exception as error:
                pb_utils.Logger.log_error(traceback_of(error))
        self._metrics.publish(0, 0)

    def _cancel_abandoned(self) -> None:
        """Cancel requests whose clients are gone. Asking Triton takes about 0.1 ms, so running
        requests are asked about every time, and of the waiting ones a few, in turns.
        """
        active = self._runtime.active_ids()
        with self._jobs_lock:
            jobs = list(self._jobs.values())
        waiting = [job for job in jobs if job.id not in active]
        first = self._next_waiting % max(1, len(waiting))
        self._next_waiting = first + WAITING_ASKED
        for job in [job for job in jobs if job.id in active] + waiting[first:][:WAITING_ASKED]:
            with job.lock:
                is_abandoned = not job.done and job.sender.is_cancelled()
            if is_abandoned:
                self._runtime.cancel(job.id)

    def _leave_crowded_cores(self) -> None:
        """Let the scheduler place the threads if the computing one has to wait for its core."""
        if self._placement is None or self._computing_thread is None:
            return
        times_ns = times_of_thread(self._computing_thread)
        if self._crowding.is_crowded(time.monotonic_ns(), *times_ns):
            pb_utils.Logger.log_info(
                "other processes use the computing cores; the scheduler places the threads now"
            )
            self._give_up_cores()

    def _give_up_cores(self) -> None:
        if self._placement is None:
            return
        for process in _placed_processes():
            let_on(process, self._placement.computing | self._placement.other)
        self._placement.close()
        self._placement = None


def _placed_processes() -> list[int]:
    """This one, and the server, which writes what is sent."""
    server = tritonserver_above()
    return [os.getpid()] if server is None else [os.getpid(), server]


def _settings(path: Path, model_config: dict[str, Any]) -> dict[str, Any]:
    import yaml

    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    decoupled = bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
    if decoupled != bool(settings["triton_config"]["decoupled"]):
        raise pb_utils.TritonModelException(
            f"decoupled is {decoupled} in config.pbtxt and {not decoupled} in {path}; set both to"
            " the same value"
        )
    packaged = settings["toolkit"].get("package_version")
    if packaged != PACKAGE_VERSION:
        raise pb_utils.TritonModelException(
            f"this repository has package version {packaged}, and the toolkit installed here serves"
            f" version {PACKAGE_VERSION}: package it again"
        )
    return settings


def _tensor(name: str, values: list[Any]) -> Any:
    if isinstance(values[0] if values else None, str):
        values = [value.encode("utf-8") for value in values]
    return pb_utils.Tensor(name, OUTPUTS_OF[name](values))


def _error(outcome: RequestOutcome, message: str) -> Any:
    return error_response(pb_utils, outcome, message)
