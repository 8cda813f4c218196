"""Rules about the verdict: enough prompts to show the configured limit, and a pair that can pay."""

from __future__ import annotations

from toolkit.plan.rules.findings import Check, Findings, RuleFinding
from toolkit.plan.subject import Subject

__all__ = ["CHECKS", "too_few_prompts"]

ERROR_RATE = 0.05  # the parity gate's bound holds with 95 % confidence


def too_few_prompts(count: int, limit: float) -> str | None:
    """Say why `count` prompts are too few for the limit; None if they are enough.

    n prompts without a divergence bound the rate by 1 - 0.05^(1/n) (Clopper and Pearson 1934).
    """
    bound = 1 - ERROR_RATE ** (1 / count) if count else 1.0
    if bound <= limit:
        return None
    return (
        f"{count} prompts cannot show that less than {limit:.2g} of the texts diverge: if none"
        f" does, they show less than {bound:.2g}"
    )


def _parity_prompts(subject: Subject) -> Findings:
    validation = subject.config.validation
    shortage = too_few_prompts(validation.max_prompts, validation.parity.max_divergence_rate)
    if subject.speculates and shortage is not None:
        hint = "59 prompts show 0.05; raise max_prompts, or parity.max_divergence_rate"
        what = f"{shortage}; the verdict would be INCONCLUSIVE"
        yield RuleFinding("warning", "validation.max_prompts", what, hint)


def _draft_is_target(subject: Subject) -> Findings:
    target, draft = subject.config.target, subject.config.draft
    if draft is None or (draft.checkpoint, draft.revision) != (target.checkpoint, target.revision):
        return
    what = "draft and target are the same checkpoint"
    if draft.quantization == target.quantization:
        what += "; drafting a token costs as much as decoding it"
    hint = (
        "name a smaller model with the same tokenizer, or set speculation.kind: ngram and remove"
        " the draft section"
    )
    yield RuleFinding("warning", "draft.checkpoint", f"{what}, so speculation can hardly pay", hint)


CHECKS: dict[str, Check] = {
    "toolkit-parity-prompts": _parity_prompts,
    "toolkit-draft-is-target": _draft_is_target,
}
