"""A pipeline of three small stages that really write files: words -> upper-cased -> counted.

Run as a program it is a build that a test can kill: `python -m tests.support.stages ROOT WORDS
[STAGE=SECONDS]`; it prints `STAGE started` when a stage has written half of its output, and `STAGE
built` or `STAGE reused` when one is done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.interfaces import Progress
from toolkit.pipeline.run import run_stages
from toolkit.pipeline.stage import Done, Finished, Stage
from toolkit.pipeline.store import Store
from toolkit.records.build import TritonRepository
from toolkit.words import Layout

Pause = Callable[[str], None]
UNDECIDED: Layout = "bls"  # a record of this layout is not reused


def small_stages(
    words: str,
    ran: list[str] | None = None,
    *,
    pause: Pause = lambda stage: None,
    layout: Layout = "llmapi",
    version: int = 1,
) -> list[Stage]:
    """ran: where the names of stages that run are noted. pause: called in the middle of each.
    layout: of the last record.
    """
    log = ran if ran is not None else []

    def stage(
        name: str,
        needs: tuple[str, ...],
        text: Callable[[Finished], str],
        parts: Callable[[Finished], Mapping[str, Any]],
    ) -> Stage:
        def run(finished: Finished, out_dir: Path, progress: Progress) -> TritonRepository:
            log.append(name)
            (out_dir / "first").write_text("first half")
            pause(name)
            (out_dir / "sub").mkdir()
            (out_dir / "sub" / "text").write_text(text(finished))
            progress(1, 1, "writing")
            return TritonRepository(
                path=out_dir / "sub", layout=layout, model=name, decoupled=True, max_draft_len=0
            )

        return Stage(
            name,
            version,
            TritonRepository,
            needs,
            parts,
            run,
            lambda record: record.layout != UNDECIDED,
        )

    def of(finished: Finished, name: str) -> str:
        return str((finished[name].record.path / "text").read_text())

    return [
        stage("words", (), lambda finished: words, lambda finished: {"config": {"words": words}}),
        stage(
            "upper/target",
            ("words",),
            lambda finished: of(finished, "words").upper(),
            lambda finished: {"inputs": {"words": finished["words"].entry.digest}},
        ),
        stage(
            "count",
            ("upper/target",),
            lambda finished: str(len(of(finished, "upper/target").split())),
            lambda finished: {
                "inputs": {"upper": finished["upper/target"].entry.digest},
                "config": {"layout": layout},
            },
        ),
    ]


class Silent:
    """An observer that keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def started(self, stage: str) -> Progress:
        return lambda done, total, what: None

    def finished(self, stage: str, done: Done) -> None:
        self.lines.append(f"{stage} {'reused' if done.reused else 'built'}")


class Printing(Silent):
    def finished(self, stage: str, done: Done) -> None:
        print(stage, "reused" if done.reused else "built", flush=True)


def main(root: str, words: str, *pauses: str) -> None:
    seconds = {stage: float(text) for stage, text in (pause.split("=") for pause in pauses)}

    def pause(stage: str) -> None:
        print(stage, "started", flush=True)
        time.sleep(seconds.get(stage, 0.0))

    store = Store(Path(root), notice=lambda text: print(text, flush=True))
    for _ in run_stages(small_stages(words, pause=pause), store, "small", Printing()):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
