"""The stages `tune` and `grid`: run the advisor on compiled engines and the prompt file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.config.schema import (
    AUTO_MAX_DRAFT_LEN,
    DeploymentConfig,
    TorchEngineConfig,
)
from toolkit.facts.gpus import Gpu
from toolkit.interfaces import Progress, StepEngine
from toolkit.pipeline.hashing import DigestMemo, digest_file, digest_value
from toolkit.pipeline.machine import machine
from toolkit.pipeline.sources import digest_sources
from toolkit.pipeline.stage import Done, Finished, Stage
from toolkit.records.advice import Advice, Grid
from toolkit.records.build import CompiledEngine
from toolkit.records.codec import from_json, to_json
from toolkit.words import DeployedRule, Drafter, QuantAlgo, Role

if TYPE_CHECKING:
    from toolkit.advise.cost import StepCosts
    from toolkit.speculative.text import TextCodec

__all__ = ["CostsOnServer", "DraftingMethod", "grid_stage", "tune_stage"]

GRID_ROUNDS = 2  # how often every cell of the grid is run

DraftingMethod = tuple[str, Drafter, Done | None]
"""(name, drafter, compiled draft); the drafter "ngram" has no compiled draft."""


class CostsOnServer(Protocol):
    """Measures costs on the server of another engine, and says what decides them."""

    def parts(self, finished: Finished) -> Mapping[str, Any]:
        """The parts of the stage's key."""
        ...

    def measure(
        self,
        finished: Finished,
        methods: Sequence[tuple[str, Drafter]],
        prompts: Sequence[tuple[str, int]],
        longest: int,
        progress: Progress,
    ) -> Mapping[str, Mapping[float, StepCosts]]:
        """Costs of every draft length up to `longest`, by name of the method and temperature.

        methods: (name, drafter). prompts: (text, tokens).
        """
        ...


def tune_stage(
    config: DeploymentConfig,
    engine: TorchEngineConfig,
    memo: DigestMemo,
    methods: Callable[[Finished], list[DraftingMethod]],
    *,
    rule: DeployedRule,
    target: Done | None = None,
    checkpoints: Callable[[Finished], Mapping[Role, Done]] | None = None,
    measured_rounds: int = 0,
    gpu: Gpu | None = None,
    served: CostsOnServer | None = None,
) -> Stage:
    """The `tune` stage.

    engine: the embedded engine that runs the models here, whatever kind serves them. methods: the
    drafting methods to compare. rule: the acceptance rule of sampled requests in the served
    deployment. target: the target's engine, if no stage before this one compiles it. checkpoints:
    role -> the checkpoint of the engine, if the deployment has engines of another kind.
    measured_rounds: how many rounds run every draft length, to check the predictions; 0 for none.
    gpu: the GPU whose costs are predicted; None if costs are measured here. served: measures them
    on the server that will serve; None if the embedded engine does.
    """
    from toolkit.advise import stage

    validation, speculation = config.validation, config.speculation
    needs: tuple[str, ...] = ()
    if target is None:
        needs = tuple(f"compile/{role}" for role in config.models)

    def target_of(finished: Finished) -> Done:
        return target or finished["compile/target"]

    def parts(finished: Finished) -> Mapping[str, Any]:
        drafts = {
            name: None if done is None else done.entry.digest for name, _, done in methods(finished)
        }
        inputs = {
            "target": target_of(finished).entry.digest,
            "drafts": drafts,
            "prompts": digest_file(validation.prompts, memo),
            "toolkit_sources": digest_sources([__name__]),
        }
        if checkpoints is not None:
            inputs["checkpoints"] = {
                role: [done.entry.digest] for role, done in checkpoints(finished).items()
            }
        if served is not None:
            inputs["served"] = served.parts(finished)
        return {
            "config": {
                "rule": rule,
                "batch_size": config.engine.max_batch_size,
                "max_draft_len": max(speculation.longest_draft, AUTO_MAX_DRAFT_LEN),
                "max_matching_ngram_size": speculation.max_matching_ngram_size,
                "threads": engine.threads,
                "measured_rounds": measured_rounds,
                "gpu": None if gpu is None else [gpu.name, ranks_of(config)],
                **validation.model_dump(include={"max_prompts", "max_tokens", "temperature"}),
            },
            "inputs": inputs,
            "fingerprint": {name: version(name) for name in ("torch", "tokenizers", "numpy")},
            "machine": machine(),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> Advice:
        engines = [
            (name, drafter, None if done is None else done.record)
            for name, drafter, done in methods(finished)
        ]
        advice = _advise(
            config,
            engine,
            target_of(finished).record,
            engines,
            rule,
            measured_rounds,
            gpu,
            None if served is None else partial(served.measure, finished),
            progress,
        )
        (out_dir / "advice.json").write_text(
            json.dumps(to_json(advice), indent=1), encoding="utf-8"
        )
        return advice

    return Stage("tune", stage.VERSION, Advice, needs, parts, run)


def _advise(
    config: DeploymentConfig,
    engine: TorchEngineConfig,
    compiled: CompiledEngine,
    engines: Sequence[tuple[str, Drafter, CompiledEngine | None]],
    rule: DeployedRule,
    measured_rounds: int,
    gpu: Gpu | None,
    measure_served: Callable[..., Mapping[str, Mapping[float, StepCosts]]] | None,
    progress: Progress,
) -> Advice:
    """Load the engines into this process, and let the advisor measure them.

    measure_served: CostsOnServer.measure. It runs first, with the machine to itself.
    """
    from toolkit.advise.cost import batch_sizes
    from toolkit.advise.stage import Contender, Question, advise, of_medium_length
    from toolkit.engines.registry import loader
    from toolkit.inprocess import eos_token_ids
    from toolkit.interfaces import Sampling
    from toolkit.speculative.drafters import Lookup
    from toolkit.speculative.sampling import weights
    from toolkit.speculative.text import TextCodec
    from toolkit.workflows.measured_runtime import MeasuredRuntime

    started = time.monotonic()
    validation, speculation, target_dir = config.validation, config.speculation, compiled.path
    codec = TextCodec.from_file(target_dir / "tokenizer.json")
    prompts = _prompts(config, engine, codec)
    longest = max(speculation.longest_draft, AUTO_MAX_DRAFT_LEN)
    served: Mapping[str, Mapping[float, StepCosts]] = {}
    if measure_served is not None:
        sent = of_medium_length(prompts, lambda prompt: len(prompt[2]))
        served = measure_served(
            [(name, drafter) for name, drafter, _ in engines],
            [(text, len(ids)) for _, text, ids in sent],
            longest,
            progress,
        )
    measured_s = time.monotonic() - started
    target = loader("torch").load(target_dir, threads=engine.threads)
    sampling = Sampling(temperature=validation.temperature)

    def probabilities(logits: Any) -> Any:
        rows = weights(logits, sampling)
        return rows / rows.sum(axis=-1, keepdims=True)

    def contender(name: str, drafter: Drafter, draft_engine: CompiledEngine | None) -> Contender:
        draft = forward_s = None
        if draft_engine is not None:
            draft = loader("torch").load(draft_engine.path, threads=engine.threads)
        if gpu is not None:
            ranks = ranks_of(config)
            forward_s = _roofline(gpu, ranks, compiled, draft_engine, engine.max_input_len)
        runtime = MeasuredRuntime(
            target,
            draft,
            codec,
            eos_token_ids=eos_token_ids(target_dir),
            acceptance="auto" if rule == "sample_match_greedy_draft" else rule,
            ngram_size=speculation.max_matching_ngram_size,
        )
        return Contender(name, drafter, runtime, draft, forward_s, served.get(name))

    question = Question(
        prompts=[(label, ids) for label, _, ids in prompts],
        max_tokens=validation.max_tokens,
        temperature=validation.temperature,
        acceptance=rule,
        batches=batch_sizes(config.engine.max_batch_size),
        max_draft_len=longest,
        measured_rounds=measured_rounds,
    )
    advice = advise(
        target,
        [contender(*method) for method in engines],
        question,
        lookup=lambda: Lookup(speculation.max_matching_ngram_size),
        probabilities=probabilities,
        progress=progress,
    )
    return replace(advice, seconds=advice.seconds + measured_s)


def ranks_of(config: DeploymentConfig) -> int:
    """The number of GPUs that share the model."""
    return config.engine.world_size


def _roofline(
    gpu: Gpu, gpus: int, target: CompiledEngine, draft: CompiledEngine | None, context: int
) -> Callable[[Role, int, int], float]:
    """A function (role, batch, tokens) -> the least seconds of a forward pass on `gpus` GPUs.

    It is the larger of the time to read the bytes and the time for the arithmetic.
    """
    from toolkit.checkpoints.shape import ModelShape, read_json
    from toolkit.plan.predict import forward_seconds

    engines: dict[Role, CompiledEngine | None] = {"target": target, "draft": draft}
    shapes = {
        role: from_json(ModelShape, read_json(compiled.path / "config.json")["toolkit"]["shape"])
        for role, compiled in engines.items()
        if compiled is not None
    }

    def forward_s(role: Role, batch: int, tokens: int) -> float:
        compiled = engines[role]
        assert compiled is not None  # prompt lookup runs no draft
        algo, kv_algo = compiled.quant_algo or "NO_QUANT", compiled.kv_cache_quant_algo
        return forward_seconds(
            shapes[role], algo, kv_algo, gpu, batch=batch, tokens=tokens, context=context, gpus=gpus
        )[0]

    return forward_s


def _prompts(
    config: DeploymentConfig, engine: TorchEngineConfig, codec: TextCodec
) -> list[tuple[str, str, tuple[int, ...]]]:
    """(domain, text, token ids) of each prompt that fits the engine."""
    from toolkit.pipeline.texts import read_labels, read_texts

    validation = config.validation
    texts = read_texts(validation.prompts, "prompt", "text", limit=validation.max_prompts)
    labels = read_labels(validation.prompts, "domain", "all", limit=validation.max_prompts)
    room = min(engine.max_input_len, engine.max_seq_len - validation.max_tokens)
    encoded = [
        (label, text, tuple(codec.encode(text))) for label, text in zip(labels, texts, strict=True)
    ]
    return [prompt for prompt in encoded if 0 < len(prompt[2]) <= room]


def grid_stage(
    config: DeploymentConfig,
    engine: TorchEngineConfig,
    memo: DigestMemo,
    engines: Mapping[Role, Mapping[QuantAlgo, Done]],
    heldout: Sequence[str],
    *,
    pairs: Collection[tuple[str, str]],
    left_out: Sequence[str] = (),
    checkpoints: Mapping[Role, Mapping[QuantAlgo, Done]] | None = None,
    gpu: Gpu | None = None,
) -> Stage:
    """The `grid` stage.

    engine: the embedded engine that runs the models here, whatever kind serves them. engines: role
    -> quant_algo -> the model compiled in that precision. checkpoints: role -> quant_algo -> the
    checkpoint of that engine, if the deployment has engines of another kind. pairs: the precisions
    of (target, draft) to compare. left_out: sentences about the other pairs. gpu: as in
    `tune_stage`.
    """
    from toolkit.advise import stage

    validation = config.validation

    def digests(results: Mapping[Role, Mapping[QuantAlgo, Done]]) -> dict[str, list[str]]:
        return {
            role: [done.entry.digest for done in by_algo.values()]
            for role, by_algo in results.items()
        }

    def parts(finished: Finished) -> Mapping[str, Any]:
        return {
            "config": {
                "max_kl": validation.quality.max_kl,
                "threads": engine.threads,
                "pairs": sorted(pairs),
                "left_out": list(left_out),
                "gpu": None if gpu is None else [gpu.name, ranks_of(config)],
                **validation.model_dump(include={"max_prompts", "max_tokens"}),
            },
            "inputs": {
                "engines": digests(engines),
                **({} if checkpoints is None else {"checkpoints": digests(checkpoints)}),
                "prompts": digest_file(validation.prompts, memo),
                "heldout": digest_value(list(heldout)),
                "toolkit_sources": digest_sources([__name__]),
            },
            "fingerprint": {name: version(name) for name in ("torch", "tokenizers", "numpy")},
            "machine": machine(),
        }

    def run(finished: Finished, out_dir: Path, progress: Progress) -> Grid:
        compiled = {
            role: {algo: done.record for algo, done in by_algo.items()}
            for role, by_algo in engines.items()
        }
        grid = _grid(config, engine, compiled, heldout, pairs, left_out, gpu, progress)
        (out_dir / "grid.json").write_text(json.dumps(to_json(grid), indent=1), encoding="utf-8")
        return grid

    return Stage("grid", stage.VERSION, Grid, (), parts, run)


def _grid(
    config: DeploymentConfig,
    engine: TorchEngineConfig,
    compiled: Mapping[Role, Mapping[QuantAlgo, CompiledEngine]],
    heldout: Sequence[str],
    pairs: Collection[tuple[str, str]],
    left_out: Sequence[str],
    gpu: Gpu | None,
    progress: Progress,
) -> Grid:
    """Measure every pair of precisions in this process. It holds the unquantized target, one other
    target at a time, and all drafts.
    """
    from toolkit.advise.cost import MEASURED, PREDICTED
    from toolkit.advise.grid import UNQUANTIZED, measure_grid
    from toolkit.advise.stage import Contender, Question
    from toolkit.engines.registry import loader
    from toolkit.inprocess import eos_token_ids
    from toolkit.speculative.text import TextCodec
    from toolkit.workflows.measured_runtime import MeasuredRuntime

    load = loader("torch").load

    def target_of(algo: QuantAlgo) -> StepEngine:
        return load(compiled["target"][algo].path, threads=engine.threads)

    drafts = {
        algo: load(draft.path, threads=engine.threads) for algo, draft in compiled["draft"].items()
    }
    unquantized, ranks = compiled["target"][UNQUANTIZED].path, ranks_of(config)
    codec = TextCodec.from_file(unquantized / "tokenizer.json")

    def contenders(algo: QuantAlgo, target: StepEngine) -> list[Contender]:
        return [contender(algo, target, name) for name in drafts if (algo, name) in pairs]

    def contender(algo: QuantAlgo, target: StepEngine, name: QuantAlgo) -> Contender:
        runtime = MeasuredRuntime(
            target, drafts[name], codec, eos_token_ids=eos_token_ids(unquantized)
        )
        forward_s = None
        if gpu is not None:
            pair = compiled["target"][algo], compiled["draft"][name]
            forward_s = _roofline(gpu, ranks, *pair, engine.max_input_len)
        return Contender(name, "draft_target", runtime, drafts[name], forward_s)

    question = Question(
        prompts=[(label, ids) for label, _, ids in _prompts(config, engine, codec)],
        max_tokens=config.validation.max_tokens,
        temperature=None,
        acceptance="auto",
        batches=(1,),
        rounds=2,
    )
    texts = [
        ids
        for ids in (codec.encode(text)[: engine.max_seq_len] for text in heldout)
        if len(ids) > 2
    ]
    costs_are = MEASURED
    if gpu is not None:
        costs_are = f"{PREDICTED} for {gpu.name if ranks == 1 else f'{ranks} x {gpu.name}'}"
    return measure_grid(
        list(compiled["target"]),
        target_of,
        contenders,
        question,
        texts,
        max_kl=config.validation.quality.max_kl,
        rounds=GRID_ROUNDS,
        progress=progress,
        costs_are=costs_are,
        left_out=left_out,
    )
