"""Whether this machine can hold the models that tuning runs on it, or has to stream them."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.config.schema import DeploymentConfig, HardwareConfig
from toolkit.errors import UsageError
from toolkit.pipeline.machine import memory_bytes
from toolkit.plan.make import subject_of
from toolkit.plan.memory import memory_of
from toolkit.plan.streamed import streamed_bytes
from toolkit.records.plan import MemoryItem
from toolkit.rounding import size
from toolkit.workflows.deployment import embedded, embedded_twin

__all__ = ["must_stream"]


def must_stream(
    config: DeploymentConfig,
    more: Sequence[MemoryItem] = (),
    *,
    host_bytes: int | None = None,
) -> bool:
    """Whether the device that the embedded engine would use here cannot hold both models at once,
    so that they are read layer by layer (`toolkit.engines.embedded.streamed`).

    more: what is held beside them. host_bytes: the memory of the machine; None for this machine's.
    False if the shape of a model is not known yet. Raises UsageError, with figures, if the device
    cannot even hold one layer.
    """
    twin = embedded_twin(config).model_copy(update={"hardware": HardwareConfig()})
    subject = subject_of(twin)[0]
    stages, serving = memory_of(subject, host_bytes or memory_bytes())
    if serving is None:
        return False
    stage = stages[-1]
    assert stage.available_bytes is not None  # a GPU of this machine, or its memory
    needed = sum(item.num_bytes for item in (*stage.items, *more))
    if needed <= stage.available_bytes:
        return False
    dtype = embedded(twin).dtype
    by_role = {
        role: streamed_bytes(shape, subject.models[role].quantization.quant_algo, dtype)
        for role, shape in subject.shapes.items()
    }
    role = max(by_role, key=lambda role: by_role[role])
    if by_role[role] <= stage.available_bytes:
        return True
    place = "this machine's memory" if stage.place == "the machine" else "a GPU of this machine"
    raise UsageError(
        f"measuring acceptance takes {size(needed)} with both models in memory, and"
        f" {size(by_role[role])} with one layer of the {role} at a time; {place} has"
        f" {size(stage.available_bytes)}",
        hint=(
            "Run it on a larger machine. Or set a number as speculation.max_draft_len: `toolkit"
            " build` then measures acceptance and speed on the engine that serves, and"
            " `toolkit plan` says which acceptance pays."
        ),
    )
