"""The engine flow as it is packaged, in a real tritonserver: our models around a stand-in of the
backend `tensorrtllm`, which compares the types of logits as the real one does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import model_config_pb2 as pb
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.support.tensorrtllm_backend import (
    MAX_DRAFT_LEN,
    built,
    launch_with_standin,
    packaged,
)
from toolkit.client import Client, Options, RequestRefused
from toolkit.facts.trtllm_build import LOGITS_DTYPE
from toolkit.triton.package import model_config
from toolkit.triton.process.localize import render_here
from toolkit.triton.process.server import TritonServer

pytestmark = pytest.mark.slow
PROMPT = "def f(x):"
ENGINES = ("tensorrt_llm", "tensorrt_llm_draft")


def served(folder: Path, *, logits_dtype: str | None = None, **options: Any) -> TritonServer:
    """The packaged engines on this machine. logits_dtype: what engines say that were built without
    `--logits_dtype`; None for ours. options: of `built`.
    """
    engines = built(folder, **options)
    for engine in engines:
        if logits_dtype is not None:
            file = engine.path / "config.json"
            config = json.loads(file.read_text())
            config["pretrained_config"]["logits_dtype"] = logits_dtype
            file.write_text(json.dumps(config))
    here = render_here(packaged(engines, folder / "repository").path, folder / "here")
    return TritonServer(here, launch=launch_with_standin)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with served(tmp_path_factory.mktemp("engine_flow")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url, model="tensorrt_llm_bls", timeout_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def mismatched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Engines with the type that ModelOpt's checkpoints state, under configurations with ours."""
    folder = tmp_path_factory.mktemp("mismatched")
    with (
        served(folder, logits_dtype="float16") as server,
        Client(server.grpc_url, model="tensorrt_llm_bls", timeout_s=60) as client,
    ):
        yield client


def test_engines_and_configurations_state_one_type(server: TritonServer) -> None:
    stated = set()
    for model in ENGINES:
        engine = json.loads((server.repository / model / "1/engine/config.json").read_text())
        stated.add(engine["pretrained_config"]["logits_dtype"])
        config = model_config.read(server.repository / model / "config.pbtxt")
        types = {tensor.name: tensor.data_type for tensor in (*config.input, *config.output)}
        logits = {types[name] for name in ("generation_logits", "context_logits", "draft_logits")}
        assert logits == {pb.DataType.Value("TYPE_FP32")}
    assert stated == {LOGITS_DTYPE} == {"float32"}


def test_drafts_change_no_greedy_text(client: Client) -> None:
    plain = client.generate(PROMPT, max_tokens=30, num_draft_tokens=0)
    drafted = client.generate(PROMPT, max_tokens=30)
    assert drafted.token_ids == plain.token_ids and len(plain.token_ids) == 30
    figures = drafted.statistics
    assert figures.accepted is not None and figures.drafted is not None
    assert 0 < figures.accepted < figures.drafted


def test_log_probabilities_come_from_the_logits_of_the_target(client: Client) -> None:
    """Also without drafts: an engine for external drafts gives no log-probabilities of its own."""
    arms = [
        client.generate(PROMPT, max_tokens=8, log_probs=True, num_draft_tokens=drafts).statistics
        for drafts in (0, MAX_DRAFT_LEN)
    ]
    plain, drafted = (arm.log_probs for arm in arms)
    assert plain is not None and drafted is not None and len(plain) == 8
    assert drafted == pytest.approx(plain, abs=1e-5) and max(plain) < 0.0


def test_draft_logits_reach_the_target(client: Client) -> None:
    """Speculative sampling: the draft's logits are sent, in the type that the draft gave."""
    options = [
        Options(max_tokens=20, temperature=0.8, seed=seed, acceptance="rejection")
        for seed in range(3)
    ]
    texts = {client.generate(PROMPT, each).token_ids for each in options}
    assert len(texts) > 1
    assert all(len(ids) == 20 for ids in texts)


def test_engines_of_another_type_fail_as_the_backend_fails(mismatched: Client) -> None:
    assert mismatched.generate(PROMPT, max_tokens=8).token_ids  # no logits, so no type matters
    failure = "Assertion failed: generationLogitsType == model_state_->getLogitsDataType"
    with pytest.raises(RequestRefused, match=failure):  # of the target
        mismatched.generate(PROMPT, Options(max_tokens=8, log_probs=True))
    sampled = Options(max_tokens=8, temperature=0.8, seed=7, acceptance="rejection")
    answer = mismatched.generate(PROMPT, sampled)  # of the draft: the target goes on alone
    assert len(answer.token_ids) == 8
    assert failure in str(answer.statistics.draft_failure)


@pytest.mark.parametrize(
    "options", [{"version": "0.21"}, {"tp_size": 2}, {"speculation": "none"}], ids=str
)
def test_other_tensor_names_sizes_and_a_target_alone_are_served(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """0.21 has its own names of two tensors; later versions are alike. Greedy, sampled with a seed,
    and with log-probabilities: of the logits for a pair, of the engine's own for a target alone.
    """
    with (
        served(tmp_path, **options) as server,
        Client(server.grpc_url, model="tensorrt_llm_bls", timeout_s=60) as client,
    ):
        greedy = client.generate(PROMPT, max_tokens=12)
        assert len(greedy.token_ids) == 12
        seeded = [
            client.generate(PROMPT, max_tokens=12, temperature=0.8, seed=seed).token_ids
            for seed in (3, 3, 4)
        ]
        assert seeded[0] == seeded[1] != seeded[2]
        log_probs = client.generate(PROMPT, max_tokens=12, log_probs=True).statistics.log_probs
        assert log_probs is not None and len(log_probs) == 12


def infer(server: TritonServer, model: str, outputs: list[str], **tensors: Any) -> dict[str, Any]:
    inputs = []
    for name, value in tensors.items():
        inputs.append(triton_grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype)))
        inputs[-1].set_data_from_numpy(value)
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        wanted = [triton_grpc.InferRequestedOutput(name) for name in outputs]
        answer = client.infer(model, inputs, outputs=wanted)
    return {name: answer.as_numpy(name) for name in outputs}


def request(**more: Any) -> dict[str, Any]:
    """The tensors of a request for 4 tokens, as a client of the engine model sends them."""
    return {
        "input_ids": np.array([[100, 101, 102]], dtype=np.int32),
        "input_lengths": np.array([[3]], dtype=np.int32),
        "request_output_len": np.array([[4]], dtype=np.int32),
        **more,
    }


def test_the_counts_of_tokens_are_requested_by_scalars_as_in_the_template(
    server: TritonServer,
) -> None:
    """With `reshape` they reach the backend as [batch], like every other scalar of a request."""
    config = model_config.read(server.repository / "tensorrt_llm" / "config.pbtxt")
    scalars = {tensor.name for tensor in config.input if tensor.HasField("reshape")}
    assert {"return_num_input_tokens", "return_num_output_tokens", "streaming"} <= scalars


def test_the_stand_in_is_no_kinder_than_the_backend(server: TritonServer) -> None:
    both = ["output_ids", "sequence_length"]
    plain = infer(server, "tensorrt_llm", both, **request())["output_ids"]
    assert plain.shape == (1, 1, 7)  # with the prompt
    with pytest.raises(InferenceServerException, match="must be present in list of output"):
        infer(server, "tensorrt_llm", ["output_ids"], **request())
    drafts = {"draft_input_ids": np.array([[1, 2]], dtype=np.int32)}
    with pytest.raises(InferenceServerException, match="the engine does not"):
        infer(server, "tensorrt_llm_draft", both, **request(**drafts))
    drafts = {"draft_input_ids": np.ones((1, MAX_DRAFT_LEN + 1), dtype=np.int32)}
    with pytest.raises(InferenceServerException, match="exceed max_draft_len"):
        infer(server, "tensorrt_llm", both, **request(**drafts))
    # Triton itself compares the type that a client sends with the one of config.pbtxt.
    halves = {
        "draft_input_ids": np.array([[1]], dtype=np.int32),
        "draft_logits": np.zeros((1, 1, 258), dtype=np.float16),
    }
    with pytest.raises(InferenceServerException, match="data-type is 'FP16'"):
        infer(server, "tensorrt_llm", both, **request(**halves))
