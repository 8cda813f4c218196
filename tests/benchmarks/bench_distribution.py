"""Does the distribution test raise false alarms on a sound deployment, and what does it cost?

The quickstart's compiled engines in the real runtime, in this process; unseeded requests at T =
0.8, as validation sends them, each run with other prompts and fresh draws. Every run does all tests
with their controls. With --faulty the accept rule is broken instead, and every run has to fail.
Good: no alarm in 20 runs (a right test raises one in 1,000 runs), every control rejected, under 30
s a run.

    python -m tests.benchmarks.bench_distribution [--runs 20] [--engines engines/quickstart]
    [--prompts FILE] [--faulty]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

from tests.support.accept_rules import accept_by_argmax, with_rule
from tests.support.runtime_endpoint import RuntimeEndpoint, noise
from toolkit.bench.prompts import read_prompts
from toolkit.config.schema import DistributionGates
from toolkit.engines.registry import loader
from toolkit.inprocess import eos_token_ids
from toolkit.speculative.acceptance import RULES
from toolkit.speculative.runtime import RuntimeSettings, SpeculativeRuntime
from toolkit.speculative.text import TextCodec
from toolkit.validate.arms import Sender
from toolkit.validate.gates import distribution_gate
from toolkit.validate.reference import reference_from_engine
from toolkit.validate.sampled import draw_samples, judge_samples

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--engines", type=Path, default=ROOT / "engines" / "quickstart")
    parser.add_argument(
        "--prompts", type=Path, default=ROOT / "configs" / "quickstart" / "data" / "prompts.jsonl"
    )
    parser.add_argument(
        "--faulty", action="store_true", help="keep drafts for being the likeliest token"
    )
    arguments = parser.parse_args()
    if not arguments.engines.is_dir():
        print(
            f"{arguments.engines} is missing: toolkit build configs/quickstart.yaml",
            file=sys.stderr,
        )
        return 2
    target, draft = (arguments.engines / role for role in ("target", "draft"))
    codec = TextCodec.from_file(target / "tokenizer.json")
    eos = eos_token_ids(target)
    load = loader("torch").load
    rules = {**RULES, "rejection": with_rule(accept_by_argmax)} if arguments.faulty else RULES
    runtime = SpeculativeRuntime(
        load(target, threads=1),
        load(draft, threads=1),
        codec,
        RuntimeSettings(3, eos_token_ids=eos),
        rules=rules,
    )
    reference = reference_from_engine(
        lambda: load(target, threads=1), codec.encode, eos, noise, lambda: load(draft, threads=1)
    )
    prompts = read_prompts(arguments.prompts, 64)
    gates = DistributionGates(max_seconds=600)
    alarms = blind = 0
    seconds: list[float] = []
    smallest: list[float] = []
    print(
        f"{'run':>3} {'outcome':12} {'tokens':>7} {'seconds':>7} {'smallest p':>10}  least rejected"
        " control"
    )
    for run in range(arguments.runs):
        began = time.monotonic()
        sender = Sender(RuntimeEndpoint(runtime, codec.encode), max_tokens=64)
        rotated = prompts[8 * run % len(prompts) :] + prompts[: 8 * run % len(prompts)]
        drawn = draw_samples(
            sender, rotated, gates, reference, temperature=0.8, near_tie_margin=0.05, seed=run
        )
        found = judge_samples(drawn, gates, rule="rejection", seed=run)
        gate = distribution_gate(found)
        seconds.append(time.monotonic() - began)
        smallest.append(min(test.p_value for test in found.tests))
        alarms += gate.outcome == "FAIL"
        blind += any(not test.control_rejected for test in found.tests)
        control = max(
            found.tests,
            key=lambda test: 1.0 if test.control_p_value is None else test.control_p_value,
        )
        shown = (
            f"{control.control_p_value:.1e} {control.name}"
            if control.control_p_value is not None
            else control.name
        )
        print(
            f"{run:3} {gate.outcome:12} {found.tokens:7,} {seconds[-1]:7.1f} {smallest[-1]:10.2e} "
            f" {shown}",
            flush=True,
        )
        if arguments.faulty:
            print(
                "    "
                + "; ".join(
                    f"{t.name} p {t.p_value:.0e} lean {t.lean or 0:+.1f}"
                    for t in found.tests
                    if t.rejected
                )
            )
    figures = {
        "benchmark": "distribution",
        "faulty": arguments.faulty,
        "runs": arguments.runs,
        "failed": alarms,
        "runs_with_a_blind_test": blind,
        "seconds_per_run": sum(seconds) / len(seconds),
        "smallest_p": min(smallest),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
