from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.timings import timing
from toolkit.bench.counters import (
    client_counts,
    counted_acceptance,
    counters_finding,
    foreign_requests,
    has_equal_blocks,
    has_speculation,
    parse_counters,
    read_counters,
    reconcile,
    settled,
    under_toolkit_names,
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


def vllm_page(
    drafts: int, drafted: int, by_position: tuple[int, ...], *, model: str = "mine", engine: int = 0
) -> str:
    """As vLLM 0.32 prints it, with the gauges of its clock between the counters."""
    labels = f'engine="{engine}",model_name="{model}"'
    lines = [
        "# TYPE vllm:spec_decode_num_drafts_total counter",
        f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(drafts)}",
        f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(drafted)}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(sum(by_position))}",
        f'vllm:request_success_total{{{labels},finished_reason="length"}} {float(drafts // 10)}',
        f"vllm:generation_tokens_total{{{labels}}} {float(drafts + sum(by_position))}",
    ]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {accepted}'
        for i, accepted in enumerate(by_position)
    ]
    return "".join(line + "\n" for line in lines)


def test_vllms_acceptance_is_that_of_the_window_and_of_all_engines() -> None:
    """Worked by hand: 80 of 100 blocks kept their first token, 60 the second, 30 the third."""
    before = vllm_page(50, 150, (50, 50, 50)) + vllm_page(7, 21, (7, 7, 7), engine=1)
    now = vllm_page(110, 330, (90, 80, 60)) + vllm_page(47, 141, (47, 37, 27), engine=1)
    other = vllm_page(900, 2700, (900, 900, 900), model="other")
    acceptance = counted_acceptance(
        parse_counters(now + other, "mine"), parse_counters(before, "mine")
    )
    assert acceptance is not None
    assert (acceptance.drafted, acceptance.accepted, acceptance.verify_steps) == (300, 170, 100)
    assert acceptance.rate == pytest.approx(170 / 300)
    assert acceptance.length == pytest.approx(2.7)
    assert [place.accepted for place in acceptance.by_position] == [80, 60, 30]
    assert [place.joint for place in acceptance.by_position] == pytest.approx([0.8, 0.6, 0.3])
    assert [place.conditional for place in acceptance.by_position] == pytest.approx(
        [0.8, 0.75, 0.5]
    )
    assert has_equal_blocks(acceptance) and acceptance.alpha is None


def test_blocks_of_unequal_lengths_are_seen() -> None:
    acceptance = counted_acceptance(parse_counters(vllm_page(100, 250, (80, 60, 30))), {})
    assert acceptance is not None and not has_equal_blocks(acceptance)
    assert acceptance.by_position[1].joint == pytest.approx(0.6)  # of all verify steps


def test_a_server_that_was_started_anew_in_the_window_has_no_acceptance() -> None:
    before, now = vllm_page(100, 300, (80, 60, 30)), vllm_page(5, 15, (5, 5, 5))
    assert counted_acceptance(parse_counters(now), parse_counters(before)) is None


def test_a_server_without_speculation_has_no_acceptance() -> None:
    counters = parse_counters(FOREIGN, "mine")
    assert not has_speculation(counters) and counted_acceptance(counters, {}) is None
    idle = counted_acceptance(parse_counters(vllm_page(0, 0, (0, 0, 0))), {})
    assert idle is not None and (idle.rate, idle.length, idle.by_position) == (None, None, ())


def test_a_page_of_a_single_vllm_model_counts_its_aliases_and_adapters() -> None:
    page = vllm_page(10, 30, (8, 6, 3))
    assert has_speculation(parse_counters(page, "an-adapter"))
    both = page + vllm_page(10, 30, (8, 6, 3), model="other")
    assert not has_speculation(parse_counters(both, "an-adapter"))


def test_counts_of_requests_are_held_against_vllms_by_position_too() -> None:
    known = parse_counters(vllm_page(20, 60, (9, 6, 4)))
    timings = [
        timing(
            [(1, 12), (2, 12)],
            drafted=30,
            accepted=9,
            verify_steps=10,
            drafted_by_position=(10, 10, 10),
            accepted_by_position=(4, 3, 2),
        )
        for _ in range(2)
    ]
    expected = client_counts(timings, known=known)
    checks = reconcile(lambda: known, {}, expected, settle_s=0.0)
    differ = {check.name: (check.client, check.server) for check in checks if not check.matches}
    place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert len(checks) == 8
    assert differ == {
        f'{place}{{position="0"}}': (8, 9),
        "vllm:spec_decode_num_accepted_tokens_total": (18, 19),
        "vllm:generation_tokens_total": (48, 39),
    }


def test_vllms_counters_are_given_under_the_names_of_ours() -> None:
    counters = parse_counters(vllm_page(100, 300, (80, 60, 30)))
    assert under_toolkit_names(counters) == {
        "toolkit_requests": 10,
        "toolkit_output_tokens": 270,
        "toolkit_draft_tokens": 300,
        "toolkit_accepted_draft_tokens": 170,
        "toolkit_verify_steps": 100,
    }
    assert under_toolkit_names({"nv_inference_request_success": 3}) == {"toolkit_requests": 3}
    assert under_toolkit_names({"up": 1}) == {}


def test_requests_of_other_clients_are_counted() -> None:
    checks = [
        CounterCheck("vllm:request_success_total", 5, 8, matches=False),
        CounterCheck("vllm:generation_tokens_total", 50, 90, matches=False),
    ]
    assert foreign_requests(checks) == 3
    said = counters_finding(checks, unread="").detail
    assert said.endswith("; 3 requests of other clients were served in the same time")
    assert foreign_requests([CounterCheck("toolkit_requests", 5, 4, matches=False)]) == 0
