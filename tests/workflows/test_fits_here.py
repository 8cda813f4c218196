"""What tuning runs on this machine, and what it refuses to load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.deployments import config_of
from toolkit.errors import UsageError
from toolkit.records.plan import MemoryItem
from toolkit.workflows.deployment import embedded, embedded_twin
from toolkit.workflows.fits_here import must_stream

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


def test_models_that_do_not_fit_this_machine_are_streamed() -> None:
    assert must_stream(config_of("pytorch"), host_bytes=64 * GIB)
    assert not must_stream(config_of("pytorch"), host_bytes=96 * GIB)


def test_a_machine_that_cannot_hold_a_layer_is_refused_with_figures() -> None:
    """A layer of Llama 70B has 0.86 G weights, which FP8 computes in 4 bytes each; its LM head has
    1.05 G weights in BF16.
    """
    assert must_stream(config_of("pytorch"), host_bytes=8 * GIB)
    with pytest.raises(UsageError) as refusal:
        must_stream(config_of("pytorch"), host_bytes=6 * GIB)
    assert "7.00 GB with one layer of the target" in refusal.value.what
    assert "has 6.44 GB" in refusal.value.what
    assert "speculation.max_draft_len" in str(refusal.value.hint)


def test_unquantized_they_take_two_bytes_a_parameter() -> None:
    plain = {"quantization": {"quant_algo": "NO_QUANT"}}
    config = config_of(
        "pytorch",
        target={"checkpoint": "meta-llama/Llama-3.3-70B-Instruct", **plain},
        draft={"checkpoint": "meta-llama/Llama-3.2-1B-Instruct", **plain},
    )
    assert must_stream(config, host_bytes=128 * GIB)
    assert not must_stream(config, host_bytes=160 * GIB)


def test_what_is_held_beside_them_counts() -> None:
    second = MemoryItem("a second target", 72 * GIB, "quantized")
    assert must_stream(config_of("pytorch"), [second], host_bytes=128 * GIB)
    assert not must_stream(config_of("pytorch"), host_bytes=128 * GIB)
