from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.timings import timing
from toolkit.bench.counters import (
    client_counts,
    counters_finding,
    parse_counters,
    read_counters,
    reconcile,
    settled,
)
from toolkit.records.measured import CounterCheck

PAGE = """# HELP toolkit_requests Requests by outcome
# TYPE toolkit_requests counter
toolkit_requests{model="tensorrt_llm",outcome="stop"} 3
toolkit_requests{model="tensorrt_llm",outcome="length"} 4
toolkit_output_tokens{model="tensorrt_llm"} 1.5e3
nv_cpu_utilization 0.25
"""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def metrics_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


def test_samples_are_summed_over_labels() -> None:
    assert parse_counters(PAGE) == {
        "toolkit_requests": 7.0,
        "toolkit_output_tokens": 1500.0,
        "nv_cpu_utilization": 0.25,
    }


def test_a_metrics_page_is_read_over_http(metrics_url: str) -> None:
    assert read_counters(metrics_url)["toolkit_requests"] == 7.0


def test_counters_are_differenced_over_the_window() -> None:
    (check,) = reconcile(lambda: {"a": 15.0}, {"a": 10.0}, {"a": 5})
    assert (check.server, check.client, check.matches) == (5, 5, True)


def test_counters_that_arrive_late_are_waited_for() -> None:
    pages = iter([{"a": 0.0}, {"a": 2.0}, {"a": 5.0}])
    waits: list[float] = []
    (check,) = reconcile(lambda: next(pages), {}, {"a": 5}, sleep=waits.append)
    assert check.matches
    assert len(waits) == 2


def test_a_mismatch_is_told_after_the_wait() -> None:
    waits: list[float] = []
    checks = reconcile(lambda: {"a": 4.0}, {}, {"a": 5, "b": 1}, settle_s=1.0, sleep=waits.append)
    assert [(check.server, check.matches) for check in checks] == [(4, False), (None, False)]
    assert sum(waits) == pytest.approx(1.0)


FOREIGN = """vllm:request_success_total{finished_reason="stop",model_name="mine"} 3
vllm:request_success_total{finished_reason="length",model_name="mine"} 4
vllm:request_success_total{finished_reason="stop",model_name="other"} 50
vllm:generation_tokens_total{model_name="mine"} 70
nv_inference_request_success{model="pre",version="1"} 9
broken line
nv_energy{gpu="0"} not_a_number
"""


def test_what_was_counted_for_other_models_is_left_out() -> None:
    found = parse_counters(FOREIGN, "mine")
    assert found == {"vllm:request_success_total": 7, "vllm:generation_tokens_total": 70}
    assert parse_counters(FOREIGN)["vllm:request_success_total"] == 57


def test_counts_that_still_come_in_are_waited_for() -> None:
    pages = iter([5, 5, 6, 6, 6, 6, 6, 6, 6, 99])
    found = settled(
        lambda: {"toolkit_requests": next(pages)}, still_s=0.5, sleep=lambda seconds: None
    )
    assert found == {"toolkit_requests": 6}
    restless = iter(range(1000))
    assert (
        settled(
            lambda: {"toolkit_requests": next(restless)}, settle_s=1.0, sleep=lambda seconds: None
        )["toolkit_requests"]
        == 10
    )
    clock = iter(range(1000))
    assert settled(
        lambda: {"process_seconds": next(clock)}, still_s=0.3, sleep=lambda seconds: None
    ) == {"process_seconds": 3}


def test_each_server_is_asked_for_the_counters_that_it_has() -> None:
    timings = [timing([(1, 1), (2, 2)]) for _ in range(7)]
    assert client_counts(timings, known=parse_counters(FOREIGN, "mine")) == {
        "vllm:request_success_total": 7,
        "vllm:generation_tokens_total": 21,
    }
    assert client_counts(timings, known=["nv_inference_request_success", "x"]) == {
        "nv_inference_request_success": 7
    }
    assert client_counts(timings, known=["toolkit_requests"]) == {
        "toolkit_requests": 7,
        "toolkit_output_tokens": 21,
    }
    assert client_counts(timings, known=[]) == {}


def test_what_counters_say_is_a_finding() -> None:
    right, wrong = CounterCheck("a", 5, 5, matches=True), CounterCheck("b", 5, 7, matches=False)
    found = [
        counters_finding(checks, unread="nobody read them", failed=failed)
        for checks, failed in (((), 0), ((right,), 0), ((right, wrong), 0), ((right, wrong), 2))
    ]
    assert [finding.severity for finding in found] == ["warning", "ok", "warning", "warning"]
    differ = "the server's counters differ from the client's own counts: b 7 against 5; "
    assert [finding.detail for finding in found] == [
        "nobody read them",
        "1 counters of the server equal the client's own counts",
        differ + "another client was served, or one is wrong",
        differ + "2 requests failed, which the server may count",
    ]
