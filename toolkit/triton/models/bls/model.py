"""The model that clients of the `bls` layout call: preprocessing, rounds of draft and target,
postprocessing.

It serves one prompt at a time, in `execute`, and makes only calls that are answered once, because
Triton's Python backend does these reliably. (Under load with Triton 2.51, decoupled calls damaged
the memory of this process, and so did calls from threads of our own.) Many requests run at once
because there are many instances, as many as the target has slots. Triton queues the other requests.
Plain decoding streams by short calls, each of which continues the one before.

`toolkit.speculative.bls_loop` decides what a round means, and `toolkit.triton.tensors.bls` what the
tensors mean. This file is only Triton's side, and does not depend on the backend that serves the
engines. The prompts of one request are served one after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import triton_python_backend_utils as pb_utils

# This path is for the process that loads this file; its children must not inherit it.
os.environ.pop("LD_LIBRARY_PATH", None)

import json

from toolkit.errors import RequestError
from toolkit.interfaces import RequestStats, TokenEvent
from toolkit.speculative.adaptive import AdaptiveSettings, Controller
from toolkit.speculative.bls_loop import Adaptive, DraftFailed, Drafts, Part, Rounds, Settings
from toolkit.speculative.call_costs import CallCosts
from toolkit.speculative.limits import check_prompt_length, check_total_length
from toolkit.speculative.load_gate import LoadGate
from toolkit.speculative.text import TextStream
from toolkit.triton.tensors.backend import (
    Gap,
    Metrics,
    error_response,
    instance_number,
    parameters_of,
    parameters_of_request,
    send_tensors,
    shared_memory,
    traceback_of,
)
from toolkit.triton.tensors.bls import (
    BlsAnswer,
    BlsRequest,
    Prepared,
    choose_draft_len,
    engine_inputs,
    parse_bls,
    preprocessing_inputs,
    read_drafts,
    shaped,
    split_prompts,
    text_value,
    token_log_probs,
)
from toolkit.triton.tensors.contract import PACKAGE_VERSION
from toolkit.triton.tensors.requests import Limits
from toolkit.triton.tensors.word_lists import unpack
from toolkit.words import AcceptanceChoice, LogProbSource, RequestOutcome, SeedScope

CLIENT_CHECK_INTERVAL_NS = 50_000_000  # one check whether the client is gone takes about 0.1 ms
PREPROCESSING_OUTPUTS = (
    "INPUT_ID",
    "OUT_END_ID",
    "OUT_PAD_ID",
    "STOP_WORDS_IDS",
    "BAD_WORDS_IDS",
    "EMBEDDING_BIAS",
)
# How long one call of plain decoding should take. The call itself costs about half a millisecond,
# which is 2 % of the shorter one.
STREAMED_CALL_NS = 25_000_000
WHOLE_CALL_NS = 250_000_000
MAX_CALL_TOKENS = 64
DRAFT_PAUSE_NS = 10_000_000_000  # without calls to a draft that has failed
UNTOLD = ("toolkit_reused_prompt_tokens",)  # the engines have it, in their own figures
FIGURES = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks")


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = parameters_of(args)
        packaged_version = parameters.get("package_version")
        if packaged_version != str(PACKAGE_VERSION):
            raise pb_utils.TritonModelException(
                f"this repository has package version {packaged_version}, and the toolkit that it"
                f" imports serves version {PACKAGE_VERSION}: package it again"
            )
        self._parameters = parameters
        self._decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
        self._inputs = {
            tensor["name"]: tensor["dims"] in (["1"], [1]) for tensor in config["input"]
        }
        self._types = {
            tensor["name"]: pb_utils.triton_string_to_numpy(tensor["data_type"])
            for tensor in config["output"]
        }
        self._default_timeout_ms = int(1000 * float(parameters["request_timeout_s"]))
        self._limits = Limits(
            decoupled=self._decoupled,
            max_draft_len=int(parameters.get("max_draft_len", "0")),
            max_input_len=int(parameters["max_input_len"]),
            max_timeout_ms=self._default_timeout_ms,
        )
        end_ids = parameters.get("end_ids", "").split(",")
        self._end_ids = tuple(int(end_id) for end_id in end_ids if end_id)
        self._accumulate = parameters.get("accumulate_tokens", "false").lower() in ("true", "1")
        self._metrics = Metrics(pb_utils, args["model_name"], untold=UNTOLD)
        self._lost_draft: tuple[int, str] | None = None  # when it failed, and why
        self._adaptive: Adaptive | None = None
        self._shared: Path | None = None
        if "adaptive" in parameters and self._limits.max_draft_len:
            # Of this instance, which serves its requests one after the other.
            longest = self._limits.max_draft_len
            size = LoadGate.SIZE + CallCosts.size(longest)
            name = f"{args['model_name']}-{args['model_version']}"
            memory, self._shared = shared_memory(name, size)
            if self._shared is None:
                pb_utils.Logger.log_warn(
                    "the temporary folder takes no file, so the instances of this model choose"
                    " draft lengths each for itself, and draft too much under load"
                )
            costs = CallCosts(longest, memory[LoadGate.SIZE :])
            adaptive = AdaptiveSettings(**json.loads(parameters["adaptive"]))
            gate = LoadGate(memory[: LoadGate.SIZE], instance_number(args))
            self._adaptive = Adaptive(Controller(adaptive, costs, longest), costs, gate)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._serve(request)

    def finalize(self) -> None:
        if self._shared is not None:
            self._shared.unlink(missing_ok=True)

    def _refuse(
        self,
        sender: Any,
        outcome: RequestOutcome,
        message: str,
        stats: RequestStats | None = None,
        gaps: Sequence[Gap] = (),
    ) -> None:
        self._metrics.finished(outcome, stats, gaps)
        sender.send(
            error_response(pb_utils, outcome, message),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    def _serve(self, request: Any) -> None:
        sender, arrival_ns = request.get_response_sender(), time.monotonic_ns()
        self._metrics.add("toolkit_active_requests", 1)
        try:
            arrays = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
            parameters = parameters_of_request(request)
            self._answer(request.request_id(), arrays, parameters, sender, arrival_ns)
        except RequestError as error:
            outcome: RequestOutcome = "error" if isinstance(error, EngineFailed) else "refused"
            self._refuse(sender, outcome, str(error))
        except Exception as error:  # without an answer the request would stay open in Triton
            pb_utils.Logger.log_error(traceback_of(error))
            self._refuse(sender, "error", str(error) or repr(error))
        finally:
            self._metrics.add("toolkit_active_requests", -1)

    def _answer(
        self,
        request_id: str,
        arrays: dict[str, Any],
        parameters: Mapping[str, object],
        sender: Any,
        arrival_ns: int,
    ) -> None:
        prompts = split_prompts(arrays, decoupled=self._decoupled)
        is_batch = len(prompts) > 1
        limits = dataclasses.replace(self._limits, max_draft_len=0) if is_batch else self._limits
        # All are checked before the first is answered.
        checked = [self._check(prompt, parameters, limits) for prompt in prompts]
        for index, (request, prepared) in enumerate(checked):
            answer = BlsAnswer(
                request,
                int(1e6 * float(self._parameters["stream_interval_ms"])),
                accumulate=self._accumulate,
                batch_index=index if is_batch else None,
            )
            is_last = index == len(checked) - 1
            if not self._generate(
                request_id, request, prepared, answer, sender, arrival_ns, is_last=is_last
            ):
                return

    def _check(
        self, arrays: dict[str, Any], parameters: Mapping[str, object], limits: Limits
    ) -> tuple[BlsRequest, Prepared]:
        request = parse_bls(
            arrays,
            parameters,
            limits,
            self._inputs,
            acceptance=cast(AcceptanceChoice, self._parameters.get("acceptance", "auto")),
            fresh_seed=random.SystemRandom().getrandbits(63),
        )
        prepared = self._prepare(request, arrays)
        self._check_lengths(request, prepared)
        return request, prepared

    def _generate(
        self,
        request_id: str,
        request: BlsRequest,
        prepared: Prepared,
        answer: BlsAnswer,
        sender: Any,
        arrival_ns: int,
        *,
        is_last: bool,
    ) -> bool:
        """Answer one prompt. is_last: of its request. Returns whether it was answered; if not, the
        request was refused.
        """
        own_parameters = self._parameters
        last_check_ns = arrival_ns

        def cancelled() -> bool:
            nonlocal last_check_ns
            now = time.monotonic_ns()
            if now - last_check_ns < CLIENT_CHECK_INTERVAL_NS:
                return False
            last_check_ns = now
            return bool(sender.is_cancelled())

        timeout_ms = request.request.timeout_ms or self._default_timeout_ms
        draft_len, reason = choose_draft_len(
            request,
            len(prepared.ids),
            max_prompt_tokens=int(own_parameters.get("max_prompt_tokens", "0")) or None,
            adapts=self._adaptive is not None,
            seeds=cast(SeedScope, own_parameters.get("seeds", "request")),
        )
        engines = EngineModels(own_parameters, request, prepared, self._lost())
        rounds = Rounds(
            Settings(
                request_id=request_id,
                prompt_ids=prepared.ids,
                max_tokens=request.max_tokens,
                draft_len=draft_len,
                draft_len_reason=reason,
                end_ids=frozenset(prepared.end_ids),
                arrival_ns=arrival_ns,
                deadline_ns=arrival_ns + timeout_ms * 1_000_000,
                on_draft_failure=own_parameters.get("on_draft_failure", "error"),
                verify_only=request.rule == "verify_only",
                log_probs=request.log_probs,
                running_stats=request.request.repeats_figures,
            ),
            engines,
            TextStream(PostProcessing(), prepared.ids, request.request.stop),
            cancelled=cancelled,
            adaptive=self._adaptive if reason == "pays" else None,
        )
        if self._adaptive is not None:
            self._adaptive.gate.begin(decides=reason == "pays")
        try:
            for event in rounds:
                if event.finish_reason in ("deadline", "cancelled"):
                    tokens = 0 if event.stats is None else event.stats.output_tokens
                    messages = {
                        "deadline": (
                            f"deadline of {timeout_ms} ms passed after {tokens} tokens; timeout_ms"
                            " sets another"
                        ),
                        "cancelled": "cancelled by the client",
                    }
                    message = messages[event.finish_reason]
                    self._refuse(sender, event.finish_reason, message, event.stats, answer.gaps)
                    return False
                self._send(sender, answer, event, rounds, engines, is_last=is_last)
        finally:
            self._end_work()
            engines.release()
        if rounds.draft_failure is not None and self._lost() is None:
            self._lost_draft = time.monotonic_ns(), rounds.draft_failure.what
        return True

    def _end_work(self) -> None:
        """Let the other instances see that this one serves no request."""
        if self._adaptive is not None:
            self._adaptive.gate.end()

    def _lost(self) -> str | None:
        """Why the draft is not called now: it has failed lately. A draft that hangs would hold up
        one request after the other.
        """
        if self._lost_draft is None:
            return None
        failed_ns, why = self._lost_draft
        if time.monotonic_ns() - failed_ns >= DRAFT_PAUSE_NS:
            return None
        return f"the draft failed less than {DRAFT_PAUSE_NS // 10**9} s ago: {why}"

    def _send(
        self,
        sender: Any,
        answer: BlsAnswer,
        event: TokenEvent,
        rounds: Rounds,
        engines: EngineModels,
        *,
        is_last: bool,
    ) -> None:
        failure = None if rounds.draft_failure is None else str(rounds.draft_failure)
        values = answer.respond(
            event, time.monotonic_ns(), rounds.log_probs, rounds.next_best, engines.figures, failure
        )
        if values is None:
            return
        tensors = [
            pb_utils.Tensor(name, shaped(name, tensor_values, self._types[name]))
            for name, tensor_values in values.items()
        ]
        if event.finish_reason is None:
            send_tensors(pb_utils, sender, tensors, is_final=False)
            return
        if failure is not None:
            pb_utils.Logger.log_warn(f"decoded without drafts, since the draft failed: {failure}")
        # Before the answer, since the next request may follow it at once, on another instance.
        self._end_work()
        send_tensors(pb_utils, sender, tensors, is_final=is_last)
        # Afterwards, since a long stream has many gaps to count.
        self._metrics.finished(event.finish_reason, event.stats, answer.gaps)

    def _prepare(self, request: BlsRequest, arrays: dict[str, Any]) -> Prepared:
        inputs = preprocessing_inputs(request, arrays)
        outputs = call("preprocessing", inputs, PREPROCESSING_OUTPUTS, refusals=True)
        end_id = int(outputs["OUT_END_ID"].reshape(-1)[0])
        end_ids = self._end_ids
        if request.end_id is not None:
            end_ids = () if end_id < 0 else (end_id,)
        bias = outputs.get("EMBEDDING_BIAS")
        return Prepared(
            ids=tuple(outputs["INPUT_ID"].reshape(-1).tolist()),
            end_ids=end_ids,
            pad_id=int(outputs["OUT_PAD_ID"].reshape(-1)[0]),
            stop_words=unpack(outputs["STOP_WORDS_IDS"].reshape(2, -1).tolist()),
            bad_words=outputs.get("BAD_WORDS_IDS"),
            bias=bias if bias is not None and bias.size else None,
        )

    def _check_lengths(self, request: BlsRequest, prepared: Prepared) -> None:
        """Check the whole request once, since an engine call checks only its own few tokens."""
        length = len(prepared.ids)
        check_prompt_length(length, int(self._parameters["max_input_len"]))
        check_total_length(length, request.max_tokens, int(self._parameters["max_seq_len"]))


class EngineFailed(RequestError):
    """A model that we called failed. The request is not at fault."""


class EngineModels:
    """The two engine models, called for one request. lost_draft: why the draft is not called.
    figures: the target's cache figures, summed over its calls.
    """

    def __init__(
        self,
        parameters: dict[str, str],
        request: BlsRequest,
        prepared: Prepared,
        lost_draft: str | None = None,
    ) -> None:
        self._lost_draft = lost_draft
        self._target = parameters.get("tensorrt_llm_model_name", "tensorrt_llm")
        self._draft = parameters.get("tensorrt_llm_draft_model_name")
        self._seeds = cast(SeedScope, parameters.get("seeds", "request"))
        self._log_probs = cast(LogProbSource, parameters.get("log_probs", "engine"))
        self._has_end_token = parameters.get("end_token", "hidden") == "returned"
        self._vocab_size = int(parameters["vocab_size"]) if "vocab_size" in parameters else None
        # Tensors that the engine's version names differently.
        self._names = {
            name: parameters[f"engine_{name}"]
            for name in ("min_tokens", "seed")
            if f"engine_{name}" in parameters
        }
        # The engines keep a slot for each request until it ends.
        self._owner = uuid.uuid4().hex if parameters.get("keeps_slots") == "true" else ""
        self._holding: set[str] = set()  # models that keep a slot
        self._request = request
        self._prepared = prepared
        self.figures: dict[str, int] = {}
        self._call_tokens = 1  # of the next call of plain decoding; the first token comes alone

    def draft(self, ids: Sequence[int], count: int) -> Drafts:
        if self._draft is None:
            raise DraftFailed("this deployment has no draft model", hint="Send num_draft_tokens 0.")
        if self._lost_draft is not None:
            raise DraftFailed(self._lost_draft)
        tensors = engine_inputs(
            self._request,
            self._prepared,
            ids,
            count,
            role="draft",
            seeds=self._seeds,
            has_end_token=self._has_end_token,
            owner=self._owner,
        )
        wanted = [
            "output_ids",
            "sequence_length",
            *(["generation_logits"] if "return_generation_logits" in tensors else []),
        ]
        hint = "Send num_draft_tokens 0, or package with triton.on_draft_failure: plain."
        try:
            answer = self._call(self._draft, tensors, wanted)
            new, logits = read_drafts(
                answer,
                count,
                vocab_size=self._vocab_size,
                wants_logits="generation_logits" in wanted,
            )
        except EngineFailed as error:
            raise DraftFailed(error.what, hint=hint) from error
        except Exception as error:  # whatever it answered: the target can go on without it
            what = f"the model {self._draft!r} answered wrongly: {error}"
            raise DraftFailed(what, hint=hint) from error
        return Drafts(new, logits)

    def release(self) -> None:
        """Let the engines give the request's slots to others. A slot of an engine that has failed
        is free soon anyway.
        """
        if not self._owner:
            return
        tensors = {"stop": np.array([[True]]), "slot_owner": text_value(self._owner)}
        for model in self._holding:
            with contextlib.suppress(EngineFailed):
                call(model, tensors, ())

    def _call(self, model: str, tensors: dict[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
        """Call an engine, with the names that its version has for the tensors."""
        self._holding.discard(model)  # one that does not answer would not answer a release either
        answer = call(
            model, {self._names.get(name, name): array for name, array in tensors.items()}, wanted
        )
        self._holding.add(model)
        return answer

    def verify(self, ids: Sequence[int], drafts: Drafts) -> Part:
        return self._call_target(
            ids, len(drafts.ids) + 1, drafts=drafts.ids, draft_logits=drafts.logits
        )

    def plain(self, ids: Sequence[int], count: int) -> Generator[Part, None, None]:
        """Make calls that each take about STREAMED_CALL_NS or WHOLE_CALL_NS: long enough that the
        cost of calling is small, and short enough to stream, or at least to be cancelled in time.
        """
        call_ns = STREAMED_CALL_NS if self._request.request.streaming else WHOLE_CALL_NS
        known, call_tokens = list(ids), min(count, self._call_tokens)
        while count > 0:
            started = time.monotonic_ns()
            part = self._call_target(known, call_tokens, whole=True)
            elapsed = time.monotonic_ns() - started
            yield part
            if len(part.ids) < call_tokens:  # the engine met an end token or a stop word
                return
            known += part.ids
            count -= call_tokens
            fitting = max(1, call_tokens * call_ns // max(1, elapsed))
            self._call_tokens = min(fitting, MAX_CALL_TOKENS)
            call_tokens = min(count, self._call_tokens)

    def _call_target(self, ids: Sequence[int], count: int, **options: Any) -> Part:
        tensors = engine_inputs(
            self._request,
            self._prepared,
            ids,
            count,
            role="target",
            seeds=self._seeds,
            log_probs=self._log_probs,
            has_end_token=self._has_end_token,
            owner=self._owner,
            **options,
        )
        wanted = ["output_ids", "sequence_length"]
        wanted += ["output_log_probs"] if "return_log_probs" in tensors else []
        wanted += ["generation_logits"] if "return_generation_logits" in tensors else []
        wanted += FIGURES if "return_perf_metrics" in tensors else []
        answer = self._call(self._target, tensors, wanted)
        for name in FIGURES:
            if name in answer:
                self.figures[name] = self.figures.get(name, 0) + int(answer[name].reshape(-1)[0])
        new = _new_ids(answer, count)
        logits, log_probs = answer.get("generation_logits"), answer.get("output_log_probs")
        if logits is not None:
            rows = logits.reshape(-1, logits.shape[-1])[: len(new)]
            return Part(new, *token_log_probs(rows, new, self._vocab_size))
        if log_probs is not None:
            return Part(new, tuple(float(value) for value in log_probs.reshape(-1)[: len(new)]))
        return Part(new)


class PostProcessing:
    """The postprocessing model as a decoder. The rows of ids are sent as if they were beams."""

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        longest = max(1, *map(len, rows)) if rows else 1
        tokens = np.zeros((1, len(rows), longest), dtype=np.int32)
        for index, row in enumerate(rows):
            tokens[0, index, : len(row)] = row
        lengths = np.array([[len(row) for row in rows]], dtype=np.int32)
        answer = call(
            "postprocessing", {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths}, ["OUTPUT"]
        )
        return [
            text.decode("utf-8", errors="replace") for text in answer["OUTPUT"].reshape(-1).tolist()
        ]


def _new_ids(answer: dict[str, Any], count: int) -> tuple[int, ...]:
    length = int(answer["sequence_length"].reshape(-1)[0])
    return tuple(answer["output_ids"].reshape(-1)[: min(length, count)].tolist())


def call(
    model: str, tensors: dict[str, Any], wanted: Sequence[str], *, refusals: bool = False
) -> dict[str, Any]:
    """Call a model that answers once. refusals: if it answers with the code for an invalid
    argument, the client is at fault.

    Raises RequestError for a refusal, and EngineFailed for any other failure.
    """
    return _arrays(model, _exec(model, tensors, wanted), refusals=refusals)


def _exec(model: str, tensors: dict[str, Any], wanted: Sequence[str]) -> Any:
    inputs = [pb_utils.Tensor(name, array) for name, array in tensors.items()]
    request = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=list(wanted), inputs=inputs
    )
    try:
        return request.exec()
    except pb_utils.TritonModelException as error:
        raise EngineFailed(f"the model {model!r} cannot be called: {error}") from error


def _arrays(model: str, response: Any, *, refusals: bool = False) -> dict[str, Any]:
    if response.has_error():
        error = response.error()
        if refusals and error.code() == pb_utils.TritonError.INVALID_ARG:
            raise RequestError(error.message())
        raise EngineFailed(f"the model {model!r} failed: {error.message()}")
    # Copies, because the arrays are views of memory that is freed with the response.
    return {tensor.name(): tensor.as_numpy().copy() for tensor in response.output_tensors()}
