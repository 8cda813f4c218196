"""One request while it is served: its tokens, its slot, its rule, and what a verify step means
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from toolkit.interfaces import GenerationRequest, TokenEvent
from toolkit.speculative.acceptance import Rule
from toolkit.speculative.ending import Reason, last_text, read_block
from toolkit.speculative.sampling import Floats, log_probability
from toolkit.speculative.stats import Tally
from toolkit.speculative.text import TextStream
from toolkit.words import FinishReason

__all__ = ["OnEvent", "Sequence"]

OnEvent = Callable[[TokenEvent], None]


class Sequence:
    """ids is prompt and output together. All of it but the last token stands in the target's
    cache between steps.
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
    ) -> None:
        self.request = request
        self.on_event = on_event
        self.rule = rule
        self.ids = list(request.prompt_ids)
        self.drafts: list[int] = []
        self.slot = -1
        self.prefilled = 0  # prompt tokens in the target's cache
        self.finish_reason: FinishReason | None = None
        self.tally = Tally(len(self.ids), draft_len, arrival_ns, request.cumulative_logprob)
        self._text = text
        self._eos = eos
        self._end = len(self.ids) + request.max_tokens
        self._draft_len = draft_len
        self.load_limit = draft_len  # what the load allows in this step; the runtime sets it

    @property
    def speculates(self) -> bool:
        """A draft can be of use at all: the first token comes from prefill, and the last one of
        a step is never drafted.
        """
        return self._draft_len > 0 and self.request.max_tokens > 2

    def draft_room(self) -> int:
        """Tokens to draft in this step: a step adds one token more than it keeps, and no token
        beyond max_tokens is of use.
        """
        return min(self._draft_len, self.load_limit, self._end - len(self.ids) - 1)

    def take(self, kept: int, token: int, logits: Floats | None, now_ns: int) -> TokenEvent:
        """Add the kept drafts and `token`, up to the first that ends the request. Returns what is
        to be told, without stats.

        logits: the target's rows behind which the tokens stand, needed only where log-probabilities
        are asked for.
        """
        verified = len(self.ids) > len(
            self.request.prompt_ids
        )  # the first token comes from prefill
        block = read_block(
            self._text, [*self.drafts[:kept], token], self._end - len(self.ids), self._eos
        )
        new, text = block.tokens, block.text
        reason: Reason | None = block.reason
        self.ids += new
        self.rule.note(new)
        self.tally.add_tokens(len(new), now_ns)
        if verified:
            self.tally.add_step(len(self.drafts), min(kept, len(new)))
        if logits is not None:
            for index, each in enumerate(new):
                self.tally.add_logprob(log_probability(logits[index], each))
        if reason is not None:
            rest, reason = last_text(self._text, reason)
            text += rest
        self.finish_reason = reason
        self.drafts.clear()
        return TokenEvent(self.request.request_id, tuple(new), text, reason, self._text.stopped_by)

    def end(self, reason: FinishReason, error: str | None = None) -> TokenEvent:
        """The event of an end that no token brought: cancelled, deadline, error."""
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
