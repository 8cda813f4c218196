"""A separate program, run by the Python that may have vLLM: print the versions of the packages that
it is given by name, without importing them.

Reading versions takes a tenth of a second, importing vLLM ten seconds. The last line of the output
is {"python": VERSION, "packages": {NAME: VERSION or null}, "has_module": whether there is a module
vllm}.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(names: list[str]) -> None:
    here = str(Path(__file__).parent)  # its modules are not for this Python
    sys.path[:] = [folder for folder in sys.path if folder != here]
    packages = {name: installed(name) for name in names}
    has_module = find_spec("vllm") is not None
    answer = {"python": platform.python_version(), "packages": packages, "has_module": has_module}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
