"""Parts of keys that the stages share: versions of libraries and the compiler's fingerprint.

Everything in a key can be read without importing a heavy library, so that a build with nothing to
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

MAX_REMEMBERED_FINGERPRINTS = 64
NOT_IN_KEYS = ("builder", "python", "draft_dir", "captured_layers")


def versions(libraries: Sequence[str]) -> Fingerprint:
    """Library -> its installed version or "none", read without importing the library."""
    installed = {}
    for library in libraries:
        try:
            installed[library] = version(library)
        except PackageNotFoundError:
            installed[library] = "none"
    return installed


def engine_fingerprint(kind: EngineKind, spec: EngineSpec, file: Path) -> Fingerprint:
    """The backend's fingerprint, which `file` remembers, since it takes importing torch and running
    the compiler.

    It is computed again when anything changes on which it may depend: the spec, versions, the
    compiler's file, the machine, or our own sources. Raises StoreError if `file` cannot be written.
    """
    from toolkit.engines.stage import fingerprint
    from toolkit.pipeline.toolchain import compiler_path, instruction_set

    if spec.tensorrt_llm is not None or spec.vllm is not None:
        return fingerprint(kind, spec)  # installed versions and GPU names, which are cheap to read
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
        known = dict(
            [*known.items(), (depends_on, fingerprint(kind, spec))][-MAX_REMEMBERED_FINGERPRINTS:]
        )
        try:
            write_whole(file, json.dumps(known, indent=1))
        except OSError as error:
            raise store_error("compile", error, file) or error from error
    remembered: Fingerprint = known[depends_on]
    return remembered


def spec_parts(spec: EngineSpec) -> dict[str, Any]:
    """The spec as parts of a key.

    Fields that do not change the engine, or are known by other parts, are left out: the builder,
    the Python that has vLLM, whose version is in the fingerprint, the folder of the draft, and the
    layers that a head reads, which its digest stands for.
    """
    parts = dataclasses.asdict(spec)
    if spec.prefill_chunk_len is None:
        del parts["prefill_chunk_len"]
    for name in ("tensorrt_llm", "vllm"):
        settings = parts.pop(name)
        if settings is not None:
            schedule = settings["draft_len_schedule"]
            kept = {key: value for key, value in settings.items() if key not in NOT_IN_KEYS}
            kept["draft_len_schedule"] = schedule and sorted(map(list, schedule.items()))
            parts[name] = kept
    return parts
