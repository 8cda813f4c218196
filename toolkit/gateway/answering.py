"""One request on its way: from an arm's chunks to what the client reads, with times and counts.

The first piece of text is awaited before anything is sent, so that a refusal has its own HTTP
status. A client that hangs up ends the request on the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from toolkit.client import ClientError, RequestRefused, ServerUnavailable, Statistics
from toolkit.gateway.arms import Arm, Finished
from toolkit.gateway.backends import OptionRefused, Overloaded, Piece
from toolkit.gateway.protocol import Answers, Asked, Refusal, log_probs

__all__ = ["HUNG_UP", "Running", "error_event", "refusal_of", "watched"]

DONE = b"data: [DONE]\n\n"
HUNG_UP = "hung up"
# What a refusal of the server begins with -> the client's key that it is about: it has text alone.
ABOUT = {
    "num_draft_tokens": "num_draft_tokens",
    "the prompt has ": "prompt",
    "text_input has ": "prompt",
    "QUERY has ": "prompt",
}


def refusal_of(error: ClientError, retry_after_s: int, kind: str = "completion") -> Refusal:
    """What a client is told of an error between the gateway and the server: of a request that the
    server refuses, the server's words. Others tell where it is, which is not the clients' concern.
    kind: of the request, as in `Asked`.
    """
    if isinstance(error, OptionRefused) and error.option == "log_probs":
        return Refusal(
            "logprobs cannot be asked for: the served model does not tell log-probabilities. A"
            " deployment with triton.layout bls does, and vLLM's own server",
            parameter="logprobs",
        )
    if isinstance(error, OptionRefused):
        return Refusal(str(error), parameter=error.option)
    if isinstance(error, RequestRefused):
        about = next((key for words, key in ABOUT.items() if words in str(error)), None)
        if about == "prompt" and kind == "chat":
            about = "messages"
        return Refusal(str(error), parameter=about)
    if isinstance(error, Overloaded):
        what, code = "the model's server has no room for the request now", "overloaded"
    else:
        what, code = "the model's server is unavailable: it is gone, or has failed", "unavailable"
    return Refusal(what, status=503, code=code, retry_after_s=retry_after_s)


@dataclass
class Running:
    """A request that an arm answers. arrived_ns: of the monotonic clock."""

    arm: Arm
    asked: Asked
    answers: Answers
    arrived_ns: int
    ticket: str = ""
    is_shadow: bool = False
    keeps_text: bool = False
    statistics: Statistics = field(default_factory=Statistics)
    finish_reason: str | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    gaps_ns: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    is_unavailable: bool = False

    async def pieces(self) -> AsyncIterator[Piece]:
        """The arm's pieces, with their times taken. Raises ClientError."""
        asked, options = self.asked, self.arm.options(self.asked.options)
        if asked.key is not None:
            # Nobody can find out by the time of the first token what another key has sent.
            options = dataclasses.replace(options, cache_salt=asked.key)
        stream = self.arm.backend.stream(
            asked.prompt,
            options,
            self.answers.id,
            streams=asked.streams,
            tells_accepted=asked.tells_speculation,
        )
        async with aclosing(stream):  # type: ignore[type-var]
            try:
                async for piece in stream:
                    self._note(piece)
                    yield piece
            except ServerUnavailable:
                self.is_unavailable = True
                raise

    def _note(self, piece: Piece) -> None:
        chunk = piece.chunk
        if chunk.text or chunk.token_ids:
            if self.last_ns is not None:
                self.gaps_ns.append(chunk.received_ns - self.last_ns)
            self.first_ns = self.first_ns or chunk.received_ns
            self.last_ns = chunk.received_ns
        if self.keeps_text or not self.asked.streams:
            self.texts.append(chunk.text)
            self.token_ids.extend(chunk.token_ids)
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.statistics = chunk.statistics or Statistics()

    async def whole(self, spell: Callable[[int], str]) -> dict[str, Any]:
        """The answer of a request that does not stream. spell: the text of a token. Raises
        ClientError.
        """
        async for _ in self.pieces():
            pass
        scores = None
        if self.asked.options.log_probs:
            try:
                scores = log_probs(self.asked, self.token_ids, self.statistics, spell)
            except ValueError as error:
                raise ServerUnavailable(
                    "the server has not told a log-probability of every token"
                ) from error
        reason = self.finish_reason or "stop"
        return self.answers.whole("".join(self.texts), reason, self.statistics, scores)

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream, as bytes. Raises ClientError, before the first one or later."""
        answers, is_first = self.answers, True
        async with aclosing(self.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                if is_first and (event := answers.first_event()) is not None:
                    yield _event(event)
                is_first = False
                chunk = piece.chunk
                if chunk.text or (self.asked.tells_speculation and chunk.token_ids):
                    yield _event(answers.event(chunk.text, self._counts(piece)))
        yield _event(answers.last_event(self.finish_reason or "stop"))
        if self.asked.tells_usage:
            yield _event(answers.usage_event(self.statistics, self._timing()))
        yield DONE

    def _counts(self, piece: Piece) -> dict[str, Any]:
        """What an event tells of its tokens. Servers tell the tokens of the prompt at the end."""
        counts: dict[str, Any] = {}
        chunk = piece.chunk
        if self.asked.tells_tokens and chunk.output_tokens is not None:
            counts["usage"] = {"completion_tokens": chunk.output_tokens}
        if self.asked.tells_speculation:
            counts["speculation"] = {"tokens": len(chunk.token_ids), "accepted": piece.accepted}
        return counts

    def _timing(self) -> dict[str, Any] | None:
        if not self.asked.tells_speculation or self.first_ns is None or self.last_ns is None:
            return None
        ttft_ns, e2e_ns = self.first_ns - self.arrived_ns, self.last_ns - self.arrived_ns
        return {"timing": {"ttft_ms": ttft_ns / 1e6, "e2e_ms": e2e_ns / 1e6}}

    def finished(self, status: int | None, error: str | None = None) -> Finished:
        """How it went. status: of HTTP; None: the client left."""
        return Finished(
            self.ticket,
            self.answers.id,
            self.arm.name,
            status,
            self.first_ns - self.arrived_ns if self.first_ns and self.asked.streams else None,
            time.monotonic_ns() - self.arrived_ns,
            tuple(self.gaps_ns),
            self.statistics,
            "".join(self.texts) if self.keeps_text else None,
            self.is_shadow,
            error,
            self.is_unavailable,
        )


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def error_event(refusal: Refusal) -> bytes:
    """The event that ends a stream whose server failed."""
    return _event(refusal.body())


async def watched(work: asyncio.Task[Any], left: asyncio.Task[Any], limit_s: float) -> bool:
    """Wait until the work is done, the client has left, or limit_s is over: whether the work is
    done. Else it is cancelled, and over when this returns. Only a client that does not read what it
    is sent can need the limit: the server's answer has a shorter one.
    """
    try:
        await asyncio.wait({work, left}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return True
    finally:
        left.cancel()
        work.cancel()  # does nothing if it is done
    await asyncio.gather(work, return_exceptions=True)
    return False
