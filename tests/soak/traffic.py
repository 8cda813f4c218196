"""The requests of a soak, and what is right as an answer to each.

Kinds of requests, in shares of all:

    greedy, sampled  of mixed lengths, streamed and whole; a greedy text is judged against the same
                     request alone on an idle server
    cancelled        the client hangs up after a few chunks; in llmapi also: somebody who knows the
                     id of the request stops it
    malformed        tensors that are not what the model's interface says
    hostile          well-formed requests that cost one user nothing and all others much, if they
                     are not refused; in llmapi also a stop request with an id that nobody has

A text may differ from its reference where rounding decides between two tokens, since floating point
is not batch-invariant. The logits behind the reference say where.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from toolkit.client import (
    Client,
    Completion,
    Options,
    RequestRefused,
    RequestTiming,
    ServerUnavailable,
    timing,
)
from toolkit.triton.tensors.contract import BLS_MODEL, MODEL

__all__ = [
    "ANSWER_S",
    "ENGINE_HOSTILE",
    "HOSTILE",
    "MALFORMED",
    "STOPS",
    "Answer",
    "Attack",
    "Case",
    "Kind",
    "Outcome",
    "Server",
    "Traffic",
    "Verdict",
    "compare",
    "references",
]

Kind: TypeAlias = Literal["greedy", "sampled", "cancelled", "malformed", "hostile"]
SHARES: dict[Kind, float] = {
    "greedy": 0.55,
    "sampled": 0.32,
    "cancelled": 0.10,
    "malformed": 0.01,
    "hostile": 0.02,
}
CALM: tuple[Kind, ...] = ("greedy", "sampled")
LENGTHS = (1, 8, 24, 64, 160)  # output tokens
# As in validation.parity: two tokens whose logits are this close are decided by rounding; a
# difference at ten times that is a fault.
NEAR_TIE = 0.05
FAULT = 10 * NEAR_TIE
ANSWER_S = 60.0  # a request that has no answer by then hangs

Outcome: TypeAlias = Literal["answered", "cancelled", "refused", "unavailable"]
Verdict: TypeAlias = Literal["right", "near-tie", "wrong"]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and an output length, whose greedy text is known."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reference:
    """The greedy text of a case, and the logits [output tokens, vocabulary] behind it."""

    completion: Completion
    logits: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request. sent_ns and ended_ns: the client's monotonic clock; why: of an
    answer that is wrong or failed. by_model: whether the model counts the request.
    """

    kind: Kind
    outcome: Outcome
    verdict: Verdict
    sent_ns: int
    ended_ns: int
    timing: RequestTiming | None = None
    why: str = ""
    by_model: bool = True


@dataclass(frozen=True, slots=True)
class Server:
    """One life of the server: its client, and a channel for messages that the client would not
    send.
    """

    client: Client
    channel: grpc.Channel

    @staticmethod
    def at(url: str) -> Server:
        options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        return Server(Client(url, timeout_s=ANSWER_S), grpc.insecure_channel(url, options=options))

    def close(self) -> None:
        self.client.close()
        self.channel.close()

    @property
    def hostile(self) -> dict[str, Attack]:
        """The hostile requests that concern the served layout."""
        if "stop" in self.client.interface().inputs:
            return HOSTILE | LLMAPI_HOSTILE | STOPS
        return HOSTILE | (ENGINE_HOSTILE if self.client.model == BLS_MODEL else {})

    def message(self, prompt: str, **options: Any) -> Any:
        interface = self.client.interface()
        model = self.client.model or ""
        return interface.request(model, prompt, Options(**options), "", streaming=True)

    def send(self, message: Any, *, hangs_up: bool = False) -> None:
        """Raises RequestRefused with the server's reason, or ServerUnavailable.

        hangs_up: cancel the stream at once when an error comes. Else it is read to its end, as
        `Client` reads it: Triton 24.10 keeps a request for ever whose client hangs up in between.
        """
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        call = stub.ModelStreamInfer(iter([message]), timeout=ANSWER_S)
        errors = (response.error_message for response in call)
        try:
            reason = next((error for error in errors if error), None)
            if hangs_up:
                call.cancel()
            else:
                collections.deque(errors, maxlen=0)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise ServerUnavailable(str(error.details())) from error
            raise RequestRefused(f"{error.code()}: {error.details()}") from error
        if reason is not None and reason.startswith(("Stub process", DEAD_MODEL)):
            raise ServerUnavailable(reason)
        if reason is not None:
            raise RequestRefused(reason)


def _text_input(message: Any, raw: bytes | None = None, **fields: Any) -> Any:
    """The message with other bytes, or other fields, of its prompt."""
    names = [tensor.name for tensor in message.inputs]
    place = names.index("text_input")
    if raw is not None:
        message.raw_input_contents[place] = raw
    for name, value in fields.items():
        if name == "shape":
            message.inputs[place].shape[:] = value
        else:
            setattr(message.inputs[place], name, value)
    return message


def _stop(server: Server, request_id: str) -> Any:
    """A message that stops the request with this id."""
    message = server.message("")
    message.id = request_id
    shape = [1, 1] if server.client.interface().batched else [1]
    message.inputs.add(name="stop", datatype="BOOL", shape=shape)
    message.raw_input_contents.append(b"\1")
    return message


def _many_stop_words(server: Server) -> Any:
    """A message with a million of them, in 4 MB."""
    message = server.message("abcd", max_tokens=8, stop=("x",))
    place = next(i for i, tensor in enumerate(message.inputs) if "stop" in tensor.name)
    count = 1_000_000
    message.raw_input_contents[place] = bytes(4 * count)
    message.inputs[place].shape[-1] = count
    return message


def _long_name(server: Server) -> Any:
    message = server.message("abcd", max_tokens=8)
    message.parameters["k" * 2**22].int64_param = 1
    return message


def _engine_call(tokens: int) -> Any:
    """A call of the target of the layout bls that wants the logits of so many tokens."""
    message = service_pb2.ModelInferRequest(model_name="tensorrt_llm")
    numbers = {"input_ids": [1, 2], "input_lengths": [2], "request_output_len": [tokens]}
    for name, values in numbers.items():
        message.inputs.add(name=name, datatype="INT32", shape=[1, len(values)])
        message.raw_input_contents.append(struct.pack(f"<{len(values)}i", *values))
    message.inputs.add(name="return_generation_logits", datatype="BOOL", shape=[1, 1])
    message.raw_input_contents.append(b"\1")
    return message


Attack: TypeAlias = Callable[[Server], Any]
# By name. What Triton itself refuses no model counts; what our models refuse begins so.
COUNTED = "[refused]"
MALFORMED: dict[str, Attack] = {
    "a prompt of numbers": lambda server: _text_input(
        server.message("abcd"), b"\1\0\0\0", datatype="INT32"
    ),
    "a prompt that ends early": lambda server: _text_input(
        server.message("abcd"), b"\xff\xff\0\0abcd"
    ),
    "seven prompts in the room of one": lambda server: _text_input(
        server.message("abcd"), shape=[7]
    ),
    "an input that is not there": lambda server: _text_input(
        server.message("abcd"), name="text_inputs"
    ),
    "a prompt that is not UTF-8": lambda server: _text_input(
        server.message("abcd"), b"\4\0\0\0\xff\xfe\xfd\xfc"
    ),
    "a temperature that is no number": lambda server: server.message(
        "abcd", temperature=float("nan")
    ),
    "a negative number of tokens": lambda server: server.message("abcd", max_tokens=-1),
}
HOSTILE: dict[str, Attack] = {
    "100,000 stop words": lambda server: server.message(
        "abcd", max_tokens=64, stop=tuple(f"word {number}" for number in range(100_000))
    ),
    "a stop word of a megabyte": lambda server: server.message("abcd", stop=("x" * 2**20,)),
    "a prompt of 4 MB": lambda server: server.message("abcd " * 800_000),
    "a million tokens": lambda server: server.message("abcd", max_tokens=1_000_000),
    "a deadline of a week": lambda server: server.message("abcd", timeout_ms=7 * 86_400_000),
    "a parameter with a name of 4 MB": _long_name,
    "drafts without end": lambda server: server.message("abcd", num_draft_tokens=100_000),
}
# Layout bls leaves empty stop words out, as TensorRT-LLM's examples expect.
LLMAPI_HOSTILE: dict[str, Attack] = {"a million empty stop words": _many_stop_words}
# Only llmapi can be asked to stop a request. No model counts these, nor those to an engine model.
STOPS: dict[str, Attack] = {
    "a stop for an id that nobody has": lambda server: _stop(server, "1"),
}
ENGINE_HOSTILE: dict[str, Attack] = {
    "the logits of a million tokens": lambda server: _engine_call(1_000_000),
}
NOT_COUNTED = frozenset([*STOPS, *ENGINE_HOSTILE])
DEAD_MODEL = "[error] the model's process"  # triton/native/backend.cpp
# What has to be in the answer, where it says more than that something is refused.
WORDS = {
    "a stop for an id that nobody has": "[cancelled] no request with id '1' is running",
    "a million empty stop words": "holds 1000000 ",
    "a parameter with a name of 4 MB": "unknown input 'kkkk",
    "the logits of a million tokens": "return_generation_logits of 1000000 tokens takes",
}


class Traffic:
    """Makes requests and judges them. Several threads may use one.

    references: from the function of that name.
    """

    def __init__(self, references: dict[Case, Reference]) -> None:
        self._references = references
        self._cases = list(references)

    @staticmethod
    def cases(prompts: Sequence[str], longest: int) -> list[Case]:
        """Short, usual and long prompts, in turns, each with every length of output.

        longest: characters of a long prompt, which is made of several.
        """
        joined = itertools.cycle(prompts)
        cases = []
        for number, prompt in enumerate(prompts):
            text = prompt
            if number % 3 == 0:
                text = " ".join(prompt.split()[:3])
            elif number % 3 == 1:
                while len(text) < longest:
                    text += "\n" + next(joined)
                text = text[:longest]
            cases.append(Case(text, LENGTHS[number % len(LENGTHS)]))
        return cases

    def send(self, server: Server, chance: random.Random, *, is_calm: bool) -> Answer:
        """Send one request of a random kind, and judge what comes back. is_calm: only of those
        that are meant well.
        """
        kinds = CALM if is_calm else tuple(SHARES)
        kind = chance.choices(kinds, [SHARES[name] for name in kinds])[0]
        sent_ns = time.monotonic_ns()

        def answer(outcome: Outcome, verdict: Verdict = "right", **more: Any) -> Answer:
            return Answer(kind, outcome, verdict, sent_ns, time.monotonic_ns(), **more)

        try:
            if kind in ("malformed", "hostile"):
                attacks = MALFORMED if kind == "malformed" else server.hostile
                name = chance.choice(list(attacks))
                message = attacks[name](server)
                try:
                    server.send(message)
                except RequestRefused as error:
                    is_told = WORDS.get(name, "") in str(error)
                    return answer(
                        "refused",
                        "right" if is_told else "wrong",
                        why="" if is_told else f"{name}: {error}",
                        by_model=str(error).startswith(COUNTED) and name not in NOT_COUNTED,
                    )
                return answer("answered", "wrong", why=f"{name} was answered, not refused")
            case = chance.choice(self._cases)
            options = Options(max_tokens=case.max_tokens, temperature=0.0)
            if kind == "cancelled":
                hang_up_after = chance.randrange(1, 4)
                if "stop" in server.client.interface().inputs and chance.random() < 0.5:
                    name = f"request {chance.getrandbits(64)}"
                    return answer(*self.stopped(server, case, name, hang_up_after))
                for number, _ in enumerate(server.client.stream(case.prompt, options), 1):
                    if number == hang_up_after:
                        break
                return answer("cancelled")
            if kind == "sampled":
                options = dataclasses.replace(options, temperature=0.8, top_k=50)
            received = list(server.client.stream(case.prompt, options))
            timed = timing(case.prompt, received, sent_ns)
            verdict, why = self._judged(case, timed, is_greedy=kind == "greedy")
            return answer("answered", verdict, timing=timed, why=why)
        except ServerUnavailable as error:
            return answer("unavailable", why=str(error))
        except RequestRefused as error:
            return answer("refused", "wrong", why=f"an honest request was refused: {error}")

    def stopped(self, server: Server, case: Case, name: str, after: int) -> tuple[Outcome, Verdict]:
        """Run a case that is stopped by its id after so many chunks, if it is not over by then."""
        options = Options(max_tokens=case.max_tokens, temperature=0.0)
        try:
            chunks = server.client.stream(case.prompt, options, request_id=name)
            for number, _ in enumerate(chunks, 1):
                if number == after and not self._is_stopped(server, name):
                    return "refused", "wrong"
        except RequestRefused as error:
            return "cancelled", "right" if "cancelled by the client" in str(error) else "wrong"
        return "answered", "right"

    @staticmethod
    def _is_stopped(server: Server, name: str) -> bool:
        """Whether a stop for this id is answered as one; it may come too late."""
        try:
            server.send(_stop(server, name))
        except RequestRefused as error:
            over = f"no request with id {name!r} is running"
            return str(error) in ("[cancelled] cancelled by the client", f"[cancelled] {over}")
        return False

    def _judged(self, case: Case, timed: RequestTiming, *, is_greedy: bool) -> tuple[Verdict, str]:
        if timed.output_tokens != len(timed.token_ids):
            return "wrong", f"{timed.output_tokens} tokens counted, {len(timed.token_ids)} sent"
        if timed.finish_reason == "length" and timed.output_tokens != case.max_tokens:
            return "wrong", f"{timed.output_tokens} of {case.max_tokens} tokens, for length"
        if not is_greedy:
            return "right", ""
        return compare(self._references[case], timed)


def references(repository: Path, client: Client, cases: Sequence[Case]) -> dict[Case, Reference]:
    """The greedy texts without drafts, one request at a time, with the logits that the same engine
    gives in this process.
    """
    import torch
    from tokenizers import Tokenizer

    from toolkit.engines.registry import loader

    version = repository / MODEL / "1"
    folder = version / "engine"  # of the layout bls
    if not folder.is_dir():
        folder = version / "engines" / "target"
    engine = loader("torch").load(folder, threads=1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = {}
    with torch.inference_mode():
        for case in cases:
            text = client.generate(
                case.prompt, max_tokens=case.max_tokens, temperature=0.0, num_draft_tokens=0
            )
            prompt = tokenizer.encode(case.prompt).ids
            ids = torch.tensor([[*prompt, *text.token_ids]])
            parts = [
                engine.forward([0], part).clone()
                for part in torch.split(ids, engine.max_step_tokens, dim=1)
            ]
            engine.rewind([0], [0])
            logits = torch.cat(parts, dim=1)[0, len(prompt) - 1 : -1]
            found[case] = Reference(text, logits.numpy())
    return found


def compare(reference: Reference, timed: RequestTiming) -> tuple[Verdict, str]:
    """A greedy answer beside its reference."""
    known_ids = reference.completion.token_ids
    pairs = enumerate(zip(known_ids, timed.token_ids, strict=False))
    place = next((i for i, (known, got) in pairs if known != got), None)
    if place is None:
        known_text = reference.completion.text
        is_equal = known_ids == timed.token_ids and known_text == timed.text
        return ("right", "") if is_equal else ("wrong", f"{timed.text!r}, not {known_text!r}")
    got, known = timed.token_ids[place], known_ids[place]
    margin = float(reference.logits[place, known] - reference.logits[place, got])
    if margin < FAULT:
        return "near-tie", f"{margin:.3f}"
    return "wrong", (
        f"token {place} of {timed.prompt[:40]!r} is {got}, whose logit is {margin:.2f} below that"
        f" of {known}"
    )
