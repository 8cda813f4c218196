"""One embedded engine with the tensors of TensorRT-LLM's Triton backend: the models `tensorrt_llm`
and `tensorrt_llm_draft` of the `bls` layout, for the kind `torch`.

`execute` hands a request to the executor and returns. One thread runs the executor and answers.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import triton_python_backend_utils as pb_utils

# This path is for the process that loads this file; its children must not inherit it.
os.environ.pop("LD_LIBRARY_PATH", None)

try:
    from toolkit.engines.registry import loader
    from toolkit.errors import RequestError, ToolkitError
    from toolkit.speculative.executor import Call, Executor, Output
    from toolkit.triton.tensors.backend import ERROR_CODES, folder_of, parameters_of, traceback_of
    from toolkit.triton.tensors.engine_tensors import (
        EngineRequest,
        arrays_of,
        parse_engine,
        visible_tokens,
    )
    from toolkit.words import RequestOutcome
except ImportError as error:
    import sys

    raise ImportError(
        f"{error}: tritonserver's Python backend runs Python {sys.version.split()[0]} at"
        f" {sys.prefix}, which needs the toolkit installed. Launch with the repository's"
        " launch.sh, or install the toolkit there."
    ) from error


@dataclass
class Job:
    """One running request. ids, log_probs and logits have not been sent yet."""

    request: EngineRequest
    sender: Any
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
        self._executor = Executor(engine)
        self._call_numbers = iter(range(1 << 62))
        self._call_ids: dict[str, str] = {}  # the client's id -> ours
        self._stop = threading.Event()
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._run, name="executor")
        self._thread.start()

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
        self._thread.join()

    def _run(self) -> None:
        try:
            self._executor.run(self._stop)
        except Exception as error:
            self._broken = (
                f"the executor failed and serves no more requests: {error!r}; the server's log has"
                " the traceback"
            )
            pb_utils.Logger.log_error(traceback_of(error))

    def _accept(self, triton_request: Any, sender: Any) -> None:
        arrays = {tensor.name(): tensor.as_numpy().copy() for tensor in triton_request.inputs()}
        request, name = parse_engine(arrays, decoupled=self._decoupled), triton_request.request_id()
        if request.cancels:
            if not name:
                raise RequestError(
                    "stop came without a request id", hint="Send the id of the request to cancel."
                )
            if name in self._call_ids:
                self._executor.cancel(self._call_ids[name])
            sender.send(
                pb_utils.InferenceResponse([]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
            return
        job, call_id = Job(request, sender), str(next(self._call_numbers))
        call = Call(
            call_id,
            request.ids,
            request.max_tokens,
            drafts=request.drafts,
            draft_logits=request.draft_logits,
            sampling=request.sampling,
            end_ids=request.end_ids,
            stop_sequences=request.stop_words,
            min_tokens=request.min_tokens,
            log_probs="return_log_probs" in request.returns,
            logits="return_generation_logits" in request.returns,
        )
        if name:
            self._call_ids[name] = call_id
        try:
            self._executor.submit(call, lambda output: self._deliver(job, name, output))
        except BaseException:
            self._call_ids.pop(name, None)
            raise

    def _refuse(self, sender: Any, outcome: RequestOutcome, message: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, ERROR_CODES[outcome]))
        sender.send(
            pb_utils.InferenceResponse(error=error),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    # The executor's thread.

    def _deliver(self, job: Job, name: str, output: Output) -> None:
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
            if job.request.streaming:
                job.sender.send(self._response(job, {}))
            return
        if self._call_ids.get(name) == output.call_id:
            del self._call_ids[name]
        if output.finish_reason in ("error", "cancelled"):
            self._refuse(job.sender, output.finish_reason, output.error or "cancelled")
            return
        job.sender.send(
            self._response(job, _figures(job, output)),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    def _response(self, job: Job, figures: dict[str, int | float | None]) -> Any:
        arrays = arrays_of(
            job.request, job.ids, log_probs=job.log_probs, logits=job.logits, figures=figures
        )
        job.ids, job.log_probs, job.logits = [], [], []
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in arrays.items()]
        )


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
