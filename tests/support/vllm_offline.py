"""Greedy texts from vLLM itself, without a server. Runs in vLLM's own Python:

    PYTHON -m tests.support.vllm_offline CASES.json

CASES.json: {"prompts": [[token id, ...], ...], "max_tokens": N, "args": [arguments of LLM(), ...]}.
For each of `args` it prints a line {"token_ids": [[...], ...], "drafted": N, "accepted": N}. Each
is run in a fork of its own, since a process can load only one speculating model: its kernels are
replaced by those for a CPU when it loads, and that fails the second time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

SPEC_DECODE = "vllm:spec_decode_"


def main(file: Path) -> int:
    import vllm

    cases = json.loads(file.read_text())
    for args in cases["args"]:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps(run(vllm, args, cases["prompts"], cases["max_tokens"])))
                sys.stdout.flush()
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                os._exit(1)
        if os.waitpid(child, 0)[1] != 0:
            return 1
    return 0


def run(vllm: Any, args: dict[str, Any], prompts: list[list[int]], max_tokens: int) -> Any:
    engine = vllm.LLM(**args, enforce_eager=True, disable_log_stats=False)
    answers = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        use_tqdm=False,
    )
    counts = {
        metric.name.removeprefix(SPEC_DECODE): getattr(metric, "value", None)
        for metric in engine.get_metrics()
        if metric.name.startswith(SPEC_DECODE)
    }
    return {
        "token_ids": [list(answer.outputs[0].token_ids) for answer in answers],
        "drafted": counts.get("num_draft_tokens", 0),
        "accepted": counts.get("num_accepted_tokens", 0),
    }


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
