"""The whole toolkit on pairs far smaller than the quickstart's: the real command builds, serves and
judges a deployment from its YAML.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import write_checkpoint
from toolkit.config.load import load_config
from toolkit.errors import UsageError
from toolkit.records.judged import Divergence
from toolkit.validate.replay import Replay, write_replay
from toolkit.workflows.folders import Workplace
from toolkit.workflows.replay import replay_divergence

PROMPTS = (
    "def read(path):\n",
    "class Stack:\n",
    "import os\n",
    "for i in range(",
    "# sort the list\n",
    "return x + ",
)


def write_deployment(folder: Path, target: Path, draft: Path, **sections: dict[str, Any]) -> Path:
    """Write a YAML and its data files. A random pair cannot be faster with speculation, so latency
    is measured here and not gated.
    """
    lines = [
        {"text": f"line {i}: the quick brown fox jumps over the lazy dog, {i * i} times and more"}
        for i in range(22)
    ]
    for name, part in (("calib", lines[:12]), ("heldout", lines[12:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    )
    quantization = {"quant_algo": "W8A8_SQ_PER_CHANNEL"}
    config: dict[str, Any] = {
        "name": "tiny",
        "target": {"checkpoint": str(target), "quantization": quantization},
        "draft": {"checkpoint": str(draft), "quantization": quantization},
        "calibration": {
            "dataset": "calib.jsonl",
            "heldout": "heldout.jsonl",
            "calib_size": 8,
            "calib_max_seq_length": 64,
        },
        "speculation": {"max_draft_len": 3},
        # So long that no chunk is a single step, however slow the machine: the draft of a random
        # pair agrees too seldom to be judged by its steps.
        "triton": {"stream_interval_ms": 1000},
        "engine": {
            "kind": "torch",
            "mode": "eager",
            "max_batch_size": 4,
            "max_input_len": 64,
            "max_seq_len": 160,
        },
        "validation": {
            "prompts": "prompts.jsonl",
            "max_tokens": 12,
            "rounds": 1,
            "max_rounds": 1,
            # The calibration text is so unlike the prompts that the quantized model would differ
            # from the unquantized one.
            "parity": {"max_divergence_rate": 0.9, "source": "never"},
            "distribution": {"effect": 0.15},  # drawing enough tokens for this effect takes seconds
            "quality": {"max_kl": 5.0},
            "latency": {"min_speedup": None},
            # So short that the open loop has no p99, and none is asked for.
            "load": {"rate": 8, "goodput": {"e2e": 60_000}, "min_goodput": 0.5, "max_seconds": 8},
        },
    }
    config.update(sections)
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(config, indent=1))  # JSON is YAML
    return path


def toolkit(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "toolkit", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def write_divergence(folder: Path, config: Path) -> str:
    """Write a replay file as a validation of `config` does when it finds a fault; its path."""
    divergence = Divergence(
        prompt_index=0,
        prompt=PROMPTS[0],
        arm="speculative",
        draft_len=3,
        position=3,
        kind="broken",
        plain_token=5,
        speculative_token=6,
        margin=2.0,
        plain_rank=0,
        speculative_rank=9,
        plain_gap=0.0,
        speculative_gap=7.0,
        seed=None,
        detail="a token nobody knows",
    )
    stated = load_config(config).model_dump(mode="json", exclude_unset=True)
    replay = Replay(divergence, 12, 0.0, 0.05, (1, 2, 3, 5), (1, 2, 3, 6), stated)
    return str(folder / write_replay(folder / "replay", replay))


def test_a_replay_of_what_cannot_be_judged_here_is_refused(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    file = tmp_path / write_divergence(tmp_path, write_deployment(tmp_path, *tiny_pair))
    workplace = Workplace(tmp_path)
    with pytest.raises(UsageError, match="'tiny' is not built here"):
        replay_divergence(file, workplace)
    workplace.repository("tiny").mkdir(parents=True)
    (workplace.engines("tiny") / "target").mkdir(parents=True)
    # TensorRT-LLM's engines have such a file.
    (workplace.engines("tiny") / "target" / "config.json").write_text('{"pretrained_config": {}}')
    with pytest.raises(UsageError, match="'tiny' has no engine of kind torch here"):
        replay_divergence(file, workplace)
    file.write_text(file.read_text().replace('"kind": "torch"', '"kind": "flashlight"'))
    with pytest.raises(
        UsageError, match=r"the deployment in this replay file is not valid(.|\n)*flashlight"
    ):
        replay_divergence(file, workplace)


@pytest.mark.slow
def test_one_command_ends_in_a_verdict_and_a_second_one_has_nothing_to_do(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = write_deployment(tmp_path, *tiny_pair)
    first = toolkit("build", str(config), cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "PASS" in first.stdout
    report = json.loads((tmp_path / "build/reports/tiny/report.json").read_text())
    assert report["verdict"] == "PASS"
    assert report["parity"]["prompts"] == len(PROMPTS)
    assert {"plain", "speculative"} <= set(report["arms"])
    assert report["quality"]["target"]["tokens"] > 0
    assert "serve" in [stage["stage"] for stage in report["memory"]]
    (served,) = (stage for stage in report["stages"] if stage["stage"] == "serve")
    assert served["peak_memory_bytes"] > 50_000_000  # a server, its stub and torch
    arms = report["load"]["point"]["arms"]
    assert [(arm["name"], arm["requests"], arm["failed"]) for arm in arms] == [
        ("plain", 32, 0),
        ("speculative", 32, 0),
    ]
    assert arms[1]["acceptance"]["verify_steps"] > 0 and arms[1]["goodput_share"]["low"] > 0.5
    assert [agreement["against"] for agreement in report["agreements"]] == ["engine"]
    assert all(test["control_rejected"] for test in report["distribution"]["tests"])
    for folder in ("engines/tiny/target", "engines/tiny/draft", "triton_repo/tiny/tensorrt_llm/1"):
        assert (tmp_path / folder).is_dir()
    second = toolkit("build", str(config), cwd=tmp_path)
    assert second.returncode == 0
    assert "nothing changed" in second.stdout
    explained = toolkit("explain", str(config), cwd=tmp_path)
    assert explained.returncode == 0
    assert "reused" in explained.stdout
    again = toolkit("validate", "--replay", write_divergence(tmp_path, config), cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "then  output token 4: broken, a token nobody knows" in again.stdout
    assert (
        "now   identical" in again.stdout and "the texts are not those of the file" in again.stdout
    )


ODD_PAIRS = {
    "qwen2-f16-shards": (
        {
            "family": "qwen2",
            "dtype": "float16",
            "max_shard_size": "60KB",
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
        },
        {
            "family": "llama",
            "dtype": "float32",
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "head_dim": 8,
        },
    ),
    "qwen3-odd-heads": (
        {"family": "qwen3", "dtype": "float32", "head_dim": 32, "tie_word_embeddings": True},
        {
            "family": "mistral",
            "dtype": "bfloat16",
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 24,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD_PAIRS)
def test_checkpoints_that_differ_in_all_but_the_tokenizer_work(name: str, tmp_path: Path) -> None:
    target_options, draft_options = ODD_PAIRS[name]
    eos = [257, 10]  # several EOS ids
    target = write_checkpoint(tmp_path / "target", seed=3, eos_token_id=eos, **target_options)
    draft = write_checkpoint(
        tmp_path / "draft", seed=4, eos_token_id=eos, num_hidden_layers=1, **draft_options
    )
    for folder in (target, draft):
        (folder / "generation_config.json").unlink(missing_ok=True)
    config = write_deployment(tmp_path, target, draft)
    done = toolkit("build", str(config), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "build/reports/tiny/report.json").read_text())
    assert report["verdict"] == "PASS"


@pytest.mark.slow
def test_a_pair_that_is_padded_differently_is_repaired_and_the_report_says_so(
    tmp_path: Path,
) -> None:
    """Qwen2.5 does this: the target has more rows than the draft for the same tokens. A draft with
    another chat template is reported too.
    """
    target = write_checkpoint(tmp_path / "target", family="qwen2", seed=5, vocab_size=320)
    draft = write_checkpoint(
        tmp_path / "draft",
        family="qwen2",
        seed=6,
        vocab_size=272,
        num_hidden_layers=1,
        tie_word_embeddings=True,
    )
    (draft / "chat_template.jinja").write_text("{{ messages[0].content }}")
    config = write_deployment(tmp_path, target, draft)
    done = toolkit("build", str(config), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "build/reports/tiny/report.json").read_text())
    assert report["verdict"] == "PASS"
    assert {role: engine["vocab_size"] for role, engine in report["engines"].items()} == {
        "target": 272,
        "draft": 272,
    }
    warnings = {
        finding["check"]: finding
        for finding in report["findings"]
        if finding["severity"] == "warning"
    }
    assert warnings["vocabulary"]["detail"].startswith("the target's 320 rows are trimmed to 272")
    assert warnings["chat template"]["detail"].startswith("the target has none, and the draft has")
    assert (
        "the target's 320 rows are trimmed to 272"
        in (tmp_path / "build/reports/tiny/report.md").read_text()
    )
    [proof] = (tmp_path / "build/store/pair").glob("*/record.json")
    record = json.loads(proof.read_text())["record"]
    assert (record["target_vocab_size"], record["draft_vocab_size"], record["vocab_size"]) == (
        320,
        272,
        272,
    )


def test_generated_files_are_left_out_of_git() -> None:
    root = Path(__file__).parents[1]
    ignored = (root / ".gitignore").read_text()
    for folder in ("build", "engines", "triton_repo"):
        assert f"/{folder}/*" in ignored
        assert (root / folder / "README.md").is_file()


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.slow
def test_a_deployment_of_an_instruct_pair_is_built_and_judged_on_messages(tmp_path: Path) -> None:
    """Calibration, held-out text, the prompts of tune and validate: the target's template writes
    all of them, and is part of every key that it decides.
    """
    target = write_checkpoint(tmp_path / "target", seed=5)
    draft = write_checkpoint(tmp_path / "draft", seed=6, num_hidden_layers=1)
    for checkpoint in (target, draft):
        (checkpoint / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = write_deployment(tmp_path, target, draft, speculation={"max_draft_len": "auto"})
    for name in ("calib", "heldout", "prompts"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        conversations: list[dict[str, Any]] = [
            {
                "messages": [
                    {"role": "user", "content": row.get("text", row.get("prompt"))[:40]},
                    {"role": "assistant", "content": "yes"},
                ],
                "category": "code",
            }
            for row in rows
        ]
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in conversations)
        )

    done = toolkit("build", str(config), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "build/reports/tiny/report.json").read_text())
    assert report["verdict"] == "PASS"
    assert "raw text" not in {finding["check"] for finding in report["findings"]}
    templates = {
        stage: {record["parts"]["inputs"].get("chat_template") for record in records}
        for stage in ("pair", "quantize", "tune", "validate")
        if (
            records := [
                json.loads(file.read_text())
                for file in (tmp_path / "build/store").glob(f"{stage}*/**/record.json")
            ]
        )
    }
    assert templates["pair"] == {None}
    (digest,) = templates["quantize"]
    assert digest is not None
    assert templates["tune"] == templates["validate"] == {digest}
