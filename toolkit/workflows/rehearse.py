"""`toolkit build CONFIG --rehearse`: the whole build of a deployment without its models and engine.

The real plan is made first, and a deployment that cannot work is not rehearsed. Then stand-ins
replace the checkpoints, the embedded engine replaces the real one, and every stage runs as usual.
"""

from __future__ import annotations

from collections.abc import Collection

from toolkit.config.schema import DeploymentConfig
from toolkit.pipeline.run import Observer
from toolkit.pipeline.store import Store
from toolkit.standins.prepare import Rehearsal, prepare
from toolkit.workflows.build import Built, build
from toolkit.workflows.folders import Workplace
from toolkit.workflows.plan import plan_of
from toolkit.workflows.stages.sequence import raise_refused, rehearsal_stages

__all__ = ["prepare_rehearsal", "rehearse"]


def prepare_rehearsal(config: DeploymentConfig, workplace: Workplace) -> Rehearsal:
    """Plan the real deployment, then write the stand-ins for its checkpoints.

    Raises PlanError with everything that cannot work.
    """
    raise_refused(config.name, plan_of(config).judgements)
    return prepare(config, workplace.rehearsal(config.name))


def rehearse(
    rehearsal: Rehearsal,
    workplace: Workplace,
    observer: Observer,
    store: Store,
    *,
    until: str = "validate",
    fresh: Collection[str] = (),
) -> Built:
    """Build the rehearsal up to the stage `until`. Raises what the stages raise."""
    stages = rehearsal_stages(
        rehearsal.requested, rehearsal.served, workplace, store.memo, rehearsal.replaced
    )
    return build(
        rehearsal.served, workplace, observer, store, until=until, fresh=fresh, stages=stages
    )
