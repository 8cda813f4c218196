"""What the gateway counts, for Prometheus, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """arm: of a roll-out, else `served`. status: of HTTP, or `hung up` for a client that left."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "toolkit_gateway_requests",
            "Answered requests",
            ["path", "arm", "status"],
            registry=self.registry,
        )
        self.running = Gauge(
            "toolkit_gateway_running_requests", "Requests that are running", registry=self.registry
        )
        self.ttft = Histogram(
            "toolkit_gateway_ttft_seconds",
            "From the arrival of a request to the first text of its stream",
            ["arm"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "toolkit_gateway_e2e_latency_seconds",
            "From the arrival of a request to the end of its answer",
            ["arm"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.icl = Histogram(
            "toolkit_gateway_icl_seconds",
            "Gaps between the chunks of a stream",
            ["arm"],
            buckets=GAP_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "toolkit_gateway_output_tokens", "Output tokens", ["arm"], registry=self.registry
        )
        self.drafted = Counter(
            "toolkit_gateway_draft_tokens", "Draft tokens", ["arm"], registry=self.registry
        )
        self.accepted = Counter(
            "toolkit_gateway_accepted_draft_tokens",
            "Accepted draft tokens",
            ["arm"],
            registry=self.registry,
        )
        self.draft_failures = Counter(
            "toolkit_gateway_draft_failures",
            "Requests that went on plainly because their draft failed",
            ["arm"],
            registry=self.registry,
        )

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(_WithoutCreated(self.registry))


class _WithoutCreated:
    """The registry without the series that only say when a series began."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> list[Metric]:
        metrics = list(self._registry.collect())
        for metric in metrics:
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
        return metrics
