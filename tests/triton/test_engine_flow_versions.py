"""What is packaged for the engine flow answers in every version that the plan allows, in both of
its layouts' models: `tensorrt_llm_bls`, and `ensemble`. A real tritonserver runs them around the
stand-in of the backend `tensorrtllm`.

The table of it in docs/tensorrt_llm.md is written by this test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.support.deployments import config_of
from tests.support.pages import check_made_part
from tests.support.tensorrtllm_backend import built, launch_with_standin, packaged
from tests.support.upstream_clients import end_to_end, infer, int32
from toolkit.client import Client
from toolkit.facts.versions import VERSIONS
from toolkit.plan.make import make_plan
from toolkit.triton.process.localize import render_here
from toolkit.triton.process.server import TritonServer

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "tensorrt_llm.md"
BEGIN, END = "<!-- engine versions: begin -->\n", "<!-- engine versions: end -->\n"
NO_DRAFT = {"draft": None, "speculation__kind": "none"}
CASES: dict[str, dict[str, Any]] = {
    "none": NO_DRAFT,
    "draft_target": {},
    "draft_target, TP 2": {"engine__tp_size": 2, "hardware__count": 2},
    "draft_target, schedule": {"speculation__draft_len_schedule": {1: 4, 3: 2, 4: 0}},
    "draft_target, max_concurrency": {"speculation__max_concurrency": 2},
    "ngram": {"draft": None, "speculation__kind": "ngram"},
}
MODELS = {"bls": "tensorrt_llm_bls", "ensemble": "ensemble"}
PLAN_REFUSES, PLAIN, DRAFTS = "the plan refuses", "answers", "answers with drafts"
PROMPT, TOKENS = "def f(x):", 12
Cell = tuple[str, str, str]  # version, case, layout


def is_possible(version: str, keys: dict[str, Any]) -> bool:
    """Whether the plan allows it, as far as the version's own limits of precision let it."""
    keys = {"engine__tensorrt_llm": version, **keys}
    for role in ("target", "draft"):
        if keys.get(role, "") is not None:
            keys[f"{role}__quantization__allow_unsupported"] = True
    return make_plan(config_of("engine", **keys)).possible


def texts_of(server: TritonServer) -> dict[str, tuple[str, bool]]:
    """Layout -> (the greedy text, whether tokens were drafted for it). The stand-in's tokens are
    halves of characters, and each is a replacement character in the text.
    """
    with Client(server.grpc_url, model=MODELS["bls"], timeout_s=60) as client:
        answer = client.generate(PROMPT, max_tokens=TOKENS)
    plain, _ = end_to_end(server.grpc_url, MODELS["ensemble"], PROMPT, TOKENS)
    is_drafted = bool(answer.statistics.drafted)
    return {"bls": (answer.text, is_drafted), "ensemble": (plain.removeprefix(PROMPT), False)}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, str]:
    answers = {}
    for version in VERSIONS:
        for case, keys in CASES.items():
            if not is_possible(version, keys):
                answers.update({(version, case, layout): PLAN_REFUSES for layout in MODELS})
                continue
            folder = tmp_path_factory.mktemp("engine_flow")
            engines = built(
                folder,
                version,
                tp_size=keys.get("engine__tp_size", 1),
                speculation="none" if keys is NO_DRAFT else "draft_target",
            )
            here = render_here(packaged(engines, folder / "repository").path, folder / "here")
            with TritonServer(here, launch=launch_with_standin) as server:
                texts = texts_of(server)
            for layout, (text, is_drafted) in texts.items():
                assert len(text) == TOKENS, (version, case, layout)
                answers[version, case, layout] = DRAFTS if is_drafted else PLAIN
    return answers


def test_every_version_of_the_engine_flow_answers_in_both_layouts(cells: dict[Cell, str]) -> None:
    for (version, case, layout), answer in cells.items():
        is_served = VERSIONS[version].engine_flow and case in (
            "none",
            "draft_target",
            "draft_target, TP 2",
        )
        drafts = case != "none" and layout == "bls"
        expected = DRAFTS if drafts else PLAIN
        assert answer == (expected if is_served else PLAN_REFUSES), (version, case, layout)


def table(cells: dict[Cell, str]) -> str:
    lines = [["", *VERSIONS], ["---"] * (len(VERSIONS) + 1)]
    lines += [
        [f"{case}, `{layout}`", *(cells[version, case, layout] for version in VERSIONS)]
        for case in CASES
        for layout in MODELS
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_table_in_the_docs_says_the_same(
    cells: dict[Cell, str], request: pytest.FixtureRequest
) -> None:
    check_made_part(PAGE, BEGIN, END, table(cells), request)


def test_an_ensemble_over_engines_that_are_not_decoupled_takes_one_prompt(tmp_path: Path) -> None:
    """As the backend itself (src/utils.cc, createRequestsFromInputTensors)."""
    repository = packaged(built(tmp_path, speculation="none"), tmp_path / "repository")
    here = render_here(repository.path, tmp_path / "here")
    tensors = {
        "text_input": np.array([["ab"], ["cd"]]).astype(object),
        "max_tokens": int32([3], [3]),
    }
    with (
        TritonServer(here, launch=launch_with_standin) as server,
        triton_grpc.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match=r"Batch size > 1 requires .* decoupled"),
    ):
        infer(client, "ensemble", tensors)
