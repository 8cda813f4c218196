"""Whether the verdict can say what it is asked to: a pair that can pay, and enough prompts for
the limit.
"""

from __future__ import annotations

from toolkit.plan.rules.found import Check, Findings, Found
from toolkit.plan.subject import Subject

__all__ = ["CHECKS", "few_prompts"]

RISK = 0.05  # the parity gate's bound holds with 95 % confidence


def few_prompts(count: int, limit: float) -> str | None:
    """What is wrong with so few prompts: n clean ones bound a rate by 1 - 0.05^(1/n) (Clopper
    and Pearson 1934).
    """
    bound = 1 - RISK ** (1 / count) if count else 1.0
    if bound <= limit:
        return None
    return (
        f"{count} prompts cannot show that under {limit:.2g} of the texts diverge: a clean run"
        f" shows {bound:.2g}"
    )


def _parity_prompts(subject: Subject) -> Findings:
    validation = subject.config.validation
    said = few_prompts(validation.max_prompts, validation.parity.max_divergence_rate)
    if subject.speculates and said is not None:
        hint = "59 prompts show 0.05; raise max_prompts, or parity.max_divergence_rate"
        yield Found(
            "warning", "validation.max_prompts", f"{said}, and the verdict is INCONCLUSIVE", hint
        )


def _draft_is_target(subject: Subject) -> Findings:
    target, draft = subject.config.target, subject.config.draft
    if draft is None or (draft.checkpoint, draft.revision) != (target.checkpoint, target.revision):
        return
    same = draft.quantization == target.quantization
    what = "draft and target are the same checkpoint" + (
        ": drafting a token costs as much as decoding it" if same else ""
    )
    hint = (
        "name a smaller model of the same tokenizer, or set speculation.kind: ngram and remove the"
        " draft section"
    )
    yield Found("warning", "draft.checkpoint", f"{what}, so speculation can hardly pay", hint)


CHECKS: dict[str, Check] = {
    "toolkit-parity-prompts": _parity_prompts,
    "toolkit-draft-is-target": _draft_is_target,
}
