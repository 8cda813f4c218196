"""The lines of a roll-out's journal: what one has to be, so that a state can follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from toolkit.config.schema import RolloutConfig

__all__ = ["VERSION", "Begin", "Outcome", "fault_of"]

VERSION: Literal[1] = 1  # of the form of these lines; a journal without one has this
Outcome = Literal["running", "promoted", "rolled back"]
Figure = Annotated[float, Field(allow_inf_nan=False)]  # whatever a server may have told


class _Line(BaseModel):
    model_config = ConfigDict(strict=True)


class Begin(_Line):
    """The first one."""

    kind: Literal["begin"]
    version: Literal[1] = VERSION
    ids: dict[str, str]
    settings: dict[str, Any]
    time: Figure


class _Session(_Line):
    kind: Literal["session"]
    session: int
    arm: Literal["baseline", "candidate"]
    share: Annotated[float, Field(ge=0, le=1)]
    error: bool
    ttft_ms: Figure | None
    token_ms: Figure | None
    acceptance: Figure | None
    undrafted: bool = False  # the server told that it drafted nothing; older lines do not say


class _Texts(_Line):
    kind: Literal["texts"]
    prompt: int
    equal: bool


class _Copy(_Line):
    """A prompt that both arms were sent and one answered."""

    kind: Literal["copy"]
    prompt: int
    failed: Literal["baseline", "candidate"]


class _Decision(_Line):
    kind: Literal["decision"]
    time: Figure
    outcome: Outcome
    step: Annotated[int, Field(ge=0)]
    why: str


FIRST: TypeAdapter[Any] = TypeAdapter(Begin)
LATER: TypeAdapter[Any] = TypeAdapter(
    Annotated[_Session | _Texts | _Copy | _Decision, Field(discriminator="kind")]
)


def fault_of(entry: Mapping[str, Any], *, is_first: bool, steps: int = 0) -> str | None:
    """What is wrong with a line; None if nothing is. steps: how many the roll-out has."""
    if is_first and entry.get("kind") == "begin" and entry.get("version", VERSION) != VERSION:
        return f"it has form {entry['version']!r}, and this version of the toolkit reads {VERSION}"
    try:
        (FIRST if is_first else LATER).validate_python(entry)
        if is_first:
            RolloutConfig(**entry["settings"])
        elif entry["kind"] == "decision" and entry["step"] >= steps:
            return f"step: there is no step {entry['step']}"
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        return f"{place}: {fault['msg'].lower()}" if place else fault["msg"].lower()
    return None
