"""What our models share inside Triton's Python backend: metrics, error codes and the arguments of
`initialize`.

Triton's own module exists only in the process that serves a model, so it is an argument here.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.interfaces import RequestStats
from toolkit.triton.tensors.contract import METRICS
from toolkit.words import RequestOutcome

__all__ = ["ERROR_CODES", "Metrics", "folder_of", "parameters_of", "traceback_of"]

# Outcome -> name of its code in pb_utils.TritonError. Names, because Triton fills that class only
# after a model has been imported.
ERROR_CODES = {
    "refused": "INVALID_ARG",
    "overloaded": "UNAVAILABLE",
    "deadline": "UNAVAILABLE",
    "cancelled": "CANCELLED",
    "error": "INTERNAL",
}


def folder_of(arguments: Mapping[str, str]) -> Path:
    """The version folder of a model. arguments: those of `initialize`."""
    return Path(arguments["model_repository"]) / arguments["model_version"]


def parameters_of(arguments: Mapping[str, str]) -> dict[str, str]:
    """The parameters of a model's config.pbtxt. A placeholder of a template counts as unset, as it
    does in TensorRT-LLM's backend.
    """
    stated = json.loads(arguments["model_config"]).get("parameters", {})
    values = {name: str(value["string_value"]) for name, value in stated.items()}
    return {name: value for name, value in values.items() if value and not value.startswith("${")}


class Metrics:
    """Triton's custom metrics. Each change is a message to the server process (about 16
    microseconds), so changes are collected and sent from one place.

    untold: counters of what the runtime may not tell. They appear with their first value: 0 would
    say that there was nothing to count.
    """

    def __init__(self, pb_utils: Any, model: str, untold: Collection[str] = ()) -> None:
        kinds = {
            "counter": pb_utils.MetricFamily.COUNTER,
            "gauge": pb_utils.MetricFamily.GAUGE,
            "histogram": pb_utils.MetricFamily.HISTOGRAM,  # python_backend pull 374, of 2024
        }
        self._model = model
        self._families = {
            spec.name: pb_utils.MetricFamily(
                name=spec.name, description=spec.meaning, kind=kinds[spec.kind]
            )
            for spec in METRICS
        }
        self._metrics: dict[tuple[str, str | None], Any] = {}
        self._gauges: dict[str, int] = {}
        self._buckets = {spec.name: spec.buckets for spec in METRICS if spec.buckets}
        self._notes: queue.SimpleQueue[
            tuple[RequestOutcome, RequestStats | None, Sequence[int]]
        ] = queue.SimpleQueue()
        for spec in METRICS:
            if spec.name != "toolkit_requests" and spec.name not in untold:
                self._metric(spec.name)

    def note(
        self,
        outcome: RequestOutcome,
        stats: RequestStats | None = None,
        gaps_ns: Sequence[int] = (),
    ) -> None:
        """Remember a finished request until `publish`. May be called from any thread."""
        self._notes.put((outcome, stats, gaps_ns))

    def publish(self, active: int, queued: int) -> None:
        """Bring Triton's values up to date. Call it from one thread only."""
        while not self._notes.empty():
            self.finished(*self._notes.get())
        for name, value in (
            ("toolkit_active_requests", active),
            ("toolkit_queued_requests", queued),
        ):
            if self._gauges.get(name) != value:
                self._gauges[name] = value
                self._metric(name).set(value)

    def finished(
        self,
        outcome: RequestOutcome,
        stats: RequestStats | None = None,
        gaps_ns: Sequence[int] = (),
    ) -> None:
        """Count a finished request now. Call it from one thread only. gaps_ns: between the chunks
        that were sent.
        """
        self._metric("toolkit_requests", outcome).increment(1)
        for gap_ns in gaps_ns:
            self._observe("toolkit_icl_seconds", gap_ns)
        if stats is None:
            return
        self.add("toolkit_draft_tokens", stats.drafted)
        self.add("toolkit_accepted_draft_tokens", stats.accepted)
        self.add("toolkit_verify_steps", stats.verify_steps)
        self.add("toolkit_output_tokens", stats.output_tokens)
        first_ns, last_ns = stats.first_token_ns, stats.last_token_ns
        if first_ns is not None:
            self._observe("toolkit_ttft_seconds", first_ns - stats.arrival_ns)
        if first_ns is not None and last_ns is not None and stats.output_tokens > 1:
            self._observe("toolkit_tpot_seconds", (last_ns - first_ns) / (stats.output_tokens - 1))

    def add(self, name: str, value: int) -> None:
        """Add to a counter, or to a gauge that several instances share."""
        if value:
            self._metric(name).increment(value)

    def _observe(self, name: str, duration_ns: float) -> None:
        self._metric(name).observe(duration_ns / 1e9)

    def _metric(self, name: str, outcome: RequestOutcome | None = None) -> Any:
        if (name, outcome) not in self._metrics:
            labels = {"model": self._model}
            if outcome is not None:
                labels["outcome"] = outcome
            limits = {"buckets": list(self._buckets[name])} if name in self._buckets else {}
            self._metrics[name, outcome] = self._families[name].Metric(labels=labels, **limits)
        return self._metrics[name, outcome]


def traceback_of(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))
