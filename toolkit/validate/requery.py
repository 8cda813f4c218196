"""Send the prompts that diverged once more, to get the log-probabilities of each arm's tokens.

This is a separate pass after the timed requests, since log-probabilities cost time, and it sends
only the diverging prompts. The arms are asked one after the other; if each has its own server, the
one that runs is asked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.validate.arms import Sender
from toolkit.validate.parity import ArmTexts, AskedAgain, earliest_difference
from toolkit.words import ParityArm, SentArm

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["ask_again"]


def ask_again(
    sender: Sender, plain: Sequence[RequestTiming], arms: Sequence[ArmTexts], *, draft_lens: bool
) -> AskedAgain:
    """Return what `Judge.again` needs; empty if nothing diverged. draft_lens: a request may state
    its draft length.

    A refusal is an answer, too: it counts for all requests, and nothing more is sent.
    """
    diverging = [
        (arm, index)
        for arm in arms
        for index, (own, others) in enumerate(zip(plain, arm.texts, strict=True))
        if (first := earliest_difference(own, others)) is not None
        and (first[0].plain_token, first[0].speculative_token) != (None, None)
    ]
    answers: dict[tuple[ParityArm, int, int], RequestTiming] = {}
    for arm, index in diverging:
        options = {"num_draft_tokens": arm.draft_len} if draft_lens else {}
        answer = _ask(sender, index, plain[index].prompt, arm.arm, **options)
        if isinstance(answer, str):
            return {(each.arm, each.draft_len, number): answer for each, number in diverging}
        answers[arm.arm, arm.draft_len, index] = answer
    own_again: dict[int, RequestTiming] = {}
    for index in sorted({index for _, index in diverging}):
        answer = _ask(sender, index, plain[index].prompt, "plain")
        if isinstance(answer, str):
            return dict.fromkeys(answers, answer)
        own_again[index] = answer
    return {key: (own_again[key[2]], answer) for key, answer in answers.items()}


def _ask(
    sender: Sender, index: int, prompt: str, arm: SentArm, **options: Any
) -> RequestTiming | str:
    answer = sender.ask(index, prompt, arm, temperature=0.0, log_probs=True, **options)
    if isinstance(answer, str):
        return f"the server refuses log-probabilities: {answer}"
    return answer
