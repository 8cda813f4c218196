"""Run the stages whose results are not in the store, and publish the folders that people use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.config.schema import DeploymentConfig
from toolkit.engines.spec import engine_spec
from toolkit.errors import BackendUnavailable, StageError, UsageError
from toolkit.pipeline.machine import gpus, obstacle
from toolkit.pipeline.run import Explanation, Observer, explain, run_stages, upto
from toolkit.pipeline.stage import Done, Stage
from toolkit.pipeline.store import Store
from toolkit.records.build import CompiledEngine
from toolkit.records.plan import Plan
from toolkit.records.report import ValidationReport
from toolkit.words import ROLES
from toolkit.workflows.folders import Workplace
from toolkit.workflows.report import publish_report
from toolkit.workflows.serve import Machine, check_servable
from toolkit.workflows.stages.sequence import (
    REAL_KINDS,
    possible_plan,
    stages_of,
)

__all__ = ["Built", "build", "explain_build"]


@dataclass(frozen=True, slots=True)
class Built:
    """What a build did.

    published: the folders that hold its results. changed: whether a stage ran or a folder was
    published again. outdated: folders of this deployment that an earlier build made from other
    engines than those that are published now.
    """

    stages: dict[str, Done]
    published: tuple[Path, ...]
    changed: bool
    outdated: tuple[Path, ...] = ()

    @property
    def report(self) -> ValidationReport | None:
        return self.stages["validate"].record if "validate" in self.stages else None

    @property
    def not_executed(self) -> dict[str, tuple[str, ...]]:
        """Stage -> what no GPU has executed of its engine, for engines of TensorRT-LLM."""
        records = {
            name: done.record
            for name, done in self.stages.items()
            if isinstance(done.record, CompiledEngine)
        }
        return {
            name: record.tensorrt_llm.not_executed
            for name, record in records.items()
            if record.tensorrt_llm is not None
        }


def build(
    config: DeploymentConfig,
    workplace: Workplace,
    observer: Observer,
    store: Store,
    *,
    until: str = "validate",
    fresh: Collection[str] = (),
    stages: Sequence[Stage] | None = None,
    plan: Plan | None = None,
    here: Machine | None = None,
) -> Built:
    """Run the stages up to `until` whose results are not in the store, and publish the results.

    fresh: stages that run even if their results are stored. stages: run these instead of
    `stages_of(config)`. plan: the plan, if the caller has made it already. here: what serves the
    deployment; None for this machine. Raises what the stages raise.
    """
    _check_folders(config.name, workplace, store)
    if stages is None:
        plan = plan or possible_plan(config)
        if until in ("compile", "package", "validate"):
            _check_vllm_python(config)
            _check_draft_path(config, workplace)
        if until == "validate":
            check_servable(config, here or Machine())  # before hours of downloads and quantizing
        stages = upto(stages_of(config, workplace, store.memo, plan=plan), until)
        if until in ("compile", "package"):
            _check_builder(config, stages, store)
    chosen = upto(stages, until)
    finished: dict[str, Done] = {}
    published: list[Path] = []
    changed = False
    for name, done in run_stages(chosen, store, config.name, observer, fresh=fresh):
        finished[name] = done
        changed |= not done.reused
        for destination, parts in _publications(
            config, workplace, tuple(stage.name for stage in chosen)
        ):
            if name in parts.values() and set(parts.values()) <= set(finished):
                entries = {folder: finished[stage].entry for folder, stage in parts.items()}
                is_deployed = destination != workplace.advice(config.name)
                changed |= store.publish(entries, destination, manifest=is_deployed)
                published.append(destination)
        if name == "validate":
            changed |= publish_report(store, config.name, workplace.report(config.name), observer)
            published.append(workplace.report(config.name))
    return Built(
        finished, tuple(published), changed, tuple(_outdated(config, workplace, store, finished))
    )


def _check_vllm_python(config: DeploymentConfig) -> None:
    """Raise UsageError if the YAML names a Python for vLLM on this machine that cannot be used,
    before anything is quantized for it.
    """
    from toolkit.engines.vllm.environment import find_environment

    engine = config.vllm_engine
    is_elsewhere = config.hardware.gpu != "auto" and not gpus()
    if engine is None or engine.python is None or is_elsewhere:
        return
    try:
        find_environment(engine.python)
    except BackendUnavailable as error:
        raise UsageError(f"engine.python: {error.fault}", hint=error.hint) from error


def _check_draft_path(config: DeploymentConfig, workplace: Workplace) -> None:
    """Raise UsageError if vLLM would take the draft for a head, because of a name in the path of
    the folders that this build publishes. The store lies below the same root.
    """
    from toolkit.engines.vllm.arguments import METHODS, SPECULATION, check_draft_path

    if config.vllm_engine is None or not config.speculation.has_draft_model:
        return
    folder = (workplace.engines(config.name) / "draft").absolute()
    method = METHODS[config.speculation.kind]
    check_draft_path({SPECULATION: {"method": method, "model": str(folder)}})


def _check_folders(name: str, workplace: Workplace, store: Store) -> None:
    """Raises StageError if results could not be written, before anything is computed."""
    for path in (
        store.root,
        workplace.engines(name),
        workplace.repository(name),
        workplace.report(name),
    ):
        if fault := obstacle(path):
            hint = "Rename or remove it, or run the toolkit in another folder."
            raise StageError("build", fault, hint=hint)


def explain_build(
    config: DeploymentConfig, workplace: Workplace, store: Store
) -> list[Explanation]:
    """Say for each stage what `build` would do with it, and why."""
    stages = stages_of(config, workplace, store.memo, download=False)
    try:
        check_servable(config, Machine())
    except (UsageError, BackendUnavailable):
        stages = upto(stages, "package")
    return explain(stages, store, config.name)


def _publications(
    config: DeploymentConfig, workplace: Workplace, stages: Sequence[str]
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Each folder that is published, with its subfolders and the stages that make them. stages: all
    that are run.
    """
    yield workplace.engines(config.name), {role: f"compile/{role}" for role in config.models}
    yield workplace.advice(config.name), {"": "tune"}
    yield workplace.repository(config.name), {"": "package"}
    for kind in REAL_KINDS:  # of a rehearsal
        name = f"{config.name}-{kind}"
        compiled = {role: f"compile/{role}-{kind}" for role in ROLES}
        yield (
            workplace.engines(name),
            {role: stage for role, stage in compiled.items() if stage in stages},
        )
        yield workplace.repository(name), {"": f"package/{kind}"}


def _outdated(
    config: DeploymentConfig, workplace: Workplace, store: Store, finished: Mapping[str, Done]
) -> Iterator[Path]:
    """Published folders of later stages than `until` that were made from engines which this build
    has replaced.
    """
    stages = {role: f"compile/{role}" for role in config.models}
    if not set(stages.values()) <= set(finished):
        return  # engines/NAME has not changed
    engines = {role: finished[stage].entry.digest for role, stage in stages.items()}
    last = {stage: entry["parts"]["inputs"] for stage, entry in store.last(config.name).items()}
    packaged = {
        stage.removeprefix("compile/"): digest
        for stage, digest in last.get("package", {}).items()
        if stage.startswith("compile/")
    }
    if (
        "package" not in finished
        and packaged != engines
        and workplace.repository(config.name).exists()
    ):
        yield workplace.repository(config.name)
    validated = last.get("validate", {})
    served = (
        finished["package"].entry.digest if "package" in finished else validated.get("repository")
    )
    is_current = (validated.get("engines"), validated.get("repository")) == (engines, served)
    if "validate" not in finished and not is_current and workplace.report(config.name).exists():
        yield workplace.report(config.name)


def _check_builder(config: DeploymentConfig, stages: Sequence[Stage], store: Store) -> None:
    """Raises BackendUnavailable if a stage has to run trtllm-build and this machine has none.

    A build whose engines are all in the store does not need it.
    """
    if not config.capabilities.needs_trtllm_build:
        return
    if all(stage.reused for stage in explain(stages, store, config.name)):
        return
    from toolkit.engines.trt_engine import TrtEngineBackend

    TrtEngineBackend().check_builder(engine_spec(config, "target"))
