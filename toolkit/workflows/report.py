"""The report of a deployment, with what `tune` found beside what `validate` measured.

Validation is not repeated because somebody ran `tune` afterwards: its report is written again, with
the advice and the grid in it. They speak of the deployment only where they looked at the same
engines and prompts on the same machine; what was found for others is named as such and not shown.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from toolkit.interfaces import Progress
from toolkit.pipeline.run import Observer, run_stages
from toolkit.pipeline.sources import digest_sources
from toolkit.pipeline.stage import Finished, Stage
from toolkit.pipeline.store import Entry, Store
from toolkit.records.advice import Advice, Grid
from toolkit.records.codec import from_json
from toolkit.records.measured import Finding
from toolkit.records.report import ValidationReport
from toolkit.words import Role

__all__ = ["publish_report"]

VERSION = 1
COMMANDS = {
    "tune": ("advice", "toolkit tune CONFIG"),
    "grid": ("grid", "toolkit tune CONFIG --grid"),
}

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Stored(Generic[R]):
    """The last result of a stage under a deployment's name. parts: what its key was made of."""

    entry: Entry
    record: R
    parts: Mapping[str, Any]


def publish_report(store: Store, name: str, destination: Path, observer: Observer) -> bool:
    """Make `destination` hold the last report of the deployment, as it is to be read now.
    Returns whether anything was done.
    """
    validated = _last(store, name, "validate", ValidationReport)
    if validated is None:
        return False
    advice, grid = _last(store, name, "tune", Advice), _last(store, name, "grid", Grid)
    if validated.record.replaced or (
        advice is None and grid is None
    ):  # a rehearsal's models are not those that were tuned
        return store.publish({"": validated.entry}, destination)
    compiled = {
        stage: known["parts"]["inputs"]
        for stage, known in store.last(name).items()
        if stage.startswith("compile/")
    }
    checkpoints = {
        stage.partition("/")[2]: inputs["checkpoint"]
        for stage, inputs in compiled.items()
        if "checkpoint" in inputs
    }
    ((_, done),) = run_stages([_stage(validated, advice, grid, checkpoints)], store, name, observer)
    return store.publish({"": done.entry}, destination)


def _last(store: Store, name: str, stage: str, kind: type[R]) -> Stored[R] | None:
    """None where there is none, or one of another version."""
    known = store.last(name).get(stage)
    entry = None if known is None else store.find(stage, known["key"])
    if known is None or entry is None:
        return None
    try:
        return Stored(entry, from_json(kind, entry.record), known["parts"])
    except (ValueError, TypeError, KeyError):
        return None


def _stage(
    validated: Stored[ValidationReport],
    advice: Stored[Advice] | None,
    grid: Stored[Grid] | None,
    checkpoints: Mapping[str, str],
) -> Stage:
    """checkpoints: by role, digests of what the deployment's engines were compiled from."""
    beside: dict[str, Stored[Any]] = {
        stage: found for stage, found in (("tune", advice), ("grid", grid)) if found is not None
    }
    stale = {
        stage: reasons
        for stage, found in beside.items()
        if (reasons := list(_differences(found.parts, validated.parts, checkpoints)))
    }

    def parts(finished: Finished) -> Mapping[str, Any]:
        return {
            "inputs": {
                "validate": validated.entry.digest,
                **{stage: found.entry.digest for stage, found in beside.items()},
                "toolkit_sources": digest_sources([__name__]),
            },
            "stale": stale,
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> ValidationReport:
        from toolkit.report.render import write_report

        current = {stage: found.record for stage, found in beside.items() if stage not in stale}
        findings = [
            Finding(COMMANDS[stage][0], "warning", _outdated(stage, reasons))
            for stage, reasons in stale.items()
        ]
        report = replace(
            validated.record,
            advice=current.get("tune", validated.record.advice),
            grid=current.get("grid"),
            findings=(*validated.record.findings, *findings),
        )
        shutil.copytree(validated.entry.path, out_dir, dirs_exist_ok=True)
        write_report(report, out_dir)
        return report

    return Stage("report", VERSION, ValidationReport, (), parts, run)


def _outdated(stage: str, reasons: list[str]) -> str:
    what, command = COMMANDS[stage]
    return f"the last {what} is of {', '.join(reasons)}, and is not shown; measure again: {command}"


def _differences(
    found: Mapping[str, Any], validated: Mapping[str, Any], checkpoints: Mapping[str, str]
) -> Iterator[str]:
    """In what a measurement of `tune` or `grid` is not of the deployment that was validated.

    For TensorRT-LLM both looked at other engines of the same checkpoints, and their costs are of no
    machine.
    """
    looked_at, served = found["inputs"], validated["inputs"]
    engines = served.get("engines", {})
    if "checkpoints" in looked_at:
        if any(
            checkpoints.get(role) not in looked_at["checkpoints"].get(role, ()) for role in engines
        ):
            yield "other checkpoints"
    elif any(digest not in _engines(role, looked_at) for role, digest in engines.items()):
        yield "other engines"
    if looked_at["prompts"] != served["prompts"]:
        yield "other prompts"
    settings = found["config"].keys() & validated["config"].keys()
    changed = sorted(one for one in settings if found["config"][one] != validated["config"][one])
    if changed:
        yield f"another {' and '.join(changed)}"
    if "checkpoints" not in looked_at and found["machine"] != validated["machine"]:
        yield "another machine"


def _engines(role: Role, inputs: Mapping[str, Any]) -> list[str]:
    """Digests of the engines of a role that were looked at."""
    if "engines" in inputs:  # the grid's: of every precision
        return list(inputs["engines"].get(role, ()))
    return [inputs["target"]] if role == "target" else list(inputs["drafts"].values())
