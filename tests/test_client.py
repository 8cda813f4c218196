"""The client against a scripted gRPC server: what it sends, what it makes of the answers, and
its arithmetic on times.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from toolkit import client as client_module
from toolkit.client import (
    ALWAYS,
    STREAM_END_S,
    TENSORS,
    Client,
    ModelInterface,
    Options,
    RequestRefused,
    RequestTiming,
    ServerUnavailable,
    Statistics,
    read_prompts,
    speedup,
    summarise,
)
from toolkit.resampling import bootstrap_ratio
from toolkit.triton.package import model_config
from toolkit.triton.tensors.contract import INPUTS, LOG_PROB_INPUTS, OUTPUTS

MS = 1_000_000
TYPES = {"TYPE_STRING": "BYTES", "TYPE_INT32": "INT32", "TYPE_INT64": "INT64", "TYPE_FP32": "FP32"}


def answer(**outputs: Sequence[Any]) -> Any:
    """One response of the model, as Triton would encode it."""
    dtypes = {spec.name: TYPES[spec.dtype] for spec in OUTPUTS}
    response = service_pb2.ModelStreamInferResponse()
    for name, values in outputs.items():
        response.infer_response.outputs.add(name=name, datatype=dtypes[name], shape=[len(values)])
        if dtypes[name] == "BYTES":
            texts = [str(value).encode() for value in values]
            raw = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        else:
            raw = np.asarray(values, client_module.NUMPY_TYPES[dtypes[name]]).tobytes()
        response.infer_response.raw_output_contents.append(raw)
    return response


class Script(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers every request by the same script: responses, and seconds to wait between them."""

    def __init__(self, config: Any, script: Sequence[Any]) -> None:
        self.config = config
        self.script = script
        self.requests: list[Any] = []
        self.cancelled = threading.Event()
        self.over = threading.Event()

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelConfigResponse(config=self.config)

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        self.requests.append(next(requests))
        try:
            for step in self.script:
                if isinstance(step, grpc.StatusCode):
                    context.abort(step, "on purpose")
                elif isinstance(step, float):
                    time.sleep(step)
                else:
                    yield step
        finally:
            if not context.is_active():
                self.cancelled.set()
            self.over.set()


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[Client, Script]]]:
    servers, clients = [], []

    def start(*script: Any, config: Any = None, **settings: Any) -> tuple[Client, Script]:
        service = Script(config or model_config.build(decoupled=True), script)
        server = grpc.server(futures.ThreadPoolExecutor(4))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        clients.append(Client(f"127.0.0.1:{port}", **settings))
        return clients[-1], service

    yield start
    for client in clients:
        client.close()
    for server in servers:
        server.stop(None).wait()


STATISTICS: dict[str, Sequence[Any]] = {
    "finish_reason": ["length"],
    "stop_reason": ["None"],
    "num_input_tokens": [3],
    "verify_steps": [2],
    "drafted_by_position": [2, 2],
    "accepted_by_position": [2, 1],
    "total_draft_tokens": [4],
    "total_accepted_draft_tokens": [3],
}
STREAM = (
    answer(text_output=["a"], output_ids=[1], num_output_tokens=[1]),
    answer(text_output=[""], output_ids=[2, 3], num_output_tokens=[3]),
    answer(text_output=["bc"], output_ids=[], num_output_tokens=[3], **STATISTICS),
)
REFUSAL = service_pb2.ModelStreamInferResponse(error_message="[refused] too long")


def test_every_option_and_question_is_an_input_of_the_model() -> None:
    assert {*TENSORS.values(), *ALWAYS} <= {spec.name for spec in (*INPUTS, *LOG_PROB_INPUTS)}
    assert set(TENSORS) == set(Options.__dataclass_fields__)


def test_a_request_holds_what_was_asked_and_nothing_else(serve: Callable[..., Any]) -> None:
    client, service = serve(*STREAM)
    list(
        client.stream(
            "héllo",
            Options(max_tokens=4),
            seed=2**63,
            stop=("x", "y"),
            num_draft_tokens=0,
            request_id="me",
        )
    )
    (request,) = service.requests
    sent = dict(
        zip([tensor.name for tensor in request.inputs], request.raw_input_contents, strict=True)
    )
    assert request.id == "me"
    assert set(sent) == {
        *(
            "text_input",
            "streaming",
            "sampling_param_max_tokens",
            "sampling_param_seed",
            "sampling_param_stop",
            "num_draft_tokens",
        ),
        *ALWAYS,
    }
    assert sent["text_input"] == struct.pack("<I", 6) + "héllo".encode()
    assert sent["sampling_param_stop"] == struct.pack("<I", 1) + b"x" + struct.pack("<I", 1) + b"y"
    assert sent["sampling_param_seed"] == np.uint64(2**63).tobytes()
    assert sent["num_draft_tokens"] == np.int32(0).tobytes()


@pytest.mark.parametrize(
    ("options", "top_p"),
    [
        ({"temperature": 0.8}, 1.0),
        ({"temperature": 0.8, "top_k": 0}, 1.0),
        ({"temperature": 0.8, "top_k": 5}, None),
        ({"temperature": 0.8, "top_p": 0.9}, 0.9),
        ({"temperature": 0.0}, None),
        ({}, None),
    ],
)
def test_a_temperature_alone_samples_from_all_tokens(
    serve: Callable[..., Any], options: dict[str, Any], top_p: float | None
) -> None:
    """TensorRT-LLM's engines would be greedy without top_k and top_p."""
    client, service = serve(*STREAM)
    list(client.stream("x", **options))
    (request,) = service.requests
    sent = dict(
        zip([tensor.name for tensor in request.inputs], request.raw_input_contents, strict=True)
    )
    expected = None if top_p is None else np.float32(top_p).tobytes()
    assert sent.get("sampling_param_top_p") == expected


def test_chunks_arrive_with_tokens_and_statistics_at_the_end(serve: Callable[..., Any]) -> None:
    client, _ = serve(*STREAM)
    chunks = list(client.stream("x"))
    assert [(chunk.text, chunk.token_ids, chunk.output_tokens) for chunk in chunks] == [
        ("a", (1,), 1),
        ("", (2, 3), 3),
        ("bc", (), 3),
    ]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
    assert chunks[0].statistics is None
    statistics = chunks[2].statistics
    assert statistics is not None
    assert statistics.acceptance_rate == 0.75
    assert statistics.acceptance_length == 2.5
    assert (statistics.drafted_by_position, statistics.accepted_by_position) == ((2, 2), (2, 1))
    assert chunks[2].stop_reason is None


def test_generate_gives_the_one_answer(serve: Callable[..., Any]) -> None:
    client, _ = serve(
        answer(text_output=["abc"], output_ids=[1, 2, 3], num_output_tokens=[3], **STATISTICS)
    )
    completion = client.generate("x")
    assert (completion.text, completion.token_ids, completion.finish_reason) == (
        "abc",
        (1, 2, 3),
        "length",
    )
    assert completion.statistics.input_tokens == 3


def test_a_model_that_repeats_its_text_is_understood(serve: Callable[..., Any]) -> None:
    config = model_config.build(decoupled=True)
    del config.parameters["stream_text"]
    known = ("text_input", "streaming", "sampling_param_max_tokens", "return_finish_reason")
    for tensor in [tensor for tensor in config.input if tensor.name not in known]:
        config.input.remove(tensor)
    script = [answer(text_output=[text]) for text in ("a", "ab", "abc")]
    client, service = serve(
        *script, answer(text_output=["abc"], finish_reason=["length"]), config=config
    )
    assert [chunk.text for chunk in client.stream("x")] == ["a", "b", "c", ""]
    assert {tensor.name for tensor in service.requests[0].inputs} == {
        "text_input",
        "streaming",
        "return_finish_reason",
    }
    with pytest.raises(
        RequestRefused, match="no input 'num_draft_tokens', so num_draft_tokens cannot be set"
    ):
        client.generate("x", num_draft_tokens=0)
    (timing,) = client.measure(["x"])
    assert (timing.text, timing.output_tokens, timing.tpot_ns) == ("abc", None, None)


def test_an_error_of_the_server_is_a_refusal_with_its_text(serve: Callable[..., Any]) -> None:
    client, _ = serve(STREAM[0], REFUSAL)
    chunks = client.stream("x")
    assert next(chunks).text == "a"
    with pytest.raises(RequestRefused, match="too long"):
        next(chunks)


@pytest.mark.parametrize(
    ("message", "outcome", "text"),
    [
        ("[refused] too long", "refused", "too long"),
        ("[deadline] 5 ms passed", "deadline", "5 ms passed"),
        ("[request id: 5] unexpected shape", None, "[request id: 5] unexpected shape"),
        ("too long [refused] ", None, "too long [refused] "),
    ],
)
def test_an_error_says_its_outcome(
    serve: Callable[..., Any], message: str, outcome: str | None, text: str
) -> None:
    client, _ = serve(service_pb2.ModelStreamInferResponse(error_message=message))
    with pytest.raises(RequestRefused) as refused:
        list(client.stream("x"))
    assert (refused.value.outcome, str(refused.value)) == (outcome, text)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "Stub process 'tensorrt_llm_0_0' is not healthy.",
            "the model's process has died (Stub process 'tensorrt_llm_0_0' is not healthy.)",
        ),
        (  # triton/native/backend.cpp, as the next
            "[error] the model's process was killed by signal 9",
            "the model's process was killed by signal 9",
        ),
        ("[error] the model's process has died", "the model's process has died"),
        (  # of a model that the layout bls called
            "[error] the model 'draft' failed: Stub process 'draft_0_0' is not healthy.",
            "the model's process has died"
            " (the model 'draft' failed: Stub process 'draft_0_0' is not healthy.)",
        ),
    ],
)
def test_a_dead_model_process_is_no_refusal_of_the_request(
    serve: Callable[..., Any], message: str, said: str
) -> None:
    client, _ = serve(service_pb2.ModelStreamInferResponse(error_message=message))
    with pytest.raises(ServerUnavailable) as unavailable:
        list(client.stream("x"))
    assert str(unavailable.value).partition("\n")[0].endswith(f": {said}")


@pytest.mark.parametrize(
    "message",
    [
        "[request id: 5] Server is stopping, scheduler for model has stopped accepting",
        "[error] the model 'preprocessing' failed: Model preprocessing - Error when running"
        " inference: Server not ready",
        "Request for unknown model: 'tensorrt_llm' has no available versions",
    ],
)
def test_a_server_that_is_stopping_does_not_refuse_the_request(
    serve: Callable[..., Any], message: str
) -> None:
    client, _ = serve(service_pb2.ModelStreamInferResponse(error_message=message))
    with pytest.raises(ServerUnavailable, match="stopping"):
        list(client.stream("x"))


def test_closing_a_stream_cancels_it_on_the_server(serve: Callable[..., Any]) -> None:
    client, service = serve(STREAM[0], 0.5, *STREAM[1:])
    chunks = client.stream("x")
    next(chunks)
    chunks.close()
    assert service.cancelled.wait(5)


def test_closing_the_client_ends_what_another_thread_waits_for(serve: Callable[..., Any]) -> None:
    client, service = serve(STREAM[0], 3.0, *STREAM[1:])
    client.interface()
    failures = []

    def read() -> None:
        try:
            client.chunks("x")
        except ServerUnavailable as error:
            failures.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while not service.requests:
        time.sleep(0.001)
    client.close()
    reader.join(2)
    assert not reader.is_alive()
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([*STREAM], None),
        ([*STREAM, 0.1], None),
        ([REFUSAL, 0.1], RequestRefused),
        ([REFUSAL, grpc.StatusCode.UNAVAILABLE], RequestRefused),
        ([STREAM[0]], ServerUnavailable),
        ([STREAM[0], grpc.StatusCode.UNAVAILABLE], ServerUnavailable),
    ],
)
def test_a_stream_that_is_read_whole_gives_what_one_by_one_gives(
    serve: Callable[..., Any], script: list[Any], error: type[Exception] | None
) -> None:
    client, service = serve(*script)
    if error is None:
        whole, single = client.chunks("x"), list(client.stream("x"))
        assert [chunk.text for chunk in whole] == [chunk.text for chunk in single]
        assert whole[-1].finish_reason == single[-1].finish_reason
        assert not service.cancelled.is_set()
        return
    for read in (client.chunks, lambda prompt: list(client.stream(prompt))):
        with pytest.raises(error):
            read("x")


@pytest.mark.parametrize("script", [[REFUSAL, 0.3], [*STREAM, 0.3]])
def test_an_answered_stream_is_not_cancelled_before_the_server_ends_it(
    serve: Callable[..., Any], script: list[Any]
) -> None:
    client, service = serve(*script)
    with contextlib.suppress(RequestRefused):
        for chunk in client.stream("x"):
            if chunk.finish_reason is not None:
                break
    assert service.over.wait(5)
    assert not service.cancelled.is_set()


def test_a_server_that_does_not_end_an_answered_stream_is_left(serve: Callable[..., Any]) -> None:
    client, service = serve(REFUSAL, STREAM_END_S + 0.5, STREAM[0])
    with pytest.raises(RequestRefused):
        list(client.stream("x"))
    assert service.cancelled.wait(5)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (grpc.StatusCode.UNAVAILABLE, "cannot be reached or went away"),
        (grpc.StatusCode.INTERNAL, "on purpose"),
    ],
)
def test_a_stream_that_breaks_is_told_apart_from_a_refusal(
    serve: Callable[..., Any], step: Any, message: str
) -> None:
    client, _ = serve(STREAM[0], step)
    kind = ServerUnavailable if step == grpc.StatusCode.UNAVAILABLE else RequestRefused
    with pytest.raises(kind, match=message):
        list(client.stream("x"))


def test_a_stream_that_ends_without_an_answer_is_no_success(serve: Callable[..., Any]) -> None:
    client, _ = serve()
    with pytest.raises(ServerUnavailable, match="ended without an answer"):
        list(client.stream("x"))


def test_a_server_that_does_not_answer_runs_into_the_timeout(serve: Callable[..., Any]) -> None:
    client, _ = serve(1.0, *STREAM, timeout_s=0.2)
    with pytest.raises(ServerUnavailable, match=r"no answer within 0.2 s"):
        client.generate("x")


def test_nobody_there_is_said_so() -> None:
    with Client("127.0.0.1:9", timeout_s=5) as client:
        assert not client.ready()
        with pytest.raises(ServerUnavailable, match=r"127.0.0.1:9: the server cannot be reached"):
            client.generate("x")


def test_an_unknown_option_is_a_type_error(serve: Callable[..., Any]) -> None:
    client, _ = serve(*STREAM)
    with pytest.raises(TypeError, match="max_token"):
        client.generate("x", max_token=3)


def test_measured_times_follow_the_schedule(serve: Callable[..., Any]) -> None:
    client, _ = serve(0.05, STREAM[0], 0.1, *STREAM[1:])
    for timing in client.measure(["x", "y", "z"], concurrency=3):
        assert [tokens for _, tokens in timing.chunks] == [1, 2]
        assert timing.ttft_ns is not None
        assert timing.e2e_ns is not None
        assert timing.ttft_ns >= 50 * MS
        assert (
            timing.e2e_ns >= 150 * MS
        )  # the gap between two chunks has no lower bound: the first may arrive late
        assert timing.text == "abc"
        assert timing.token_ids == (1, 2, 3)


def timing(sent_ns: int, chunks: Sequence[tuple[int, int]], **statistics: Any) -> RequestTiming:
    figures = Statistics(output_tokens=sum(tokens for _, tokens in chunks), **statistics)
    return RequestTiming("", "", (), "length", sent_ns, tuple(chunks), figures)


def test_latencies_are_counted_in_tokens_not_in_chunks() -> None:
    measured = timing(100, [(150, 1), (210, 3), (240, 1)])
    assert measured.ttft_ns == 50
    assert measured.e2e_ns == 140
    assert measured.tpot_ns == round(90 / 4)
    assert measured.icl_ns == (60, 30)
    assert measured.itl == ((20, 3), (30, 1))


def test_what_cannot_be_measured_is_none() -> None:
    assert timing(0, []).ttft_ns is None
    assert timing(0, []).e2e_ns is None
    assert timing(0, [(10, 1)]).tpot_ns is None
    assert timing(0, [(10, 1)]).itl == ()
    assert Statistics(drafted=0, accepted=0, verify_steps=0).acceptance_rate is None
    # Ten blocks of two: eight second tokens were looked at.
    by_position = Statistics(drafted_by_position=(10, 10), accepted_by_position=(8, 6))
    assert by_position.acceptance_alpha == pytest.approx(14 / 18)
    # Six of them have one token: of the four others' second tokens four fifths were looked at.
    mixed = Statistics(drafted_by_position=(10, 4), accepted_by_position=(8, 2))
    assert mixed.acceptance_alpha == pytest.approx(10 / 13.2)
    assert Statistics(drafted=4, accepted=2).acceptance_alpha is None
    assert Statistics(drafted_by_position=(), accepted_by_position=()).acceptance_alpha is None
    assert Statistics(drafted=0, accepted=0, verify_steps=0).acceptance_length is None


def test_summary_weights_itl_by_tokens_and_divides_sums() -> None:
    arm = [
        timing(0, [(10 * MS, 1), (40 * MS, 3)], drafted=4, accepted=2, verify_steps=1),
        timing(0, [(10 * MS, 1), (50 * MS, 1)], drafted=4, accepted=0, verify_steps=1),
    ]
    figures = summarise(arm)
    assert figures["tokens_per_s"] == pytest.approx(6 / 0.090)
    assert figures["itl_p50_ms"] == pytest.approx(np.percentile([10, 10, 10, 40], 50))
    assert figures["itl_p90_ms"] == pytest.approx(np.percentile([10, 10, 10, 40], 90))
    assert figures["acceptance_rate"] == 0.25
    assert figures["acceptance_length"] == 2.0
    assert summarise([])["tokens_per_s"] is None


def test_a_port_that_does_not_exist_is_refused_and_nobody_is_called() -> None:
    """gRPC takes it modulo 65536."""
    with pytest.raises(ServerUnavailable, match="localhost:65537: a port is at most 65535"):
        Client("localhost:65537")


def test_the_script_without_tritonclient_says_what_to_install(tmp_path: Path) -> None:
    script = shutil.copyfile(client_module.__file__, tmp_path / "validate_latency.py")
    done = subprocess.run(
        [sys.executable, "-S", script],
        env={},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "validate_latency.py needs tritonclient and numpy (No module named "
    )
    assert done.stderr.count("\n") == 1


def test_prompts_are_read_from_json_lines_and_text(tmp_path: Path) -> None:
    lines, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text('{"prompt": "a b"}\n\n{"text": "c"}\n')
    text.write_text("a b\n\nc\n")
    assert read_prompts(lines) == ["a b", "c"]
    assert read_prompts(text) == ["a b", "c"]
    lines.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n'.encode())
    text.write_bytes(b"a b\r\n")
    assert read_prompts(lines) == ["a\u2028b"]
    assert read_prompts(text) == ["a b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"other": 1}\n', "a.jsonl:2: no `prompt` string"),
        (b'{"prompt": 5}', "a.jsonl:1: no `prompt` string"),
        (b'["a"]', "a.jsonl:1: no `prompt` string"),
        (b'{"messages": []}', "a.jsonl:1: `messages` need a chat template"),
        (b'{"prompt": "a"}\n{', "a.jsonl:2: not JSON"),
        (b'{"prompt": "\xff"}', "a.jsonl: is not UTF-8"),
        (b"\n", "a.jsonl: no prompts"),
        (None, "a.jsonl: cannot be read: No such file"),
    ],
)
def test_prompts_that_cannot_be_used_end_the_program_with_a_line(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        read_prompts(file)


def test_the_program_measures_both_arms(
    serve: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client, service = serve(*STREAM)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    arguments = ["--url", client.url, "--prompts", str(tmp_path / "p.jsonl"), "--rounds", "1"]
    assert client_module.main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["plain"]["requests"] == figures["speculative"]["requests"] == 2
    low, high = figures["speedup_interval"]
    assert 0 < low <= figures["speedup"] <= high
    asked = [{tensor.name for tensor in request.inputs} for request in service.requests]
    assert ["num_draft_tokens" in names for names in asked[4:]] == [True, False, True, False]
    assert client_module.main(arguments) == 0
    table = capsys.readouterr().out
    assert "tokens_per_s" in table
    assert re.search(
        r"^speedup \d+\.\d\dx, 95% interval \d.* over 2 prompts x 1 rounds, one request at a"
        r" time$",
        table,
        re.M,
    )
    assert client_module.main(["--url", "127.0.0.1:9", *arguments[2:]]) == 3
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gate", "code", "said"),
    [
        ("e2e_p50<=60000", 0, "PASS"),
        ("e2e_p50<=0.0001", 1, "FAIL"),
        ("tokens_per_s>=1e9", 2, None),
        ("tokens_per_s>=1000000000", 1, "FAIL"),
        ("acceptance_rate>=0.7", 0, "PASS"),  # 3 of 4
        ("ttft_p99<=60000", 4, "INCONCLUSIVE"),  # of 20 samples
        ("speed>=1000", 1, "FAIL"),
        ("speed>=0.000001", 0, "PASS"),
    ],
)
def test_limits_decide_the_exit_code(
    serve: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    gate: str,
    code: int,
    said: str | None,
) -> None:
    client, _ = serve(*STREAM)
    (tmp_path / "p.txt").write_text("".join(f"{n}\n" for n in range(10)))
    arguments = ["--url", client.url, "--prompts", str(tmp_path / "p.txt"), "--rounds", "2"]
    if said is None:
        with pytest.raises(SystemExit) as ended:
            client_module.main([*arguments, "--gate", gate])
        assert ended.value.code == code
        assert "NAME<=NUMBER" in capsys.readouterr().err
        return
    assert client_module.main([*arguments, "--gate", gate]) == code
    assert re.search(rf"^{said} +{gate[:7]}", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_answer_comes_in_as_many_chunks_as_the_model_sends(
    serve: Callable[..., Any], decoupled: bool
) -> None:
    whole = answer(text_output=["abc"], output_ids=[1, 2, 3], num_output_tokens=[3], **STATISTICS)
    script = STREAM if decoupled else (whole,)
    client, service = serve(*script, config=model_config.build(decoupled=decoupled))
    chunks = list(client.answer("x"))
    assert (len(chunks) > 1) == decoupled
    assert chunks[-1].finish_reason is not None
    sent = service.requests[-1]
    at = [tensor.name for tensor in sent.inputs].index("streaming")
    assert sent.raw_input_contents[at] == bytes([decoupled])


def test_a_model_that_does_not_stream_is_timed_by_whole_answers(
    serve: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = answer(text_output=["abc"], output_ids=[1, 2, 3], num_output_tokens=[3], **STATISTICS)
    client, _ = serve(whole, config=model_config.build(decoupled=False))
    (tmp_path / "p.txt").write_text("a\nb\n")
    arguments = ["--url", client.url, "--prompts", str(tmp_path / "p.txt"), "--rounds", "1"]
    assert client_module.main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["speculative"]
    assert figures["ttft_p50_ms"] is figures["tpot_p50_ms"] is None
    assert figures["e2e_p50_ms"] > 0 and figures["output_tokens"] == 6
    assert client_module.main([*arguments, "--gate", "ttft_p50<=1000"]) == 1
    assert "only whole answers are timed" in capsys.readouterr().out


def test_saved_runs_of_other_requests_are_not_compared(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    client, _ = serve(*STREAM)
    files = []
    for number, tokens in enumerate(("3", "4")):
        (tmp_path / "p.txt").write_text("a\n")
        files.append(str(tmp_path / f"{number}.json"))
        arguments = ["--url", client.url, "--prompts", str(tmp_path / "p.txt"), "--rounds", "1"]
        client_module.main([*arguments, "--max-tokens", tokens, "--save", files[-1]])
    with pytest.raises(SystemExit, match="measured with other max_tokens"):
        client_module.main(["--compare", *files])
    (tmp_path / "p.txt").write_text("{}")
    with pytest.raises(SystemExit, match="is not a run saved with --save"):
        client_module.main(["--compare", files[0], str(tmp_path / "p.txt")])


def timed(tokens: int, ns: int, *, ended: bool = True) -> RequestTiming:
    """A request of one chunk that took ns."""
    statistics = Statistics(output_tokens=tokens if ended else None)
    return RequestTiming("p", "t", (), "stop" if ended else None, 0, ((ns, tokens),), statistics)


def test_the_interval_is_the_one_of_a_build() -> None:
    """The script stands alone, so it has the formula a second time: here both are held together."""
    generator = np.random.default_rng(5)
    shape = (3, 16)
    tokens, ns = generator.integers(1, 64, (2, *shape)), generator.integers(1, 9, (2, *shape)) * MS
    arms = [
        [[timed(int(tokens[arm, r, p]), int(ns[arm, r, p])) for p in range(16)] for r in range(3)]
        for arm in (0, 1)
    ]
    found = speedup(arms[1], arms[0])
    assert found == pytest.approx(bootstrap_ratio((tokens[0], tokens[1]), (ns[0], ns[1])))
    assert found[1] < found[0] < found[2]


def test_requests_without_an_end_are_left_out_of_the_speed_up() -> None:
    plain = [[timed(10, 20 * MS), timed(10, 20 * MS)]]
    assert speedup(plain, [[timed(10, 10 * MS), timed(99, MS, ended=False)]]) == pytest.approx(
        (2.0, 2.0, 2.0)
    )
    assert speedup(plain, [[timed(10, MS, ended=False)] * 2]) is None
    assert speedup([], []) is None


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ("a \udcff b", {}, "text_input cannot be sent as BYTES"),
        ("a", {"stop": ("\ud800",)}, "stop"),
        ("a", {"max_tokens": 2**32 + 5}, "4294967301 is not between"),
        ("a", {"seed": 2**70}, "seed cannot be sent as UINT64"),
    ],
)
def test_what_a_tensor_cannot_hold_is_refused_and_not_bent(
    prompt: str, options: dict[str, Any], named: str
) -> None:
    form = ModelInterface(
        {spec.name: spec.dtype.removeprefix("TYPE_") for spec in INPUTS}, cumulative=False
    )
    with pytest.raises(RequestRefused, match=named):
        form.request("m", prompt, Options(**options), "", streaming=True)
