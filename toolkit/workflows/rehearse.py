"""`toolkit build CONFIG --rehearse`: the whole build of a deployment whose models and engine are
not at hand.

The real plan comes first: what cannot work is not rehearsed. Then stand-ins take the checkpoints'
places, the embedded engine takes the engine's, and every stage runs as it would.
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

__all__ = ["ready", "rehearse"]


def ready(config: DeploymentConfig, workplace: Workplace) -> Rehearsal:
    """Judge the real deployment, then write what stands in for it. Raises PlanError with
    everything that cannot work.
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
    """Build what `ready` has made, up to `until`. Raises what the stages raise."""
    stages = rehearsal_stages(
        rehearsal.requested, rehearsal.served, workplace, store.memo, rehearsal.replaced
    )
    return build(
        rehearsal.served, workplace, observer, store, until=until, fresh=fresh, stages=stages
    )
