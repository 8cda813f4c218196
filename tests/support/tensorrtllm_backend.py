"""Repositories of the engine flow in a real tritonserver, whose backend `tensorrtllm` is a
stand-in.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.trtllm import place_with_builder, write_trtllm_checkpoint
from toolkit.config.schema import TritonConfig
from toolkit.interfaces import EngineSpec, TensorRtLlmSpec
from toolkit.process.workspace import Workspace
from toolkit.records.build import CompiledEngine, TritonRepository
from toolkit.triton.package.trtllm import package_bls
from toolkit.triton.process.server import launch_command
from toolkit.words import Role, SpeculationKind

STAND_IN = Path(__file__).with_name("tensorrtllm_standin")
MAX_DRAFT_LEN = 3
END_ID = 257
FLAG = "--backend-directory="


def launch_with_standin(
    repository: Path, workspace: Workspace, config: TritonConfig
) -> tuple[list[str], dict[str, str]]:
    """As `launch_command`, with a backend directory that also has the stand-in."""
    command, environment = launch_command(repository, workspace, config)
    [index] = [place for place, part in enumerate(command) if part.startswith(FLAG)]
    backends = Path(command[index].removeprefix(FLAG))
    shutil.copytree(STAND_IN, backends / "tensorrtllm")
    for link in [file for file in (backends / "python").iterdir() if file.is_symlink()]:
        library = link.resolve()  # Triton loads no library from outside for a Python-based backend
        link.unlink()
        shutil.copy(library, link)
    return command, environment


def built(
    folder: Path,
    version: str = "1.2.1",
    *,
    tp_size: int = 1,
    speculation: SpeculationKind = "draft_target",
) -> list[CompiledEngine]:
    """The target, and the draft if there is one, as our backend builds them with a stand-in
    `trtllm-build`.
    """
    roles: list[Role] = ["target", "draft"] if speculation == "draft_target" else ["target"]
    place = place_with_builder(folder / "bin", STANDIN_VERSION=version)
    engines = []
    for role in roles:
        checkpoint = write_trtllm_checkpoint(folder / role, role=role, tp_size=tp_size)
        spec = EngineSpec(
            role=role,
            max_batch_size=4,
            max_input_len=96,
            max_seq_len=240,
            max_draft_len=MAX_DRAFT_LEN if len(roles) == 2 and role == "target" else 0,
            tensorrt_llm=TensorRtLlmSpec(version, speculation=speculation, tp_size=tp_size),
        )
        out_dir = folder / f"{role}-engine"
        out_dir.mkdir()
        engines.append(
            place.backend().compile(checkpoint, spec, out_dir, lambda done, total, what: None)
        )
    return engines


def packaged(engines: list[CompiledEngine], folder: Path) -> TritonRepository:
    target, draft = [*engines, None][:2]
    assert target is not None
    return package_bls(
        target,
        draft,
        TritonConfig(default_max_tokens=16, request_timeout_s=60.0),
        folder,
        name="pair",
        end_ids=(END_ID,),
        max_draft_len=0 if draft is None else MAX_DRAFT_LEN,
    )
