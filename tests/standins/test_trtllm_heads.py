"""What the stand-in for TensorRT-LLM refuses of heads and MTP layers, release by release, as the
classes of upstream's llm_args.py do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from toolkit.standins.trtllm import PACKAGE, RELEASE_VARIABLE

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tensorrt_llm.llmapi import llm_args
answers = []
for given in json.loads(sys.argv[2]):
    try:
        name = given.pop("class", None)
        if name is not None:
            config = getattr(llm_args, name)(**given)
        elif llm_args.IS_CLASS:
            config = llm_args.DecodingBaseConfig.from_dict(given)
        else:
            config = given
        made = llm_args.LlmArgs(model="m", speculative_config=config).speculative_config
        answers.append(f"{type(made).__name__} {made.max_draft_len}")
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""


def answers(release: str, *given: dict[str, Any]) -> list[str]:
    """What LLM() of the release makes of each speculative_config: its class and length, or the
    error.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(PACKAGE.parent), json.dumps(given)],
        env={**os.environ, RELEASE_VARIABLE: release},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [str(answer) for answer in json.loads(done.stdout)]


@pytest.mark.parametrize(
    ("release", "kind", "key"),
    [
        ("1.1.0", "Eagle", "speculative_model_dir"),
        ("1.2.0", "Eagle", "speculative_model"),
        ("1.2.1", "Eagle", "speculative_model"),
        ("1.3.0rc20", "Eagle3", "speculative_model"),
        ("1.4.0rc1", "Eagle3", "speculative_model"),
    ],
)
def test_a_head_has_a_length_a_folder_and_known_keys(release: str, kind: str, key: str) -> None:
    whole = {"decoding_type": kind, "max_draft_len": 3, key: "head"}
    without = [{name: whole[name] for name in whole if name != left} for left in whole]
    fits, typeless, no_length, no_folder, unknown, layers = answers(
        release,
        whole,
        *without,
        {**whole, "eagle3_layers": [1]},
        {**whole, "eagle3_layers_to_capture": [1, 3]},
    )
    assert fits == f"{kind}DecodingConfig 3"
    assert layers == fits
    for refused in (typeless, no_length, no_folder, unknown):
        assert "Error" in refused.partition(":")[0], refused


def test_names_of_other_releases_are_refused() -> None:
    whole = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "head"}
    assert answers("1.2.1", whole)[0] == "ValueError: Invalid decoding type: Eagle3"
    old = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "head"}
    assert answers("1.0.0", {**old, "eagle3_layers_to_capture": [1]})[0].startswith("Validation")
    # The constructor of 1.2.0 sets attributes, and an alias is none.
    assert answers("1.2.0", old)[0].startswith("ValueError")
    assert answers("1.2.1", old)[0] == "EagleDecodingConfig 3"
    # Still read as an alias by the candidates.
    assert answers("1.4.0rc1", old)[0] == "EagleDecodingConfig 3"


def test_a_length_of_mtp_layers_is_overwritten_up_to_early_candidates() -> None:
    alone = {"decoding_type": "MTP", "max_draft_len": 3}
    both = {**alone, "num_nextn_predict_layers": 3}
    for release in ("1.0.0", "1.1.0", "1.2.0", "1.2.1", "1.3.0rc20"):
        assert answers(release, alone, both) == ["MTPDecodingConfig 1", "MTPDecodingConfig 3"]
    for release in ("1.3.0rc28", "1.4.0rc1"):
        assert answers(release, alone, both) == ["MTPDecodingConfig 3", "MTPDecodingConfig 3"]
    zero = {"decoding_type": "MTP", "num_nextn_predict_layers": 0}
    for release in ("1.0.0", "1.2.1", "1.4.0rc1"):
        assert answers(release, zero)[0].startswith("ValidationError")
