"""The same pair on four engines: ours, vLLM, OpenVINO GenAI and transformers' assisted generation.

The quickstart pair, its held-out prompts, greedy, one request at a time, the same most tokens,
draft length, processors and threads for all; FP32, and INT8 where an engine has it. Every arm
(engine, precision, plain or speculative) is a process of its own; in each round they take turns,
one at a time, forwards and backwards in turn, so that a busy moment hits all alike. A call counts
from prompt ids to output ids. The first turn of each is a warm-up, on other prompts. Prefix caches
are off, since every round sends the same prompts. Good: figures with less than 0.2 cores at work
elsewhere; every text equal or a near-tie in FP32.

    python -m tests.benchmarks peers [--prompts 16] [--rounds 2] [--max-tokens 64] [--threads 2]
        [--only ours vllm openvino transformers] [--precisions FP32 INT8]
        [--markdown docs/peers.md]

What an engine needs, in an environment of its own; one that is not there is a row that says so:

    make vllm       .venv-vllm      vLLM
    make openvino   .venv-openvino  OpenVINO GenAI, and what exports the pair for it

Engines are compiled and exported before anything is measured, once: into build/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import yaml

from tests.benchmarks import peer_table as table
from tests.benchmarks.peer_table import Arm, Difference, Row, Turn
from toolkit.errors import ToolkitError

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart"
CONFIG = ROOT / "configs" / "quickstart.yaml"
RUNNER, EXPORT = (Path(__file__).with_name(name) for name in ("peer_runner.py", "peer_export.py"))
PREPARED = ROOT / "build" / "peers"
QUANT_ALGO = {"FP32": "NO_QUANT", "INT8": "W8A8_SQ_PER_CHANNEL"}
TITLES = {
    "ours": "ours",
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "transformers": "transformers",
}
ROWS = (
    ("ours", "FP32"),
    ("ours", "INT8"),
    ("vllm", "FP32"),
    ("vllm", "INT8"),
    ("openvino", "FP32"),
    ("openvino", "INT8"),
    ("transformers", "FP32"),
)
WARM_UP_PROMPTS = 2
START_TIMEOUT_S, TURN_TIMEOUT_S = 600.0, 300.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class MissingError(Exception):
    """Why an arm cannot run."""


@dataclass(frozen=True)
class Prepared:
    """What a row's processes start with."""

    python: Path
    target: Path
    draft: Path
    variables: dict[str, str]


# What each engine loads.


def openvino_python() -> Path:
    """The Python of `.venv-openvino`, beside this program's own environment or in the checkout."""
    for folder in (Path(sys.prefix).parent, ROOT):
        python = folder / ".venv-openvino" / "bin" / "python"
        if python.exists():
            return python
    raise MissingError("no .venv-openvino; `make openvino` makes it")


def compiled(kind: str, precision: str) -> Path:
    """A folder with engines `target` and `draft` of the quickstart pair, from the project's store
    if they are there.
    """
    from toolkit.cli.progress import displayed
    from toolkit.config.load import load_config
    from toolkit.pipeline.store import Store
    from toolkit.workflows.build import build
    from toolkit.workflows.folders import Workplace

    deployment = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    deployment["name"] = f"peers-{kind}-{precision.lower()}"
    for role in ("target", "draft"):
        deployment[role]["quantization"] = {"quant_algo": QUANT_ALGO[precision]}
    if kind == "vllm":
        lengths = ("max_batch_size", "max_input_len", "max_seq_len")
        deployment["engine"] = {
            "kind": "vllm",
            "dtype": "float32",
            **{name: deployment["engine"][name] for name in lengths},
        }
        del deployment["triton"]
    written = json.loads(
        json.dumps(deployment).replace('"quickstart/', f'"{QUICKSTART.as_posix()}/')
    )
    PREPARED.mkdir(parents=True, exist_ok=True)
    file = PREPARED / f"{deployment['name']}.yaml"
    file.write_text(yaml.safe_dump(written), encoding="utf-8")
    config, workplace = load_config(file), Workplace(PREPARED)
    with displayed() as display:
        build(config, workplace, display, Store(Workplace(ROOT).store), until="compile")
    return workplace.engines(config.name)


def prepare_ours(precision: str) -> Prepared:
    folder = compiled("torch", precision)
    return Prepared(
        Path(sys.executable),
        folder / "target",
        folder / "draft",
        {"PYTHONPATH": str(ROOT)},
    )


def prepare_vllm(precision: str) -> Prepared:
    """FP32 as the checkpoint is; INT8 as our quantization writes it for vLLM."""
    from toolkit.engines.vllm.environment import find_environment

    python = find_environment().python
    folder = QUICKSTART if precision == "FP32" else compiled("vllm", precision)
    variables = {"VLLM_CACHE_ROOT": str(PREPARED / "vllm-cache")}
    # vLLM's installation guide for CPUs preloads Intel's OpenMP; its wheel brings it.
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    if openmp.exists():
        variables["LD_PRELOAD"] = str(openmp)
    return Prepared(python, folder / "target", folder / "draft", variables)


def prepare_openvino(precision: str) -> Prepared:
    python = openvino_python()
    folders = []
    for role in ("target", "draft"):
        source = QUICKSTART / role
        digest = hashlib.sha256(
            b"".join(
                hashlib.sha256(file.read_bytes()).digest()
                for file in (EXPORT, *sorted(source.iterdir()))
            )
        ).hexdigest()[:12]
        folder = PREPARED / "openvino" / f"{role}-{digest}"
        if not folder.exists():
            export(python, source, folder)
        folders.append(folder / precision)
    return Prepared(python, folders[0], folders[1], {})


def export(python: Path, source: Path, folder: Path) -> None:
    print(f"exporting the {source.name} for OpenVINO ...", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        log = folder.with_suffix(".log")
        with log.open("w") as stream:
            code = subprocess.run(
                [python, EXPORT, source, Path(scratch) / "out"],
                env=environment({}, threads=2),
                stdout=stream,
                stderr=stream,
                check=False,
            ).returncode
        if code != 0:
            raise MissingError(f"the export failed: {last_words(log)}")
        (Path(scratch) / "out").rename(folder)


def prepare_transformers(precision: str) -> Prepared:
    return Prepared(Path(sys.executable), QUICKSTART / "target", QUICKSTART / "draft", {})


PREPARE: dict[str, Callable[[str], Prepared]] = {
    "ours": prepare_ours,
    "vllm": prepare_vllm,
    "openvino": prepare_openvino,
    "transformers": prepare_transformers,
}


# Processes.


def environment(variables: dict[str, str], threads: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {
        **inherited,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        **variables,
    }


def last_words(log: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return ([*lines, *errors] or ["it said nothing"])[-1][:200]


class Process:
    """One arm, which loads and then waits. It ends with this program, whose end closes its input.

    `wait_until_ready` and `run` raise MissingError where it does not answer, or ends.
    """

    def __init__(
        self, command: Sequence[str | Path], variables: dict[str, str], log: Path, threads: int
    ) -> None:
        self.log = log
        self.stream: IO[str] = log.open("w")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stream,
            text=True,
            env=environment(variables, threads),
            cwd=log.parent,
        )

    def wait_until_ready(self) -> dict[str, str]:
        """The versions of the engine's packages, once it is loaded."""
        versions: dict[str, str] = self._answer(START_TIMEOUT_S)["versions"]
        return versions

    def run(self, prompts: Sequence[Sequence[int]]) -> Turn:
        assert self.process.stdin is not None
        busy_before, began = busy_cpu_s(), time.perf_counter()
        try:
            self.process.stdin.write(json.dumps({"prompts": prompts}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise MissingError(f"it ended: {last_words(self.log)}") from None
        answer = self._answer(TURN_TIMEOUT_S)
        busy, cpu_s = busy_cpu_s() - busy_before, answer.pop("cpu_s")
        return Turn(
            **answer,
            wall_s=time.perf_counter() - began,
            others_cpu_s=max(0.0, busy - cpu_s),
        )

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self.process.kill()

        timer = threading.Timer(timeout_s, give_up)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if is_late.is_set():
            raise MissingError(f"no answer within {timeout_s:.0f} s")
        if not line:
            self.process.wait()
            raise MissingError(f"it ended: {last_words(self.log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.stream):
            assert stream is not None
            stream.close()


def busy_cpu_s() -> float:
    """Processor seconds that all programs of this machine, and others of its host, have used."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / CLOCK_TICKS


# The measurement.


def measure(
    arms: Sequence[tuple[Arm, Process]],
    prompts: Sequence[Sequence[int]],
    warm_up: Sequence[Sequence[int]],
    rounds: int,
) -> None:
    """Run all arms in turns, and append their turns. An arm whose process ends or hangs is left
    out from then on, and has no turns.
    """

    def run(arm: Arm, process: Process, batch: Sequence[Sequence[int]]) -> Turn | None:
        if arm.missing is not None:
            return None
        try:
            return process.run(batch)
        except MissingError as reason:
            arm.missing, arm.turns = str(reason), []
            return None

    for arm, process in arms:
        run(arm, process, warm_up)
    for index in range(rounds):
        for arm, process in arms[:: -1 if index % 2 else 1]:
            turn = run(arm, process, prompts)
            if turn is not None:
                arm.turns.append(turn)


def prepare_rows(
    chosen: Sequence[tuple[str, str]],
) -> tuple[list[Row], list[tuple[str, Row, Prepared]]]:
    """All rows, and what those start with whose engines are there."""
    rows, ready = [], []
    for engine, precision in chosen:
        row = Row(TITLES[engine], precision)
        rows.append(row)
        try:
            ready.append((engine, row, PREPARE[engine](precision)))
        except (MissingError, ToolkitError) as reason:
            row.plain.missing = str(reason).splitlines()[0]
    return rows, ready


def start_row(
    engine: str, row: Row, prepared: Prepared, options: argparse.Namespace, folder: Path
) -> list[tuple[Arm, Process]]:
    """Start both arms at once. An arm that does not get ready says why, and is run no more."""
    print(f"starting {row.engine}, {row.precision} ...", file=sys.stderr, flush=True)
    arms = []
    for name, arm, draft in (
        ("plain", row.plain, None),
        ("speculative", row.speculative, str(prepared.draft)),
    ):
        task = {
            "engine": engine,
            "target": str(prepared.target),
            "draft": draft,
            "precision": row.precision,
            "threads": options.threads,
            "draft_len": options.draft_len,
            "max_tokens": options.max_tokens,
        }
        log = folder / f"{engine}-{row.precision}-{name}.log"
        command: list[str | Path] = [prepared.python, RUNNER, json.dumps(task)]
        arms.append((arm, Process(command, prepared.variables, log, options.threads)))
    for arm, process in arms:
        try:
            row.versions = process.wait_until_ready()
        except MissingError as reason:
            arm.missing = str(reason)
    return arms


def read_prompts(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of `count` held-out prompts, spread over the file, and of others to warm up."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(QUICKSTART / "target" / "tokenizer.json"))
    lines = (QUICKSTART / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ids = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    total = count + WARM_UP_PROMPTS
    chosen = [ids[index * len(ids) // total] for index in range(total)]
    return chosen[:count], chosen[count:]


def eos_ids() -> tuple[int, ...]:
    settings = json.loads((QUICKSTART / "target" / "generation_config.json").read_text())
    ids = settings["eos_token_id"]
    return tuple(ids) if isinstance(ids, list) else (ids,)


class Gaps:
    """How far chosen tokens lie below the best one, in logits of the float32 checkpoint."""

    def __init__(self, prompts: Sequence[Sequence[int]], eos: Sequence[int]) -> None:
        self.prompts, self.eos = prompts, eos
        self.model: Any = None

    def of(self, reference: Arm) -> Callable[[Difference], float]:
        """Texts that share all before the difference with the reference's."""

        def gap(difference: Difference) -> float:
            import torch
            import transformers

            if self.model is None:
                self.model = transformers.AutoModelForCausalLM.from_pretrained(
                    QUICKSTART / "target", dtype=torch.float32
                ).eval()
            shared = reference.turns[0].ids[difference.prompt][: difference.position]
            with torch.no_grad():
                ids = torch.tensor([[*self.prompts[difference.prompt], *shared]])
                logits = self.model(ids).logits[0, -1]
            tokens = [self.eos[0] if token is None else token for token in difference.tokens]
            return float(logits.max() - logits[tokens].min())

        return gap


# The report.


def machine(threads: int) -> str:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.machine()
    return f"{name}, {os.cpu_count()} processors, {threads} used"


def report(
    options: argparse.Namespace, rows: Sequence[Row], prompts: Sequence[Sequence[int]]
) -> None:
    from toolkit.config.load import load_config

    eos = eos_ids()
    gaps = Gaps(prompts, eos)
    near_tie_margin = load_config(CONFIG).validation.parity.near_tie_margin
    floats = [row for row in rows if row.precision == "FP32" and row.plain.turns]
    reference = floats[-1] if floats else None
    lines: list[tuple[str, ...]] = [table.HEADINGS]
    differing: list[str] = []
    for row in rows:
        own = to_fp32 = None
        if row.missing is None:
            own = table.compare_texts(row.speculative, row.plain, eos)
            differing += table.told(row, own, gaps.of(row.plain), near_tie_margin)
        if row.plain.turns and reference is not None:
            to_fp32 = table.compare_texts(row.plain, reference.plain, eos)
        lines.append(table.cells(row, own, to_fp32))
    others = table.others_cores(rows)
    versions = table.versions_of(rows)
    facts = [
        f"{machine(options.threads)}. {len(prompts)} prompts, {options.max_tokens} tokens at most,"
        f" draft length {options.draft_len}, {options.rounds} rounds in turns."
        f" Intervals: 95 %.",
        "Versions: "
        + "; ".join(
            f"{engine}: {', '.join(f'{name} {number}' for name, number in packages.items())}"
            for engine, packages in versions.items()
        )
        + f". Python {platform.python_version()}.",
        f"Other programs kept {others:.2f} cores busy meanwhile.",
    ]
    if reference is not None:
        facts.append(f"FP32 text: plain decoding of {reference.engine}.")
    if others > table.BUSY_CORES:
        facts.append(
            f"The machine was not idle (more than {table.BUSY_CORES:g} cores): run it again before"
            " you compare."
        )
    print(table.as_text(lines))
    for line in (*facts, *differing):
        print(line)
    if options.markdown:
        notes = "\n".join(f"- {line}" for line in (*facts, *differing))
        table.write_block(options.markdown, f"{table.as_markdown(lines)}\n\n{notes}")
    print(json.dumps(as_json(options, rows, others)))


def as_json(options: argparse.Namespace, rows: Sequence[Row], others: float) -> dict[str, Any]:
    return {
        "benchmark": "peers",
        "device": machine(options.threads),
        "prompts": options.prompts,
        "rounds": options.rounds,
        "max_tokens": options.max_tokens,
        "draft_len": options.draft_len,
        "others_cores": round(others, 3),
        "versions": {**table.versions_of(rows), "transformers of .venv": version("transformers")},
        "rows": [
            {
                "engine": row.engine,
                "precision": row.precision,
                "not_run": row.missing,
                **({} if row.missing else figures(row)),
            }
            for row in rows
        ],
    }


def figures(row: Row) -> dict[str, Any]:
    estimates = {
        "plain_tokens_per_s": row.plain.rate,
        "speculative_tokens_per_s": row.speculative.rate,
        "speedup": row.speedup,
    }
    turns = (*row.plain.turns, *row.speculative.turns)
    return {
        **{name: [round(number, 3) for number in value] for name, value in estimates.items()},
        "acceptance_length": row.speculative.acceptance_length,
        # what the arms used while others had their turn
        "idle_cpu_s": round(sum(turn.idle_cpu_s for turn in turns), 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-len", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=tuple(PREPARE), default=tuple(PREPARE))
    parser.add_argument(
        "--precisions", nargs="+", choices=tuple(QUANT_ALGO), default=tuple(QUANT_ALGO)
    )
    parser.add_argument("--markdown", type=Path, help="the page whose table is replaced")
    options = parser.parse_args(arguments)
    prompts, warm_up = read_prompts(options.prompts)
    chosen = [row for row in ROWS if row[0] in options.only and row[1] in options.precisions]
    with tempfile.TemporaryDirectory() as scratch:
        rows, ready = prepare_rows(chosen)
        arms: list[tuple[Arm, Process]] = []
        try:
            for engine, row, prepared in ready:
                arms += start_row(engine, row, prepared, options, Path(scratch))
            measure(arms, prompts, warm_up, options.rounds)
        finally:
            for _, process in arms:
                process.stop()
    report(options, rows, prompts)
    return 0 if any(row.missing is None for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
