"""The model that Triton's Python backend runs: requests in, token events out, as responses in
TensorRT-LLM's `llmapi` form.

Who does what. Triton calls `execute`, which checks a request, submits it and returns at once. One
thread runs the speculative runtime and sends what it produces (about 0.1 ms a response; a thread of
its own for the sending was no faster, and fell behind the runtime on a busy machine, so that chunks
arrived late and in heaps). One watches for clients that went away and keeps the metrics. All
thinking about requests is in `toolkit.triton.tensors.requests`; here is only Triton's side.

A fault of one request is answered to that request, and the server goes on. If the runtime itself
breaks, every open request is answered with the reason, and later ones are refused with it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# The libraries of the server's own wheel are on this path for the process that loads this file, and
# for no child of it.
os.environ.pop("LD_LIBRARY_PATH", None)

try:
    from toolkit.errors import RequestError, ToolkitError
    from toolkit.inprocess import load_runtime
    from toolkit.interfaces import GenerationRequest, TokenEvent
    from toolkit.speculative.runtime import QueueFull
    from toolkit.triton.tensors.backend import CODES, Metrics, traceback_of
    from toolkit.triton.tensors.contract import MODEL, OUTPUTS, PACKAGE_VERSION
    from toolkit.triton.tensors.requests import Answer, Limits, Request, parse
    from toolkit.words import RequestOutcome
except ImportError as error:
    import sys

    raise ImportError(
        f"{error}: the Python of tritonserver's Python backend is {sys.version.split()[0]} at"
        f" {sys.prefix}, and it has to have the toolkit installed. Launch with the repository's"
        " launch.sh, or install the toolkit there."
    ) from error

NUMPY_TYPES = {
    "TYPE_STRING": np.object_,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP32": np.float32,
}
OUTPUT_TYPES = {spec.name: NUMPY_TYPES[spec.dtype] for spec in OUTPUTS}


@dataclass
class Job:
    """One running request. `sender` is not touched after the last response: Triton has freed it
    by then.
    """

    id: str
    name: str  # the client's own request id, possibly empty
    sender: Any
    answer: Answer
    timeout_ms: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: bool = False


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"]) / args["model_version"]
        settings = _settings(folder / "model.yaml", json.loads(args["model_config"]))
        own = settings["toolkit"]
        speculative = settings.get("speculative_config")
        self._max_seq_len = int(settings["max_seq_len"])
        self._default_max_tokens = int(own["default_max_tokens"])
        self._default_timeout_ms = int(1000 * own["request_timeout_s"])
        max_draft_len = 0 if speculative is None else int(speculative["max_draft_len"])
        self._limits = Limits(
            decoupled=bool(settings["triton_config"]["decoupled"]), max_draft_len=max_draft_len
        )
        try:
            self._runtime = load_runtime(
                folder / settings["model"],
                folder / draft if (draft := (speculative or {}).get("speculative_model")) else None,
                threads=own["threads"],
                max_draft_len=max_draft_len,
                acceptance=own["acceptance"],
                max_queue_size=int(own["max_queue_size"]),
                draft_len_schedule=[
                    (requests, length) for requests, length in own["draft_len_schedule"]
                ],
                ngram_size=(speculative or {}).get("max_matching_ngram_size"),
            )
        except ToolkitError as error:
            raise pb_utils.TritonModelException(str(error)) from error

        self._jobs: dict[str, Job] = {}
        self._jobs_lock = threading.Lock()
        self._next = 0
        self._broken: str | None = None
        self._stop = threading.Event()
        self._metrics = Metrics(pb_utils, MODEL)
        self._period_s = settings["triton_config"]["cancellation_check_period_ms"] / 1000
        self._stream_interval_ns = int(1e6 * own["stream_interval_ms"])
        self._threads = [
            threading.Thread(target=self._run, name="runtime"),
            threading.Thread(target=self._watch, name="watcher"),
        ]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._accept(request)

    def finalize(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._fail_all("the server is stopping")
        self._runtime.close()

    # From Triton: check, submit, or refuse.

    def _accept(self, triton_request: Any) -> None:
        sender = triton_request.get_response_sender()
        arrival_ns = time.monotonic_ns()
        try:
            if self._broken is not None:
                raise RuntimeError(self._broken)
            tensors = {
                tensor.name(): tensor.as_numpy().reshape(-1).tolist()
                for tensor in triton_request.inputs()
            }
            parameters = json.loads(triton_request.parameters() or "{}")
            request = parse(tensors, parameters, self._limits)
            name = triton_request.request_id() or str(parameters.get("id", ""))
            if request.cancels:
                sender.send(self._cancel(name), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                self._submit(request, name, sender, arrival_ns)
        except QueueFull as error:
            self._refuse(sender, "overloaded", str(error))
        except RequestError as error:
            self._refuse(sender, "refused", str(error))
        except Exception as error:  # Triton has to get an answer, or the request stays open
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
            self._next += 1
            job = Job(
                str(self._next), name, sender, Answer(request, self._stream_interval_ns), timeout_ms
            )
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
        )
        try:
            self._runtime.submit(generation, lambda event: self._deliver(job, event))
        except BaseException:
            self._forget(job)
            raise
        if self._broken is not None:  # since the check at the door
            self._fail_all(self._broken)

    def _forget(self, job: Job) -> None:
        with self._jobs_lock:
            self._jobs.pop(job.id, None)

    def _cancel(self, name: str) -> Any:
        """Answer a `stop` request: cancel every running request with this id."""
        with self._jobs_lock:
            found = [job for job in self._jobs.values() if name and job.name == name]
        if not found:
            raise RequestError(
                f"stop: no request with id {name!r} is running",
                hint="Send the id of the request to cancel.",
            )
        for job in found:
            self._runtime.cancel(job.id)
        return pb_utils.InferenceResponse([_tensor("text_output", [""])])

    # The runtime's thread.

    def _run(self) -> None:
        try:
            self._runtime.run(self._stop)
        except Exception as error:
            self._broken = (
                f"the runtime failed and serves no more requests: {error!r}; the server's log says"
                " where"
            )
            pb_utils.Logger.log_error(traceback_of(error))
            self._fail_all(self._broken)

    def _fail_all(self, reason: str) -> None:
        with self._jobs_lock:
            open_jobs = list(self._jobs.values())
        for job in open_jobs:
            self._deliver(job, TokenEvent(job.id, (), "", finish_reason="error", error=reason))

    def _deliver(self, job: Job, event: TokenEvent) -> None:
        """Send what an event calls for. A fault in it is the request's own: the runtime has to
        go on.
        """
        if job.done:
            return
        try:
            response = self._response(job, event)
            if event.finish_reason is None:
                if response is not None:
                    job.sender.send(response)
                return
            outcome = event.finish_reason
        except Exception as error:
            pb_utils.Logger.log_error(traceback_of(error))
            self._runtime.cancel(job.id)
            outcome, response = "error", _error("error", str(error) or repr(error))
        self._close(job, response)
        self._metrics.note(outcome, event.stats)

    def _response(self, job: Job, event: TokenEvent) -> Any:
        if event.finish_reason in ("stop", "length", None):
            tensors = job.answer.add(event, time.monotonic_ns())
            return tensors and pb_utils.InferenceResponse(
                [_tensor(name, values) for name, values in tensors.items()]
            )
        if event.finish_reason == "deadline":
            tokens = 0 if event.stats is None else event.stats.output_tokens
            return _error(
                "deadline",
                f"deadline of {job.timeout_ms} ms passed after {tokens} tokens; timeout_ms sets"
                " another",
            )
        return _error(event.finish_reason, event.error or "cancelled by the client")

    def _close(self, job: Job, response: Any) -> None:
        """Send the last response. The lock keeps the watcher from asking Triton about a request
        that is freed by it.
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
                counters = self._runtime.counters()
                self._metrics.publish(counters.active, counters.queued)
            except (
                Exception
            ) as error:  # the watch goes on: without it no abandoned request would ever be found
                pb_utils.Logger.log_error(traceback_of(error))
        self._metrics.publish(0, 0)

    def _cancel_abandoned(self) -> None:
        with self._jobs_lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            with job.lock:
                gone = not job.done and job.sender.is_cancelled()
            if gone:
                self._runtime.cancel(job.id)


def _settings(path: Path, model_config: dict[str, Any]) -> dict[str, Any]:
    import yaml

    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    stated = bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
    if stated != bool(settings["triton_config"]["decoupled"]):
        raise pb_utils.TritonModelException(
            f"decoupled is {stated} in config.pbtxt and {not stated} in {path}; write it equal in"
            " both"
        )
    packaged = settings["toolkit"].get("package_version")
    if packaged != PACKAGE_VERSION:
        raise pb_utils.TritonModelException(
            f"this repository has package version {packaged}, and the toolkit installed here serves"
            f" version {PACKAGE_VERSION}: package it again"
        )
    return settings


def _tensor(name: str, values: list[Any]) -> Any:
    data = [value.encode("utf-8") if isinstance(value, str) else value for value in values]
    return pb_utils.Tensor(name, np.array(data, dtype=OUTPUT_TYPES[name]))


def _error(outcome: RequestOutcome, message: str) -> Any:
    return pb_utils.InferenceResponse(
        error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, CODES[outcome]))
    )
