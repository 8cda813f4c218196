"""What is packaged for the PyTorch flow loads in every version that the plan allows: the served
model file over the stand-in for TensorRT-LLM, which refuses what upstream's classes refuse.

The table of it in docs/tensorrt_llm.md is written by this test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import HEAD, config_of
from tests.support.pages import check_made_part
from tests.support.trtllm_packages import engine
from toolkit.config.schema import TritonConfig
from toolkit.engines.spec import engine_spec
from toolkit.engines.trtllm.llm_args import llm_args, resolved
from toolkit.facts.versions import VERSIONS
from toolkit.plan.make import captured_by_head, make_plan
from toolkit.standins.trtllm import RELEASE_VARIABLE
from toolkit.standins.trtllm.tensorrt_llm.releases import RELEASES
from toolkit.triton.package.trtllm import package_llmapi

PAGE = Path(__file__).parents[3] / "docs" / "tensorrt_llm.md"
PROGRAM = Path(__file__).parents[2] / "support" / "load_served.py"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->\n"
NGRAM = {"draft": None, "speculation__kind": "ngram"}
SCHEDULE = {"speculation__draft_len_schedule": {1: 4, 3: 2, 4: 0}}
LIMIT = {"speculation__max_concurrency": 2}
CASES: dict[str, dict[str, Any]] = {
    "none": {"draft": None, "speculation__kind": "none"},
    "draft_target": {},
    "draft_target, TP 2": {"engine__tp_size": 2, "hardware__count": 2},
    "draft_target, schedule": SCHEDULE,
    "draft_target, max_concurrency": LIMIT,
    "ngram": NGRAM,
    "ngram, schedule": {**NGRAM, **SCHEDULE},
    "ngram, max_concurrency": {**NGRAM, **LIMIT},
    "eagle3": HEAD,
    "eagle3, TP 2": {**HEAD, "engine__tp_size": 2, "hardware__count": 2},
    "eagle3, schedule": {**HEAD, **SCHEDULE},
    "eagle3, max_concurrency": {**HEAD, **LIMIT},
    "mtp": {"draft": None, "speculation__kind": "mtp"},
}
PLAN_REFUSES = "the plan refuses"
ACCEPTED, MENDED = "loads", "loads; was refused"


def config_for(version: str, keys: dict[str, Any]) -> Any:
    """The base deployment in this version, as far as its own limits of precision let it."""
    keys = {"engine__tensorrt_llm": version, **keys}
    if not VERSIONS[version].serving_tags:
        keys["engine__container_image"] = "registry.example/triton:1"
    for role in ("target", "draft"):
        if keys.get(role, "") is not None:
            keys[f"{role}__quantization__allow_unsupported"] = True
    return config_of("pytorch", **keys)


def packaged(folder: Path, version: str, keys: dict[str, Any]) -> Path | None:
    """The repository of this case with the models' paths on this machine; None if the plan refuses
    it.
    """
    config = config_for(version, keys)
    if not make_plan(config).possible:
        return None
    spec = engine_spec(config, "target")
    assert spec.tensorrt_llm is not None
    pair = []
    for role in config.models:
        made = engine(folder / "engines", role, "trtllm_pytorch", spec.tensorrt_llm.tp_size)
        assert made.tensorrt_llm is not None
        pair.append(replace(made, tensorrt_llm=replace(made.tensorrt_llm, version=version)))
    target, draft = pair[0], pair[1] if len(pair) == 2 else None
    asked = replace(spec.tensorrt_llm, captured_layers=captured_by_head(config))
    args = resolved(
        llm_args(spec, asked, config.target.quantization.kv_cache_quant_algo),
        target.path,
        None if draft is None else draft.path,
    )
    image = config.engine.container_image
    out = folder / "out"
    record = package_llmapi(
        target,
        draft,
        args,
        TritonConfig(),
        out,
        name="x",
        max_draft_len=4,
        container_image=image,
    )
    return record.path


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """(version, case) -> the program's answer. Cases that the plan refuses are left out."""
    found = {}
    for version, row in VERSIONS.items():
        folder = tmp_path_factory.mktemp(version)
        repositories = {}
        for number, (case, keys) in enumerate(CASES.items()):
            path = packaged(folder / str(number), version, keys)
            if path is not None:
                repositories[case] = path
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *map(str, repositories.values())],
            env={**os.environ, RELEASE_VARIABLE: row.release},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answered = json.loads(done.stdout.splitlines()[-1])
        for case, answer in zip(repositories, answered, strict=True):
            found[version, case] = answer
    return found


def test_the_stand_in_has_a_release_for_every_row() -> None:
    assert list(RELEASES) == [row.release for row in VERSIONS.values()]


def test_the_plan_refuses_what_a_version_does_not_have(
    answers: dict[tuple[str, str], dict[str, Any]],
) -> None:
    left_out = {(version, case) for version in VERSIONS for case in CASES} - set(answers)
    limits = {case for case in CASES if "max_concurrency" in case}
    schedules = {case for case in CASES if "schedule" in case}
    heads = {case for case in CASES if "eagle3" in case}
    by_load = heads & (limits | schedules)
    assert left_out == {
        *(("0.21", case) for case in CASES),
        *(("1.0", case) for case in limits | schedules | heads),
        *(("1.1", case) for case in schedules | heads),
        *((version, case) for version in ("1.2.0", "1.2.1", "1.3rc-early") for case in by_load),
        *((version, "mtp") for version in VERSIONS),
    }


def test_a_head_meets_the_class_of_the_version(
    answers: dict[tuple[str, str], dict[str, Any]],
) -> None:
    classes = {
        version: answer["config"] for (version, case), answer in answers.items() if case == "eagle3"
    }
    assert classes == {
        "1.2.0": "EagleDecodingConfig",
        "1.2.1": "EagleDecodingConfig",
        "1.3rc-early": "Eagle3DecodingConfig",
        "1.3rc-late": "Eagle3DecodingConfig",
        "1.4rc": "Eagle3DecodingConfig",
    }


def test_what_the_plan_allows_loads(answers: dict[tuple[str, str], dict[str, Any]]) -> None:
    refused = {key: answer["served"] for key, answer in answers.items() if answer["served"]}
    assert refused == {}


def test_the_mapping_itself_is_refused_up_to_1_2(
    answers: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """The stand-in would not be one otherwise: this is what the server met before."""
    for (version, case), answer in answers.items():
        takes_mapping = VERSIONS[version].speculative_config == "mapping"
        assert (answer["raw"] is None) == (takes_mapping or case == "none"), (version, case)
        if version == "1.2.1" and case != "none":
            assert "Extra inputs are not permitted" in answer["raw"]
        elif version == "1.1" and case != "none":
            assert answer["raw"].startswith("AttributeError: 'decoding_type' is a ClassVar")


def test_scheduling_overlaps_where_upstream_can(
    answers: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """With a draft model from 1.2 on, and with a schedule only where one model drafts; with a head
    always.
    """
    for (version, case), answer in answers.items():
        if "ngram" in case:
            expected = False
        elif case == "none" or "eagle3" in case:
            expected = True
        else:
            expected = version not in ("1.0", "1.1") and (
                "schedule" not in case or VERSIONS[version].one_model
            )
        assert answer["overlaps"] is expected, (version, case)


def test_every_version_is_told_to_sample(answers: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert [key for key, answer in answers.items() if not answer["samples"]] == []


def table(answers: dict[tuple[str, str], dict[str, Any]]) -> str:
    def cell(version: str, case: str) -> str:
        answer = answers.get((version, case))
        if answer is None:
            return PLAN_REFUSES
        is_new = "eagle3" in case  # no served model ever passed it on as a mapping
        return ACCEPTED if answer["raw"] is None or is_new else MENDED

    lines = [["", *VERSIONS], ["---"] * (len(VERSIONS) + 1)]
    lines += [[case, *(cell(version, case) for version in VERSIONS)] for case in CASES]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_table_in_the_docs_says_the_same(
    answers: dict[tuple[str, str], dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    check_made_part(PAGE, BEGIN, END, table(answers), request)
