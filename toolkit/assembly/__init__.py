"""The pipeline itself: which stages there are, what each one's key is made of, and where results are published.

    pair -> quantize/{target,draft} -> compile/{target,draft} -> [tune] -> package -> validate

This is one of the two places where the working packages meet (`serving` is the other). Stage functions are imported when they
are called, and keys are made of versions that can be read without importing a heavy library, so that a build that finds nothing
to do takes about a second.
"""

from toolkit.assembly.advising import tune, tune_grid
from toolkit.assembly.asked import embedded, models_of, speculation_of, tp_size_of
from toolkit.assembly.build import Built, build, explain_build
from toolkit.assembly.making import engine_spec
from toolkit.assembly.packaging import in_container
from toolkit.assembly.replaying import replay_divergence
from toolkit.assembly.stages import raise_refused, refuse_impossible, rehearsal_stages, stages_of
from toolkit.assembly.workplace import Workplace

__all__ = [
    "Built",
    "Workplace",
    "build",
    "embedded",
    "engine_spec",
    "explain_build",
    "in_container",
    "models_of",
    "raise_refused",
    "refuse_impossible",
    "rehearsal_stages",
    "replay_divergence",
    "speculation_of",
    "stages_of",
    "tp_size_of",
    "tune",
    "tune_grid",
]
