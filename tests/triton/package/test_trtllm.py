"""Repositories for TensorRT-LLM's containers, and our model.py in a real tritonserver, over a
stand-in for TensorRT-LLM's `LLM`.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tritonclient.grpc import model_config_pb2 as pb

from tests.support.trtllm_packages import ARGS, engine, llmapi
from toolkit import client as client_module
from toolkit.client import Client, RequestRefused
from toolkit.config.schema import TritonConfig
from toolkit.errors import RequestError, StageError
from toolkit.facts.triton_tensors import LLMAPI
from toolkit.facts.versions import VERSIONS
from toolkit.interfaces import Sampling
from toolkit.records.build import TritonRepository
from toolkit.standins.trtllm import PACKAGE
from toolkit.standins.trtllm.tensorrt_llm.toy import TEXT, Logprob
from toolkit.triton.package import model_config
from toolkit.triton.package.monitoring import FILES
from toolkit.triton.package.trtllm import model_yaml, package_bls
from toolkit.triton.process.server import TritonServer
from toolkit.triton.tensors.contract import METRICS
from toolkit.triton.tensors.requests import Request
from toolkit.triton.tensors.trtllm_tensors import (
    OUR_INPUTS,
    OUR_OUTPUTS,
    Responses,
    sampling_arguments,
    token_log_probs,
    verify_steps,
)

STEP_VARIABLE = "TENSORRT_LLM_STAND_IN_STEP_S"  # seconds, of servers that start


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("model_py", ["ours", "container"])
def test_the_llmapi_repository_is_the_template_s(
    tmp_path: Path, decoupled: bool, model_py: str
) -> None:
    record = llmapi(tmp_path, decoupled=decoupled, model_py=model_py)
    config = model_config.read(record.path / "tensorrt_llm" / "config.pbtxt")
    for given, facts in ((config.input, LLMAPI.inputs), (config.output, LLMAPI.outputs)):
        for tensor, fact in zip(given, facts, strict=False):
            assert (tensor.name, pb.DataType.Name(tensor.data_type), tuple(tensor.dims)) == (
                fact.name,
                fact.dtype,
                fact.dims,
            )
            assert given is config.output or tensor.optional is fact.optional
        ours = OUR_INPUTS if given is config.input else OUR_OUTPUTS
        assert [tensor.name for tensor in given][len(facts) :] == (
            [spec.name for spec in ours] if model_py == "ours" else []
        )
    settings = yaml.safe_load((record.path / "tensorrt_llm/1/model.yaml").read_text())
    assert (
        settings["triton_config"]["decoupled"]
        is config.model_transaction_policy.decoupled
        is decoupled
    )
    assert {key: settings[key] for key in ARGS} == ARGS
    plain = yaml.safe_load((record.path / "tensorrt_llm/1/plain.yaml").read_text())
    assert plain == {key: settings[key] for key in settings if key != "speculative_config"}
    assert (
        ("toolkit" in settings)
        is (record.path / "tensorrt_llm/1/model.py").is_file()
        is (model_py == "ours")
    )
    assert (record.path / "tensorrt_llm/1/engines/draft/config.json").is_file()
    assert (record.path / "kubernetes.yaml").is_file()
    assert (record.path / "validate_latency.py").is_file()


@pytest.mark.parametrize("layout", ["bls", "llmapi"])
def test_the_readme_names_every_tensor_and_launch_file(tmp_path: Path, layout: str) -> None:
    """It names every tensor of the entry model's configuration, and every file that starts the
    repository.
    """
    if layout == "bls":
        pair = [engine(tmp_path / "engines", role, "trt_engine") for role in ("target", "draft")]
        record = package_bls(
            pair[0],
            pair[1],
            TritonConfig(),
            tmp_path / "out",
            name="pair",
            end_ids=(257,),
            max_draft_len=3,
        )
    else:
        record = llmapi(tmp_path)
    text = (record.path / "README.md").read_text(encoding="utf-8")
    config = model_config.read(record.path / record.model / "config.pbtxt")
    for tensor in (*config.input, *config.output):
        dtype = pb.DataType.Name(tensor.data_type).removeprefix("TYPE_")
        assert f"| `{tensor.name}` | {dtype} |" in text
    assert "| `text_input` | STRING | the prompt, exactly one, UTF-8 |" in text
    files = {file.name for file in record.path.iterdir() if file.is_file()} - {
        "README.md",
        "validate_latency.py",
    }
    launched, watched = text.split("## Call")[0], text.split("## Watch")[1].split("## Metrics")[0]
    named = [set(re.findall(r"^\| `([\w.-]+)` \|", part, re.M)) for part in (launched, watched)]
    assert named == [files - set(FILES), set(FILES)] and set(FILES) <= files
    assert "target FP8, draft FP8, up to 3 draft tokens per step" in text
    assert "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3" in text
    call = re.search(r"-d '(.*)' localhost:8000/v2/models/(\w+)/generate", text)
    assert call is not None and call[2] == record.model
    assert set(json.loads(call[1])) <= {tensor.name for tensor in config.input}
    assert all(f"| `{metric.name}` | {metric.kind} |" in text for metric in METRICS)
    # With `llmapi` a request cannot ask for plain decoding, but a start can.
    assert ("docker-run.sh --plain" in text) is (layout == "llmapi")
    assert ('if [ "$1" = --plain ]' in (record.path / "launch.sh").read_text()) is (
        layout == "llmapi"
    )
    assert (record.path / "docker-run.sh").read_text().rstrip().endswith('"$@"') is (
        layout == "llmapi"
    )


@pytest.mark.parametrize("tp_size", [1, 2, 8])
def test_the_engine_flow_is_packaged_with_both_engines(tmp_path: Path, tp_size: int) -> None:
    pair = [
        engine(tmp_path / "engines", role, "trt_engine", tp_size) for role in ("target", "draft")
    ]
    record = package_bls(
        pair[0],
        pair[1],
        TritonConfig(),
        tmp_path / "out",
        name="pair",
        end_ids=(257,),
        max_draft_len=3,
    )
    assert (record.layout, record.model, record.max_draft_len) == ("bls", "tensorrt_llm_bls", 3)
    for model in ("tensorrt_llm", "tensorrt_llm_draft"):
        config = model_config.read(record.path / model / "config.pbtxt")
        assert config.parameters["gpu_device_ids"].string_value == ",".join(
            map(str, range(tp_size))
        )
        assert (record.path / model / "1" / "engine" / "config.json").is_file()
        assert not (record.path / model / "1" / "model.py").exists()
    assert f"--gpus={tp_size}" in (record.path / "docker-run.sh").read_text()


def test_an_engine_of_another_kind_is_refused(tmp_path: Path) -> None:
    import dataclasses

    foreign = dataclasses.replace(engine(tmp_path, "target", "torch"), tensorrt_llm=None)
    with pytest.raises(
        StageError, match="TensorRT-LLM did not build this engine: its kind is torch"
    ):
        package_bls(
            foreign, None, TritonConfig(), tmp_path / "out", name="x", end_ids=(), max_draft_len=0
        )


@pytest.mark.parametrize(
    ("tokens", "average", "steps"), [(10, 2.5, 3), (1, 1.0, 0), (10, None, None), (0, 1.0, None)]
)
def test_verify_steps_are_the_iterations_after_the_first(
    tokens: int, average: float | None, steps: int | None
) -> None:
    assert verify_steps(tokens, average) == steps


def with_standin(record: TritonRepository) -> Path:
    """The repository, with the stand-in in the model's version folder, where Python finds it when
    Triton runs the model.
    """
    shutil.copytree(PACKAGE, record.path / "tensorrt_llm" / "1" / "tensorrt_llm")
    return record.path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with TritonServer(with_standin(llmapi(tmp_path_factory.mktemp("trtllm")))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url, timeout_s=30) as client:
        yield client


def test_counts_ids_and_acceptance_come_with_the_answer(client: Client) -> None:
    whole = client.generate("a prompt", max_tokens=10)
    assert whole.text == TEXT
    assert whole.token_ids == tuple(range(100, 110))
    figures = whole.statistics
    assert (
        figures.input_tokens,
        figures.output_tokens,
        figures.verify_steps,
        figures.accepted,
    ) == (2, 10, 3, 6)
    assert figures.acceptance_length == 3.0
    assert figures.drafted is None  # the runtime does not report it, and we do not guess


def test_log_probabilities_come_with_the_last_chunk_if_requested(
    client: Client,
) -> None:
    (statistics,) = (
        chunk.statistics
        for chunk in client.stream("a prompt", max_tokens=10, log_probs=True)
        if chunk.statistics
    )
    assert (
        statistics.log_probs is not None
        and statistics.next_best is not None
        and statistics.next_best_log_probs is not None
    )
    assert (
        len(statistics.log_probs)
        == len(statistics.next_best)
        == len(statistics.next_best_log_probs)
        == 10
    )
    assert all(
        other < chosen < 0.0
        for chosen, other in zip(statistics.log_probs, statistics.next_best_log_probs, strict=True)
    )
    assert all(token != 100 + place for place, token in enumerate(statistics.next_best))
    assert client.generate("a prompt", max_tokens=10).statistics.log_probs is None


def test_log_probabilities_are_those_of_the_tokens_that_were_chosen() -> None:
    def place(**likeliest: float) -> dict[int, Logprob]:
        return {
            int(token[1:]): Logprob(value, rank)
            for rank, (token, value) in enumerate(likeliest.items(), 1)
        }

    assert token_log_probs([7, 8], [place(t7=-0.1, t9=-3.0), place(t5=-0.7, t8=-0.7)]) == {
        "output_log_probs": [-0.1, -0.7],
        "next_best_ids": [9, 5],
        "next_best_log_probs": [-3.0, -0.7],
    }
    assert token_log_probs([7, 8], [place(t7=-0.1), place(t8=-0.2)]) == {
        "output_log_probs": [-0.1, -0.2]
    }
    (unknown,) = token_log_probs([7], [place(t5=-0.7)])["output_log_probs"]
    assert math.isnan(unknown)
    assert token_log_probs([7, 8], [place(t7=-0.1)]) == {}  # one is missing, unknown which


def test_a_version_without_log_probabilities_refuses_them() -> None:
    request = Request("x", returns=frozenset({"return_log_probs"}))
    assert sampling_arguments(request, 5, 2)["logprobs"] == 2
    with pytest.raises(RequestError, match="returns no log-probabilities under speculation"):
        sampling_arguments(request, 5, 0)


@pytest.mark.parametrize(
    ("setting", "value"), [("seed", 0), ("frequency_penalty", 0.5), ("presence_penalty", -1.0)]
)
def test_settings_that_the_version_ignores_are_refused(
    client: Client, setting: str, value: float
) -> None:
    with pytest.raises(RequestRefused, match=f"sampling_param_{setting}: this version"):
        client.generate("x", max_tokens=3, **{setting: value})
    assert client.generate("x", max_tokens=3, frequency_penalty=0.0).text  # a neutral value


def test_a_version_that_respects_seeds_gets_them() -> None:
    triton = TritonConfig()
    settings = {version: model_yaml({}, triton, version)["toolkit"] for version in VERSIONS}
    assert settings["1.2.1"]["ignored"] == ["frequency_penalty", "presence_penalty", "seed"]
    assert settings["1.4rc"]["ignored"] == ["frequency_penalty", "presence_penalty"]
    request = Request("x", sampling=Sampling(temperature=1.0, seed=7))
    assert sampling_arguments(request, 5, 0, settings["1.4rc"]["ignored"])["seed"] == 7


def test_acceptance_is_not_taken_from_counters_that_are_zero(server: TritonServer) -> None:
    """In this release the runtime's own counters of drafts stay zero."""
    body = {
        "text_input": "a prompt",
        "sampling_param_max_tokens": 10,
        "sampling_param_return_perf_metrics": True,
        "sampling_param_exclude_input_from_output": True,
    }
    url = f"http://{server.http_url}/v2/models/tensorrt_llm/generate"
    response = urllib.request.urlopen(url, data=json.dumps(body).encode(), timeout=30)
    answer = json.loads(response.read())
    assert (answer["text_output"], answer["total_accepted_draft_tokens"]) == (TEXT, 6)
    assert "total_draft_tokens" not in answer


def test_chunks_hold_what_is_new(client: Client) -> None:
    chunks = list(client.stream("a prompt", max_tokens=10))
    assert len(chunks) == 4
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [chunk.output_tokens for chunk in chunks] == [1, 4, 7, 10]
    assert sum((chunk.token_ids for chunk in chunks), ()) == tuple(range(100, 110))


def test_a_client_of_the_template_gets_a_reason_with_every_chunk(server: TritonServer) -> None:
    body = {"text_input": "a prompt", "sampling_param_max_tokens": 10, "streaming": True}
    url = f"http://{server.http_url}/v2/models/tensorrt_llm/generate_stream"
    data = json.dumps({**body, "return_finish_reason": True}).encode()
    lines = urllib.request.urlopen(url, data=data, timeout=30).read().decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert [event["finish_reason"] for event in events] == ["None", "None", "None", "length"]


def test_the_prompt_comes_first_unless_it_is_left_out(server: TritonServer) -> None:
    body = {"text_input": "a prompt ", "sampling_param_max_tokens": 2}
    url = f"http://{server.http_url}/v2/models/tensorrt_llm/generate"
    response = urllib.request.urlopen(url, data=json.dumps(body).encode(), timeout=30)
    assert json.loads(response.read())["text_output"] == "a prompt one two"


def counted(server: TritonServer, name: str) -> Callable[[], float]:
    """Reads one sample of the server's page, given as it stands there."""

    def read() -> float:
        with urllib.request.urlopen(server.metrics_url, timeout=10) as page:
            lines = page.read().decode().splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)

    return read


def wait_for(what: Callable[[], float], value: float) -> None:
    """Metrics are published ten times a second."""
    deadline = time.monotonic() + 10
    while what() != value and time.monotonic() < deadline:
        time.sleep(0.05)
    assert what() == value


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Two requests run and one may wait; a step takes long."""
    repository = with_standin(
        llmapi(
            tmp_path_factory.mktemp("narrow"),
            args={"max_batch_size": 2},
            max_queue_size=1,
            request_timeout_s=60.0,
            stream_interval_ms=500.0,
        )
    )
    with contextlib.ExitStack() as running:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(STEP_VARIABLE, "0.2")
            server = running.enter_context(TritonServer(repository))
        client = running.enter_context(Client(server.grpc_url, timeout_s=30))
        client.generate("x", max_tokens=1)  # Triton opens its page after it is ready
        # Tests count what is new, so this one has to be on the page before they begin.
        wait_for(counted(server, 'toolkit_requests{model="tensorrt_llm",outcome="length"}'), 1)
        yield server


def test_requests_beyond_the_queue_are_refused_at_once(narrow: TritonServer) -> None:
    refused = counted(narrow, 'toolkit_requests{model="tensorrt_llm",outcome="overloaded"}')
    finished = counted(narrow, 'toolkit_requests{model="tensorrt_llm",outcome="length"}')
    before = refused(), finished()
    with Client(narrow.grpc_url, timeout_s=30) as client, ThreadPoolExecutor(3) as pool:
        running = [pool.submit(client.generate, "x", max_tokens=10) for _ in range(3)]
        wait_for(counted(narrow, "toolkit_queued_requests"), 1)
        assert counted(narrow, "toolkit_active_requests")() == 2
        with pytest.raises(RequestRefused, match="3 requests are open, 2 of them may run"):
            client.generate("x", max_tokens=10)
        assert [future.result().text for future in running] == [TEXT] * 3
        assert client.generate("x", max_tokens=1).text == "one"
    wait_for(refused, before[0] + 1)
    wait_for(finished, before[1] + 4)
    wait_for(counted(narrow, "toolkit_active_requests"), 0)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_deadline_ends_the_request_in_the_runtime_too(
    narrow: TritonServer, streaming: bool
) -> None:
    missed = counted(narrow, 'toolkit_requests{model="tensorrt_llm",outcome="deadline"}')
    before = missed()
    with Client(narrow.grpc_url, timeout_s=30) as client:
        client.generate("x", max_tokens=1)
        began = time.monotonic()
        with pytest.raises(RequestRefused, match=r"deadline of 300 ms passed after \d tokens"):
            if streaming:
                list(client.stream("x", max_tokens=10, timeout_ms=300))
            else:
                client.generate("x", max_tokens=10, timeout_ms=300)
        assert time.monotonic() - began < 0.7  # the whole text takes 0.8 s
        wait_for(missed, before + 1)
        wait_for(counted(narrow, "toolkit_active_requests"), 0)


def test_the_packaged_deadline_holds_for_requests_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = llmapi(tmp_path, request_timeout_s=0.25)
    monkeypatch.setenv(STEP_VARIABLE, "0.2")
    with (
        TritonServer(with_standin(settings)) as server,
        Client(server.grpc_url, timeout_s=30) as client,
        pytest.raises(RequestRefused, match="deadline of 250 ms passed"),
    ):
        client.generate("x", max_tokens=10)


def test_chunks_keep_the_interval_and_their_gaps_are_counted(narrow: TritonServer) -> None:
    gaps, first = (
        counted(narrow, f'toolkit_{name}_seconds_count{{model="tensorrt_llm"}}')
        for name in ("icl", "ttft")
    )
    slow = counted(narrow, 'toolkit_icl_seconds_bucket{model="tensorrt_llm",le="0.1"}')
    before = gaps(), first(), slow()
    with Client(narrow.grpc_url, timeout_s=30) as client:
        chunks = list(client.stream("x", max_tokens=10))
    # Steps end after 0.2, 0.4, 0.6 and 0.8 s; the last chunk never waits.
    assert [chunk.output_tokens for chunk in chunks] == [1, 10]
    assert "".join(chunk.text for chunk in chunks) == TEXT
    wait_for(gaps, before[0] + 1)
    wait_for(first, before[1] + 1)
    assert slow() == before[2]  # the gap was longer than a tenth of a second


def test_acceptance_is_counted_as_far_as_the_runtime_tells(narrow: TritonServer) -> None:
    accepted, steps, tokens = (
        counted(narrow, f"toolkit_{name}{{")
        for name in ("accepted_draft_tokens", "verify_steps", "output_tokens")
    )
    before = accepted(), steps(), tokens()
    with Client(narrow.grpc_url, timeout_s=30) as client:
        client.generate("x", max_tokens=10)
    wait_for(accepted, before[0] + 6)
    wait_for(steps, before[1] + 3)
    wait_for(tokens, before[2] + 10)
    with urllib.request.urlopen(narrow.metrics_url, timeout=10) as page:
        assert "toolkit_draft_tokens{" not in page.read().decode()  # not told, so not 0


def output(tokens: int, average: float, drafted: int) -> SimpleNamespace:
    """The last output of a runtime that counts drafted tokens (0: of one that does not)."""
    told = SimpleNamespace(total_draft_tokens=drafted, acceptance_rate=0.0)
    metrics = SimpleNamespace(kv_cache_metrics=None, timing_metrics=None, speculative_decoding=told)
    completion = SimpleNamespace(
        text="x", token_ids=list(range(tokens)), request_perf_metrics=metrics
    )
    return SimpleNamespace(
        outputs=[completion], prompt_token_ids=[1], avg_decoded_tokens_per_iter=average
    )


def test_drafted_tokens_are_the_runtime_s_own_or_nobody_s() -> None:
    request = Request("x", returns=frozenset({"sampling_param_return_perf_metrics"}))
    told = Responses(request, 0, 0)
    answer = told.of(output(10, 2.5, 12), 5, final=True) or {}
    assert answer["total_draft_tokens"] == [12]
    assert answer["total_accepted_draft_tokens"] == [6]
    assert answer["acceptance_rate"] == [0.5]
    assert (told.stats(output(10, 2.5, 12)).drafted, told.stats(None).verify_steps) == (12, 0)
    untold = Responses(request, 0, 0).of(output(10, 2.5, 0), 5, final=True) or {}
    assert untold["total_accepted_draft_tokens"] == [6]
    assert not {"total_draft_tokens", "acceptance_rate"} & set(untold)


@pytest.mark.parametrize("streaming", [True, False])
def test_times_of_tokens_are_those_of_streams_only(streaming: bool) -> None:
    """Without streaming nobody sees the first token."""
    responses = Responses(Request("x", streaming=streaming), 100, 0)
    responses.of(output(4, 2.0, 0), 300, final=True)
    stats = responses.stats(output(4, 2.0, 0))
    assert (stats.arrival_ns, stats.first_token_ns) == (100, 300 if streaming else None)
    assert (stats.output_tokens, stats.verify_steps, stats.accepted) == (4, 1, 2)


@pytest.mark.parametrize(
    ("other", "answer", "ended"),
    [
        ("another", "cancelled by the client", 1),
        ("mine", "2 running requests have the id 'mine', so none is cancelled", 0),
    ],
)
def test_a_stop_request_ends_the_one_request_with_its_id(
    narrow: TritonServer, other: str, answer: str, ended: int
) -> None:
    cancelled = counted(narrow, 'toolkit_requests{model="tensorrt_llm",outcome="cancelled"}')
    before = cancelled()
    body = {"text_input": "x", "stop": True, "id": "mine"}
    url = f"http://{narrow.http_url}/v2/models/tensorrt_llm/generate"
    with Client(narrow.grpc_url, timeout_s=30) as client, ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(client.generate, "x", max_tokens=10, request_id=request_id)
            for request_id in ("mine", other)
        ]
        wait_for(counted(narrow, "toolkit_active_requests"), 2)
        with pytest.raises(urllib.error.HTTPError) as stopped:
            urllib.request.urlopen(url, data=json.dumps(body).encode(), timeout=30)
        assert answer in json.loads(stopped.value.read())["error"]
        for future in running[:ended]:
            with pytest.raises(RequestRefused, match="cancelled by the client"):
                future.result()
        for future in running[ended:]:
            assert future.result().token_ids
    wait_for(cancelled, before + ended)


def test_the_packaged_check_compares_a_run_and_a_plain_restart(
    server: TritonServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the README says: measured, started again as launch.sh --plain does, measured, compared."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} x"}) + "\n" for n in range(4)))
    options = ["--prompts", str(prompts), "--rounds", "2", "--max-tokens", "10"]
    files = {name: str(tmp_path / f"{name}.json") for name in ("speculative", "plain")}
    check = client_module.main
    assert check(["--url", server.grpc_url, *options]) == 0
    assert "--baseline" in capsys.readouterr().out
    assert check(["--url", server.grpc_url, *options, "--save", files["speculative"]]) == 0
    monkeypatch.setenv(
        "LLM_CONFIG_PATH", str(server.repository / "tensorrt_llm" / "1" / "plain.yaml")
    )
    with TritonServer(server.repository) as plain:
        assert check(["--url", plain.grpc_url, *options, "--save", files["plain"]]) == 0
        both = ["--url", server.grpc_url, "--baseline", plain.grpc_url, *options, "--json"]
        capsys.readouterr()
        assert check(both) == 0
    # Ten tokens: a prefill and 9 decode steps, or a prefill and 3 verify steps of the same time.
    assert 1.5 < json.loads(capsys.readouterr().out)["speedup"] < 3.0
    compare = ["--compare", files["plain"], files["speculative"]]
    assert check([*compare, "--gate", "speed>=1.5", "--gate", "acceptance_length>=2.5"]) == 0
    table = capsys.readouterr().out
    assert "p99" in table and "PASS         speed>=1.5" in table
    assert check([*compare, "--gate", "speed>=9"]) == 1


def test_refusals_reach_the_client_and_the_server_goes_on(client: Client) -> None:
    with pytest.raises(RequestRefused, match="the runtime refuses this prompt"):
        client.generate("refuse me")
    with pytest.raises(RequestRefused, match=r"sampling_param_top_p is -0\.5"):
        client.generate("x", top_p=-0.5)
    with pytest.raises(RequestRefused, match="has no input 'num_draft_tokens'"):
        client.generate("x", num_draft_tokens=2)
    chunks = client.stream("x", max_tokens=10)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert client.generate("x", max_tokens=3).text == "one two three"
