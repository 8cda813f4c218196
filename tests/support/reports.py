"""Records put into a store as the pipeline does it when their stages run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.stages import Silent
from toolkit.interfaces import Progress
from toolkit.pipeline.run import run_stages
from toolkit.pipeline.stage import Finished, Stage
from toolkit.pipeline.store import Store
from toolkit.records.advice import Advice, Grid
from toolkit.records.report import ValidationReport
from toolkit.report.render import write_report

__all__ = ["keep"]


def keep(
    store: Store,
    stage_name: str,
    record: Advice | Grid | ValidationReport,
    parts: Mapping[str, Any],
    *,
    name: str = "tiny",
) -> None:
    """As the pipeline does it when the stage runs."""

    def run(finished: Finished, out_dir: Path, progress: Progress) -> Any:
        if isinstance(record, ValidationReport):
            write_report(record, out_dir)
            (out_dir / "server.log").write_text("what the server said")
        return record

    stage = Stage(stage_name, 1, type(record), (), lambda finished: parts, run)
    assert dict(run_stages([stage], store, name, Silent()))
