"""Raw text beside a chat template is told, by key, and messages are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.chat_templates import CHATML
from tests.support.checkpoints import write_checkpoint
from toolkit.config.load import load_config
from toolkit.config.schema import DeploymentConfig
from toolkit.workflows.plan import plan_of
from toolkit.workflows.raw_texts import raw_text_findings, raw_texts

MESSAGES = Path(__file__).parents[1] / "data" / "messages.jsonl"


def deployment(folder: Path, *, template: bool = True, algo: str = "W8A16") -> DeploymentConfig:
    """A target with a chat template, two raw prompts among three, and raw calibration text."""
    target = write_checkpoint(folder / "target")
    if template:
        (target / "chat_template.jinja").write_text(CHATML)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    rows = {
        "prompts": [chat, {"prompt": "b"}, {"prompt": "c"}, {"prompt": "beyond the limit"}],
        "calib": [{"text": text} for text in "defg"],
    }
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    shutil.copy(MESSAGES, folder / "heldout.jsonl")
    (folder / "a.yaml").write_text(
        f"name: a\ntarget: {{checkpoint: target, quantization: {{quant_algo: {algo}}}}}\n"
        "speculation: {kind: none}\n"
        "calibration: {dataset: calib.jsonl, heldout: heldout.jsonl, calib_size: 3}\n"
        "validation: {prompts: prompts.jsonl, max_prompts: 3}\n"
    )
    return load_config(folder / "a.yaml")


def test_raw_text_beside_a_template_is_named_by_its_key(tmp_path: Path) -> None:
    assert list(raw_texts(deployment(tmp_path))) == [
        (
            "validation.prompts",
            "2 of the 3 texts that are used are raw, and the target has a chat template:"
            " acceptance, parity and latency are measured on text that no chat client sends",
        ),
        (
            "calibration.dataset",
            "3 of the 3 texts that are used are raw, and the target has a chat template: activation"
            " scales are measured on text that no chat client sends",
        ),
    ]


def test_the_plan_warns_with_a_way_out_and_the_report_says_the_same(tmp_path: Path) -> None:
    config = deployment(tmp_path)
    plan = plan_of(config)
    judged = [one for one in plan.judgements if one.rule == "toolkit-raw-text"]
    assert [(one.severity, one.path) for one in judged] == [
        ("warning", "validation.prompts"),
        ("warning", "calibration.dataset"),
    ]
    assert judged[0].hint is not None and '{"messages": [' in judged[0].hint
    assert [finding.detail for finding in raw_text_findings(config)] == [
        f"{one.path}: {one.what}" for one in judged
    ]


@pytest.mark.parametrize(
    ("template", "algo", "keys"),
    [
        (True, "NO_QUANT", ["validation.prompts"]),  # calibration text is not used
        (False, "W8A16", []),
    ],
)
def test_what_is_not_used_or_has_no_template_is_not_judged(
    tmp_path: Path, template: bool, algo: str, keys: list[str]
) -> None:
    config = deployment(tmp_path, template=template, algo=algo)
    if not template:  # messages need one
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    assert [key for key, _ in raw_texts(config)] == keys


@pytest.mark.parametrize(
    ("checkpoint", "keys"),
    [
        ("Qwen/Qwen3-8B", ["validation.prompts", "calibration.dataset"]),  # known
        ("google/gemma-2-9b-it", ["validation.prompts", "calibration.dataset"]),
        ("meta-llama/Llama-2-7b-chat-hf", ["validation.prompts", "calibration.dataset"]),
        ("Qwen/Qwen2.5-0.5B", []),
        ("somebody-chat/digit-base", []),
    ],
)
def test_a_hub_id_is_judged_by_its_name(tmp_path: Path, checkpoint: str, keys: list[str]) -> None:
    """Whether its template was fetched before does not matter."""
    deployment(tmp_path)
    chosen = [f"target.checkpoint={checkpoint}"]
    plan = plan_of(load_config(tmp_path / "a.yaml", chosen))
    judged = [one for one in plan.judgements if one.rule == "toolkit-raw-text"]
    assert [one.path for one in judged] == keys
    assert all("and the target is an instruct model" in one.what for one in judged)


def test_messages_without_a_template_are_refused_by_the_plan(tmp_path: Path) -> None:
    config = deployment(tmp_path, template=False)
    plan = plan_of(config)
    refused = {one.path: one.what for one in plan.judgements if one.rule == "toolkit-texts"}
    assert not plan.possible
    assert "has no chat template to write them" in refused["validation.prompts"]
    assert "has no chat template to write them" in refused["calibration"]


def test_a_template_that_cannot_be_used_is_refused_by_the_plan(tmp_path: Path) -> None:
    config = deployment(tmp_path)
    (tmp_path / "target" / "chat_template.jinja").write_text("{% if %}")
    plan = plan_of(config)
    refused = {one.path: one.what for one in plan.judgements if one.rule == "toolkit-texts"}
    assert "chat_template.jinja: the chat template fails, in its line 1" in refused["calibration"]
