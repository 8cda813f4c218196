"""Publish the report of a deployment, with the results of `tune` beside those of `validate`.

If somebody runs `tune` after `validate`, the validation is not repeated: its report is written
again, with the advice and the grid in it. They are shown only if they were measured with the same
engines and prompts on the same machine; otherwise a finding says what differs.
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
    """The last result of a stage of a deployment. parts: the parts of its key."""

    entry: Entry
    record: R
    parts: Mapping[str, Any]


def publish_report(store: Store, name: str, destination: Path, observer: Observer) -> bool:
    """Publish the last report of the deployment, with the last advice and grid, in `destination`.

    Returns whether anything has changed there.
    """
    validated = _last(store, name, "validate", ValidationReport)
    if validated is None:
        return False
    advice, grid = _last(store, name, "tune", Advice), _last(store, name, "grid", Grid)
    # The models of a rehearsal are not those that were tuned.
    if validated.record.replaced or (advice is None and grid is None):
        return store.publish({"": validated.entry}, destination)
    compiled = {
        stage: entry["parts"]["inputs"]
        for stage, entry in store.last(name).items()
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
    """The last result of a stage; None if there is none, or if another version wrote it."""
    last = store.last(name).get(stage)
    entry = None if last is None else store.find(stage, last["key"])
    if last is None or entry is None:
        return None
    try:
        return Stored(entry, from_json(kind, entry.record), last["parts"])
    except (ValueError, TypeError, KeyError):
        return None


def _stage(
    validated: Stored[ValidationReport],
    advice: Stored[Advice] | None,
    grid: Stored[Grid] | None,
    checkpoints: Mapping[str, str],
) -> Stage:
    """The stage that writes the report with the advice and the grid in it.

    checkpoints: role -> digest of the checkpoint that the deployment's engine was compiled from.
    """
    tuned: dict[str, Stored[Any]] = {
        stage: result for stage, result in (("tune", advice), ("grid", grid)) if result is not None
    }
    stale = {
        stage: differences
        for stage, result in tuned.items()
        if (differences := list(_differences(result.parts, validated.parts, checkpoints)))
    }

    def parts(finished: Finished) -> Mapping[str, Any]:
        return {
            "inputs": {
                "validate": validated.entry.digest,
                **{stage: result.entry.digest for stage, result in tuned.items()},
                "toolkit_sources": digest_sources([__name__]),
            },
            "stale": stale,
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> ValidationReport:
        from toolkit.report.render import write_report

        current = {stage: result.record for stage, result in tuned.items() if stage not in stale}
        findings = [
            Finding(COMMANDS[stage][0], "warning", _outdated(stage, differences))
            for stage, differences in stale.items()
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


def _outdated(stage: str, differences: list[str]) -> str:
    what, command = COMMANDS[stage]
    return (
        f"the last {what} is for {', '.join(differences)}, and is not shown; measure again:"
        f" {command}"
    )


def _differences(
    tuned: Mapping[str, Any], validated: Mapping[str, Any], checkpoints: Mapping[str, str]
) -> Iterator[str]:
    """What differs between a measurement of `tune` or `grid` and the validated deployment.

    tuned, validated: the parts of their keys. For TensorRT-LLM, `tune` and `grid` measure other
    engines of the same checkpoints and predict the costs, so checkpoints are compared and machines
    are not.
    """
    measured, served = tuned["inputs"], validated["inputs"]
    engines = served.get("engines", {})
    if "checkpoints" in measured:
        if any(
            checkpoints.get(role) not in measured["checkpoints"].get(role, ()) for role in engines
        ):
            yield "other checkpoints"
    elif any(digest not in _engines(role, measured) for role, digest in engines.items()):
        yield "other engines"
    if measured["prompts"] != served["prompts"]:
        yield "other prompts"
    settings = tuned["config"].keys() & validated["config"].keys()
    changed = sorted(key for key in settings if tuned["config"][key] != validated["config"][key])
    if changed:
        yield f"another {' and '.join(changed)}"
    if "checkpoints" not in measured and tuned["machine"] != validated["machine"]:
        yield "another machine"


def _engines(role: Role, inputs: Mapping[str, Any]) -> list[str]:
    """Digests of the measured engines of a role. inputs: of the key of `tune` or `grid`."""
    if "engines" in inputs:  # the grid has one of every precision
        return list(inputs["engines"].get(role, ()))
    return [inputs["target"]] if role == "target" else list(inputs["drafts"].values())
