"""Judge a deployment by every rule of `toolkit.facts.rules`.

A rule looks at the whole deployment and yields its findings. A finding is a refusal (this cannot
work; the hint says what can), an adjustment (the builder or the runtime changes a setting without
saying so), or a warning (this may work, but nobody guarantees it). Rules run nothing and read no
files; shapes and GPUs are given to them. `toolkit.plan.memory` judges memory.
"""

from __future__ import annotations

from toolkit.plan.rules import judging, precision, runtime, serving, shapes, versions, vllm
from toolkit.plan.rules.findings import Check
from toolkit.plan.subject import Subject
from toolkit.records.plan import Judgement

__all__ = ["CHECKS", "by_severity", "resolve"]

CHECKS: dict[str, Check] = {
    **versions.CHECKS,
    **precision.CHECKS,
    **shapes.CHECKS,
    **runtime.CHECKS,
    **serving.CHECKS,
    **vllm.CHECKS,
    **judging.CHECKS,
}


def resolve(subject: Subject) -> tuple[Judgement, ...]:
    """Apply all rules; every judgement carries the id of its rule."""
    return tuple(
        Judgement(
            rule=rule,
            severity=finding.severity,
            path=finding.path,
            what=finding.what,
            hint=finding.hint,
        )
        for rule, check in CHECKS.items()
        for finding in check(subject)
    )


def by_severity(*judgements: Judgement) -> tuple[Judgement, ...]:
    """Sort judgements: refusals first, then warnings, adjustments last."""
    order = ("refused", "warning", "adjusted")
    return tuple(sorted(judgements, key=lambda judgement: order.index(judgement.severity)))
