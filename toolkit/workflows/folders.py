"""The folders for the results of a deployment, beneath the folder that the command runs in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Workplace"]


@dataclass(frozen=True, slots=True)
class Workplace:
    """The folders for results. root: the folder that the command runs in."""

    root: Path

    @property
    def store(self) -> Path:
        return self.root / "build" / "store"

    def engines(self, name: str) -> Path:
        return self.root / "engines" / name

    def repository(self, name: str) -> Path:
        return self.root / "triton_repo" / name

    def report(self, name: str) -> Path:
        return self.root / "build" / "reports" / name

    def advice(self, name: str) -> Path:
        return self.root / "build" / "advice" / name

    def rehearsal(self, name: str) -> Path:
        """The stand-ins that a rehearsal writes."""
        return self.root / "build" / "rehearsals" / name

    @property
    def vllm_cache(self) -> Path:
        """The graphs that vLLM compiled, for its next start."""
        return self.root / "build" / "vllm-cache"

    def rollout(self, name: str) -> Path:
        """The journal of a roll-out."""
        return self.root / "build" / "rollouts" / name / "journal.jsonl"

    def grid(self, name: str) -> Path:
        return self.root / "build" / "grid" / name
