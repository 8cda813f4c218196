"""One request while it is served: its tokens, its slot, its accept rule, and what a verify step
changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set

from toolkit.interfaces import GenerationRequest, TokenEvent
from toolkit.speculative.acceptance import Rule
from toolkit.speculative.adaptive import PROBE_TOKENS, Adaptation
from toolkit.speculative.ending import Reason, last_text, read_block
from toolkit.speculative.sampling import Floats, log_probability
from toolkit.speculative.stats import Tally
from toolkit.speculative.text import TextStream
from toolkit.words import DraftLenReason, FinishReason

__all__ = ["OnEvent", "Sequence"]

OnEvent = Callable[[TokenEvent], None]


class Sequence:
    """ids: prompt and output together. Between steps, the target's cache holds all of them but the
    last.
    """

    def __init__(
        self,
        request: GenerationRequest,
        on_event: OnEvent,
        *,
        rule: Rule,
        text: TextStream,
        eos: Set[int],
        draft_len: int,
        arrival_ns: int,
        adaptation: Adaptation | None = None,
        reason: DraftLenReason = "fixed",
    ) -> None:
        """draft_len: the longest draft of the request. adaptation: chooses how much of it is used;
        None: all of it, and `reason` says why.
        """
        self.request = request
        self.on_event = on_event
        self.rule = rule
        self.ids = list(request.prompt_ids)
        self.drafts: list[int] = []
        self.slot = -1
        self.cached_tokens = 0  # of ids, in the target's cache
        self.finish_reason: FinishReason | None = None
        self.tally = Tally(
            len(self.ids), draft_len, arrival_ns, request.cumulative_logprob, adaptation
        )
        self._text = text
        self._eos = eos
        self._end = len(self.ids) + request.max_tokens
        self._draft_len = draft_len
        # The draft failed, or its numbers for this request are not finite: the rest of the request
        # is decoded plainly.
        self.draft_failed = False
        self.load_limit = draft_len  # draft tokens the load allows; the runtime sets it each step
        self.adaptation = adaptation
        self._reason = reason
        # Of the newest tokens, the probability that the target's own distribution gave them; kept
        # while a probe may need it.
        self.target_chances: deque[float] = deque(maxlen=PROBE_TOKENS)
        self.noted_tokens = len(self.ids)  # of ids, that the adaptation knows of
        self.steps_without_burst = 0  # so many of the next ones

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def room(self) -> int:
        """Output tokens that are left."""
        return self._end - len(self.ids)

    @property
    def speculates(self) -> bool:
        """Whether a draft can be of any use. The first token comes from prefill, and the last token
        of a step is never a draft, so max_tokens has to be above 2.
        """
        return self._draft_len > 0 and self.request.max_tokens > 2

    def draft_room(self) -> int:
        """How many tokens to draft in this step. A step adds one token more than it accepts, and
        tokens beyond max_tokens are of no use.
        """
        chosen = None if self.adaptation is None else self.adaptation.draft_len
        if chosen == 0:  # asked in every step of all rows
            return 0
        return self.longest_draft() if chosen is None else min(self.longest_draft(), chosen)

    def longest_draft(self) -> int:
        """What draft_room() may be in this step, whatever length is chosen."""
        if self.draft_failed:
            return 0
        return min(self._draft_len, self.load_limit, self._end - len(self.ids) - 1)

    @property
    def adapts(self) -> bool:
        """Whether its draft length is chosen while it runs."""
        return self.adaptation is not None and self.speculates and not self.draft_failed

    @property
    def reason(self) -> DraftLenReason:
        """Why the next step drafts as many tokens as it does."""
        if self.draft_failed:
            return "draft failed"
        if self._reason == "request" and self.load_limit < self._draft_len:
            return "load"
        return self._reason if self.adaptation is None else self.adaptation.reason

    def take(self, accepted: int, token: int, logits: Floats | None, now_ns: int) -> TokenEvent:
        """Add the accepted drafts and `token`, up to the first that ends the request. Returns the
        event for the client, without stats.

        logits: the target's rows that the tokens were chosen from; None unless log-probabilities
        are requested.
        """
        is_verify_step = len(self.ids) > len(self.request.prompt_ids)  # else: from prefill
        block = read_block(
            self._text, [*self.drafts[:accepted], token], self._end - len(self.ids), self._eos
        )
        new, text = block.tokens, block.text
        reason: Reason | None = block.reason
        if is_verify_step:  # the newest token is fed by the next step
            self.cached_tokens = len(self.ids) + min(accepted, len(new))
        self.ids += new
        self.rule.note(new)
        self.tally.add_tokens(len(new), now_ns)
        if is_verify_step:
            self.tally.add_step(len(self.drafts), min(accepted, len(new)), self.reason)
        if logits is not None:
            for index, new_id in enumerate(new):
                self.tally.add_logprob(log_probability(logits[index], new_id))
        if reason is not None:
            rest, reason = last_text(self._text, reason)
            text += rest
        self.finish_reason = reason
        self.drafts.clear()
        return TokenEvent(self.request.request_id, tuple(new), text, reason, self._text.stopped_by)

    def end(self, reason: FinishReason, error: str | None = None) -> TokenEvent:
        """End the request without a new token (cancelled, deadline, error). Returns the event."""
        self.finish_reason = reason
        self.drafts.clear()
        return TokenEvent(
            self.request.request_id,
            (),
            self._text.finish(),
            reason,
            None,
            error,
            self.tally.stats(),
        )
