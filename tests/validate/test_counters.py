from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from toolkit.validate.counters import parse_counters, read_counters, reconcile

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
    assert parse_counters(PAGE) == {"toolkit_requests": 7.0, "toolkit_output_tokens": 1500.0, "nv_cpu_utilization": 0.25}


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
