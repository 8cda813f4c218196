"""The plugin that corrects how vLLM samples drafted tokens on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolkit.engines.vllm.environment import VllmEnvironment
from toolkit.engines.vllm.sampling_plugin import (
    expand,
    plugin_files,
    repeats_values,
    takes_no_rows,
    unless_empty,
)

# In place of vLLM: a platform, and the module whose function the plugin judges.
PLATFORM = """
class current_platform:
    is_cpu = staticmethod(lambda: {is_cpu})
    import_kernels = staticmethod(lambda: None)
"""
DROPS = """
def _expand_kernel_impl(output, input_val, cu_num_tokens, replace_from, replace_to):
    output.clone().fill_(0.5)
"""
FAILS = """
def apply_top_k_only(logits, k):
    return logits + k.max()
"""
TAKES_ALL = "def apply_top_k_only(logits, k): return logits"
WORKS = "from toolkit.engines.vllm.sampling_plugin import expand as _expand_kernel_impl\n"
REGISTER = """
from importlib.metadata import entry_points
for plugin in entry_points(group="vllm.general_plugins"):
    register = plugin.load()
    register()
    register()
from vllm.utils import cpu_triton_utils
from vllm.v1.sample.ops import topk_topp_sampler
print(cpu_triton_utils._expand_kernel_impl.__module__)
print(topk_topp_sampler.apply_top_k_only.__module__)
"""
# What the engine's process does before it serves, and then the sampler's own call.
SAMPLER = """
import torch
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.sample import rejection_sampler
load_general_plugins()
current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()
torch.full((6,), 7.0)
values = torch.tensor([0.75, 0.0, 0.5])
out = rejection_sampler.expand_batch_to_tokens(values, torch.tensor([2, 5, 6]), 6, 0, 1)
top_k = torch.tensor([5, 9, 3], dtype=torch.int32)
try:  # a step that verifies no draft
    nothing = torch.empty(0, dtype=torch.int32)
    empty = rejection_sampler.apply_top_k_top_p(torch.empty(0, 9), nothing, None).tolist()
except RuntimeError:
    empty = "fails"
print(out.tolist(), rejection_sampler.expand_batch_to_tokens(
    top_k, torch.tensor([2, 5, 6], dtype=torch.int32), 6).tolist(), empty)
"""


TOP_K = "vllm.v1.sample.ops.topk_topp_sampler"


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    folder = tmp_path / "plugins"
    for name, text in plugin_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_value_is_repeated_for_every_token_of_its_request() -> None:
    output = torch.empty(8)
    expand(output, torch.tensor([0.75, 0.0, 0.5, 2.0]), torch.tensor([2, 5, 5, 8]), 0, 1)
    assert output.tolist() == [0.75, 0.75, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    ids = torch.empty(3, dtype=torch.int32)
    expand(ids, torch.tensor([7, 9], dtype=torch.int32), torch.tensor([1, 3]), 0, 0, 128)
    assert ids.tolist() == [7, 9, 9]


def test_an_implementation_is_judged_by_its_answer() -> None:
    assert repeats_values(expand)
    assert not repeats_values(lambda *arguments: None)
    assert not repeats_values(lambda output, *others: output.fill_(0.5))


def test_top_k_of_no_rows_is_none() -> None:
    def fails(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(logits < k.max(), -1.0)

    assert not takes_no_rows(fails)
    corrected = unless_empty(fails)
    assert takes_no_rows(corrected)
    some = torch.tensor([[1.0, 3.0]]), torch.tensor([2])
    assert corrected(*some).tolist() == fails(*some).tolist() == [[-1.0, 3.0]]


@pytest.mark.parametrize(
    ("is_cpu", "expands", "limits", "left"),
    [
        (True, DROPS, FAILS, ["toolkit_vllm_sampling", "toolkit_vllm_sampling"]),
        (True, WORKS, FAILS, ["toolkit.engines.vllm.sampling_plugin", "toolkit_vllm_sampling"]),
        (True, DROPS, TAKES_ALL, ["toolkit_vllm_sampling", TOP_K]),
        (False, DROPS, FAILS, ["vllm.utils.cpu_triton_utils", TOP_K]),
    ],
    ids=["wrong", "one-is-right", "the-other-is-right", "on-a-gpu"],
)
def test_only_a_wrong_function_on_a_cpu_is_replaced(
    is_cpu: bool, expands: str, limits: str, left: list[str], plugins: Path, tmp_path: Path
) -> None:
    package = tmp_path / "packages" / "vllm"
    for folder in (package / "utils", package / "v1" / "sample" / "ops"):
        folder.mkdir(parents=True)
    (package / "v1" / "sample" / "ops" / "topk_topp_sampler.py").write_text(limits)
    (package / "platforms.py").write_text(PLATFORM.format(is_cpu=is_cpu))
    (package / "utils" / "cpu_triton_utils.py").write_text(expands)
    path = os.pathsep.join(map(str, [plugins, package.parent, Path(__file__).parents[3]]))
    done = subprocess.run(
        [sys.executable, "-c", REGISTER],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == left


@pytest.mark.vllm
def test_vllm_s_own_sampler_needs_the_plugin_and_is_right_with_it(
    vllm_environment: VllmEnvironment, plugins: Path, tmp_path: Path
) -> None:
    """If the first half fails, this vLLM needs no plugin, and facts/vllm.py has to say so."""
    right = "[0.75, 0.75, 1.0, 1.0, 1.0, 0.5] [5, 5, 9, 9, 9, 3] []"
    answers = []
    for path in ("", str(plugins)):
        done = subprocess.run(
            [vllm_environment.python, "-c", SAMPLER],
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        answers.append(done.stdout.splitlines()[-1])
    assert answers[0].rpartition(" ")[0] != right.rpartition(" ")[0]
    assert answers[0].endswith(" fails")
    assert answers[1] == right
