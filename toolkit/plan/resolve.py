"""What is possible where: every rule of `toolkit.facts.rules`, all judged at once.

A rule looks at the whole deployment and yields what it finds: a refusal (it cannot work, and what
would), an adjustment (what the builder or the runtime changes without saying so), or a warning (it
may work, and nobody vouches for it). Nothing is run or read here; shapes and GPUs are handed in.
Memory is judged in `toolkit.plan.memory`.
"""

from __future__ import annotations

from toolkit.plan.rules import judging, precision, runtime, shapes, versions
from toolkit.plan.rules.found import Check
from toolkit.plan.subject import Subject
from toolkit.records.plan import Judgement

__all__ = ["CHECKS", "by_severity", "resolve"]

CHECKS: dict[str, Check] = {
    **versions.CHECKS,
    **precision.CHECKS,
    **shapes.CHECKS,
    **runtime.CHECKS,
    **judging.CHECKS,
}


def resolve(subject: Subject) -> tuple[Judgement, ...]:
    """Everything that the rules find, each with its rule's id."""
    return tuple(
        Judgement(rule=rule, severity=one.severity, path=one.path, what=one.what, hint=one.hint)
        for rule, check in CHECKS.items()
        for one in check(subject)
    )


def by_severity(*judgements: Judgement) -> tuple[Judgement, ...]:
    """Refusals first, adjustments last."""
    order = ("refused", "warning", "adjusted")
    return tuple(sorted(judgements, key=lambda one: order.index(one.severity)))
