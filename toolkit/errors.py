"""The tree of exceptions. Each exception builds its text from typed arguments and keeps them, so
that callers can branch on fields. In brackets: the exit code.

    ToolkitError                   what is wrong, where, and a hint
    +-- ConfigError          (2)   one or more faults of a YAML file, with positions
    |   +-- PlanError        (2)   a valid file that describes a deployment that cannot work
    +-- UsageError           (2)   a command or argument that cannot work
    +-- CheckpointError      (2)   a checkpoint is missing, unsupported, damaged or contradicts
    |                              itself
    +-- PairingError         (2)   draft and target do not belong together
    +-- StageError           (3)   a stage started and failed
    |   +-- StoreError       (3)   the store could not be read or written (disk full, permission,
    |   |                          damaged entry)
    |   +-- ServerError      (3)   tritonserver did not start, died or hung; has the end of its log
    +-- BackendUnavailable   (3)   a library or program that is needed is not installed, or broken
    +-- RequestError         (2)   one generation request cannot be served; the server continues

A failed gate is not an exception: it is an outcome in the report, and the CLI turns the verdict
into an exit code. Only the programs (the CLI, and the
latency check that is shipped beside a repository) print errors and choose exit codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "ConfigError",
    "Fault",
    "PairingError",
    "PlanError",
    "RequestError",
    "ServerError",
    "StageError",
    "StoreError",
    "ToolkitError",
    "UsageError",
]


class ToolkitError(Exception):
    """The root of all errors that a user can fix: what is wrong (`what`), `where`, and a `hint`."""

    exit_code = 3

    def __init__(
        self, what: str, *, where: str | Path | None = None, hint: str | None = None
    ) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint
        super().__init__(self._text())

    def _text(self) -> str:
        head = self.what if self.where is None else f"{self.where}: {self.what}"
        return head if self.hint is None else f"{head}\n  {self.hint}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in a config file. line and column count from 1. excerpt: the source line. width:
    the length of the caret line below it. origin: the command-line argument that has the fault, if
    it is not in the file.
    """

    path: str  # dotted key path, e.g. "target.quantization.quant_algo"
    message: str
    line: int | None = None
    column: int | None = None
    excerpt: str | None = None
    width: int = 1
    hint: str | None = None
    origin: str | None = None

    def render(self, file: str) -> str:
        """The fault as lines of text: place and message, the excerpt with a caret, the hint."""
        position = "" if self.line is None else f":{self.line}:{self.column or 1}"
        path = f"{self.path}: " if self.path else ""
        lines = [f"{self.origin or file}{position}: {path}{self.message}"]
        if self.excerpt is not None and self.line is not None:
            number = str(self.line)
            lines.append(f"  {number} | {self.excerpt}")
            lines.append(
                f"  {' ' * len(number)} |"
                f" {' ' * ((self.column or 1) - 1)}{'^' * max(1, self.width)}"
            )
        if self.hint is not None:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


class ConfigError(ToolkitError):
    """All faults of one config file."""

    exit_code = 2

    def __init__(self, file: str | Path, faults: list[Fault]) -> None:
        self.file = str(file)
        self.faults = tuple(faults)
        super().__init__("\n".join(fault.render(self.file) for fault in faults))


class PlanError(ConfigError):
    """All rules of the plan that refuse a deployment."""


class UsageError(ToolkitError):
    exit_code = 2


class CheckpointError(ToolkitError):
    exit_code = 2


class PairingError(ToolkitError):
    exit_code = 2


class RequestError(ToolkitError):
    exit_code = 2


class StageError(ToolkitError):
    """A stage started and failed. `stage` is its name."""

    def __init__(
        self, stage: str, what: str, *, where: str | Path | None = None, hint: str | None = None
    ) -> None:
        self.stage = stage
        super().__init__(what, where=where, hint=hint)

    def _text(self) -> str:
        return f"{self.stage}: {ToolkitError._text(self)}"


class StoreError(StageError):
    pass


class ServerError(StageError):
    """tritonserver did not start, died or hung. log_tail: the last lines that it printed."""

    def __init__(self, what: str, *, log_tail: str = "", hint: str | None = None) -> None:
        self.log_tail = log_tail
        super().__init__("serve", what, hint=hint)

    def _text(self) -> str:
        text = StageError._text(self)
        return text if not self.log_tail else f"{text}\n  the end of its log:\n{self.log_tail}"


class BackendUnavailable(ToolkitError):
    """A library or program that is needed is not installed. `name` is its name, `extra` the extra
    that installs it. fault: what is wrong with the one that is there; None: there is none.
    """

    def __init__(
        self,
        name: str,
        *,
        extra: str | None = None,
        fault: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.name = name
        self.extra = extra
        self.fault = fault
        if not hint and extra:
            hint = f"pip install --editable '.[{extra}]' in the toolkit's checkout"
        what = f"{name} is not available" if fault is None else f"{name} cannot be used: {fault}"
        super().__init__(what, hint=hint or None)
