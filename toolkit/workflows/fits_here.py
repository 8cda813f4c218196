"""Whether this machine can hold the models that tuning runs on it."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.config.schema import DeploymentConfig, HardwareConfig
from toolkit.errors import UsageError
from toolkit.pipeline.machine import memory_bytes
from toolkit.plan.make import subject_of
from toolkit.plan.memory import memory_of
from toolkit.records.plan import MemoryItem
from toolkit.rounding import size
from toolkit.workflows.deployment import embedded_twin

__all__ = ["check_fits_here"]


def check_fits_here(
    config: DeploymentConfig,
    more: Sequence[MemoryItem] = (),
    *,
    host_bytes: int | None = None,
) -> None:
    """Raises UsageError, with figures, if the device that the embedded engine would use here cannot
    hold both models at once.

    more: what is held beside them. host_bytes: the memory of the machine; None for this machine's.
    A model whose shape is not known yet is not judged.
    """
    twin = embedded_twin(config).model_copy(update={"hardware": HardwareConfig()})
    stages, serving = memory_of(subject_of(twin)[0], host_bytes or memory_bytes())
    if serving is None:
        return
    stage = stages[-1]
    assert stage.available_bytes is not None  # a GPU of this machine, or its memory
    items = (*stage.items, *more)
    needed = sum(item.num_bytes for item in items)
    if needed <= stage.available_bytes:
        return
    made_of = ", ".join(f"{item.name} {size(item.num_bytes)}" for item in items)
    place = "this machine's memory" if stage.place == "the machine" else "a GPU of this machine"
    raise UsageError(
        "measuring acceptance runs both models on the embedded engine, in this process. That takes"
        f" {size(needed)} ({made_of}), and {place} has {size(stage.available_bytes)}",
        hint=(
            "Run it where they fit. Or set a number as speculation.max_draft_len: `toolkit build`"
            " then measures acceptance and speed on the engine that serves, and"
            " `toolkit plan` says which acceptance pays."
        ),
    )
