"""`toolkit report --verify`: compare what is deployed with its manifests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.config.schema import DeploymentConfig
from toolkit.errors import UsageError
from toolkit.interfaces import Progress
from toolkit.pipeline.manifest import Verified, verify
from toolkit.workflows.folders import Workplace

__all__ = ["deployed_folders", "verify_folders"]


def deployed_folders(config: DeploymentConfig, workplace: Workplace) -> list[Path]:
    """The folders of a deployment that have a manifest. Raises UsageError if nothing is built."""
    folders = [workplace.engines(config.name), workplace.repository(config.name)]
    built = [folder for folder in folders if folder.is_dir()]
    if not built:
        raise UsageError(
            f"nothing of {config.name} is here",
            where=workplace.root,
            hint="Build it, or name the folder to verify: toolkit report FOLDER --verify.",
        )
    return built


def verify_folders(
    folders: Sequence[Path], started: Callable[[str], Progress]
) -> tuple[Verified, ...]:
    """started: the progress of a folder, by its name. Raises UsageError if one has no manifest."""
    return tuple(verify(folder, started(f"verify {folder.name}")) for folder in folders)
