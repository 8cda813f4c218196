"""From what was measured to the name of the fault behind it. Pure: records in, findings out.

Each fault leaves its own mark. Where the first wrong token stands tells a forward from a cache: the
first output token comes from prefill, the second from the first verify forward behind a clean
cache, and only the third has rejected drafts behind it. Which arms are wrong tells forwards from
the accept rule: `verify` accepts nothing. What the server counts and what the draft engine would
have proposed tell the rest. A name is a strong hint and no proof; the replay files are for whoever
looks closer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from toolkit.records.judged import (
    Agreement,
    Distribution,
    Divergence,
    DraftCheck,
    Parity,
    StopCheck,
)
from toolkit.records.measured import Finding
from toolkit.validate.agreement import explained_without_first_token
from toolkit.validate.draft_check import shortfall
from toolkit.validate.reference import Reference

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = [
    "ACCEPT_RULE",
    "BOS",
    "CACHE",
    "CONTINUATIONS",
    "DECODE",
    "DRAFT_CACHE",
    "DRAFT_MODEL",
    "FROM_DRAFT",
    "LIKELY",
    "OVERRUN",
    "ROWS",
    "SAMPLING",
    "SEEDS",
    "STOP",
    "TO_DRAFT",
    "UNLIKELY",
    "VERIFY",
    "WEIGHTS",
    "diagnose",
    "of_sampling",
]

BOS = "prompt read without its first token"
WEIGHTS = "wrong weights"
DECODE = "decode forward: positions or cache"
VERIFY = "verify forward: positions or mask"
CACHE = "cache not rewound"
ROWS = "accept rule off by one row"
ACCEPT_RULE = "accept rule"
DRAFT_CACHE = "draft cache not caught up"
DRAFT_MODEL = "draft is not the draft that was compiled"
STOP = "stop word missed"
OVERRUN = "more tokens than asked for"
SAMPLING = "sampling settings not respected"
LIKELY = "accept rule favours likely tokens"
UNLIKELY = "accept rule favours unlikely tokens"
TO_DRAFT = "accept rule leans to the draft"
FROM_DRAFT = "accept rule leans away from the draft"
CONTINUATIONS = "sampled texts differ between the arms"
SEEDS = "seeds do not reproduce"

WRONG = ("suspicious", "broken")


def diagnose(
    *,
    plain: Sequence[RequestTiming],
    parity: Parity | None,
    agreements: Sequence[Agreement],
    draft_check: DraftCheck | None,
    stop_check: StopCheck | None,
    distribution: Distribution | None,
    overrun: int,
    reference: Reference | None,
    near_tie_margin: float,
) -> list[Finding]:
    """The faults that the evidence names, the most basic one first; empty where nothing is wrong.
    reference None: no model can be asked, so that only what the texts show by themselves is named.
    """
    engine = next((one for one in agreements if one.against == "engine"), None)
    found: list[Finding] = []
    if reference is not None:
        found += _of_the_plain_arm(plain, engine, agreements, reference, near_tie_margin)
    if not found and parity is not None:
        found += _of_speculation(parity, reference)
    if draft_check is not None:
        found += _of_the_draft(draft_check)
    if stop_check is not None and stop_check.wrong and stop_check.detail is not None:
        detail = (
            f"{stop_check.wrong} of {stop_check.requests} requests with a stop word did not end"
            f" before it: {stop_check.detail}"
        )
        found.append(
            _error(
                STOP, f"{detail}. Look at every token of an accepted block, not at its last one."
            )
        )
    if distribution is not None:
        found += of_sampling(distribution)
    if overrun:
        found.append(
            _error(
                OVERRUN,
                f"{overrun} answers hold more tokens than max_tokens: steps are counted where"
                " tokens should be",
            )
        )
    return found


def _of_the_plain_arm(
    plain: Sequence[RequestTiming],
    engine: Agreement | None,
    agreements: Sequence[Agreement],
    reference: Reference,
    near_tie_margin: float,
) -> Iterator[Finding]:
    short = [
        text
        for text in plain
        if text.statistics.input_tokens == len(reference.encode(text.prompt)) - 1 and text.token_ids
    ]
    wrong = engine is not None and engine.kind in WRONG
    if (short or wrong) and explained_without_first_token(
        short or plain, reference, near_tie_margin
    ):
        how = (
            f"the server counts one prompt token fewer for {len(short)} of {len(plain)} prompts,"
            " and "
            if short
            else ""
        )
        detail = (
            f"{how}the plain texts are those that the engine gives without the prompt's first token"
            " (BOS)"
        )
        yield _error(BOS, f"{detail}. Encode with special tokens, once.")
    elif engine is not None and wrong and engine.first_tokens == 0 and _late_only(engine):
        detail = (
            "no prompt's first token, which comes from prefill, is wrong, and"
            f" {engine.beyond_rounding} later ones are"
        )
        yield _error(
            DECODE,
            f"{detail}. {engine.detail}. The forward of one token behind a cache is at fault.",
        )
    elif engine is not None and wrong:
        detail = (
            f"{engine.beyond_rounding} of {engine.tokens} tokens of the plain texts are not those"
            f" of the compiled engine, from the first output token on ({engine.first_tokens} of"
            f" {engine.prompts} prompts)"
        )
        yield _error(
            WEIGHTS, f"{detail}. {engine.detail}. The server runs other weights, or damaged ones."
        )
    else:
        for one in agreements:
            if one.against == "source" and one.kind in WRONG:
                detail = (
                    f"{one.beyond_rounding} of {one.tokens} tokens are not those of the source"
                    f" checkpoint: {one.detail}"
                )
                yield _error(
                    WEIGHTS, f"{detail}. The engine was not made of this checkpoint, or wrongly."
                )


def _late_only(engine: Agreement) -> bool:
    """Whether so many right first tokens are no accident: would they be wrong as often as the
    rest, P < 1 in 1000.
    """
    return (1.0 - engine.beyond_rounding / engine.tokens) ** engine.prompts < 1e-3


def _of_speculation(parity: Parity, reference: Reference | None) -> Iterator[Finding]:
    verify = [one for one in parity.divergences if one.arm == "verify" and one.kind in WRONG]
    real = [one for one in parity.divergences if one.arm == "speculative" and one.kind in WRONG]
    if verify:
        first = min(one.position for one in verify)
        texts = len({one.prompt_index for one in verify})
        count = f"with nothing accepted, {texts} of {parity.prompts} texts differ from plain ones"
        if first <= 1:
            detail = (
                f"{count}, from output token {first + 1} on, where no draft has been rejected yet"
            )
            yield _error(
                VERIFY,
                f"{detail}. The forward of several tokens is at fault: their positions, mask or"
                " kernel.",
            )
        else:
            detail = (
                f"{count}, from output token {first + 1} on: the first verify forward is right,"
                " what follows a rejection is not"
            )
            yield _error(
                CACHE,
                f"{detail}. Rejected drafts are left in the target's cache, or its length is"
                " wrong.",
            )
    elif real:
        lengths = sorted({one.draft_len for one in real})
        where = (
            "verifying without accepting gives the plain text, speculation at draft length"
            f" {', '.join(map(str, lengths))} not"
        )
        if not any(one.arm == "verify" for one in parity.arms):
            where = (
                f"speculation at draft length {', '.join(map(str, lengths))} differs from plain"
                " text"
            )
        moved = (
            f"; the position moves with the draft length for {parity.moved} prompts"
            if parity.moved
            else ""
        )
        if reference is not None and (shift := _row_shift(real, reference)) is not None:
            detail = f"{where}{moved}. The wrong tokens are the target's choices one place {shift}"
            yield _error(ROWS, f"{detail}: a row of the logits is taken for its neighbour.")
        else:
            yield _error(
                ACCEPT_RULE, f"{where}{moved}. Tokens are kept that the target did not choose."
            )


def _row_shift(real: Sequence[Divergence], reference: Reference) -> str | None:
    """Whether most wrong tokens are what the target chooses one place earlier or later (asked of
    greedy ones).

    Not all of them: a row is also behind the draft before it, which need not be the target's own
    choice.
    """
    asked = [
        one
        for one in real
        if one.seed is None and one.speculative_token is not None and one.position > 0
    ][:8]
    if not asked:
        return None
    for name in ("earlier", "later"):
        if 2 * sum(
            _chosen_beside(one, reference, name) == one.speculative_token for one in asked
        ) > len(asked):
            return name
    return None


def _chosen_beside(one: Divergence, reference: Reference, name: str) -> int:
    """The target's choice at the place before or behind a divergence, along its own greedy text."""
    ids = list(reference.encode(one.prompt))
    for _ in range(one.position - (name == "earlier")):
        ids.append(int(reference.next_logits(ids).argmax()))
    if name == "later":
        ids.append(int(reference.next_logits(ids).argmax()))
    return int(reference.next_logits(ids).argmax())


def _of_the_draft(check: DraftCheck) -> Iterator[Finding]:
    behind = shortfall(check.after_full, check.after_full_expected, check.after_full_kept)
    earlier = shortfall(check.earlier, check.earlier_expected, check.earlier_kept)
    rates = (
        "first drafts kept where the draft engine proposes the right token: "
        f"{check.after_full_kept} of {check.after_full_expected} behind a fully accepted block, "
        f"{check.earlier_kept} of {check.earlier_expected} before any"
    )
    if behind and not earlier:
        advice = (
            "The last draft of a kept block was proposed and never fed: feed it with the token that"
            " follows."
        )
        yield _error(DRAFT_CACHE, f"{rates}. {advice}")
    elif behind or earlier:
        yield _error(
            DRAFT_MODEL,
            f"{rates}. The served draft does not see what it should, or has other weights.",
        )


def of_sampling(found: Distribution) -> Iterator[Finding]:
    """What is wrong with how tokens are drawn at temperature > 0."""
    rejected = {test.name: test for test in found.tests if test.rejected}
    own = rejected.get("speculative: by probability")
    draft = rejected.get("speculative: by draft against target")
    between = [
        test for test in found.tests if test.lean is None and test.rejected
    ]  # the arms, without a model
    groups = [
        test
        for name, test in rejected.items()
        if test not in between and not name.startswith("speculative")
    ]
    if (
        found.outside_filters
        or "plain: by probability" in rejected
        or (groups and own is None and draft is None)
    ):
        ruled_out = (
            f"{found.outside_filters} tokens that top-k or top-p rule out"
            if found.outside_filters
            else ""
        )
        wrong = ", ".join(f"{test.name} (p = {test.p_value:.1e})" for test in rejected.values())
        parts = [part for part in (ruled_out, wrong and f"rejected: {wrong}") if part]
        yield _error(
            SAMPLING,
            f"{'; '.join(parts)}. Temperature, top-k or top-p do not reach the sampler as they were"
            " asked.",
        )
    elif own is not None or draft is not None:
        # Where both see it, the order along which the tokens are shifted further is the one that
        # the fault follows.
        strongest = max(
            (test for test in (own, draft) if test is not None),
            key=lambda test: abs(test.lean or 0.0),
        )
        towards = (strongest.lean or 0.0) > 0
        name = (
            (LIKELY if towards else UNLIKELY)
            if strongest is own
            else (TO_DRAFT if towards else FROM_DRAFT)
        )
        hint = (
            " A draft is kept for being the likeliest token, or the temperature is lower than"
            " asked."
            if name == LIKELY
            else ""
        )
        detail = (
            f"{strongest.name}: p = {strongest.p_value:.1e} over {strongest.samples:,} tokens,"
            f" {strongest.lean:+.1f} sigma"
        )
        yield _error(name, f"{detail}; plain decoding is sound.{hint}")
    elif rejected:
        listed = ", ".join(
            f"{test.name}: p = {test.p_value:.1e} over {test.samples:,}" for test in between
        )
        yield _error(CONTINUATIONS, f"{listed}. The accept rule changes what is sampled.")
    if found.unrepeated or not found.seeds_matter:
        detail = (
            f"{found.unrepeated} of {found.seeded} seeded requests gave another text the second"
            " time"
        )
        detail = detail if found.unrepeated else "every seed gives the same text"
        yield _error(
            SEEDS,
            f"{detail}. The seed has to fix the noise of every position, and nothing else may.",
        )


def _error(name: str, detail: str) -> Finding:
    return Finding(name, "error", detail)
