"""Roll a deployment out behind the gateway: `make_rollout(...)`, and what its journal says."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit.config.schema import DeploymentConfig
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.gateway.rollout import Rollout

__all__ = [
    "PLAIN",
    "order_rollback",
    "rollout_maker",
    "set_aside",
    "status_of",
    "take_orders",
]

PLAIN = "plain"  # the baseline: the candidate's own server, which decodes plainly
ORDER = "rollback"  # a file beside the journal


def rollout_maker(
    config: DeploymentConfig, candidate: str, baseline: str, file: Path
) -> Callable[[], Rollout]:
    """What makes the roll-out in the gateway's event loop. candidate, baseline: addresses; PLAIN
    for the candidate's server without drafts. Raises UsageError if no request switches them off.
    """
    from toolkit.gateway.arms import Arm
    from toolkit.gateway.rollout import BASELINE, CANDIDATE, Rollout
    from toolkit.workflows.gateway import backend_of

    if baseline == PLAIN and config.capabilities.plain_arm != "request":
        raise UsageError(
            f"no request switches drafts off for engine.kind {config.engine.kind}",
            hint="Serve a plain deployment, too, and name it: --baseline HOST:PORT.",
        )

    def make() -> Rollout:
        is_plain = baseline == PLAIN
        return Rollout(
            Arm(BASELINE, backend_of(config, candidate if is_plain else baseline), is_plain),
            Arm(CANDIDATE, backend_of(config, candidate)),
            config.rollout,
            file,
            ids={"deployment": config.name, "baseline": baseline, "candidate": candidate},
        )

    return make


def set_aside(file: Path) -> None:
    """Rename an older journal, so that a roll-out begins anew. An order to the older one is void.

    Raises UsageError if another process runs the older one: it would go on, and no order would
    reach it.
    """
    from toolkit.gateway.journal import Journal

    if not file.exists():
        return
    with contextlib.closing(Journal(file)):
        for number in itertools.count(1):
            aside = file.with_suffix(f".{number}.jsonl")
            if not aside.exists():
                break
        file.with_name(ORDER).unlink(missing_ok=True)
        file.rename(aside)


def status_of(file: Path) -> dict[str, Any]:
    """What a roll-out's journal says, as JSON. is_run: whether a process runs it now. Raises
    UsageError if there is none.
    """
    from toolkit.gateway.journal import is_written
    from toolkit.gateway.rollout import read_state

    found = read_state(file)
    if found is None:
        raise UsageError(
            "there is no roll-out", where=file, hint="Start one: toolkit rollout run CONFIG ADDRESS"
        )
    begin, state = found
    return {"ids": begin["ids"], "is_run": is_written(file), **state.summary()}


def order_rollback(file: Path, why: str) -> Literal["done", "told", "already done"]:
    """Roll back; told: the process that runs the roll-out does it. Raises UsageError if there is no
    roll-out.
    """
    from toolkit.gateway.journal import Journal
    from toolkit.gateway.rollout import decision, read_state

    found = read_state(file)
    if found is None:
        status_of(file)  # says so
        return "told"
    if found[1].outcome == "rolled back":
        return "already done"
    try:
        journal = Journal(file)
    except UsageError:
        order = file.with_name(ORDER)
        part = order.with_name(f".{ORDER}.{os.getpid()}")
        try:
            part.write_text(why, encoding="utf-8", errors="replace")
        except OSError:
            if (
                not part.exists()
            ):  # a full disk has no room for the reason, which an order can do without
                raise
        part.replace(order)
        return "told"
    try:
        journal.add(decision(found[1], "rolled back", found[1].step, why), lasting=True)
    finally:
        journal.close()
    return "done"


def take_orders(rollout: Rollout, file: Path) -> None:
    """Do what `order_rollback` has told another process to do. The order stays until the journal
    has it; that it is there is enough, whoever may read or remove it.
    """
    order = file.with_name(ORDER)
    if not order.exists():
        return
    try:
        why = order.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        why = f"by an operator, whose reason cannot be read ({error.strerror})"
    rollout.roll_back(why or "by an operator")
    if rollout.state.outcome == "rolled back":
        with contextlib.suppress(OSError):
            order.unlink()
