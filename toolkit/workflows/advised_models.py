"""The models of a deployment as the advisor observes them: loaded into this process and run, or
streamed over given texts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from toolkit.config.schema import DeploymentConfig, TorchEngineConfig
from toolkit.interfaces import Progress, StepEngine
from toolkit.records.build import CompiledEngine, QuantizedCheckpoint
from toolkit.words import DeployedRule, QuantAlgo, Role

if TYPE_CHECKING:
    from toolkit.advise.grid import OpenTarget
    from toolkit.advise.observe import LogitsOf
    from toolkit.advise.stage import Contender, GivenTexts
    from toolkit.speculative.text import TextCodec
    from toolkit.workflows.measured_runtime import MeasuredRuntime

__all__ = [
    "AdvisedModels",
    "Model",
    "load_models",
    "load_targets",
    "stream_models",
    "stream_targets",
]

Model: TypeAlias = CompiledEngine | QuantizedCheckpoint
"""A model that is loaded, or one that is streamed."""


@dataclass(frozen=True, slots=True)
class AdvisedModels:
    """The models as the advisor observes them. given: texts in place of those that the target
    writes. draft: of a draft, or of None for prompt lookup, the model, and the runtime that serves
    the target with it; no runtime if the models are streamed.
    """

    target: LogitsOf
    given: GivenTexts | None
    draft: Callable[[Model | None], tuple[LogitsOf | None, MeasuredRuntime | None]]


def load_models(
    config: DeploymentConfig,
    engine: TorchEngineConfig,
    compiled: Model,
    codec: TextCodec,
    rule: DeployedRule,
) -> AdvisedModels:
    """Load the engines into this process."""
    from toolkit.advise.observe import teacher_forced
    from toolkit.engines.registry import loader
    from toolkit.inprocess import eos_token_ids
    from toolkit.workflows.measured_runtime import MeasuredRuntime

    load = loader("torch").load
    target = load(compiled.path, threads=engine.threads)

    def with_draft(draft: Model | None) -> tuple[LogitsOf | None, MeasuredRuntime | None]:
        loaded = None if draft is None else load(draft.path, threads=engine.threads)
        runtime = MeasuredRuntime(
            target,
            loaded,
            codec,
            eos_token_ids=eos_token_ids(compiled.path),
            acceptance="auto" if rule == "sample_match_greedy_draft" else rule,
            ngram_size=config.speculation.max_matching_ngram_size,
        )
        return None if loaded is None else teacher_forced(loaded), runtime

    return AdvisedModels(teacher_forced(target), None, with_draft)


def stream_models(
    config: DeploymentConfig,
    engine: TorchEngineConfig,
    target: Model,
    codec: TextCodec,
    folder: Path,
    progress: Progress,
) -> AdvisedModels:
    """Let every model read given texts, as many as the target reads in reasonable time."""
    from toolkit.workflows.measured_streamed import (
        StreamedModels,
        all_texts,
        evenly,
        given_texts,
        number_of_texts,
    )

    given = given_texts(config, engine, codec)
    given = evenly(given, number_of_texts(_checkpoint(target), all_texts(given), engine))
    models = StreamedModels(all_texts(given), engine, folder, progress)

    def streamed_draft(draft: Model | None) -> tuple[LogitsOf | None, MeasuredRuntime | None]:
        return None if draft is None else models.logits_of(_checkpoint(draft)), None

    return AdvisedModels(models.logits_of(_checkpoint(target)), given, streamed_draft)


def load_targets(
    engine: TorchEngineConfig,
    compiled: Mapping[Role, Mapping[QuantAlgo, Model]],
    pairs: Collection[tuple[str, str]],
    codec: TextCodec,
    *,
    predicted: bool,
) -> Callable[[QuantAlgo], OpenTarget]:
    """Load a target when it is opened, and its drafts: one after the other if costs are predicted.
    If pairs are timed in turns, all drafts stay in memory.
    """
    from toolkit.advise.grid import UNQUANTIZED, OpenTarget
    from toolkit.advise.observe import teacher_forced
    from toolkit.advise.stage import Contender
    from toolkit.engines.registry import loader
    from toolkit.inprocess import eos_token_ids
    from toolkit.workflows.measured_runtime import MeasuredRuntime

    eos = eos_token_ids(compiled["target"][UNQUANTIZED].path)

    def load(role: Role, algo: QuantAlgo) -> StepEngine:
        return loader("torch").load(compiled[role][algo].path, threads=engine.threads)

    load_draft = partial(load, "draft") if predicted else cache(partial(load, "draft"))

    def contender(target: StepEngine, name: QuantAlgo) -> Contender:
        draft = load_draft(name)
        runtime = MeasuredRuntime(target, draft, codec, eos_token_ids=eos)
        return Contender(name, "draft_target", runtime, teacher_forced(draft))

    def open_target(algo: QuantAlgo) -> OpenTarget:
        target = load("target", algo)
        names = [name for name in compiled["draft"] if (algo, name) in pairs]
        return OpenTarget(teacher_forced(target), map(partial(contender, target), names))

    return open_target


def stream_targets(
    config: DeploymentConfig,
    engine: TorchEngineConfig,
    checkpoints: Mapping[Role, Mapping[QuantAlgo, Model]],
    pairs: Collection[tuple[str, str]],
    codec: TextCodec,
    heldout: Sequence[Sequence[int]],
    folder: Path,
    progress: Progress,
) -> tuple[GivenTexts, Sequence[Sequence[int]], Callable[[QuantAlgo], OpenTarget]]:
    """(texts to observe acceptance on, held-out texts for KL, what opens a target): of both kinds
    of texts, as many as the unquantized target reads in reasonable time.
    """
    from toolkit.advise.grid import UNQUANTIZED, OpenTarget
    from toolkit.advise.stage import Contender
    from toolkit.workflows.measured_streamed import (
        StreamedModels,
        all_texts,
        evenly,
        given_texts,
        judged_texts,
        number_of_texts,
    )

    given, reference = given_texts(config, engine, codec), checkpoints["target"][UNQUANTIZED]
    given = evenly(given, number_of_texts(_checkpoint(reference), all_texts(given), engine))
    judged = judged_texts(given, heldout, config.validation.max_tokens)
    models = StreamedModels(all_texts(given, judged), engine, folder, progress)

    def contender(name: QuantAlgo) -> Contender:
        draft = models.logits_of(_checkpoint(checkpoints["draft"][name]))
        return Contender(name, "draft_target", None, draft)

    def open_target(algo: QuantAlgo) -> OpenTarget:
        names = [name for name in checkpoints["draft"] if (algo, name) in pairs]
        target = models.logits_of(_checkpoint(checkpoints["target"][algo]))
        return OpenTarget(target, map(contender, names))

    return given, judged, open_target


def _checkpoint(model: Model) -> QuantizedCheckpoint:
    assert isinstance(model, QuantizedCheckpoint), "an engine is loaded, not streamed"
    return model
