"""How far is acceptance on given texts, streamed, from acceptance on what the target writes?

    python -m tests.benchmarks.bench_streamed [--target DIR] [--draft DIR] [--prompts 64]

Three measurements of one pair, by default the quickstart's as it was trained: with both models in
memory, where the target writes every text (exact); streamed over the target's own greedy texts,
given as completions; streamed over held-out text. Good: on its own texts, greedy alpha and tokens
per step are the exact ones. The other figures show the bias of the approximations.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.advise.observe import Text, teacher_forced
from toolkit.advise.stage import Contender, GivenTexts, Question, advise
from toolkit.config.schema import TorchEngineConfig
from toolkit.engines.embedded.engine import open_checkpoint
from toolkit.interfaces import Sampling
from toolkit.pipeline.texts import read_texts
from toolkit.records.advice import Advice
from toolkit.records.build import QuantizedCheckpoint
from toolkit.speculative.drafters import Lookup
from toolkit.speculative.sampling import weights
from toolkit.speculative.text import TextCodec
from toolkit.words import Role
from toolkit.workflows.measured_runtime import MeasuredRuntime
from toolkit.workflows.measured_streamed import PROMPT_TOKENS, StreamedModels, all_texts

QUICKSTART = Path("configs/quickstart")
MAX_TOKENS, TEMPERATURE, DRAFT_LEN = 64, 0.8, 3


def probabilities(logits: Any) -> Any:
    rows = weights(logits, Sampling(temperature=TEMPERATURE))
    return rows / rows.sum(axis=-1, keepdims=True)


def forward_s(role: Role, batch: int, tokens: int) -> float:
    """Acceptance does not depend on costs; the draft's forwards cost a tenth of the target's."""
    return 0.001 if role == "draft" else 0.010


def measured(
    target: Any, contender: Contender, prompts: Sequence[tuple[int, ...]], given: GivenTexts | None
) -> Advice:
    question = Question(
        [("all", ids) for ids in prompts],
        MAX_TOKENS,
        TEMPERATURE,
        "rejection",
        max_draft_len=DRAFT_LEN,
        batches=(1,),
        given=given,
    )
    return advise(
        target,
        [contender],
        question,
        lookup=lambda: Lookup(4),
        probabilities=probabilities,
        progress=lambda done, total, what: None,
    )


def figures(advice: Advice) -> dict[str, Any]:
    (candidate,) = advice.candidates
    alphas = {
        f"alpha {alpha.rule}": [round(x, 3) for x in (alpha.estimate, alpha.low, alpha.high)]
        for alpha in candidate.alphas
        if alpha.rule in ("greedy", "rejection")
    }
    tokens = {
        f"tokens/step {prediction.mode}": round(prediction.acceptance_length, 3)
        for prediction in candidate.predictions
        if prediction.draft_len == DRAFT_LEN
    }
    return {**alphas, **tokens, "first choices": advice.first_choices, "tokens": advice.tokens}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--target", type=Path, default=QUICKSTART / "target")
    arguments.add_argument("--draft", type=Path, default=QUICKSTART / "draft")
    arguments.add_argument("--prompts", type=int, default=64)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)  # the models are small
    codec = TextCodec.from_file(chosen.target / "tokenizer.json")
    target, draft = (open_checkpoint(path) for path in (chosen.target, chosen.draft))
    runtime = MeasuredRuntime(target, draft, codec, eos_token_ids=())
    texts = read_texts(QUICKSTART / "data/prompts.jsonl", "prompt", limit=chosen.prompts)
    prompts = [tuple(codec.encode(text)) for text in texts]
    loaded = Contender("draft", "draft_target", runtime, teacher_forced(draft), forward_s)
    results = {"written by the target": measured(teacher_forced(target), loaded, prompts, None)}

    own = [
        Text("all", ids, output, MAX_TOKENS)
        for ids, output in zip(prompts, runtime.write(prompts, MAX_TOKENS, 0.0), strict=True)
    ]
    heldout = []
    for text in read_texts(QUICKSTART / "data/heldout.jsonl", "text"):
        ids = tuple(codec.encode(text)[: PROMPT_TOKENS + MAX_TOKENS])
        heldout.append(Text("all", ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:], MAX_TOKENS))
    for name, given in (
        ("its greedy texts", GivenTexts(own, "completions")),
        ("held-out text", GivenTexts(heldout, "held-out text")),
    ):
        with tempfile.TemporaryDirectory() as folder:
            engine = TorchEngineConfig(device="cpu")
            models = StreamedModels(
                all_texts(given), engine, Path(folder), lambda done, total, what: None
            )
            target_logits, draft_logits = (
                models.logits_of(QuantizedCheckpoint(role, path, None, None, "", 0, 0, None, ()))
                for role, path in (("target", chosen.target), ("draft", chosen.draft))
            )
            streamed = Contender("draft", "draft_target", None, draft_logits, forward_s)
            given_prompts = [text.prompt for text in given.texts]
            results[name] = measured(target_logits, streamed, given_prompts, given)
    for name, advice in results.items():
        print(f"{name:22} {figures(advice)}")
    by_name = {name: figures(advice) for name, advice in results.items()}
    print(json.dumps({"machine": platform.processor(), "results": by_name}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
