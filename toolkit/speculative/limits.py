"""What can be served at all. These checks refuse a request before any engine runs, and each message
says what would be accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.errors import RequestError, UsageError
from toolkit.interfaces import MAX_PENALTY, GenerationRequest, StepEngine

__all__ = ["Limits", "check_engines", "check_prompt_length", "check_total_length"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a deployment can serve."""

    vocab_size: int
    max_input_len: int  # prompt tokens
    max_seq_len: int  # prompt and output together
    max_draft_len: int

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError if the request can never be served. Nothing is shortened to fit."""
        length, sampling = len(request.prompt_ids), request.sampling
        if length == 0:
            raise RequestError("the prompt is empty", hint="Send at least one token.")
        check_prompt_length(length, self.max_input_len)
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.vocab_size:
            raise RequestError(
                f"the prompt holds token ids outside the vocabulary of {self.vocab_size}"
            )
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}; it has to be at least 1")
        check_total_length(length, request.max_tokens, self.max_seq_len)
        if request.draft_len is not None and not 0 <= request.draft_len <= self.max_draft_len:
            raise RequestError(
                f"draft_len is {request.draft_len}; this deployment drafts 0 to"
                f" {self.max_draft_len} tokens"
            )
        if "" in request.stop:
            raise RequestError("an empty stop word would end every text before it begins")
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0.0):
            raise RequestError(
                f"temperature is {sampling.temperature}; it has to be 0 (greedy) or more"
            )
        if sampling.top_k < 0 or not 0.0 < sampling.top_p <= 1.0:
            raise RequestError(
                f"top_k is {sampling.top_k} and top_p {sampling.top_p}; top_k has to be 0 (off) or"
                " more, and top_p in (0, 1]"
            )
        if not max(abs(sampling.frequency_penalty), abs(sampling.presence_penalty)) <= MAX_PENALTY:
            raise RequestError(
                f"frequency_penalty is {sampling.frequency_penalty} and presence_penalty"
                f" {sampling.presence_penalty}; each has to be from {-MAX_PENALTY} to"
                f" {MAX_PENALTY}"
            )


def check_prompt_length(length: int, max_input_len: int) -> None:
    """Raises RequestError for a prompt that is too long for the deployment."""
    if length > max_input_len:
        raise RequestError(
            f"the prompt has {length} tokens, and this deployment takes up to {max_input_len}"
            " (max_input_len)",
            hint="Send a shorter prompt, or build with a larger engine.max_input_len.",
        )


def check_total_length(
    length: int,
    max_tokens: int,
    max_seq_len: int,
    *,
    unit: str = "prompt tokens",
) -> None:
    """Raises RequestError if `length` tokens and max_tokens more exceed the context.

    unit: what the message calls the `length` tokens; an engine's call may hold output, too.
    """
    if length + max_tokens > max_seq_len:
        raise RequestError(
            f"{length} {unit} and max_tokens {max_tokens} together exceed max_seq_len"
            f" {max_seq_len}",
            hint=f"Ask for at most {max_seq_len - length} tokens."
            if length < max_seq_len
            else "Send a shorter prompt.",
        )


def check_engines(target: StepEngine, draft: StepEngine | None, max_draft_len: int) -> None:
    """Raises UsageError if the engines cannot serve together."""
    if max_draft_len and target.max_step_tokens <= max_draft_len:
        raise UsageError(
            f"the target's engine takes {target.max_step_tokens} tokens per step, too few to verify"
            f" {max_draft_len} draft tokens",
            hint="Build it with this draft length, or lower speculation.max_draft_len.",
        )
    if draft is None:
        return
    if draft.vocab_size != target.vocab_size:
        raise UsageError(
            f"the draft's vocabulary has {draft.vocab_size} tokens, the target's"
            f" {target.vocab_size}"
        )
    for name in ("max_batch_size", "max_seq_len"):
        if getattr(draft, name) < getattr(target, name):
            raise UsageError(
                f"the draft's {name} {getattr(draft, name)} is below the target's"
                f" {getattr(target, name)}",
                hint="Build both engines with the same limits.",
            )
