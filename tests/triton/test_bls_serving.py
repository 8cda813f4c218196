"""The bls layout in a real tritonserver gives the answers of llmapi: also when streaming, with
other requests at the same time, and when drafts fail.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import np_to_triton_dtype

from tests.support.serving import (
    MAX_BATCH_SIZE,
    MAX_DRAFT_LEN,
    MAX_INPUT_LEN,
    MAX_SEQ_LEN,
    add_bls_variant,
)
from toolkit.client import Client, Options, RequestRefused
from toolkit.triton.package import model_config
from toolkit.triton.process.server import TritonServer

PROMPTS = tuple(f"def f{number}(x): return {'x' * (number % 7)}" for number in range(16))
CASES = [
    Options(max_tokens=1),
    Options(max_tokens=2),
    Options(max_tokens=30),
    Options(max_tokens=30, num_draft_tokens=1),
    Options(max_tokens=30, num_draft_tokens=0),
    Options(max_tokens=20, stop=("e", "xyz")),
    Options(max_tokens=20, acceptance="verify_only"),
    Options(max_tokens=30, temperature=0.8, seed=7),
    Options(max_tokens=25, temperature=1.2, top_k=20, top_p=0.9, seed=8, num_draft_tokens=2),
]


@pytest.fixture(scope="module")
def client(tiny_bls_server: TritonServer) -> Iterator[Client]:
    with Client(tiny_bls_server.grpc_url, timeout_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def llmapi(tiny_server: TritonServer) -> Iterator[Client]:
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        yield client


def variant(server: TritonServer, name: str) -> Client:
    return Client(server.grpc_url, model=f"bls_{name}", timeout_s=60)


def post(server: TritonServer, path: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://{server.http_url}/v2/models/{path}", data=json.dumps(body).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def infer(
    client: triton_grpc.InferenceServerClient, model: str, tensors: dict[str, Any]
) -> dict[str, Any]:
    """One answer of a model, decoupled or not, as name -> array."""
    inputs = []
    for name, value in tensors.items():
        array = np.array(value)
        inputs.append(triton_grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    answers: list[Any] = []
    client.start_stream(lambda result, error: answers.append(error or result))
    client.async_stream_infer(model, inputs)
    client.stop_stream()
    (answer,) = [
        item for item in answers if isinstance(item, Exception) or item.get_response().outputs
    ]
    if isinstance(answer, Exception):
        raise answer
    return {output.name: answer.as_numpy(output.name) for output in answer.get_response().outputs}


@pytest.mark.parametrize("options", CASES)
def test_the_answers_are_those_of_the_llmapi_layout(
    client: Client, llmapi: Client, options: Options
) -> None:
    for prompt in PROMPTS[:3]:
        ours, theirs = client.generate(prompt, options), llmapi.generate(prompt, options)
        assert (ours.text, ours.token_ids, ours.finish_reason) == (
            theirs.text,
            theirs.token_ids,
            theirs.finish_reason,
        )
        assert ours.stop_reason == theirs.stop_reason
        for figure in (
            "input_tokens",
            "output_tokens",
            "drafted",
            "accepted",
            "verify_steps",
            "accepted_by_position",
        ):
            if figure != "accepted_by_position" or options.num_draft_tokens != 0:
                assert getattr(ours.statistics, figure) == getattr(theirs.statistics, figure), (
                    figure
                )


@pytest.mark.parametrize("options", CASES)
def test_streaming_gives_what_one_answer_gives(client: Client, options: Options) -> None:
    whole = client.generate(PROMPTS[3], options)
    chunks = list(client.stream(PROMPTS[3], options))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert chunks[-1].finish_reason == whole.finish_reason
    assert chunks[-1].output_tokens == len(whole.token_ids) == whole.statistics.output_tokens


def test_speculation_streams_and_reports_its_acceptance(client: Client) -> None:
    """At temperature 1.2 with shared noise, so that the random pair agrees now and then."""
    options = Options(max_tokens=100, temperature=1.2, seed=3)
    plain = client.generate(PROMPTS[0], options, num_draft_tokens=0)
    chunks = list(client.stream(PROMPTS[0], options))
    figures = chunks[-1].statistics
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == plain.token_ids
    assert len(chunks) > 2
    assert figures is not None
    assert figures.drafted is not None
    assert figures.accepted is not None
    assert figures.drafted_by_position is not None
    assert 0 < figures.accepted < figures.drafted == sum(figures.drafted_by_position)
    assert figures.verify_steps == 99 - figures.accepted
    assert plain.statistics.drafted == 0


def test_sixteen_at_once_get_what_each_gets_alone(client: Client) -> None:
    cases = [(prompt, CASES[number % len(CASES)]) for number, prompt in enumerate(PROMPTS)]
    alone = [client.generate(prompt, options) for prompt, options in cases]

    def run(number: int) -> tuple[str, tuple[int, ...], str | None]:
        prompt, options = cases[number]
        if number % 2:
            whole = client.generate(prompt, options)
            return whole.text, whole.token_ids, whole.finish_reason
        chunks = list(client.stream(prompt, options))
        ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        return "".join(chunk.text for chunk in chunks), ids, chunks[-1].finish_reason

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(run, range(16)))
    assert together == [(whole.text, whole.token_ids, whole.finish_reason) for whole in alone]


@pytest.mark.parametrize("acceptance", ["rejection", "coupled", "sample_match"])
def test_every_rule_serves_sampled_requests(client: Client, acceptance: str) -> None:
    whole = client.generate(
        PROMPTS[1], max_tokens=60, temperature=1.2, seed=7, acceptance=acceptance
    )
    assert whole.statistics.drafted
    assert whole.statistics.accepted is not None
    assert len(whole.token_ids) == 60 or whole.finish_reason == "stop"


def test_an_http_client_written_for_tensorrt_llm_is_served(
    tiny_bls_server: TritonServer, client: Client
) -> None:
    expected = client.generate(PROMPTS[2], max_tokens=24)
    body = {
        "text_input": PROMPTS[2],
        "max_tokens": 24,
        "bad_words": "",
        "stop_words": "",
        "stream": False,
    }
    speculative = {
        **body,
        "num_draft_tokens": 3,
        "use_draft_logits": False,
        "return_perf_metrics": True,
    }
    for request in (body, speculative):
        status, text = post(tiny_bls_server, "tensorrt_llm_bls/generate", request)
        assert status == 200, text
        assert json.loads(text)["text_output"] == PROMPTS[2] + expected.text
    figures = json.loads(text)
    assert figures["total_draft_tokens"] == expected.statistics.drafted
    assert figures["kv_cache_reused_blocks"] > figures["kv_cache_alloc_new_blocks"]
    _, text = post(
        tiny_bls_server, "tensorrt_llm_bls/generate_stream", {**speculative, "stream": True}
    )
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert "".join(event["text_output"] for event in events) == expected.text


def test_accumulated_chunks_repeat_the_text(tiny_bls_server: TritonServer, client: Client) -> None:
    body = {"text_input": PROMPTS[2], "max_tokens": 40, "stream": True}
    _, text = post(tiny_bls_server, "bls_accumulating/generate_stream", body)
    texts = [
        json.loads(line.removeprefix("data: "))["text_output"] for line in text.splitlines() if line
    ]
    assert texts[-1] == client.generate(PROMPTS[2], max_tokens=40).text
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    with variant(tiny_bls_server, "accumulating") as accumulating:
        assert (
            "".join(chunk.text for chunk in accumulating.stream(PROMPTS[2], max_tokens=40))
            == texts[-1]
        )


def test_a_loop_written_against_the_engine_models_gives_the_same_text(
    tiny_bls_server: TritonServer, client: Client
) -> None:
    """The loop of TensorRT-LLM's own client: it calls every model with that model's tensors, and
    every answer holds prompt and output together.
    """
    expected = client.generate(PROMPTS[4], max_tokens=20)
    with triton_grpc.InferenceServerClient(tiny_bls_server.grpc_url) as raw:
        query = {
            "QUERY": [[PROMPTS[4].encode()]],
            "REQUEST_OUTPUT_LEN": np.array([[20]], dtype=np.int32),
        }
        prepared = infer(
            raw, "preprocessing", {name: np.array(value) for name, value in query.items()}
        )
        prompt = prepared["INPUT_ID"][0].tolist()
        ids, reused = list(prompt), []
        while len(ids) < len(prompt) + 20 and ids[-1] != prepared["OUT_END_ID"][0][0]:
            common = {
                "input_ids": np.array([ids], dtype=np.int32),
                "input_lengths": np.array([[len(ids)]], dtype=np.int32),
                "end_id": prepared["OUT_END_ID"],
                "return_perf_metrics": np.array([[True]]),
            }
            count = min(3, len(prompt) + 20 - len(ids) - 1)
            drafts: list[int] = []
            if count > 0:
                draft = infer(
                    raw,
                    "tensorrt_llm_draft",
                    {**common, "request_output_len": np.array([[count]], dtype=np.int32)},
                )
                length = draft["sequence_length"][0][0]
                drafts = draft["output_ids"][0][0][len(ids) : length].tolist()
                common["draft_input_ids"] = np.array([drafts], dtype=np.int32)
            wanted = np.array([[len(drafts) + 1]], dtype=np.int32)
            target = infer(raw, "tensorrt_llm", {**common, "request_output_len": wanted})
            new = target["output_ids"][0][0][: target["sequence_length"][0][0]].tolist()
            assert new[: len(ids)] == ids
            assert 1 <= len(new) - len(ids) <= len(drafts) + 1
            reused.append(int(target["kv_cache_reused_blocks"][0][0]) / (len(ids) - 1))
            ids = new
        assert tuple(ids[len(prompt) :]) == expected.token_ids
        # Every round but the first computes only one token and the drafts.
        assert reused[1:] == [1.0] * len(reused[1:])
        rows = {
            "TOKENS_BATCH": np.array([[ids]], dtype=np.int32),
            "SEQUENCE_LENGTH": np.array([[len(ids)]], dtype=np.int32),
        }
        assert infer(raw, "postprocessing", rows)["OUTPUT"][0].decode().endswith(expected.text)


def test_draft_logits_travel_from_engine_to_engine(tiny_bls_server: TritonServer) -> None:
    with triton_grpc.InferenceServerClient(tiny_bls_server.grpc_url) as raw:
        common = {
            "input_ids": np.array([[256, 100, 101]], dtype=np.int32),
            "input_lengths": np.array([[3]], dtype=np.int32),
            "exclude_input_in_output": np.array([[True]]),
            "temperature": np.array([[1.0]], dtype=np.float32),
            "runtime_top_p": np.array([[1.0]], dtype=np.float32),
            "seed": np.array([[5]], dtype=np.uint64),
        }
        draft_inputs = {
            "request_output_len": np.array([[3]], dtype=np.int32),
            "return_generation_logits": np.array([[True]]),
        }
        draft = infer(raw, "tensorrt_llm_draft", {**common, **draft_inputs})
        assert draft["generation_logits"].shape == (1, 1, 3, 258)
        target_inputs = {
            "request_output_len": np.array([[4]], dtype=np.int32),
            "draft_input_ids": draft["output_ids"][0],
            "draft_logits": draft["generation_logits"][0],
        }
        target = infer(raw, "tensorrt_llm", {**common, **target_inputs})
        assert 1 <= target["sequence_length"][0][0] <= 4
        with pytest.raises(Exception, match="for these draft tokens it has to be"):
            infer(
                raw,
                "tensorrt_llm",
                {**common, **target_inputs, "draft_logits": draft["generation_logits"][0][:, :2]},
            )


def test_log_probabilities_add_up(tiny_bls_server: TritonServer) -> None:
    body = {"text_input": PROMPTS[5], "max_tokens": 15, "return_log_probs": True}
    speculative, plain = (
        json.loads(
            post(tiny_bls_server, "tensorrt_llm_bls/generate", {**body, "num_draft_tokens": n})[1]
        )
        for n in (3, 0)
    )
    assert speculative["output_log_probs"] == pytest.approx(plain["output_log_probs"])
    for answer_tensors in (speculative, plain):
        assert (
            len(answer_tensors["next_best_ids"])
            == len(answer_tensors["next_best_log_probs"])
            == len(answer_tensors["output_log_probs"])
            == 15
        )
        assert all(
            other <= chosen
            for chosen, other in zip(
                answer_tensors["output_log_probs"],
                answer_tensors["next_best_log_probs"],
                strict=True,
            )
        )
    assert speculative["next_best_ids"] == plain["next_best_ids"]
    assert speculative["cum_log_probs"] == pytest.approx(
        sum(speculative["output_log_probs"]), rel=1e-5
    )


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", Options(max_tokens=1), "text_input is empty"),
        ("x", Options(max_tokens=0), "max_tokens is 0"),
        ("x", Options(max_tokens=MAX_SEQ_LEN + 1), f"together exceed max_seq_len {MAX_SEQ_LEN}"),
        ("x" * (MAX_INPUT_LEN + 1), Options(max_tokens=1), f"up to {MAX_INPUT_LEN}"),
        (
            "x",
            Options(max_tokens=1, num_draft_tokens=MAX_DRAFT_LEN + 1),
            f"num_draft_tokens is {MAX_DRAFT_LEN + 1}",
        ),
        ("x", Options(max_tokens=1, top_p=1.5), "top_p is 1.5"),
        ("x", Options(max_tokens=3, acceptance="hope"), "acceptance is 'hope'"),
    ],
)
def test_what_cannot_be_served_is_refused(
    client: Client, prompt: str, options: Options, message: str
) -> None:
    with pytest.raises(RequestRefused, match=message):
        client.generate(prompt, options)
    with pytest.raises(RequestRefused, match=message):
        list(client.stream(prompt, options))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_token": 3}, "unknown input 'max_token'"),
        ({"beam_width": 2}, "beam_width .* is not supported"),
        ({"return_context_logits": True}, "return_context_logits is not served here"),
        ({"repetition_penalty": 1.5}, "repetition_penalty is not served by the embedded engine"),
        ({"image_url_input": "x"}, "images are not served"),
    ],
)
def test_what_this_deployment_lacks_is_refused_by_name(
    tiny_bls_server: TritonServer, extra: dict[str, Any], message: str
) -> None:
    status, text = post(
        tiny_bls_server, "tensorrt_llm_bls/generate", {"text_input": "x", "max_tokens": 3, **extra}
    )
    assert status in (400, 500)
    assert re.search(message, json.loads(text)["error"]), text


def test_a_deadline_ends_a_request_plain_or_not(client: Client) -> None:
    for drafts in (0, 3):
        with pytest.raises(RequestRefused, match="deadline of 5 ms passed after"):
            list(
                client.stream(
                    PROMPTS[6],
                    max_tokens=200,
                    timeout_ms=5,
                    num_draft_tokens=drafts,
                    temperature=1.0,
                    seed=1,
                )
            )


def test_leaving_a_stream_frees_its_room(client: Client, tiny_bls_server: TritonServer) -> None:
    for number in range(6):
        chunks = client.stream(
            PROMPTS[7], max_tokens=200, num_draft_tokens=0 if number % 2 else None
        )
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
    assert eventually(lambda: metric(tiny_bls_server, "toolkit_active_requests") == 0)
    assert client.generate(PROMPTS[0], max_tokens=2).token_ids


def test_adaptive_lengths_give_the_same_texts_and_say_why(
    tiny_bls_server: TritonServer, client: Client
) -> None:
    """The first requests measure what lengths cost; the random pair's drafts are rarely right."""
    reasons: dict[str, int] = {}
    with variant(tiny_bls_server, "adaptive") as adaptive:
        for _ in range(2):
            for prompt, options in itertools.product(("abc", "def f(x)", "xyxyxy"), CASES):
                adapted = adaptive.generate(prompt, options)
                assert adapted.token_ids == client.generate(prompt, options).token_ids
                steps = adapted.statistics.steps_by_reason or {}
                assert sum(steps.values()) == adapted.statistics.verify_steps
                for reason, count in steps.items():
                    reasons[reason] = reasons.get(reason, 0) + count
        long = adaptive.generate(PROMPTS[0] + PROMPTS[1], max_tokens=20).statistics
    assert {"measuring", "request", "fixed"} <= set(reasons)
    assert set(reasons) & {"pays", "acceptance", "load"}
    assert (set(long.steps_by_reason or {}), long.drafted) == ({"prompt length"}, 0)


def test_adaptive_lengths_give_the_same_texts_under_load(
    tiny_bls_server: TritonServer, client: Client
) -> None:
    """The instances of the adaptive model decide together whether they draft."""
    prompts = [f"f{number}(x)" for number in range(16)]
    expected = [client.generate(prompt, max_tokens=40).token_ids for prompt in prompts]
    reasons: set[str] = set()
    with variant(tiny_bls_server, "adaptive") as adaptive, ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            answers = list(
                pool.map(lambda prompt: adaptive.generate(prompt, max_tokens=40), prompts)
            )
            assert [answer.token_ids for answer in answers] == expected
            for answer in answers:
                reasons |= set(answer.statistics.steps_by_reason or {})
        for max_tokens in (1, 2, 3):  # alone again, on instances that saw another load last
            answers = [adaptive.generate(prompt, max_tokens=max_tokens) for prompt in prompts]
            assert [answer.token_ids for answer in answers] == [
                ids[:max_tokens] for ids in expected
            ]
    assert "load" in reasons  # the first epoch is one of plain decoding


def test_rounds_with_their_own_seeds_are_repeatable(tiny_bls_server: TritonServer) -> None:
    """For backends that restart their random numbers with every call."""
    with variant(tiny_bls_server, "seeds_by_call") as by_call:
        first, repeated, other_seed = (
            by_call.generate(PROMPTS[8], max_tokens=30, temperature=1.0, seed=seed)
            for seed in (4, 4, 5)
        )
    assert first.token_ids == repeated.token_ids != other_seed.token_ids


def test_a_missing_draft_is_an_error_or_leaves_the_request_to_the_target(
    tiny_bls_server: TritonServer, client: Client
) -> None:
    expected = client.generate(PROMPTS[9], max_tokens=12, num_draft_tokens=0)
    with (
        variant(tiny_bls_server, "lost_draft") as strict,
        variant(tiny_bls_server, "lost_draft_plain") as lenient,
    ):
        with pytest.raises(
            RequestRefused, match=r"(?s)the model 'nowhere' .*on_draft_failure: plain"
        ):
            strict.generate(PROMPTS[9], max_tokens=12)
        assert strict.generate(PROMPTS[9], max_tokens=12, num_draft_tokens=0).text == expected.text
        assert lenient.generate(PROMPTS[9], max_tokens=12).token_ids == expected.token_ids
        assert (
            "".join(chunk.text for chunk in lenient.stream(PROMPTS[9], max_tokens=12))
            == expected.text
        )
    _, text = post(
        tiny_bls_server,
        "bls_lost_draft_plain/generate",
        {"text_input": PROMPTS[9], "max_tokens": 12},
    )
    assert "the model 'nowhere'" in json.loads(text)["draft_failure"]


def test_a_draft_that_failed_is_left_alone_for_a_while(tiny_bls_server: TritonServer) -> None:
    with variant(tiny_bls_server, "lost_draft_plain") as lenient:
        failures = [
            lenient.generate(PROMPTS[9], max_tokens=4).statistics.draft_failure
            for _ in range(2 * MAX_BATCH_SIZE)
        ]
    assert all("the model 'nowhere'" in (failure or "") for failure in failures)
    assert any("the draft failed less than 10 s ago" in (failure or "") for failure in failures)


WRONG_DRAFT = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.wrong = json.loads(args["model_config"])["parameters"]["wrong"]["string_value"]

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            asked = pb_utils.get_input_tensor_by_name(request, "request_output_len")
            count = int(asked.as_numpy().reshape(-1)[0])
            ids = np.full((1, 1, count), 300 if self.wrong == "ids" else 100, np.int32)
            logits = np.zeros((1, 1, count, 500 if self.wrong == "wide" else 258), np.float32)
            if self.wrong == "nan":
                logits[:] = np.nan
            tensors = [
                pb_utils.Tensor("output_ids", ids),
                pb_utils.Tensor("sequence_length", np.array([[count]], np.int32)),
                pb_utils.Tensor("generation_logits", logits),
            ]
            if self.wrong == "length":
                del tensors[1]
            sender.send(
                pb_utils.InferenceResponse(tensors),
                flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
"""


def test_a_draft_that_answers_wrongly_fails_no_request(
    tiny_bls_server: TritonServer, client: Client, tmp_path: Path
) -> None:
    """On a server of its own, with drafts that each are wrong in their way."""
    told = {
        "ids": "outside the vocabulary: 300 to 300",
        "nan": "not finite",
        "wide": "the target did not verify its drafts",
        "length": "no sequence_length",
    }
    repository = tmp_path / "repository"
    shutil.copytree(tiny_bls_server.repository, repository)
    for folder in repository.glob("bls_*"):
        shutil.rmtree(folder)
    for wrong in told:
        draft = repository / f"draft_{wrong}"
        shutil.copytree(repository / "tensorrt_llm_draft", draft)
        config = model_config.read(draft / "config.pbtxt")
        config.name, config.backend = draft.name, "python"
        config.parameters["wrong"].string_value = wrong
        model_config.write(config, draft / "config.pbtxt")
        (draft / "1" / "model.py").write_text(WRONG_DRAFT)
        parameters = {"tensorrt_llm_draft_model_name": draft.name}
        add_bls_variant(repository, f"bls_{wrong}", parameters)
    options = Options(max_tokens=12, temperature=0.8, seed=7, acceptance="rejection")
    expected = client.generate(PROMPTS[9], max_tokens=12, num_draft_tokens=0)
    with TritonServer(repository) as server:
        for wrong, message in told.items():
            with variant(server, wrong) as wronged:
                answer = wronged.generate(PROMPTS[9], options)
                assert message in str(answer.statistics.draft_failure), wrong
                assert len(answer.token_ids) == 12 or answer.finish_reason == "stop"
                greedy = wronged.generate(
                    PROMPTS[9], max_tokens=12
                )  # while the draft is left alone
                assert greedy.token_ids == expected.token_ids
                assert message in str(greedy.statistics.draft_failure)
                steps = greedy.statistics.steps_by_reason
                assert steps == {"draft failed": greedy.statistics.verify_steps}


def test_the_draft_gives_up_before_the_request_does(tiny_bls_server: TritonServer) -> None:
    def timeout_s(model: str) -> float:
        url = f"http://{tiny_bls_server.http_url}/v2/models/{model}/config"
        with urllib.request.urlopen(url, timeout=10) as answer:
            parameters = json.loads(answer.read())["parameters"]
        return float(parameters["request_timeout_s"]["string_value"])

    assert timeout_s("tensorrt_llm_draft") == timeout_s("tensorrt_llm") / 4 == 15.0


def test_a_dead_draft_is_an_error_or_leaves_the_request_to_the_target(
    tiny_bls_server: TritonServer,
) -> None:
    """On a server of its own, since it kills the draft model's process."""
    with (
        TritonServer(tiny_bls_server.repository) as server,
        Client(server.grpc_url, timeout_s=60) as client,
        variant(server, "strict") as strict,
    ):
        expected = client.generate(PROMPTS[10], max_tokens=12, num_draft_tokens=0)
        assert client.generate(PROMPTS[10], max_tokens=12).statistics.drafted
        os.kill(stub_of("tensorrt_llm_draft", server.pid), signal.SIGKILL)
        time.sleep(2.5)  # the supervisor checks a dead process twice before it acts
        assert client.generate(PROMPTS[10], max_tokens=12).token_ids == expected.token_ids
        with pytest.raises(RequestRefused, match="tensorrt_llm_draft"):
            strict.generate(PROMPTS[10], max_tokens=12)
        server.check()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_draft_that_dies_or_stands_still_in_mid_stream_fails_no_request(
    tiny_bls_server: TritonServer, client: Client, sign: signal.Signals
) -> None:
    """On a server of its own. The draft is stopped within a call: it is the draft's turn when the
    process does not run and no token comes.
    """
    options = Options(max_tokens=100, temperature=1.2, seed=3)
    expected = client.generate(PROMPTS[0], options, num_draft_tokens=0)
    with (
        TritonServer(tiny_bls_server.repository) as server,
        Client(server.grpc_url, timeout_s=60) as own,
    ):
        draft = stub_of("tensorrt_llm_draft", server.pid)
        answers = [own.stream(prompt, options) for prompt in (PROMPTS[0], PROMPTS[1])]
        seen = [[next(answer), next(answer), next(answer)] for answer in answers]
        os.kill(draft, signal.SIGSTOP)
        time.sleep(0.3)
        began = time.monotonic()
        if sign == signal.SIGKILL:
            os.kill(draft, sign)
        with ThreadPoolExecutor(2) as pool:
            rests = list(pool.map(list, answers))
        seconds = time.monotonic() - began
        chunks = seen[0] + rests[0]
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected.token_ids
        for rest in rests:
            assert rest[-1].statistics is not None
            assert "tensorrt_llm_draft" in str(rest[-1].statistics.draft_failure)
        assert seconds < (5.0 if sign == signal.SIGKILL else 20.0)
        again = own.generate(PROMPTS[0], options)
        assert (again.token_ids, again.statistics.drafted) == (expected.token_ids, 0)
        server.check()
        killed = "stands still and is killed" in server.log_path.read_text()
        assert killed == (sign == signal.SIGSTOP)


HANGING = """

from pathlib import Path

def hanging(self, step=Executor.step):
    while self._open and Path(__file__).with_name("hang").exists():
        time.sleep(0.05)
    return step(self)

Executor.step = hanging
"""


def test_a_draft_whose_forward_does_not_return_is_given_up_and_ended(
    tiny_bls_server: TritonServer, client: Client, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(tiny_bls_server.repository, repository)
    for folder in repository.glob("bls_*"):
        shutil.rmtree(folder)
    draft = repository / "tensorrt_llm_draft"
    config = model_config.read(draft / "config.pbtxt")
    config.parameters["request_timeout_s"].string_value = "2"
    model_config.write(config, draft / "config.pbtxt")
    model = draft / "1" / "model.py"
    model.write_text(model.read_text() + HANGING)
    expected = client.generate(PROMPTS[0], max_tokens=40, num_draft_tokens=0)
    with TritonServer(repository) as server, Client(server.grpc_url, timeout_s=60) as own:
        pid = stub_of("tensorrt_llm_draft", server.pid)
        assert own.generate(PROMPTS[0], max_tokens=40).statistics.drafted
        model.with_name("hang").touch()
        began = time.monotonic()
        answer = own.generate(PROMPTS[0], max_tokens=40)
        assert 2.0 < time.monotonic() - began < 8.0
        assert answer.token_ids == expected.token_ids
        assert "the engine does not answer" in str(answer.statistics.draft_failure)
        assert eventually(lambda: state_of(pid) in ("Z", ""))
        assert own.generate(PROMPTS[0], max_tokens=40).token_ids == expected.token_ids
        server.check()


def state_of(pid: int) -> str:
    """The state of a process in /proc; empty if it is gone."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def stub_of(model: str, server: int) -> int:
    """The process that runs a Python model of this server, with whichever backend."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if parent == server and any(f"/{model}/" in word for word in words):
            return int(folder.name)
    raise AssertionError(f"no process runs {model}")


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def metric(server: TritonServer, name: str) -> float:
    page = urllib.request.urlopen(server.metrics_url, timeout=10).read().decode()
    values = [
        line.split()[-1]
        for line in page.splitlines()
        if line.startswith(f'{name}{{model="tensorrt_llm_bls"')
    ]
    return float(values[0])
