"""Run every bench_*.py of this folder in turn, each in a process of its own: `make bench`.

    python -m tests.benchmarks [NAME ...]      e.g. `forward kernels`; none: all of them
    python -m tests.benchmarks NAME OPTION ... its own options, which start with `--`

Each prints its table and one JSON line. The exit code is 1 when one of them failed to run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent


def main(arguments: list[str]) -> int:
    first_option = next(
        (i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments)
    )
    names, options = arguments[:first_option], arguments[first_option:]
    if options and len(names) != 1:
        print("options need the name of one benchmark before them", file=sys.stderr)
        return 2
    known = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or known:
        print(f"\n=== {name}", flush=True)
        began = time.monotonic()
        code = subprocess.run(
            [sys.executable, "-m", f"tests.benchmarks.bench_{name}", *options],
            cwd=FOLDER.parents[1],
            check=False,
        ).returncode
        print(
            f"--- {name}: {'done' if code == 0 else f'exit code {code}'} after"
            f" {time.monotonic() - began:.0f} s",
            flush=True,
        )
        if code != 0:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
