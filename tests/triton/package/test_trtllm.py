"""Repositories for TensorRT-LLM's containers, and our model.py in a real tritonserver, over a
stand-in for TensorRT-LLM's `LLM`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tritonclient.grpc import model_config_pb2 as pb

from tests.support.trtllm_packages import ARGS, engine, llmapi
from toolkit.client import Client, RequestRefused
from toolkit.config.schema import TritonConfig
from toolkit.errors import RequestError, StageError
from toolkit.facts.triton_tensors import LLMAPI
from toolkit.facts.versions import VERSIONS
from toolkit.interfaces import Sampling
from toolkit.standins.trtllm import PACKAGE
from toolkit.standins.trtllm.tensorrt_llm.toy import TEXT, Logprob
from toolkit.triton.package import model_config
from toolkit.triton.package.trtllm import model_yaml, package_bls
from toolkit.triton.process.server import TritonServer
from toolkit.triton.tensors.requests import Request
from toolkit.triton.tensors.trtllm_tensors import (
    OUR_INPUTS,
    OUR_OUTPUTS,
    sampling_arguments,
    token_log_probs,
    verify_steps,
)


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
    assert files == set(re.findall(r"^\| `([\w.-]+)` \|", text.split("## Call")[0], re.MULTILINE))
    assert "target FP8, draft FP8, up to 3 draft tokens per step" in text
    assert "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3" in text
    call = re.search(r"-d '(.*)' localhost:8000/v2/models/(\w+)/generate", text)
    assert call is not None and call[2] == record.model
    assert set(json.loads(call[1])) <= {tensor.name for tensor in config.input}
    # With `llmapi` a request cannot ask for plain decoding.
    assert ("--prompts" in text) is (layout == "bls")


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The stand-in lies in the model's version folder, where Python finds it when Triton runs the
    model.
    """
    record = llmapi(tmp_path_factory.mktemp("trtllm"))
    shutil.copytree(PACKAGE, record.path / "tensorrt_llm" / "1" / "tensorrt_llm")
    with TritonServer(record.path) as server:
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


def test_the_prompt_comes_first_unless_it_is_left_out(server: TritonServer) -> None:
    body = {"text_input": "a prompt ", "sampling_param_max_tokens": 2}
    url = f"http://{server.http_url}/v2/models/tensorrt_llm/generate"
    response = urllib.request.urlopen(url, data=json.dumps(body).encode(), timeout=30)
    assert json.loads(response.read())["text_output"] == "a prompt one two"


def test_refusals_reach_the_client_and_the_server_goes_on(client: Client) -> None:
    with pytest.raises(RequestRefused, match="the runtime refuses this prompt"):
        client.generate("refuse me")
    with pytest.raises(RequestRefused, match="sampling_param_top_p is 0"):
        client.generate("x", top_p=0.0)
    with pytest.raises(RequestRefused, match="has no input 'num_draft_tokens'"):
        client.generate("x", num_draft_tokens=2)
    chunks = client.stream("x", max_tokens=10)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert client.generate("x", max_tokens=3).text == "one two three"
