"""Ask the prompts that diverged once more, for the log-probabilities of what the arms say.

It is a pass of its own behind the timed requests, since keeping log-probabilities costs time, and
of the diverging prompts alone. Each arm is asked on its turn; where they are servers of their own,
the one that runs is asked first.
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
    """What `Judge.again` is made of; empty where nothing diverged. draft_lens: a request may state
    its draft length.

    A refusal is an answer, too: it stands for all requests, and nothing more is asked.
    """
    diverging = [
        (arm, index)
        for arm in arms
        for index, (own, others) in enumerate(zip(plain, arm.texts, strict=True))
        if (first := earliest_difference(own, others)) is not None
        and (first[0].plain_token, first[0].speculative_token) != (None, None)
    ]
    said: dict[tuple[ParityArm, int, int], RequestTiming] = {}
    for arm, index in diverging:
        options = {"num_draft_tokens": arm.draft_len} if draft_lens else {}
        answer = _ask(sender, index, plain[index].prompt, arm.arm, **options)
        if isinstance(answer, str):
            return {(one.arm, one.draft_len, number): answer for one, number in diverging}
        said[arm.arm, arm.draft_len, index] = answer
    own_again: dict[int, RequestTiming] = {}
    for index in sorted({index for _, index in diverging}):
        answer = _ask(sender, index, plain[index].prompt, "plain")
        if isinstance(answer, str):
            return dict.fromkeys(said, answer)
        own_again[index] = answer
    return {key: (own_again[key[2]], answer) for key, answer in said.items()}


def _ask(
    sender: Sender, index: int, prompt: str, arm: SentArm, **options: Any
) -> RequestTiming | str:
    answer = sender.ask(index, prompt, arm, temperature=0.0, log_probs=True, **options)
    return f"the server refuses log-probabilities: {answer}" if isinstance(answer, str) else answer
