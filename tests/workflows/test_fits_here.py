"""What tuning runs on this machine, and what it refuses to load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.deployments import config_of
from toolkit.errors import UsageError
from toolkit.records.plan import MemoryItem
from toolkit.workflows.deployment import embedded, embedded_twin
from toolkit.workflows.fits_here import check_fits_here

GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "keys", "dtype"),
    [
        ("pytorch", {}, "bfloat16"),
        ("engine", {}, "bfloat16"),
        ("vllm_cpu", {}, "bfloat16"),  # as the checkpoint
        ("vllm_cpu", {"engine__dtype": "float16"}, "bfloat16"),
        ("vllm_cpu", {"engine__dtype": "float32"}, "float32"),
    ],
)
def test_the_twin_computes_in_the_width_that_serves(
    kind: str, keys: dict[str, str], dtype: str
) -> None:
    assert embedded(embedded_twin(config_of(kind, **keys))).dtype == dtype


def test_the_twin_of_a_float32_checkpoint_that_vllm_serves_computes_in_float32(
    tmp_path: Path,
) -> None:
    model = {"checkpoint": str(write_checkpoint(tmp_path / "model", dtype="float32"))}
    config = config_of("vllm_cpu", target=model, draft=model)
    assert embedded(embedded_twin(config)).dtype == "float32"


def test_models_that_do_not_fit_this_machine_are_refused_with_figures() -> None:
    with pytest.raises(UsageError) as refusal:
        check_fits_here(config_of("pytorch"), host_bytes=64 * GIB)
    assert "target weights 72.7 GB" in refusal.value.what
    assert "has 68.7 GB" in refusal.value.what
    assert "speculation.max_draft_len" in str(refusal.value.hint)
    check_fits_here(config_of("pytorch"), host_bytes=96 * GIB)


def test_unquantized_they_take_two_bytes_a_parameter() -> None:
    plain = {"quantization": {"quant_algo": "NO_QUANT"}}
    config = config_of(
        "pytorch",
        target={"checkpoint": "meta-llama/Llama-3.3-70B-Instruct", **plain},
        draft={"checkpoint": "meta-llama/Llama-3.2-1B-Instruct", **plain},
    )
    with pytest.raises(UsageError, match="target weights 141"):
        check_fits_here(config, host_bytes=128 * GIB)
    check_fits_here(config, host_bytes=160 * GIB)


def test_what_is_held_beside_them_counts() -> None:
    second = MemoryItem("a second target", 72 * GIB, "quantized")
    with pytest.raises(UsageError, match="a second target"):
        check_fits_here(config_of("pytorch"), [second], host_bytes=128 * GIB)
