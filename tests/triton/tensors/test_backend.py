"""Histograms that are sent as counters hold what a histogram would, in few messages. Errors say
their outcome in their text.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import tempfile
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.client import RequestRefused, refused
from toolkit.interfaces import RequestStats
from toolkit.triton.tensors.backend import (
    ERROR_CODES,
    Batch,
    Gap,
    Metrics,
    error_response,
    instance_number,
    send_tensors,
    shared_memory,
    steps_by_tokens,
)
from toolkit.triton.tensors.contract import METRICS, NEXT_TOKEN_BUCKETS

MS = 1_000_000


@dataclass
class Page:
    """Stands in for Triton's metrics: keeps the values, and counts the messages."""

    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)
    messages: int = 0
    told: Counter[str] = field(default_factory=Counter)  # messages by name

    def backend(self) -> Any:
        page = self

        class Family:
            COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

            def __init__(self, name: str, description: str, kind: str) -> None:
                self.name = name

            def Metric(self, labels: dict[str, str], **limits: Any) -> Any:  # noqa: N802 - Triton's
                key = self.name, tuple(sorted(labels.items()))
                page.values.setdefault(key, 0.0)

                def increment(value: float) -> None:
                    page.messages += 1
                    page.told[self.name] += 1
                    page.values[key] += value

                return SimpleNamespace(increment=increment, observe=increment, set=increment)

        return SimpleNamespace(MetricFamily=Family)

    def of(self, name: str, **labels: str) -> float:
        return self.values[name, tuple(sorted({"model": "m", **labels}.items()))]


def stats(accepted_at: tuple[int, ...] = (), steps: int = 0, **others: Any) -> RequestStats:
    fields: dict[str, Any] = {
        "prompt_tokens": 3,
        "output_tokens": 1 + steps + sum(accepted_at),
        "verify_steps": steps,
        "drafted": 4 * steps,
        "accepted": sum(accepted_at),
        "drafted_by_position": (steps,) * len(accepted_at),
        "accepted_by_position": accepted_at,
        "arrival_ns": 0,
        "first_scheduled_ns": 2 * MS,
        "first_token_ns": 5 * MS,
        "last_token_ns": 50 * MS,
        "draft_ns": 0,
        "verify_ns": 0,
        "host_ns": 0,
    }
    return RequestStats(**{**fields, **others})


@given(st.lists(st.tuples(st.floats(0, 4), st.integers(1, 5)), max_size=40))
def test_a_batch_is_the_histogram_of_its_samples(samples: list[tuple[float, int]]) -> None:
    batch = Batch(NEXT_TOKEN_BUCKETS)
    for value, times in samples:
        batch.add(value, times)
    new, total, count = batch.take()
    values = np.repeat([value for value, _ in samples], [times for _, times in samples])
    assert count == len(values) and total == pytest.approx(values.sum())
    for limit in NEXT_TOKEN_BUCKETS:
        assert new.get(f"{limit:g}", 0) == (values <= limit).sum()
    assert new.get("+Inf", 0) == len(values)
    assert batch.take() == ({}, 0.0, 0)


@given(st.lists(st.integers(0, 4), max_size=30))
def test_steps_are_counted_by_their_tokens(accepted: list[int]) -> None:
    at = tuple(sum(tokens > position for tokens in accepted) for position in range(4))
    counted = dict(steps_by_tokens(stats(at, len(accepted))))
    assert counted == {tokens + 1: accepted.count(tokens) for tokens in sorted(set(accepted))}


def test_steps_whose_accepted_tokens_are_not_told_by_position_are_not_guessed() -> None:
    assert steps_by_tokens(stats((), 7, accepted=9)) == []
    assert steps_by_tokens(stats((), 7)) == [(1, 7)]  # without speculation


def test_a_request_is_published_with_messages_that_do_not_grow_with_its_tokens() -> None:
    gaps: list[Gap] = [(12 * MS, 3)] * 10
    few, many = [], []
    for count, seen in ((1, few), (100, many)):
        page = Page()
        metrics = Metrics(page.backend(), "m")
        page.messages = 0
        metrics.note("stop", stats((20, 10), 30), gaps * count)
        metrics.publish(0, 0)
        seen.append(page.messages)
        assert page.of("toolkit_itl_seconds_count") == 30 * count
        assert page.of("toolkit_itl_seconds_sum") == pytest.approx(0.12 * count)
        assert page.of("toolkit_itl_seconds_bucket", le="0.0025") == 0
        assert page.of("toolkit_itl_seconds_bucket", le="0.005") == 30 * count
        assert page.of("toolkit_icl_seconds_bucket", le="0.01") == 0
        assert page.of("toolkit_icl_seconds_bucket", le="+Inf") == 10 * count
        assert page.of("toolkit_tokens_per_step_sum") == 60
        assert page.of("toolkit_tokens_per_step_bucket", le="1") == 10
        assert page.of("toolkit_tokens_per_step_bucket", le="3") == 30
        assert page.of("toolkit_queue_seconds") == pytest.approx(0.002)
    assert few == many and few[0] < 60
    page.messages = 0
    metrics.publish(0, 0)
    assert page.messages == 0


def test_counters_of_many_requests_are_told_as_one_sum() -> None:
    page = Page()
    metrics = Metrics(page.backend(), "m")
    page.told.clear()
    for _ in range(10):
        metrics.note("length", stats((2, 1), 3))
    metrics.note("refused")
    metrics.publish(0, 0)
    assert page.of("toolkit_requests", outcome="length") == 10
    assert page.of("toolkit_requests", outcome="refused") == 1
    assert page.of("toolkit_output_tokens") == 70
    assert page.told["toolkit_output_tokens"] == page.told["toolkit_draft_tokens"] == 1
    assert page.told["toolkit_requests"] == 2


def test_one_request_counts_the_same_at_once() -> None:
    now, later = Page(), Page()
    Metrics(now.backend(), "m").finished("stop", stats((2, 1), 3), [(MS, 2)])
    noted = Metrics(later.backend(), "m")
    noted.note("stop", stats((2, 1), 3), [(MS, 2)])
    noted.publish(0, 0)
    assert now.values == later.values


def test_every_sample_is_there_before_the_first_request_unless_it_may_never_be() -> None:
    page = Page()
    Metrics(page.backend(), "m", untold=("toolkit_tokens_per_step", "toolkit_queue_seconds"))
    there = {name for name, _ in page.values}
    for spec in METRICS:
        names = spec.samples if spec.is_batched else (spec.name,)
        is_missing = spec.name in (
            "toolkit_requests",
            "toolkit_draft_len_steps",
            "toolkit_tokens_per_step",
            "toolkit_queue_seconds",
        )
        assert all((name in there) != is_missing for name in names), spec.name


def test_steps_are_counted_by_the_reason_of_their_draft_length() -> None:
    page = Page()
    metrics = Metrics(page.backend(), "m")
    adapted = dataclasses.replace(
        stats((20, 10), 30),
        steps_by_reason={"pays": 12, "prompt length": 3},
        draft_len_changes=2,
        draft_probes=1,
    )
    for _ in range(2):
        metrics.finished("stop", adapted)
    assert page.of("toolkit_draft_len_steps", reason="pays") == 24
    assert page.of("toolkit_draft_len_steps", reason="prompt length") == 6
    assert page.of("toolkit_draft_len_changes") == 4
    assert page.of("toolkit_draft_probes") == 2


@pytest.mark.parametrize("outcome", ERROR_CODES)
def test_the_client_reads_the_outcome_of_an_error(outcome: Any) -> None:
    codes = {name: f"code {name}" for name in ERROR_CODES.values()}

    def triton_error(text: str, code: str) -> Any:
        return SimpleNamespace(text=text, code=code)

    vars(triton_error).update(codes)
    backend = SimpleNamespace(TritonError=triton_error, InferenceResponse=lambda error: error)
    response = error_response(backend, outcome, "[5] is why")
    assert response.code == codes[ERROR_CODES[outcome]]
    read = refused(response.text, "here")
    assert isinstance(read, RequestRefused)
    assert (read.outcome, str(read)) == (outcome, "[5] is why")


class Sender:
    """Drops the tensors while it sends, as Triton does with those that were not asked for."""

    alive, flags = False, -1

    def send(self, response: list[weakref.ref[object]], flags: int) -> None:
        gc.collect()
        self.alive, self.flags = all(tensor() is not None for tensor in response), flags


class Tensor:
    pass


@pytest.mark.parametrize("is_final", [False, True])
def test_tensors_live_until_their_response_is_sent(is_final: bool) -> None:
    """What only Triton holds it frees without the interpreter's lock."""
    pb_utils = SimpleNamespace(
        InferenceResponse=lambda tensors: [weakref.ref(tensor) for tensor in tensors],
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    sender = Sender()
    send_tensors(pb_utils, sender, [Tensor(), Tensor()], is_final=is_final)
    assert (sender.alive, sender.flags) == (True, int(is_final))


def test_instances_of_a_server_share_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, file = shared_memory("a_model", 96)
    other, same_file = shared_memory("a_model", 96)
    another, _ = shared_memory("another_model", 96)
    assert file is not None and file == same_file and bytes(one) == bytes(96)
    one[7] = 1
    assert (other[7], another[7]) == (1, 0)
    assert (file.stat().st_mode & 0o777, file.parent) == (0o600, tmp_path)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("case", ["a link", "a folder", "no folder", "a full disk"])
def test_memory_is_private_where_it_cannot_be_shared(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others can write into the temporary folder, and foresee the name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, file = shared_memory("a_model", 96)
    assert file is not None
    file.unlink()
    victim = tmp_path / "victim"
    victim.write_text("kept")
    if case == "a link":
        file.symlink_to(victim)
    elif case == "a folder":
        file.mkdir()
    elif case == "no folder":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    else:
        monkeypatch.setattr(os, "posix_fallocate", full_disk)
    one, none = shared_memory("a_model", 96)
    other, _ = shared_memory("a_model", 96)
    one[7] = 1
    assert none is None
    assert other[7] == 0
    assert victim.read_text() == "kept"
    assert file.exists() is (case in ("a link", "a folder"))


@pytest.mark.parametrize(("name", "number"), [("bls_0", 0), ("bls_0_0", 0), ("bls_0_12", 12)])
def test_the_number_of_an_instance_is_read_from_its_name(name: str, number: int) -> None:
    assert instance_number({"model_instance_name": name}) == number
