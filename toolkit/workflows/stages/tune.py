"""The stages `tune` and `grid`: run the advisor on compiled engines and the prompt file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from toolkit.config.schema import (
    AUTO_MAX_DRAFT_LEN,
    DeploymentConfig,
    TorchEngineConfig,
)
from toolkit.facts.gpus import Gpu
from toolkit.interfaces import Progress
from toolkit.pipeline.hashing import DigestMemo, digest_file, digest_value
from toolkit.pipeline.machine import machine
from toolkit.pipeline.sources import digest_sources
from toolkit.pipeline.stage import Done, Finished, Stage, resume_folder
from toolkit.pipeline.texts import template_part
from toolkit.records.advice import Advice, Grid
from toolkit.records.build import QuantizedCheckpoint
from toolkit.records.codec import from_json, to_json
from toolkit.words import DeployedRule, Drafter, QuantAlgo, Role
from toolkit.workflows.advised_models import (
    Model,
    load_models,
    load_targets,
    stream_models,
    stream_targets,
)

if TYPE_CHECKING:
    from toolkit.advise.cost import StepCosts
    from toolkit.advise.grid import OpenTarget
    from toolkit.advise.stage import Contender, GivenTexts
    from toolkit.checkpoints.shape import ModelShape
    from toolkit.speculative.text import TextCodec

__all__ = ["CostsOnServer", "DraftingMethod", "grid_stage", "tune_stage"]

GRID_ROUNDS = 2  # how often every cell of the grid is run

DraftingMethod = tuple[str, Drafter, Done | None]
"""(name, drafter, draft); the drafter "ngram" has no draft. The draft is compiled, or a quantized
checkpoint that is streamed.
"""


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
    streamed: bool = False,
) -> Stage:
    """The `tune` stage.

    engine: the embedded engine that runs the models here, whatever kind serves them. methods: the
    drafting methods to compare. rule: the acceptance rule of sampled requests in the served
    deployment. target: the target's engine, if no stage before this one compiles it. checkpoints:
    role -> the checkpoint of the engine, if the deployment has engines of another kind.
    measured_rounds: how many rounds run every draft length, to check the predictions; 0 for none.
    gpu: the GPU whose costs are predicted; None if costs are measured here. served: measures them
    on the server that will serve; None if the embedded engine does. streamed: the models are read
    layer by layer instead of being run; target and drafts are then quantized checkpoints instead of
    engines.
    """
    from toolkit.advise import stage

    validation, speculation = config.validation, config.speculation
    made_by = "quantize" if streamed else "compile"
    needs: tuple[str, ...] = ()
    if target is None:
        needs = tuple(f"{made_by}/{role}" for role in config.models)

    def target_of(finished: Finished) -> Done:
        return target or finished[f"{made_by}/target"]

    def parts(finished: Finished) -> Mapping[str, Any]:
        drafts = {
            name: None if done is None else done.entry.digest for name, _, done in methods(finished)
        }
        inputs: dict[str, Any] = {
            "target": target_of(finished).entry.digest,
            "drafts": drafts,
            "prompts": digest_file(validation.prompts, memo),
            **template_part(config.target.checkpoint, *_text_files(config, heldout=streamed)),
            "toolkit_sources": digest_sources([__name__]),
        }
        if checkpoints is not None:
            inputs["checkpoints"] = {
                role: [done.entry.digest] for role, done in checkpoints(finished).items()
            }
        if served is not None:
            inputs["served"] = served.parts(finished)
        if streamed:
            _, *heldout = _text_files(config, heldout=True)
            inputs["texts"] = [digest_file(file, memo) for file in heldout]
        return {
            "config": {
                **({"streamed": _limits(engine)} if streamed else {}),
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
            resume_folder(out_dir) if streamed else None,
            progress,
        )
        (out_dir / "advice.json").write_text(
            json.dumps(to_json(advice), indent=1), encoding="utf-8"
        )
        return advice

    return Stage("tune", stage.VERSION, Advice, needs, parts, run)


def _limits(engine: TorchEngineConfig) -> dict[str, Any]:
    """What of the engine decides a streamed pass: which texts are taken, and the arithmetic."""
    return engine.model_dump(include={"max_input_len", "max_seq_len", "dtype", "device"})


def _text_files(config: DeploymentConfig, *, heldout: bool) -> list[Path]:
    """The prompts, and the files that held-out texts come from."""
    files, calibration = [config.validation.prompts], config.calibration
    if heldout and calibration is not None:
        files += [file for file in (calibration.dataset, calibration.heldout) if file is not None]
    return files


def _advise(
    config: DeploymentConfig,
    engine: TorchEngineConfig,
    target: Model,
    methods: Sequence[tuple[str, Drafter, Model | None]],
    rule: DeployedRule,
    measured_rounds: int,
    gpu: Gpu | None,
    measure_served: Callable[..., Mapping[str, Mapping[float, StepCosts]]] | None,
    streamed: Path | None,
    progress: Progress,
) -> Advice:
    """Load the models into this process, or stream them, and let the advisor measure them.

    measure_served: CostsOnServer.measure. It runs first, with the machine to itself. streamed: the
    folder that keeps what a streamed pass has finished; None loads the models.
    """
    from toolkit.advise.cost import batch_sizes
    from toolkit.advise.stage import Contender, Question, advise, of_medium_length
    from toolkit.interfaces import Sampling
    from toolkit.speculative.drafters import Lookup
    from toolkit.speculative.sampling import weights
    from toolkit.speculative.text import TextCodec

    started = time.monotonic()
    validation, speculation = config.validation, config.speculation
    codec = TextCodec.from_file(target.path / "tokenizer.json")
    prompts = _prompts(config, engine, codec)
    longest = max(speculation.longest_draft, AUTO_MAX_DRAFT_LEN)
    served: Mapping[str, Mapping[float, StepCosts]] = {}
    if measure_served is not None:
        sent = of_medium_length(prompts, lambda prompt: len(prompt[2]))
        served = measure_served(
            [(name, drafter) for name, drafter, _ in methods],
            [(text, len(ids)) for _, text, ids in sent],
            longest,
            progress,
        )
    sampling = Sampling(temperature=validation.temperature)

    def probabilities(logits: Any) -> Any:
        rows = weights(logits, sampling)
        return rows / rows.sum(axis=-1, keepdims=True)

    if streamed is None:
        models = load_models(config, engine, target, codec, rule)
    else:
        models = stream_models(config, engine, target, codec, streamed, progress)

    def contender(name: str, drafter: Drafter, draft: Model | None) -> Contender:
        logits_of, runtime = models.draft(draft)
        forward_s = None
        if gpu is not None:
            forward_s = _roofline(gpu, ranks_of(config), target, draft, engine.max_input_len)
        return Contender(name, drafter, runtime, logits_of, forward_s, served.get(name))

    given = models.given
    read_prompts = [(label, ids) for label, _, ids in prompts]
    if given is not None:
        read_prompts = [(text.domain, text.prompt) for text in given.texts]
    question = Question(
        prompts=read_prompts,
        max_tokens=validation.max_tokens,
        temperature=validation.temperature,
        acceptance=rule,
        batches=batch_sizes(config.engine.max_batch_size),
        max_draft_len=longest,
        measured_rounds=measured_rounds,
        given=given,
    )
    advice = advise(
        models.target,
        [contender(*method) for method in methods],
        question,
        lookup=lambda: Lookup(speculation.max_matching_ngram_size),
        probabilities=probabilities,
        progress=progress,
    )
    return replace(advice, seconds=time.monotonic() - started)


def ranks_of(config: DeploymentConfig) -> int:
    """The number of GPUs that share the model."""
    return config.engine.world_size


def _roofline(
    gpu: Gpu, gpus: int, target: Model, draft: Model | None, context: int
) -> Callable[[Role, int, int], float]:
    """A function (role, batch, tokens) -> the least seconds of a forward pass on `gpus` GPUs.

    It is the larger of the time to read the bytes and the time for the arithmetic.
    """
    from toolkit.plan.predict import forward_seconds

    models: dict[Role, Model | None] = {"target": target, "draft": draft}
    shapes = {role: _shape(model) for role, model in models.items() if model is not None}

    def forward_s(role: Role, batch: int, tokens: int) -> float:
        model = models[role]
        assert model is not None  # prompt lookup runs no draft
        algo, kv_algo = model.quant_algo or "NO_QUANT", model.kv_cache_quant_algo
        return forward_seconds(
            shapes[role], algo, kv_algo, gpu, batch=batch, tokens=tokens, context=context, gpus=gpus
        )[0]

    return forward_s


def _shape(model: Model) -> ModelShape:
    from toolkit.checkpoints.shape import ModelShape, read_json, read_shape

    if isinstance(model, QuantizedCheckpoint):
        return read_shape(model.path)
    return from_json(ModelShape, read_json(model.path / "config.json")["toolkit"]["shape"])


def _prompts(
    config: DeploymentConfig, engine: TorchEngineConfig, codec: TextCodec
) -> list[tuple[str, str, tuple[int, ...]]]:
    """(domain, text, token ids) of each prompt that fits the engine."""
    from toolkit.pipeline.rows import read_rows
    from toolkit.pipeline.texts import PROMPT_KEYS, Writer

    validation, write = config.validation, Writer(config.target.checkpoint).text
    rows = read_rows(validation.prompts, *PROMPT_KEYS, limit=validation.max_prompts)
    room = min(engine.max_input_len, engine.max_seq_len - validation.max_tokens)
    texts = [(row.domain, write(row)) for row in rows]
    encoded = [(domain, text, tuple(codec.encode(text))) for domain, text in texts]
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
    streamed: bool = False,
) -> Stage:
    """The `grid` stage.

    engine: the embedded engine that runs the models here, whatever kind serves them. engines: role
    -> quant_algo -> the model compiled in that precision, or its checkpoint if it is streamed.
    checkpoints: role -> quant_algo -> the checkpoint of that engine, if the deployment has engines
    of another kind. pairs: the precisions of (target, draft) to compare. left_out: sentences about
    the other pairs. gpu, streamed: as in `tune_stage`; what is streamed is not timed, so it needs a
    gpu.
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
                **({"streamed": _limits(engine)} if streamed else {}),
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
                **template_part(config.target.checkpoint, *_text_files(config, heldout=streamed)),
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
        folder = resume_folder(out_dir) if streamed else None
        grid = _grid(config, engine, compiled, heldout, pairs, left_out, gpu, folder, progress)
        (out_dir / "grid.json").write_text(json.dumps(to_json(grid), indent=1), encoding="utf-8")
        return grid

    return Stage("grid", stage.VERSION, Grid, (), parts, run)


def _grid(
    config: DeploymentConfig,
    engine: TorchEngineConfig,
    models: Mapping[Role, Mapping[QuantAlgo, Model]],
    heldout: Sequence[str],
    pairs: Collection[tuple[str, str]],
    left_out: Sequence[str],
    gpu: Gpu | None,
    streamed: Path | None,
    progress: Progress,
) -> Grid:
    """Measure every pair of precisions in this process.

    streamed: as in `_advise`.
    """
    from toolkit.advise.cost import MEASURED, PREDICTED
    from toolkit.advise.grid import UNQUANTIZED, measure_grid
    from toolkit.advise.stage import Question
    from toolkit.speculative.text import TextCodec

    ranks = ranks_of(config)
    codec = TextCodec.from_file(models["target"][UNQUANTIZED].path / "tokenizer.json")
    judged: Sequence[Sequence[int]] = [
        ids
        for ids in (codec.encode(text)[: engine.max_seq_len] for text in heldout)
        if len(ids) > 2
    ]
    given: GivenTexts | None = None
    if streamed is None:
        prompts = [(label, ids) for label, _, ids in _prompts(config, engine, codec)]
        open_target = load_targets(engine, models, pairs, codec, predicted=gpu is not None)
    else:
        given, judged, open_target = stream_targets(
            config, engine, models, pairs, codec, judged, streamed, progress
        )
        prompts = [(text.domain, text.prompt) for text in given.texts]

    def with_costs(algo: QuantAlgo) -> OpenTarget:
        """The target, with contenders whose costs are predicted if a GPU is named."""
        opened = open_target(algo)
        if gpu is None:
            return opened
        return replace(opened, contenders=map(partial(predicted, algo), opened.contenders))

    def predicted(algo: QuantAlgo, contender: Contender) -> Contender:
        assert gpu is not None
        pair = models["target"][algo], models["draft"][cast("QuantAlgo", contender.name)]
        return replace(contender, forward_s=_roofline(gpu, ranks, *pair, engine.max_input_len))

    costs_are = MEASURED
    if gpu is not None:
        costs_are = f"{PREDICTED} for {gpu.name if ranks == 1 else f'{ranks} x {gpu.name}'}"
    question = Question(
        prompts=prompts,
        max_tokens=config.validation.max_tokens,
        temperature=None,
        acceptance="auto",
        batches=(1,),
        rounds=2,
        given=given,
    )
    return measure_grid(
        list(models["target"]),
        with_costs,
        question,
        judged,
        max_kl=config.validation.quality.max_kl,
        rounds=GRID_ROUNDS,
        progress=progress,
        costs_are=costs_are,
        left_out=left_out,
    )
