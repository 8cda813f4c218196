"""A second pair, with other proportions, made of the quickstart pair in a minute and without
training: a target that is several times as wide and reads conversations.

The idea: a layer of an MLP computes the same when each of its neurons is replaced by copies that
share its output. So the wide target writes the quickstart target's text (up to rounding), the draft
fits it as it did, and only the costs change: with 4 copies the target's forward reads 3.4 times as
many weights beside the same draft. Copies are scaled differently, so that quantization meets no
repeated columns.

    python configs/quickstart/widen.py --out DIR [--times 4]
    toolkit build DIR/wide.yaml

writes target, draft, conversations and a YAML file. The chat template fits models that continue
Python: what a user says is how the answer begins.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- bos_token if loop.first or messages[loop.index0 - 1]['role'] == 'assistant' }}
    {%- if message['role'] == 'system' %}
        {{- '# ' + message['content'] + '\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] + eos_token }}
    {%- else %}
        {{- message['content'] }}
    {%- endif %}
{%- endfor %}
"""


def wide_weights(weights: dict[str, Tensor], times: int, generator: torch.Generator) -> Any:
    """Replace each MLP neuron by `times` copies: the same gate, `up` scaled by s, `down` by w / s,
    where the w of a neuron add up to 1.
    """
    wide = dict(weights)
    for name in [name for name in weights if name.endswith("mlp.down_proj.weight")]:
        layer = name.removesuffix("down_proj.weight")
        gate, up, down = (
            weights[f"{layer}{part}_proj.weight"].double() for part in ("gate", "up", "down")
        )
        neurons = len(gate)
        shares = torch.rand(times, neurons, generator=generator, dtype=torch.float64) + 0.5
        shares /= shares.sum(dim=0)
        scales = torch.rand(times, neurons, generator=generator, dtype=torch.float64) + 0.5
        parts = {
            "gate": gate.repeat(times, 1),
            "up": (up[None] * scales[..., None]).flatten(0, 1),
            "down": (down[:, None] * (shares / scales)[None]).flatten(1, 2),
        }
        for part, value in parts.items():
            wide[f"{layer}{part}_proj.weight"] = value.to(weights[name].dtype).contiguous()
    return wide


def write_model(role: str, out: Path, times: int) -> None:
    """A copy of quickstart/`role` with a chat template, `times` as wide."""
    shutil.copytree(HERE / role, out / role, dirs_exist_ok=True)
    (out / role / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    if times == 1:
        return
    weights = load_file(HERE / role / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    path = out / role / "model.safetensors"
    path.unlink()
    save_file(wide_weights(weights, times, generator), path, metadata={"format": "pt"})
    config = json.loads((out / role / "config.json").read_text())
    config["intermediate_size"] *= times
    (out / role / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_conversations(out: Path) -> None:
    """The quickstart's files as messages: a prompt is what a user says; of a text, the user says
    the first third of its lines and the assistant the rest.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in ("calib", "heldout", "prompts"):
        rows = []
        for line in (HERE / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "prompt" in row:
                said = [("user", row["prompt"])]
            else:
                lines = row["text"].splitlines(keepends=True)
                cut = max(1, len(lines) // 3)
                while not "".join(lines[:cut]).strip():
                    cut += 1
                said = [("user", "".join(lines[:cut])), ("assistant", "".join(lines[cut:]))]
            messages = [{"role": role, "content": text} for role, text in said if text]
            rows.append({"messages": messages, "category": row.get("domain", "text")})
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_config(out: Path) -> None:
    config = yaml.safe_load((HERE.parent / "quickstart.yaml").read_text(encoding="utf-8"))
    config["name"] = "wide"
    config["target"]["checkpoint"], config["draft"]["checkpoint"] = "target", "draft"
    config["calibration"] |= {"dataset": "data/calib.jsonl", "heldout": "data/heldout.jsonl"}
    config["speculation"] |= {"max_draft_len": 5, "adaptive": {"enabled": True}}
    # The wider target needs more than the default minute for the tokens of the distribution test.
    slower = {"max_seconds": 180.0}
    config["validation"] |= {"prompts": "data/prompts.jsonl", "distribution": slower}
    (out / "wide.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--times", type=int, default=4, help="copies of each neuron of the target")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    write_model("target", asked.out, asked.times)
    write_model("draft", asked.out, 1)
    write_conversations(asked.out / "data")
    write_config(asked.out)
    print(f"toolkit build {asked.out / 'wide.yaml'}")


if __name__ == "__main__":
    main()
