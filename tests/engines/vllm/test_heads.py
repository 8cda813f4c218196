"""vLLM drafts with the methods that the toolkit names, and its greedy text stays the target's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.eagle3 import train_head, write_eagle3_target, write_head
from toolkit.checkpoints.tokenizer import load_tokenizer
from toolkit.engines.vllm.arguments import engine_args, resolved, without_speculation
from toolkit.interfaces import EngineSpec, VllmSpec

if TYPE_CHECKING:
    from toolkit.engines.vllm.environment import VllmEnvironment

PROMPTS = ("The cat sat on", "def area(r):", "1 2 3 4 5", "abc abc abc", "Hello", "To be or not")
MAX_TOKENS = 40
DRAFT_LEN = 3
SPEC = EngineSpec(
    role="target",
    max_batch_size=8,
    max_input_len=64,
    max_seq_len=128,
    max_draft_len=DRAFT_LEN,
    device="cpu",
)


def answers(
    environment: VllmEnvironment, folder: Path, target: Path, cases: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    tokenizer = load_tokenizer(target)
    file = folder / "cases.json"
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    file.write_text(json.dumps({"prompts": prompts, "max_tokens": MAX_TOKENS, "args": cases}))
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    ran = subprocess.run(
        [str(environment.python), "-m", "tests.support.vllm_offline", str(file)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"token_ids"')]


@pytest.mark.vllm
@pytest.mark.slow
def test_greedy_text_is_the_target_s_whatever_drafts(
    vllm_environment: VllmEnvironment, tmp_path: Path
) -> None:
    """A head that was trained for seconds on these very texts has some of its drafts accepted, a
    random one next to none. Neither may change a token, and no more than the longest draft length
    is drafted.
    """
    target = write_eagle3_target(tmp_path / "target")
    learnt = train_head(tmp_path / "trained", target, PROMPTS)
    assert learnt > 0.9  # of the tokens that it was trained on, with the right ones before them
    write_head(tmp_path / "random")

    def args_of(draft: str | None, **fields: Any) -> dict[str, Any]:
        settings = VllmSpec("0.32.0", dtype="float32", **fields)
        args = engine_args(SPEC, settings, None)
        return resolved(args, target, None if draft is None else tmp_path / draft)

    cases = {
        "plain": without_speculation(args_of(None)),
        "random": args_of("random", speculation="eagle3"),
        "trained": args_of("trained", speculation="eagle3"),
        "scheduled": args_of("trained", speculation="eagle3", draft_len_schedule={1: 3, 3: 1}),
        "never": args_of("trained", speculation="eagle3", max_concurrency=1),
        "ngram": args_of(None, speculation="ngram"),
    }
    done = dict(
        zip(cases, answers(vllm_environment, tmp_path, target, [*cases.values()]), strict=True)
    )
    for name, answer in done.items():
        assert answer["token_ids"] == done["plain"]["token_ids"], name
    rates = {name: done[name]["accepted"] / done[name]["drafted"] for name in ("random", "trained")}
    assert rates["trained"] > 0.25 > rates["random"], rates
    assert done["ngram"]["drafted"] > 0
    assert done["never"]["drafted"] < done["scheduled"]["drafted"] < done["trained"]["drafted"]
