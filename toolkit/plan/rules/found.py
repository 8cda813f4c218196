"""What a rule may find, before it has its id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from toolkit.config.schema import ModelConfig
from toolkit.plan.subject import Subject
from toolkit.words import JudgementSeverity, QuantAlgo, Role

__all__ = ["INT8", "Check", "Findings", "Found", "of_algo", "refuse", "unless_allowed"]

INT8: tuple[QuantAlgo, ...] = ("W8A8_SQ_PER_CHANNEL", "W8A16")


@dataclass(frozen=True, slots=True)
class Found:
    severity: JudgementSeverity
    path: str
    what: str
    hint: str | None = None


Findings = Iterator[Found]
Check = Callable[[Subject], Findings]


def refuse(path: str, what: str, hint: str) -> Found:
    return Found("refused", path, what, hint)


def unless_allowed(subject: Subject, role: Role, what: str, hint: str) -> Found:
    """A refusal; with quantization.allow_unsupported a warning."""
    path = f"{role}.quantization"
    if subject.models[role].quantization.allow_unsupported:
        return Found("warning", f"{path}.quant_algo", what, hint)
    return refuse(
        f"{path}.quant_algo",
        what,
        f"{hint}; or set {path}.allow_unsupported: true to go on at your own risk",
    )


def of_algo(subject: Subject, *algos: QuantAlgo) -> list[tuple[Role, ModelConfig]]:
    return [
        (role, model)
        for role, model in subject.models.items()
        if model.quantization.quant_algo in algos
    ]
