"""The findings of a rule. `toolkit.plan.resolve` adds the rule's id and makes them judgements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from toolkit.config.schema import ModelConfig
from toolkit.plan.subject import Subject
from toolkit.words import JudgementSeverity, QuantAlgo, Role

__all__ = [
    "INT8",
    "Check",
    "Findings",
    "RuleFinding",
    "models_with_algo",
    "refuse",
    "refuse_unless_allowed",
]

INT8: tuple[QuantAlgo, ...] = ("W8A8_SQ_PER_CHANNEL", "W8A16")


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """path: the YAML key it is about. what: what is wrong or changed. hint: how to fix it."""

    severity: JudgementSeverity
    path: str
    what: str
    hint: str | None = None


Findings = Iterator[RuleFinding]
Check = Callable[[Subject], Findings]


def refuse(path: str, what: str, hint: str) -> RuleFinding:
    return RuleFinding("refused", path, what, hint)


def refuse_unless_allowed(subject: Subject, role: Role, what: str, hint: str) -> RuleFinding:
    """A refusal, or a warning if the YAML sets quantization.allow_unsupported."""
    path = f"{role}.quantization"
    if subject.models[role].quantization.allow_unsupported:
        return RuleFinding("warning", f"{path}.quant_algo", what, hint)
    return refuse(
        f"{path}.quant_algo",
        what,
        f"{hint}; or set {path}.allow_unsupported: true to continue at your own risk",
    )


def models_with_algo(subject: Subject, *algos: QuantAlgo) -> list[tuple[Role, ModelConfig]]:
    """(role, model) of every model whose quant_algo is one of `algos`."""
    return [
        (role, model)
        for role, model in subject.models.items()
        if model.quantization.quant_algo in algos
    ]
