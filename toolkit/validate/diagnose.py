"""Name the fault behind what was measured. Pure functions: records go in, findings come out.

Each fault leaves its own mark. The place of the first wrong token tells a wrong forward from a
wrong cache: the first output token comes from prefill, the second from the first verify forward
after a clean cache, and only the third follows rejected drafts. Which arms are wrong tells a wrong
forward from a wrong accept rule, since `verify` accepts nothing. The server's counts and the draft
engine's own proposals show the rest. A name is a strong hint, not a proof; the replay files are for
a closer look.
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
    """Return the faults that the evidence shows, the most basic one first; empty if there is none.

    reference None: no model can be asked, so only faults that the texts show by themselves are
    named.
    """
    engine = next((agreement for agreement in agreements if agreement.against == "engine"), None)
    findings: list[Finding] = []
    if reference is not None:
        findings += _of_the_plain_arm(plain, engine, agreements, reference, near_tie_margin)
    if not findings and parity is not None:
        findings += _of_speculation(parity, reference)
    if draft_check is not None:
        findings += _of_the_draft(draft_check)
    if stop_check is not None and stop_check.wrong and stop_check.detail is not None:
        detail = (
            f"{stop_check.wrong} of {stop_check.requests} requests with a stop word did not end"
            f" before it: {stop_check.detail}"
        )
        findings.append(
            _error(
                STOP,
                f"{detail}. Look at every token of an accepted block, not only at its last one.",
            )
        )
    if distribution is not None:
        findings += of_sampling(distribution)
    if overrun:
        findings.append(
            _error(
                OVERRUN,
                f"{overrun} answers hold more tokens than max_tokens: the server counts steps"
                " instead of tokens",
            )
        )
    return findings


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
        detail = (
            "the plain texts are those that the engine gives without the prompt's first token (BOS)"
        )
        if short:
            detail = (
                f"the server counts one prompt token fewer for {len(short)} of {len(plain)}"
                f" prompts, and {detail}"
            )
        yield _error(BOS, f"{detail}. Encode with special tokens, once.")
    elif engine is not None and wrong and engine.first_tokens == 0 and _late_only(engine):
        detail = (
            "no prompt's first token, which comes from prefill, is wrong, but"
            f" {engine.beyond_rounding} later ones are"
        )
        yield _error(
            DECODE,
            f"{detail}. {engine.detail}. The forward of one token with a cache is at fault.",
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
        for agreement in agreements:
            if agreement.against == "source" and agreement.kind in WRONG:
                detail = (
                    f"{agreement.beyond_rounding} of {agreement.tokens} tokens are not those of the"
                    f" source checkpoint: {agreement.detail}"
                )
                yield _error(
                    WEIGHTS,
                    f"{detail}. The engine was made from another checkpoint, or was made wrongly.",
                )


def _late_only(engine: Agreement) -> bool:
    """Whether it is no accident that all first tokens are right.

    If they were wrong as often as the rest, this would have a probability below 1 in 1000.
    """
    return (1.0 - engine.beyond_rounding / engine.tokens) ** engine.prompts < 1e-3


def _of_speculation(parity: Parity, reference: Reference | None) -> Iterator[Finding]:
    wrong = [divergence for divergence in parity.divergences if divergence.kind in WRONG]
    verify = [divergence for divergence in wrong if divergence.arm == "verify"]
    speculative = [divergence for divergence in wrong if divergence.arm == "speculative"]
    if verify:
        first = min(divergence.position for divergence in verify)
        texts = len({divergence.prompt_index for divergence in verify})
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
                " but what follows a rejection is not"
            )
            yield _error(
                CACHE,
                f"{detail}. Rejected drafts are left in the target's cache, or its length is"
                " wrong.",
            )
    elif speculative:
        lengths = ", ".join(map(str, sorted({each.draft_len for each in speculative})))
        detail = f"speculation at draft length {lengths} differs from plain text"
        if any(arm.arm == "verify" for arm in parity.arms):
            detail = (
                "verifying without accepting gives the plain text, but speculation at draft length"
                f" {lengths} does not"
            )
        if parity.moved:
            detail += f"; the position moves with the draft length for {parity.moved} prompts"
        shift = None if reference is None else _row_shift(speculative, reference)
        if shift is not None:
            detail += f". The wrong tokens are the target's choices one place {shift}"
            yield _error(ROWS, f"{detail}: a row of the logits is taken for its neighbour.")
        else:
            yield _error(
                ACCEPT_RULE, f"{detail}. Tokens are accepted that the target did not choose."
            )


def _row_shift(divergences: Sequence[Divergence], reference: Reference) -> str | None:
    """Return `earlier` or `later` if most wrong tokens of greedy texts are what the target chooses
    one place before or after them.

    It need not be all of them: a row also depends on the draft token before it, which may differ
    from the target's own choice.
    """
    greedy = [
        divergence
        for divergence in divergences
        if divergence.seed is None
        and divergence.speculative_token is not None
        and divergence.position > 0
    ][:8]
    for name in ("earlier", "later"):
        shifted = sum(
            _chosen_beside(divergence, reference, name) == divergence.speculative_token
            for divergence in greedy
        )
        if 2 * shifted > len(greedy):
            return name
    return None


def _chosen_beside(divergence: Divergence, reference: Reference, name: str) -> int:
    """Return the target's choice one place before or after a divergence, along its own greedy
    text.
    """
    ids = list(reference.encode(divergence.prompt))
    for _ in range(divergence.position - (name == "earlier")):
        ids.append(int(reference.next_logits(ids).argmax()))
    if name == "later":
        ids.append(int(reference.next_logits(ids).argmax()))
    return int(reference.next_logits(ids).argmax())


def _of_the_draft(check: DraftCheck) -> Iterator[Finding]:
    behind = shortfall(check.after_full, check.after_full_expected, check.after_full_kept)
    earlier = shortfall(check.earlier, check.earlier_expected, check.earlier_kept)
    rates = (
        "first draft tokens accepted where the draft engine proposes the right one: "
        f"{check.after_full_kept} of {check.after_full_expected} after a fully accepted block, "
        f"{check.earlier_kept} of {check.earlier_expected} before any"
    )
    if behind and not earlier:
        advice = (
            "The last draft token of an accepted block was proposed but never fed to the draft:"
            " feed it together with the token that follows."
        )
        yield _error(DRAFT_CACHE, f"{rates}. {advice}")
    elif behind or earlier:
        yield _error(
            DRAFT_MODEL,
            f"{rates}. The served draft does not see the right tokens, or has other weights.",
        )


def of_sampling(distribution: Distribution) -> Iterator[Finding]:
    """Name what is wrong with how tokens are drawn at temperature > 0."""
    rejected = {test.name: test for test in distribution.tests if test.rejected}
    own = rejected.get("speculative: by probability")
    draft = rejected.get("speculative: by draft against target")
    # Tests that compare the two arms, without a model.
    between = [test for test in rejected.values() if test.lean is None]
    groups = [
        test
        for name, test in rejected.items()
        if test not in between and not name.startswith("speculative")
    ]
    if (
        distribution.outside_filters
        or "plain: by probability" in rejected
        or (groups and own is None and draft is None)
    ):
        wrong = ", ".join(f"{test.name} (p = {test.p_value:.1e})" for test in rejected.values())
        parts = []
        if distribution.outside_filters:
            parts.append(f"{distribution.outside_filters} tokens that top-k or top-p rule out")
        if wrong:
            parts.append(f"rejected: {wrong}")
        yield _error(
            SAMPLING,
            f"{'; '.join(parts)}. Temperature, top-k or top-p do not reach the sampler as the"
            " request states them.",
        )
    elif own is not None or draft is not None:
        # If both tests reject, the fault follows the order along which the tokens are shifted
        # further.
        strongest = max(
            (test for test in (own, draft) if test is not None),
            key=lambda test: abs(test.lean or 0.0),
        )
        towards, away = (LIKELY, UNLIKELY) if strongest is own else (TO_DRAFT, FROM_DRAFT)
        name = towards if (strongest.lean or 0.0) > 0 else away
        hint = ""
        if name == LIKELY:
            hint = (
                " A draft token is accepted because it is the likeliest one, or the temperature is"
                " lower than requested."
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
    if distribution.unrepeated or not distribution.seeds_matter:
        detail = "every seed gives the same text"
        if distribution.unrepeated:
            detail = (
                f"{distribution.unrepeated} of {distribution.seeded} seeded requests gave another"
                " text the second time"
            )
        yield _error(
            SEEDS,
            f"{detail}. The seed alone has to determine the noise of every position.",
        )


def _error(name: str, detail: str) -> Finding:
    return Finding(name, "error", detail)
