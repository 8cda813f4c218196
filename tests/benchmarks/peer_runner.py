"""Runs one engine of `bench_peers` with one way of decoding, in a process of its own.

The Python that has the engine runs this file; nothing of the toolkit is imported, but for our own
engine. Standard input has one JSON object per line, the answers go to standard output likewise:

    {"prompts": [[id, ...], ...]}  ->  {"ids": [[id, ...], ...], "seconds": [...], "cpu_s": ...,
                                        "idle_cpu_s": ..., "accepted": ..., "steps": ...}

The first line out is {"versions": {...}}, once the engine is loaded. `ids` are the output tokens
of each prompt, `seconds` the time from prompt ids to output ids. `cpu_s` is the processor time of
this process meanwhile, `idle_cpu_s` what it used while it waited for the question. `accepted` draft
tokens and verify `steps` are counted by the engine, or by us from its forwards; null for plain
decoding. All that an engine prints goes to standard error.

    PYTHON tests/benchmarks/peer_runner.py '{"engine": "vllm", "target": DIR, "draft": DIR | null,
        "precision": "FP32", "threads": 2, "draft_len": 3, "max_tokens": 64}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MAX_SEQ_LEN = 1024
MAX_BATCH_SIZE = 8
KV_CACHE_GIB = 1


@dataclass
class Counts:
    """What speculation did since the process began."""

    accepted: int = 0
    steps: int = 0


Generate = Callable[[list[int]], list[int]]
# An engine: generate, and what it has counted so far.
Loaded = tuple[Generate, Callable[[], Counts]]


def load_ours(task: dict[str, Any]) -> Loaded:
    """Compiled engines under our own runtime. It decodes the text as well as the ids."""
    from tests.support.runtimes import make_request, serve_one
    from toolkit.inprocess import load_runtime

    draft = task["draft"]
    runtime = load_runtime(
        Path(task["target"]),
        Path(draft) if draft else None,
        threads=task["threads"],
        max_draft_len=task["draft_len"] if draft else 0,
    )
    counts = Counts()

    def generate(prompt: list[int]) -> list[int]:
        outcome = serve_one(runtime, make_request(prompt, task["max_tokens"]))
        counts.accepted += outcome.stats.accepted
        counts.steps += outcome.stats.verify_steps
        return outcome.ids

    return generate, lambda: counts


def load_transformers(task: dict[str, Any]) -> Loaded:
    """`generate` with and without `assistant_model`, its draft length held constant. It tells no
    counts: its target's forwards are counted, each of which adds one token to the accepted ones.
    """
    import torch
    import transformers

    torch.set_num_threads(task["threads"])
    transformers.utils.logging.set_verbosity_error()

    def load(folder: str) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.generation_config.max_length = None
        return model.eval()

    target, counts, assistant = load(task["target"]), Counts(), None
    if task["draft"]:
        assistant = load(task["draft"])
        own = assistant.generation_config
        own.num_assistant_tokens = task["draft_len"]
        own.num_assistant_tokens_schedule = "constant"
        own.assistant_confidence_threshold = 0.0  # it would end a block early

    def count_step(*_: object) -> None:
        counts.steps += 1

    target.register_forward_pre_hook(count_step)

    def generate(prompt: list[int]) -> list[int]:
        ids, steps_before = torch.tensor([prompt]), counts.steps
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=task["max_tokens"],
            do_sample=False,
            assistant_model=assistant,
        )
        output: list[int] = out[0, len(prompt) :].tolist()
        counts.accepted += len(output) - (counts.steps - steps_before)
        return output

    return generate, lambda: counts


def load_vllm(task: dict[str, Any]) -> Loaded:
    """vLLM's `LLM` in this process, without its prefix cache, which would hold the prompts of the
    round before.
    """
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(KV_CACHE_GIB),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    from vllm import LLM, SamplingParams, TokensPrompt

    speculative = None
    if task["draft"]:
        speculative = {
            "method": "draft_model",
            "model": task["draft"],
            "num_speculative_tokens": task["draft_len"],
        }
    engine = LLM(
        model=task["target"],
        dtype="float32",
        max_model_len=MAX_SEQ_LEN,
        max_num_seqs=MAX_BATCH_SIZE,
        enable_prefix_caching=False,
        disable_log_stats=False,  # get_metrics needs them
        speculative_config=speculative,
    )
    sampling = SamplingParams(temperature=0, max_tokens=task["max_tokens"], detokenize=False)

    def generate(prompt: list[int]) -> list[int]:
        answers = engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        return list(answers[0].outputs[0].token_ids)

    def counts() -> Counts:
        values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
        return Counts(
            accepted=int(values.get("vllm:spec_decode_num_accepted_tokens", 0)),
            steps=int(values.get("vllm:spec_decode_num_drafts", 0)),
        )

    return generate, counts


def load_openvino(task: dict[str, Any]) -> Loaded:
    """OpenVINO GenAI's `LLMPipeline`, with and without `draft_model`. Activations are float32 in
    both precisions; the KV cache too in FP32, else as the engine chooses.
    """
    import numpy as np
    import openvino
    import openvino_genai as genai

    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": task["threads"],
    }
    if task["precision"] == "FP32":
        properties["KV_CACHE_PRECISION"] = "f32"
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = KV_CACHE_GIB
    options = dict(properties)
    if task["draft"]:
        options["draft_model"] = genai.draft_model(task["draft"], "CPU", **properties)
    pipeline = genai.LLMPipeline(task["target"], "CPU", scheduler_config=scheduler, **options)
    generation = pipeline.get_generation_config()
    generation.max_new_tokens, generation.do_sample = task["max_tokens"], False
    if task["draft"]:
        generation.num_assistant_tokens = task["draft_len"]
    counts = Counts()

    def generate(prompt: list[int]) -> list[int]:
        answer = pipeline.generate(openvino.Tensor(np.array([prompt], dtype=np.int64)), generation)
        if task["draft"]:
            told = answer.extended_perf_metrics
            counts.accepted += told.get_num_accepted_tokens()
            # the target's forwards; the one of the prompt is not among them
            counts.steps += len(told.main_model_metrics.raw_metrics.m_durations)
        return list(answer.tokens[0])

    return generate, lambda: counts


LOADERS: dict[str, tuple[Callable[[dict[str, Any]], Loaded], tuple[str, ...]]] = {
    "ours": (load_ours, ("toolkit", "torch")),
    "vllm": (load_vllm, ("vllm", "vllm-cpu", "torch")),
    "openvino": (load_openvino, ("openvino-genai", "openvino")),
    "transformers": (load_transformers, ("transformers", "torch")),
}


def versions_of(names: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def main() -> None:
    task = json.loads(sys.argv[1])
    # This folder's modules are not the engine's, whatever they are called.
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).parent]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: task["threads"]])
    load, names = LOADERS[task["engine"]]
    generate, counted = load(task)
    answers.write(json.dumps({"versions": versions_of(names)}) + "\n")
    idle_since = time.process_time()
    for line in sys.stdin:
        ids, seconds, before = [], [], Counts(**vars(counted()))
        turn_began = time.process_time()
        for prompt in json.loads(line)["prompts"]:
            began = time.perf_counter()
            ids.append(generate(prompt))
            seconds.append(time.perf_counter() - began)
        after, turn_ended = counted(), time.process_time()
        answer: dict[str, Any] = {
            "ids": ids,
            "seconds": seconds,
            "cpu_s": turn_ended - turn_began,
            "idle_cpu_s": turn_began - idle_since,
        }
        for name in ("accepted", "steps"):
            gained = getattr(after, name) - getattr(before, name)
            answer[name] = gained if task["draft"] else None
        answers.write(json.dumps(answer) + "\n")
        idle_since = time.process_time()


if __name__ == "__main__":
    main()
