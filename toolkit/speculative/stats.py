"""Counters: of each request while it runs, and of the runtime since it started."""

from __future__ import annotations

from dataclasses import dataclass, field

from toolkit.interfaces import RequestStats
from toolkit.speculative.adaptive import Adaptation
from toolkit.words import DraftLenReason, FinishReason

__all__ = ["RuntimeCounters", "Tally", "Totals"]

NOT_FINITE = "the draft's numbers are not finite"


@dataclass(frozen=True, slots=True)
class RuntimeCounters:
    """The runtime at one moment. requests: finish_reason -> number of finished requests. All
    counters but active and queued only grow.

    draft_ns, verify_ns and host_ns together are the time of the verify steps. Each step counts
    once, however many requests shared it.
    """

    requests: dict[str, int]
    prompt_tokens: int
    reused_prompt_tokens: int  # of them, those that a KV cache already held
    output_tokens: int
    verify_steps: int  # counted per request: a step that served three requests counts three times
    drafted: int
    accepted: int
    steps: int  # target forwards after prefill
    draft_ns: int
    verify_ns: int
    host_ns: int
    active: int
    queued: int


@dataclass(slots=True)
class Totals:
    """The growing part of RuntimeCounters. A request is added when it has finished."""

    requests: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    output_tokens: int = 0
    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    draft_ns: int = 0
    verify_ns: int = 0
    host_ns: int = 0

    def add_step(self, draft_ns: int, verify_ns: int, host_ns: int) -> None:
        self.steps += 1
        self.draft_ns += draft_ns
        self.verify_ns += verify_ns
        self.host_ns += host_ns

    def add_request(self, finish_reason: FinishReason, stats: RequestStats) -> None:
        self.requests[finish_reason] = self.requests.get(finish_reason, 0) + 1
        self.prompt_tokens += stats.prompt_tokens
        self.reused_prompt_tokens += stats.reused_prompt_tokens or 0
        self.output_tokens += stats.output_tokens
        self.verify_steps += stats.verify_steps
        self.drafted += stats.drafted
        self.accepted += stats.accepted

    def snapshot(self, active: int, queued: int) -> RuntimeCounters:
        return RuntimeCounters(
            requests=dict(self.requests),
            prompt_tokens=self.prompt_tokens,
            reused_prompt_tokens=self.reused_prompt_tokens,
            output_tokens=self.output_tokens,
            verify_steps=self.verify_steps,
            drafted=self.drafted,
            accepted=self.accepted,
            steps=self.steps,
            draft_ns=self.draft_ns,
            verify_ns=self.verify_ns,
            host_ns=self.host_ns,
            active=active,
            queued=queued,
        )


class Tally:
    """The statistics of one running request."""

    def __init__(
        self,
        prompt_tokens: int,
        draft_len: int,
        arrival_ns: int,
        with_logprob: bool,
        adaptation: Adaptation | None = None,
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._arrival_ns = arrival_ns
        self._drafted = [0] * draft_len
        self._accepted = [0] * draft_len
        self._verify_steps = self._output_tokens = 0
        self._draft_ns = self._verify_ns = self._host_ns = 0
        self._first_token_ns: int | None = None
        self._last_token_ns: int | None = None
        self._logprob = 0.0 if with_logprob else None
        self._adaptation = adaptation
        self._steps_by_reason: dict[DraftLenReason, int] = {}
        self.first_scheduled_ns: int | None = None
        self.reused_prompt_tokens: int | None = None
        self.draft_failure: str | None = None

    def add_tokens(self, count: int, now_ns: int) -> None:
        if self._first_token_ns is None:
            self._first_token_ns = now_ns
        self._last_token_ns = now_ns
        self._output_tokens += count

    def add_step(self, drafted: int, accepted: int, reason: DraftLenReason) -> None:
        """Add one verify step. accepted: draft tokens that became output, so a draft that was
        dropped after EOS does not count. reason: of its draft length.
        """
        self._verify_steps += 1
        self._steps_by_reason[reason] = self._steps_by_reason.get(reason, 0) + 1
        for position in range(drafted):
            self._drafted[position] += 1
        for position in range(accepted):
            self._accepted[position] += 1

    def has_drafted(self, steps: int) -> bool:
        """Whether at least so many steps had drafts."""
        return bool(self._drafted) and self._drafted[0] >= steps

    def add_time(self, draft_ns: int, verify_ns: int, host_ns: int) -> None:
        self._draft_ns += draft_ns
        self._verify_ns += verify_ns
        self._host_ns += host_ns

    def add_logprob(self, value: float) -> None:
        self._logprob = (self._logprob or 0.0) + value

    def stats(self) -> RequestStats:
        return RequestStats(
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            verify_steps=self._verify_steps,
            drafted=sum(self._drafted),
            accepted=sum(self._accepted),
            drafted_by_position=tuple(self._drafted),
            accepted_by_position=tuple(self._accepted),
            arrival_ns=self._arrival_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            first_token_ns=self._first_token_ns,
            last_token_ns=self._last_token_ns,
            draft_ns=self._draft_ns,
            verify_ns=self._verify_ns,
            host_ns=self._host_ns,
            cumulative_logprob=self._logprob,
            steps_by_reason=dict(self._steps_by_reason),
            draft_len_changes=0 if self._adaptation is None else self._adaptation.changes,
            draft_probes=0 if self._adaptation is None else self._adaptation.probes,
            reused_prompt_tokens=self.reused_prompt_tokens,
            draft_failure=self.draft_failure
            or (NOT_FINITE if "draft failed" in self._steps_by_reason else None),
        )
