"""One embedded engine with the tensors of TensorRT-LLM's Triton backend: the models `tensorrt_llm`
and `tensorrt_llm_draft` of the `bls` layout, for the kind `torch`.

`execute` hands a request to the executor and returns. One thread runs the executor and answers.
Another ends requests whose time is up or whose clients are gone, answers those that the executor
does not end, and beats for `toolkit.process.supervise` while there is none of these.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

# This path is for the process that loads this file; its children must not inherit it.
os.environ.pop("LD_LIBRARY_PATH", None)

try:
    from toolkit.engines.registry import loader
    from toolkit.errors import RequestError, ToolkitError
    from toolkit.speculative.executor import Call, Executor, Output
    from toolkit.triton.tensors.backend import (
        ERROR_CODES,
        folder_of,
        parameters_of,
        send_tensors,
        traceback_of,
    )
    from toolkit.triton.tensors.contract import HEARTBEATS_VARIABLE
    from toolkit.triton.tensors.engine_tensors import (
        EngineRequest,
        arrays_of,
        parse_engine,
        visible_tokens,
    )
    from toolkit.triton.tensors.requests import check_is_only
    from toolkit.triton.tensors.size_limits import check_logits
    from toolkit.words import RequestOutcome
except ImportError as error:
    import sys

    raise ImportError(
        f"{error}: tritonserver's Python backend runs Python {sys.version.split()[0]} at"
        f" {sys.prefix}, which needs the toolkit installed. Launch with the repository's"
        " launch.sh, or install the toolkit there."
    ) from error


WATCH_INTERVAL_S = 0.1
# How long after its deadline a call may take to end before it is answered without the executor,
# which is then in a forward that does not return.
LATE_S = 1.0
# A call of the BLS model takes a quarter of a second at most, and that model itself looks whether
# its client is gone. Asking takes about 0.1 ms.
CLIENT_CHECK_AFTER_S = 1.0


@dataclass(eq=False)
class Job:
    """One running request. `sender` must not be used after the last response, since Triton has
    freed it by then. ids, log_probs and logits have not been sent yet.
    """

    request: EngineRequest
    name: str  # the client's id, possibly empty
    call_id: str
    sender: Any
    arrival_s: float
    is_late: bool = False  # its deadline has passed
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: bool = False
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    output_tokens: int = 0
    first_token_ns: int | None = None
    accepted: int = 0  # of the request's drafts


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = parameters_of(args)
        config = json.loads(args["model_config"])
        self._decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
        threads = parameters.get("threads")
        try:
            engine = loader("torch").load(
                folder_of(args) / parameters["gpt_model_path"],
                threads=None if threads is None else int(threads),
            )
        except ToolkitError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        reuses = parameters.get("enable_kv_cache_reuse", "true") == "true"
        self._executor = Executor(engine, reuse_prefixes=reuses)
        self._vocab_size = engine.vocab_size
        timeout_s = parameters.get("request_timeout_s")
        self._timeout_s = math.inf if timeout_s is None else float(timeout_s)
        self._call_numbers = iter(range(1 << 62))
        self._jobs: set[Job] = set()
        self._jobs_lock = threading.Lock()
        self._stop = threading.Event()
        self._broken: str | None = None
        self._given_up: set[Job] = set()  # answered, and the executor has not ended them yet
        beats = os.environ.get(HEARTBEATS_VARIABLE)
        self._heartbeat = None if beats is None else Path(beats) / str(os.getpid())
        self._threads = [
            threading.Thread(target=self._run, name="executor"),
            threading.Thread(target=self._watch, name="watcher"),
        ]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                if self._broken is not None:
                    raise RuntimeError(self._broken)
                self._accept(request, sender)
            except RequestError as error:
                self._refuse(sender, "refused", str(error))
            except Exception as error:  # without an answer the request would stay open in Triton
                pb_utils.Logger.log_error(traceback_of(error))
                self._refuse(sender, "error", str(error) or repr(error))

    def finalize(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            self._executor.run(self._stop)
        except Exception as error:
            self._broken = (
                f"the executor failed and serves no more requests: {error!r}; the server's log has"
                " the traceback"
            )
            pb_utils.Logger.log_error(traceback_of(error))
            self._fail_all(self._broken)

    def _fail_all(self, reason: str) -> None:
        with self._jobs_lock:
            jobs = list(self._jobs)
        for job in jobs:
            self._deliver(job, Output(job.call_id, (), "error", reason))

    def _accept(self, triton_request: Any, sender: Any) -> None:
        arrays = {tensor.name(): tensor.as_numpy().copy() for tensor in triton_request.inputs()}
        request, name = parse_engine(arrays, decoupled=self._decoupled), triton_request.request_id()
        if request.cancels and request.owner:
            self._executor.release(request.owner)
            sender.send(
                pb_utils.InferenceResponse([]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
            return
        if request.cancels:
            if not name:
                raise RequestError(
                    "stop came without a request id", hint="Send the id of the request to cancel."
                )
            with self._jobs_lock:
                jobs = [job for job in self._jobs if job.name == name]
            check_is_only(len(jobs), name)
            for job in jobs:
                self._executor.cancel(job.call_id)
            sender.send(
                pb_utils.InferenceResponse([]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
            return
        wants_logits = "return_generation_logits" in request.returns
        if wants_logits:
            check_logits(request.max_tokens, self._vocab_size)
        job = Job(request, name, str(next(self._call_numbers)), sender, time.monotonic())
        call = Call(
            job.call_id,
            request.ids,
            request.max_tokens,
            drafts=request.drafts,
            draft_logits=request.draft_logits,
            sampling=request.sampling,
            end_ids=request.end_ids,
            stop_sequences=request.stop_words,
            min_tokens=request.min_tokens,
            log_probs="return_log_probs" in request.returns,
            logits=wants_logits,
            owner=request.owner,
            cache_salt=request.cache_salt,
        )
        with self._jobs_lock:
            self._jobs.add(job)
        try:
            self._executor.submit(call, lambda output: self._deliver(job, output))
        except BaseException:
            self._forget(job)
            raise
        if self._broken is not None:  # the executor failed after the check in execute
            self._fail_all(self._broken)

    def _forget(self, job: Job) -> None:
        with self._jobs_lock:
            self._jobs.discard(job)

    def _refuse(self, sender: Any, outcome: RequestOutcome, message: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, ERROR_CODES[outcome]))
        sender.send(
            pb_utils.InferenceResponse(error=error),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    # The executor's thread.

    def _deliver(self, job: Job, output: Output) -> None:
        if job.output_tokens == 0 and output.ids:
            job.first_token_ns = time.monotonic_ns()
            pairs = zip(output.ids, job.request.drafts, strict=False)
            job.accepted = sum(token == draft for token, draft in pairs)
        count = visible_tokens(job.request, output.ids, output.finish_reason)
        job.output_tokens += count
        job.ids += output.ids[:count]
        job.log_probs += output.log_probs[:count]
        job.logits += output.logits[:count]
        if output.finish_reason is None:
            with job.lock:
                if job.request.streaming and not job.done:
                    send_tensors(pb_utils, job.sender, self._tensors(job, {}), is_final=False)
            return
        self._forget(job)
        # The lock keeps the watching thread from asking Triton about a freed request.
        with job.lock:
            self._given_up.discard(job)
            if job.done:
                return
            job.done = True
            if output.finish_reason == "cancelled" and job.is_late:
                message = (
                    f"deadline of {self._timeout_s:g} s passed after {job.output_tokens} tokens"
                )
                self._refuse(job.sender, "deadline", message)
            elif output.finish_reason in ("error", "cancelled"):
                self._refuse(job.sender, output.finish_reason, output.error or "cancelled")
            else:
                tensors = self._tensors(job, _figures(job, output))
                send_tensors(pb_utils, job.sender, tensors, is_final=True)

    # The watching thread.

    def _watch(self) -> None:
        while not self._stop.wait(WATCH_INTERVAL_S):
            try:
                self._end_overdue()
                if self._heartbeat is not None and not self._given_up:
                    self._beat(self._heartbeat)
            # The watch has to go on, or no request would be ended any more.
            except Exception as error:
                pb_utils.Logger.log_error(traceback_of(error))

    def _end_overdue(self) -> None:
        now, from_s = time.monotonic(), min(CLIENT_CHECK_AFTER_S, self._timeout_s)
        with self._jobs_lock:
            jobs = [job for job in self._jobs if now - job.arrival_s > from_s]
        for job in jobs:
            job.is_late = now - job.arrival_s > self._timeout_s
            with job.lock:
                is_over = job.is_late or (not job.done and job.sender.is_cancelled())
            if is_over:
                self._executor.cancel(job.call_id)
            if now - job.arrival_s > self._timeout_s + LATE_S:
                self._give_up(job)

    def _give_up(self, job: Job) -> None:
        """Answer a call that the executor does not end."""
        with job.lock:
            if job.done:
                return
            job.done = True
            self._given_up.add(job)
            message = f"deadline of {self._timeout_s:g} s passed, and the engine does not answer"
            self._refuse(job.sender, "deadline", message)
        self._forget(job)

    @staticmethod
    def _beat(file: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        file.touch()

    def _tensors(self, job: Job, figures: dict[str, int | float | None]) -> list[Any]:
        """Of the response with what has not been sent yet."""
        arrays = arrays_of(
            job.request, job.ids, log_probs=job.log_probs, logits=job.logits, figures=figures
        )
        job.ids, job.log_probs, job.logits = [], [], []
        return [pb_utils.Tensor(name, array) for name, array in arrays.items()]


def _figures(job: Job, output: Output) -> dict[str, int | float | None]:
    """The figures that the request wants. A KV-cache block is one token here."""
    requested = job.request.returns
    figures: dict[str, int | float | None] = {}
    if "return_perf_metrics" in requested:
        drafted = len(job.request.drafts)
        figures = {
            "kv_cache_alloc_new_blocks": output.computed_tokens,
            "kv_cache_reused_blocks": output.reused_tokens,
            "kv_cache_alloc_total_blocks": output.computed_tokens + output.reused_tokens,
            "arrival_time_ns": output.arrival_ns,
            "first_scheduled_time_ns": output.first_scheduled_ns,
            "first_token_time_ns": job.first_token_ns,
            "last_token_time_ns": time.monotonic_ns(),
            "acceptance_rate": job.accepted / drafted if drafted else 0.0,
            "total_accepted_draft_tokens": job.accepted,
            "total_draft_tokens": drafted,
        }
    if "return_num_input_tokens" in requested:
        figures["num_input_tokens"] = len(job.request.ids)
    if "return_num_output_tokens" in requested:
        figures["num_output_tokens"] = job.output_tokens
    return figures
