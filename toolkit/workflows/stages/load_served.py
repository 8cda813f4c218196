"""In a rehearsal: load what was packaged for TensorRT-LLM's PyTorch flow, in a real tritonserver.

The repository and its model file are the real ones. Only the Python package `tensorrt_llm` is a
stand-in, which refuses the arguments that upstream's classes refuse in this version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import TritonConfig
from toolkit.facts.versions import VERSIONS
from toolkit.interfaces import Progress
from toolkit.pipeline.sources import digest_sources
from toolkit.pipeline.stage import Finished, Stage
from toolkit.records.build import TritonRepository
from toolkit.standins.trtllm import PACKAGE, RELEASE_VARIABLE

if TYPE_CHECKING:
    from toolkit.process.workspace import Workspace
    from toolkit.triton.process.server import Launch

__all__ = ["and_loaded"]

STAND_IN = "toolkit.standins.trtllm.tensorrt_llm"


def and_loaded(stage: Stage, version: str, triton: TritonConfig) -> Stage:
    """The package stage, which also loads what it has written and asks it for one token."""

    def parts(finished: Finished) -> Mapping[str, Any]:
        known = dict(stage.parts(finished))
        modules = [__name__, STAND_IN, f"{STAND_IN}.llmapi.llm_args"]
        modules += [f"{STAND_IN}.releases", f"{STAND_IN}.toy"]
        known["inputs"] = {**known["inputs"], "loaded_over": digest_sources(modules)}
        return known

    def run(finished: Finished, out_dir: Path, progress: Progress) -> TritonRepository:
        record: TritonRepository = stage.run(finished, out_dir, progress)
        if triton.model_py == "ours":  # the container's model file is not here
            progress(0, None, "loading the model file over a stand-in for TensorRT-LLM")
            _load(record, VERSIONS[version].release, triton)
        return record

    return replace(stage, parts=parts, run=run)


def _load(record: TritonRepository, release: str, triton: TritonConfig) -> None:
    """Raises ServerError with the end of the log if the model does not load or answer."""
    from toolkit.client import Client
    from toolkit.process.workspace import private_folder
    from toolkit.triton.process.localize import render_here
    from toolkit.triton.process.server import TritonServer

    with private_folder() as folder:
        rendered = render_here(record.path, folder / "served")
        (rendered / record.model / "1" / PACKAGE.name).symlink_to(PACKAGE)
        config = triton.on_free_ports
        with (
            TritonServer(rendered, config, launch=_launch_of(release)) as server,
            Client(server.grpc_url, model=record.model) as client,
        ):
            client.generate("a prompt", max_tokens=1)


def _launch_of(release: str) -> Launch:
    from toolkit.triton.process.server import launch_command

    def launch(
        repository: Path, workspace: Workspace, config: TritonConfig
    ) -> tuple[list[str], dict[str, str]]:
        command, environment = launch_command(repository, workspace, config)
        return command, {**environment, RELEASE_VARIABLE: release}

    return launch
