"""The model that clients of the `bls` layout call: preprocessing, rounds of draft and target,
postprocessing.

One request at a time, in `execute`, and only calls that are answered once: what Triton's Python
backend does reliably. (Under load with Triton 2.51, decoupled calls damaged the memory of this
process, and so did calls from threads of our own.) Many requests run at once because there are many
instances, as many as the target has room for; Triton queues the others. Plain decoding streams by
short calls, each continuing the one before.

What a round means is decided in `toolkit.speculative.bls_loop`, what the tensors mean in
`toolkit.triton.tensors.bls`; here is only Triton's side. Nothing of it depends on which backend
serves the engines.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Generator, Sequence
from typing import Any, cast

import numpy as np
import triton_python_backend_utils as pb_utils

os.environ.pop("LD_LIBRARY_PATH", None)  # of the server's own wheel, for this process alone

import json

from toolkit.errors import RequestError
from toolkit.interfaces import TokenEvent
from toolkit.speculative.bls_loop import DraftFailed, Drafts, Part, Rounds, Settings
from toolkit.speculative.limits import check_prompt_length, check_total_length
from toolkit.speculative.text import TextStream
from toolkit.triton.tensors.backend import CODES, Metrics, parameters_of, traceback_of
from toolkit.triton.tensors.bls import (
    BlsAnswer,
    BlsRequest,
    Prepared,
    engine_inputs,
    parse_bls,
    preprocessing_inputs,
    shaped,
    token_log_probs,
)
from toolkit.triton.tensors.contract import PACKAGE_VERSION
from toolkit.triton.tensors.requests import Limits
from toolkit.triton.tensors.word_lists import unpack
from toolkit.words import AcceptanceChoice, LogProbSource, RequestOutcome, SeedScope

WATCH_NS = (
    50_000_000  # between two looks at whether the client is still there: each costs about 0.1 ms
)
PREPARED = (
    "INPUT_ID",
    "OUT_END_ID",
    "OUT_PAD_ID",
    "STOP_WORDS_IDS",
    "BAD_WORDS_IDS",
    "EMBEDDING_BIAS",
)
STREAMED_CALL_NS = 25_000_000  # a call costs about half a millisecond: 2 % of this
WHOLE_CALL_NS = 250_000_000
MOST_TOKENS = 64
FIGURES = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks")


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        own = parameters_of(args)
        if own.get("package_version") != str(PACKAGE_VERSION):
            raise pb_utils.TritonModelException(
                f"this repository has package version {own.get('package_version')}, and the toolkit"
                f" that it found serves version {PACKAGE_VERSION}: package it again"
            )
        self._own = own
        self._decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
        self._inputs = {
            each["name"]: each["dims"] == ["1"] or each["dims"] == [1] for each in config["input"]
        }
        self._types = {
            each["name"]: pb_utils.triton_string_to_numpy(each["data_type"])
            for each in config["output"]
        }
        self._limits = Limits(
            decoupled=self._decoupled, max_draft_len=int(own.get("max_draft_len", "0"))
        )
        self._end_ids = tuple(int(each) for each in own.get("end_ids", "").split(",") if each)
        self._accumulate = own.get("accumulate_tokens", "false").lower() in ("true", "1")
        self._metrics = Metrics(pb_utils, args["model_name"])

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._serve(request)

    def _refuse(
        self, sender: Any, outcome: RequestOutcome, message: str, stats: Any = None
    ) -> None:
        self._metrics.finished(outcome, stats)
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, CODES[outcome]))
        sender.send(
            pb_utils.InferenceResponse(error=error),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    def _serve(self, request: Any) -> None:
        sender, arrival_ns = request.get_response_sender(), time.monotonic_ns()
        self._metrics.add("toolkit_active_requests", 1)
        try:
            arrays = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
            parameters = json.loads(request.parameters() or "{}")
            self._answer(request.request_id(), arrays, parameters, sender, arrival_ns)
        except RequestError as error:
            self._refuse(
                sender, "error" if isinstance(error, EngineFailed) else "refused", str(error)
            )
        except Exception as error:  # Triton has to get an answer, or the request stays open
            pb_utils.Logger.log_error(traceback_of(error))
            self._refuse(sender, "error", str(error) or repr(error))
        finally:
            self._metrics.add("toolkit_active_requests", -1)

    def _answer(
        self,
        request_id: str,
        arrays: dict[str, Any],
        parameters: dict[str, Any],
        sender: Any,
        arrival_ns: int,
    ) -> None:
        own = self._own
        request = parse_bls(
            arrays,
            parameters,
            self._limits,
            self._inputs,
            acceptance=cast(AcceptanceChoice, own.get("acceptance", "auto")),
            fresh_seed=random.SystemRandom().getrandbits(63),
        )
        prepared = self._prepare(request, arrays)
        self._check_lengths(request, prepared)
        watched = [arrival_ns]

        def cancelled() -> bool:
            now = time.monotonic_ns()
            if now - watched[0] < WATCH_NS:
                return False
            watched[0] = now
            return bool(sender.is_cancelled())

        timeout_ms = request.request.timeout_ms or int(1000 * float(own["request_timeout_s"]))
        engines = EngineModels(self._own, request, prepared)
        rounds = Rounds(
            Settings(
                request_id=request_id,
                prompt_ids=prepared.ids,
                max_tokens=request.max_tokens,
                draft_len=request.draft_len,
                end_ids=frozenset(prepared.end_ids),
                arrival_ns=arrival_ns,
                deadline_ns=arrival_ns + timeout_ms * 1_000_000,
                on_draft_failure=own.get("on_draft_failure", "error"),
                verify_only=request.rule == "verify_only",
                log_probs=request.log_probs,
            ),
            engines,
            TextStream(PostProcessing(), prepared.ids, request.request.stop),
            cancelled=cancelled,
        )
        answer = BlsAnswer(
            request, int(1e6 * float(own["stream_interval_ms"])), accumulate=self._accumulate
        )
        for event in rounds:
            if event.finish_reason in ("deadline", "cancelled"):
                tokens = 0 if event.stats is None else event.stats.output_tokens
                said = {
                    "deadline": (
                        f"deadline of {timeout_ms} ms passed after {tokens} tokens; timeout_ms sets"
                        " another"
                    ),
                    "cancelled": "cancelled by the client",
                }
                self._refuse(sender, event.finish_reason, said[event.finish_reason], event.stats)
                return
            self._send(sender, answer, event, rounds, engines)

    def _send(
        self,
        sender: Any,
        answer: BlsAnswer,
        event: TokenEvent,
        rounds: Rounds,
        engines: EngineModels,
    ) -> None:
        failure = None if rounds.draft_failure is None else str(rounds.draft_failure)
        values = answer.respond(
            event, time.monotonic_ns(), rounds.log_probs, rounds.next_best, engines.figures, failure
        )
        if values is None:
            return
        tensors = [
            pb_utils.Tensor(name, shaped(name, each, self._types[name]))
            for name, each in values.items()
        ]
        if event.finish_reason is None:
            sender.send(pb_utils.InferenceResponse(tensors))
            return
        if failure is not None:
            pb_utils.Logger.log_warn(f"decoded plainly, since the draft failed: {failure}")
        self._metrics.finished(event.finish_reason, event.stats)
        sender.send(
            pb_utils.InferenceResponse(tensors), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )

    def _prepare(self, request: BlsRequest, arrays: dict[str, Any]) -> Prepared:
        found = call(
            "preprocessing", preprocessing_inputs(request, arrays), PREPARED, refusals=True
        )
        end_id = int(found["OUT_END_ID"].reshape(-1)[0])
        end_ids = self._end_ids if request.end_id is None else (() if end_id < 0 else (end_id,))
        bias = found.get("EMBEDDING_BIAS")
        return Prepared(
            ids=tuple(found["INPUT_ID"].reshape(-1).tolist()),
            end_ids=end_ids,
            pad_id=int(found["OUT_PAD_ID"].reshape(-1)[0]),
            stop_words=unpack(found["STOP_WORDS_IDS"].reshape(2, -1).tolist()),
            bad_words=found.get("BAD_WORDS_IDS"),
            bias=bias if bias is not None and bias.size else None,
        )

    def _check_lengths(self, request: BlsRequest, prepared: Prepared) -> None:
        """Once for the whole request: a round looks only as far as its own tokens."""
        length = len(prepared.ids)
        check_prompt_length(length, int(self._own["max_input_len"]))
        check_total_length(length, request.max_tokens, int(self._own["max_seq_len"]))


class EngineFailed(RequestError):
    """A model behind us did not do what it should: no fault of the request's."""


class EngineModels:
    """The two engine models, called for one request. figures: the target's, summed over its
    calls.
    """

    def __init__(self, own: dict[str, str], request: BlsRequest, prepared: Prepared) -> None:
        self._target = own.get("tensorrt_llm_model_name", "tensorrt_llm")
        self._draft = own.get("tensorrt_llm_draft_model_name")
        self._seeds = cast(SeedScope, own.get("seeds", "request"))
        self._log_probs = cast(LogProbSource, own.get("log_probs", "engine"))
        self._vocab_size = int(own["vocab_size"]) if "vocab_size" in own else None
        self._names = {
            name: own[f"engine_{name}"]
            for name in ("min_tokens", "seed")
            if f"engine_{name}" in own
        }
        self._request = request
        self._prepared = prepared
        self.figures: dict[str, int] = {}

    def draft(self, ids: Sequence[int], count: int) -> Drafts:
        if self._draft is None:
            raise DraftFailed("this deployment has no draft model", hint="Send num_draft_tokens 0.")
        tensors = engine_inputs(
            self._request, self._prepared, ids, count, role="draft", seeds=self._seeds
        )
        wanted = [
            "output_ids",
            "sequence_length",
            *(["generation_logits"] if "return_generation_logits" in tensors else []),
        ]
        try:
            answer = call(self._draft, self._spelled(tensors), wanted)
        except EngineFailed as error:
            raise DraftFailed(
                error.what,
                hint="Send num_draft_tokens 0, or package with triton.on_draft_failure: plain.",
            ) from error
        new = _new_ids(answer, count)
        logits = answer.get("generation_logits")
        return Drafts(
            new, None if logits is None else logits.reshape(-1, logits.shape[-1])[: len(new)]
        )

    def _spelled(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """In the words of the engine's version."""
        return {self._names.get(name, name): array for name, array in tensors.items()}

    def verify(self, ids: Sequence[int], drafts: Drafts) -> Part:
        return self._ask(ids, len(drafts.ids) + 1, drafts=drafts.ids, draft_logits=drafts.logits)

    def plain(self, ids: Sequence[int], count: int) -> Generator[Part, None, None]:
        """Calls of about as long as the target says: long enough that calling costs little, and
        short enough to stream, or at least to be ended in time.
        """
        target_ns = STREAMED_CALL_NS if self._request.request.streaming else WHOLE_CALL_NS
        known, asked = list(ids), 1
        while count > 0:
            started = time.monotonic_ns()
            part = self._ask(known, asked, whole=True)
            elapsed = time.monotonic_ns() - started
            yield part
            if len(part.ids) < asked:  # the engine met what ends a text
                return
            known += part.ids
            count -= asked
            asked = min(count, max(1, asked * target_ns // max(1, elapsed)), MOST_TOKENS)

    def _ask(self, ids: Sequence[int], count: int, **how: Any) -> Part:
        how = {**how, "seeds": self._seeds, "log_probs": self._log_probs}
        tensors = engine_inputs(self._request, self._prepared, ids, count, role="target", **how)
        wanted = ["output_ids", "sequence_length"]
        wanted += ["output_log_probs"] if "return_log_probs" in tensors else []
        wanted += ["generation_logits"] if "return_generation_logits" in tensors else []
        wanted += FIGURES if "return_perf_metrics" in tensors else []
        answer = call(self._target, self._spelled(tensors), wanted)
        for name in FIGURES:
            if name in answer:
                self.figures[name] = self.figures.get(name, 0) + int(answer[name].reshape(-1)[0])
        new, values, logits = (
            _new_ids(answer, count),
            answer.get("output_log_probs"),
            answer.get("generation_logits"),
        )
        if logits is not None:
            return Part(
                new,
                *token_log_probs(
                    logits.reshape(-1, logits.shape[-1])[: len(new)], new, self._vocab_size
                ),
            )
        return Part(
            new,
            () if values is None else tuple(float(each) for each in values.reshape(-1)[: len(new)]),
        )


class PostProcessing:
    """The postprocessing model as a decoder: rows of ids go where its beams would."""

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
    """One call of a model that answers once. refusals: what it says is the client's fault, as
    far as its code says so.
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
    # Copies: the arrays are views of memory that goes with the response.
    return {tensor.name(): tensor.as_numpy().copy() for tensor in response.output_tensors()}
