"""What our models share inside Triton's Python backend: metrics, errors and the arguments of
`initialize`.

Triton's own module exists only in the process that serves a model, so it is an argument here.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import stat
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias

from toolkit.errors import RequestError
from toolkit.interfaces import RequestStats
from toolkit.triton.tensors.contract import METRICS
from toolkit.words import RequestOutcome

__all__ = [
    "ERROR_CODES",
    "Gap",
    "Metrics",
    "elements_of",
    "error_response",
    "folder_of",
    "instance_number",
    "parameters_of",
    "parameters_of_request",
    "send_tensors",
    "shared_memory",
    "traceback_of",
]

Gap: TypeAlias = tuple[int, int]  # (ns between two chunks, tokens of the later one)
NS_PER_S = 1e9

# Outcome -> name of its code in pb_utils.TritonError. Names, because Triton fills that class only
# after a model has been imported.
ERROR_CODES = {
    "refused": "INVALID_ARG",
    "overloaded": "UNAVAILABLE",
    "deadline": "UNAVAILABLE",
    "cancelled": "CANCELLED",
    "error": "INTERNAL",
}
# Metrics that have a label of their own, which appears with its first value.
LABELS = {"toolkit_requests": "outcome", "toolkit_draft_len_steps": "reason"}


def folder_of(arguments: Mapping[str, str]) -> Path:
    """The version folder of a model. arguments: those of `initialize`."""
    return Path(arguments["model_repository"]) / arguments["model_version"]


def elements_of(tensor: Any) -> list[Any]:
    """Of an input, flat. Our own backend has them without an array, which takes longer to make.
    Raises RequestError for more elements than it reads one by one, and for texts that are cut off.
    """
    elements = getattr(tensor, "elements", None)
    try:
        found: list[Any] = (
            tensor.as_numpy().reshape(-1).tolist() if elements is None else elements()
        )
    except ValueError as error:
        raise RequestError(str(error)) from error
    return found


def parameters_of_request(request: Any) -> Mapping[str, object]:
    """What a client sent beside the tensors. Our own backend has it as it is, and not as JSON."""
    named: Mapping[str, object] | None = getattr(request, "named_parameters", None)
    return json.loads(request.parameters() or "{}") if named is None else named


def send_tensors(pb_utils: Any, sender: Any, tensors: Sequence[Any], *, is_final: bool) -> None:
    """Send a response with these tensors.

    Triton drops the tensors that the request did not ask for, and does so without the interpreter's
    lock (24.10, python_backend, src/response_sender.cc, Send: PruneOutputTensors). If nothing else
    held them then, numpy's arrays would be freed beside what other threads do, which ends the
    process, sooner or later under load. Here `tensors` holds them until Triton has the lock again.
    """
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
    sender.send(pb_utils.InferenceResponse(tensors), flags=flags)


def instance_number(arguments: Mapping[str, str]) -> int:
    """Of an instance among those of its model, from 0 on. arguments: those of `initialize`."""
    return int(arguments["model_instance_name"].rpartition("_")[2])


def shared_memory(name: str, size: int) -> tuple[memoryview, Path | None]:
    """Bytes that all instances of a model in this server share, zeros at first, and the file that
    whoever ends first removes. Where there can be no such file, they are this instance's own. name:
    of the model and its version.

    The instances have the same parent, the server, which nobody else has at the same time. A file
    that is not ours is left alone, since others may write into the temporary folder.
    """
    parent = os.getppid()
    try:
        path = Path(tempfile.gettempdir()) / f"toolkit-{name}-{parent}-{_started_at(parent)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(file)
            if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
                # The space is taken now: on a full disk, to write later would end the process.
                try:
                    os.posix_fallocate(file, 0, size)
                except OSError:
                    path.unlink(missing_ok=True)
                    raise
                return memoryview(mmap.mmap(file, size)), path
        finally:
            os.close(file)
    except OSError:
        pass
    return memoryview(bytearray(size)), None


def _started_at(pid: int) -> str:
    """When a process began, in ticks since the machine did. Another one with its number began at
    another time.
    """
    # Behind the name, which may hold spaces: see proc(5), field 22.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def parameters_of(arguments: Mapping[str, str]) -> dict[str, str]:
    """The parameters of a model's config.pbtxt. A placeholder of a template counts as unset, as it
    does in TensorRT-LLM's backend.
    """
    stated = json.loads(arguments["model_config"]).get("parameters", {})
    values = {name: str(value["string_value"]) for name, value in stated.items()}
    return {name: value for name, value in values.items() if value and not value.startswith("${")}


def error_response(pb_utils: Any, outcome: RequestOutcome, message: str) -> Any:
    """What a client's request is answered with if it has no result. The text begins with the
    outcome in brackets: a stream over gRPC has the text alone, and Triton 24.10 dies if it is asked
    for the code.
    """
    code = getattr(pb_utils.TritonError, ERROR_CODES[outcome])
    error = pb_utils.TritonError(f"[{outcome}] {message}", code)
    return pb_utils.InferenceResponse(error=error)


class Batch:
    """Samples of a histogram that were not sent yet.

    `Metric.observe` takes one sample a message, and a stream has one per token or step. Counters of
    the same form (Prometheus' `_bucket{le}`, `_sum` and `_count`) take a message per bucket,
    however many samples there are.
    """

    def __init__(self, limits: Sequence[float]) -> None:
        self._limits = tuple(limits)
        self._counts = [0] * (len(self._limits) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._limits, value)] += times
        self._sum += value * times

    def take(self) -> tuple[dict[str, int], float, int]:
        """(new samples by `le`, each with those of smaller limits; their sum; their number), once.

        Limits without new samples at or below them are left out.
        """
        labels = [*(f"{limit:g}" for limit in self._limits), "+Inf"]
        cumulative = list(accumulate(self._counts))
        new = {le: count for le, count in zip(labels, cumulative, strict=True) if count}
        total = self._sum
        self._counts, self._sum = [0] * len(labels), 0.0
        return new, total, cumulative[-1]


class Metrics:
    """Triton's custom metrics. Each change is a message to the server process (about 16
    microseconds), so changes are collected and sent from one place.

    untold: metrics of what the runtime may not tell. They appear with their first value: 0 would
    say that there was nothing to count.
    """

    def __init__(self, pb_utils: Any, model: str, untold: Collection[str] = ()) -> None:
        kinds = {
            "counter": pb_utils.MetricFamily.COUNTER,
            "gauge": pb_utils.MetricFamily.GAUGE,
            "histogram": pb_utils.MetricFamily.HISTOGRAM,  # python_backend pull 374, of 2024
        }
        self._model = model
        self._families: dict[str, Any] = {}
        for spec in METRICS:
            names = spec.samples if spec.is_batched else (spec.name,)
            kind = kinds["counter" if spec.is_batched else spec.kind]
            for name in names:
                self._families[name] = pb_utils.MetricFamily(
                    name=name, description=spec.meaning, kind=kind
                )
        self._metrics: dict[tuple[str, str | None], Any] = {}
        self._gauges: dict[str, int] = {}
        self._buckets = {
            spec.name: spec.buckets for spec in METRICS if spec.buckets and not spec.is_batched
        }
        self._batches = {spec.name: Batch(spec.buckets) for spec in METRICS if spec.is_batched}
        self._notes: queue.SimpleQueue[
            tuple[RequestOutcome, RequestStats | None, Sequence[Gap]]
        ] = queue.SimpleQueue()
        for spec in METRICS:
            if spec.name in LABELS or spec.name in untold:
                continue
            if not spec.is_batched:
                self._metric(spec.name)
                continue
            for limit in (*(f"{limit:g}" for limit in spec.buckets), "+Inf"):
                self._metric(f"{spec.name}_bucket", limit)
            self._metric(f"{spec.name}_sum")
            self._metric(f"{spec.name}_count")

    def note(
        self,
        outcome: RequestOutcome,
        stats: RequestStats | None = None,
        gaps: Sequence[Gap] = (),
    ) -> None:
        """Remember a finished request until `publish`. May be called from any thread."""
        self._notes.put((outcome, stats, gaps))

    def publish(self, active: int, queued: int) -> None:
        """Bring Triton's values up to date. Call it from one thread only. A counter that several
        finished requests add to is told their sum.
        """
        sums: Counter[tuple[str, str | None]] = Counter()
        while not self._notes.empty():
            outcome, stats, gaps = self._notes.get()
            self._note_samples(stats, gaps)
            sums += _counts(outcome, stats)
        for (name, outcome_label), value in sums.items():
            self._metric(name, outcome_label).increment(value)
        self._send_batches()
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
        gaps: Sequence[Gap] = (),
    ) -> None:
        """Count a finished request now. Call it from one thread only. gaps: between the chunks that
        were sent.
        """
        self._note_samples(stats, gaps)
        for (name, label), value in _counts(outcome, stats).items():
            self._metric(name, label).increment(value)
        self._send_batches()

    def _note_samples(self, stats: RequestStats | None, gaps: Sequence[Gap]) -> None:
        """Add what a finished request gives to histograms."""
        for gap_ns, tokens in gaps:
            self._batches["toolkit_icl_seconds"].add(gap_ns / NS_PER_S)
            if tokens:
                self._batches["toolkit_itl_seconds"].add(gap_ns / tokens / NS_PER_S, tokens)
        if stats is None:
            return
        for tokens, steps in steps_by_tokens(stats):
            self._batches["toolkit_tokens_per_step"].add(tokens, steps)
        first_ns, last_ns = stats.first_token_ns, stats.last_token_ns
        if stats.first_scheduled_ns is not None:
            self._observe("toolkit_queue_seconds", stats.first_scheduled_ns - stats.arrival_ns)
        if first_ns is not None:
            self._observe("toolkit_ttft_seconds", first_ns - stats.arrival_ns)
        if first_ns is not None and last_ns is not None and stats.output_tokens > 1:
            self._observe("toolkit_tpot_seconds", (last_ns - first_ns) / (stats.output_tokens - 1))

    def add(self, name: str, value: int) -> None:
        """Add to a counter, or to a gauge that several instances share."""
        if value:
            self._metric(name).increment(value)

    def _send_batches(self) -> None:
        for name, batch in self._batches.items():
            by_limit, total, count = batch.take()
            if not count:
                continue
            # The largest limit first, so that in a page that is read meanwhile no bucket holds more
            # than the next larger one.
            for limit, new in reversed(by_limit.items()):
                self._metric(f"{name}_bucket", limit).increment(new)
            self._metric(f"{name}_sum").increment(total)
            self._metric(f"{name}_count").increment(count)

    def _observe(self, name: str, duration_ns: float) -> None:
        self._metric(name).observe(duration_ns / NS_PER_S)

    def _metric(self, name: str, part: str | None = None) -> Any:
        """The metric with this model's label. part: the value of its own label, or the limit of a
        bucket.
        """
        if (name, part) not in self._metrics:
            labels = {"model": self._model}
            if part is not None:
                labels[LABELS.get(name, "le")] = part
            limits = {"buckets": list(self._buckets[name])} if name in self._buckets else {}
            self._metrics[name, part] = self._families[name].Metric(labels=labels, **limits)
        return self._metrics[name, part]


def steps_by_tokens(stats: RequestStats) -> list[tuple[int, int]]:
    """(output tokens of a verify step, number of such steps) of one request; empty if its accepted
    tokens are not known by position.
    """
    if stats.accepted and not stats.accepted_by_position:
        return []
    # at_least[i]: the steps that accepted i tokens or more
    at_least = (stats.verify_steps, *stats.accepted_by_position, 0)
    return [
        (accepted + 1, more - fewer)
        for accepted, (more, fewer) in enumerate(pairwise(at_least))
        if more > fewer
    ]


def _counts(outcome: RequestOutcome, stats: RequestStats | None) -> Counter[tuple[str, str | None]]:
    """(counter, its label) -> what a finished request adds to it; never 0."""
    counts: Counter[tuple[str, str | None]] = Counter({("toolkit_requests", outcome): 1})
    if stats is not None:
        counts["toolkit_draft_tokens", None] = stats.drafted
        counts["toolkit_accepted_draft_tokens", None] = stats.accepted
        counts["toolkit_verify_steps", None] = stats.verify_steps
        counts["toolkit_prompt_tokens", None] = stats.prompt_tokens
        counts["toolkit_reused_prompt_tokens", None] = stats.reused_prompt_tokens or 0
        counts["toolkit_output_tokens", None] = stats.output_tokens
        counts["toolkit_draft_len_changes", None] = stats.draft_len_changes
        counts["toolkit_draft_probes", None] = stats.draft_probes
        for reason, steps in stats.steps_by_reason.items():
            counts["toolkit_draft_len_steps", reason] = steps
    return +counts


def traceback_of(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))
