"""What the keys of the stages share: versions of libraries, digests of our own sources, and the
compiler's fingerprint.

Keys are made of what can be read without importing a heavy library: a build that finds nothing to
do takes about a second.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from toolkit.interfaces import EngineSpec, Fingerprint
from toolkit.pipeline.files import store_error, write_whole
from toolkit.pipeline.hashing import digest_value
from toolkit.pipeline.machine import gpus
from toolkit.pipeline.sources import digest_sources
from toolkit.words import EngineKind

__all__ = ["engine_fingerprint", "spec_parts", "versions"]

REMEMBERED = 64  # fingerprints of engine backends


def versions(libraries: Sequence[str]) -> Fingerprint:
    """From the installed metadata, without importing anything."""
    found = {}
    for library in libraries:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "none"
    return found


def engine_fingerprint(kind: EngineKind, spec: EngineSpec, file: Path) -> Fingerprint:
    """The backend's fingerprint, remembered: asking for it means importing torch and running the
    compiler.

    It is asked again when anything changes that it could depend on: what is asked for, versions,
    the compiler's file, the machine, or our own sources.
    """
    from toolkit.engines.embedded.toolchain import compiler_path, instruction_set
    from toolkit.engines.stage import fingerprint

    if spec.tensorrt_llm is not None:
        return fingerprint(kind, spec)  # installed versions and GPU names: cheap to ask
    compiler = compiler_path()
    status = None if compiler is None else Path(compiler).resolve().stat()
    depends_on = digest_value(
        {
            "spec": {"kind": kind, **spec_parts(spec)},
            "torch": versions(["torch"]),
            "compiler": None if status is None else [compiler, status.st_size, status.st_mtime_ns],
            "machine": [*instruction_set(), *gpus()],
            "sources": digest_sources(["toolkit.engines.stage"]),
        }
    )
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if depends_on not in known:
        known = dict([*known.items(), (depends_on, fingerprint(kind, spec))][-REMEMBERED:])
        try:
            write_whole(file, json.dumps(known, indent=1))
        except OSError as error:
            raise store_error("compile", error, file) or error from error
    remembered: Fingerprint = known[depends_on]
    return remembered


def spec_parts(spec: EngineSpec) -> dict[str, Any]:
    """Of a key: without what leaves the engine as it is, where it is built and where its draft
    lies meanwhile.
    """
    parts = dataclasses.asdict(spec)
    asked = parts.pop("tensorrt_llm")
    if asked is not None:
        decides = {
            name: value for name, value in asked.items() if name not in ("builder", "draft_dir")
        }
        schedule = asked["draft_len_schedule"]
        parts["tensorrt_llm"] = {
            **decides,
            "draft_len_schedule": schedule and sorted(map(list, schedule.items())),
        }
    return parts
