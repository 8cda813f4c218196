"""A build of a YAML's quantized checkpoints that a test can kill.

`python -m tests.support.quantizing YAML ROOT [WHAT DONE]` runs the stages up to `quantize` with the
store in ROOT, and prints each report of progress as `STAGE: WHAT DONE/TOTAL`. At the report that
WHAT and DONE name, it stops and waits to be killed. At its end it prints `STAGE DIGEST` of each
quantized checkpoint.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from toolkit.config.load import load_config
from toolkit.interfaces import Progress
from toolkit.pipeline.run import run_stages, upto
from toolkit.pipeline.stage import Done
from toolkit.pipeline.store import Store
from toolkit.workflows.folders import Workplace
from toolkit.workflows.stages.sequence import stages_of


class Stopping:
    """Prints what it is told, and stops at one report."""

    def __init__(self, stop_at: tuple[str, ...]) -> None:
        self._stop_at = stop_at

    def started(self, stage: str) -> Progress:
        def progress(done: int, total: int | None, what: str) -> None:
            print(f"{stage}: {what} {done}/{total}", flush=True)
            if (what, str(done)) == self._stop_at:
                print("stopped", flush=True)
                time.sleep(600)

        return progress

    def finished(self, stage: str, done: Done) -> None:
        if stage.startswith("quantize/"):
            print(stage, done.entry.digest, "resumed" if done.is_resumed else "", flush=True)


def main(yaml: str, root: str, *stop_at: str, fresh: bool = False) -> None:
    import torch

    torch.set_num_threads(1)
    config, store = load_config(Path(yaml)), Store(Path(root))
    stages = upto(stages_of(config, Workplace(Path(root).parent), store.memo), "quantize")
    again = ["quantize"] if fresh else []
    for _ in run_stages(stages, store, config.name, Stopping(stop_at), fresh=again):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
