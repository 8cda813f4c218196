"""How TensorRT-LLM's engines read temperature, top_k and top_p, and what our BLS sends them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from toolkit.facts.triton_tensors import BLS
from toolkit.triton.tensors.bls import BlsRequest, Prepared, engine_inputs, parse_bls
from toolkit.triton.tensors.contract import BLS_INPUTS
from toolkit.triton.tensors.engine_sampling import read_sampling
from toolkit.triton.tensors.requests import Limits

INPUTS = {
    **{fact.name: fact.dims == (1,) for fact in BLS.inputs},
    **{spec.name: spec.dims == (1,) for spec in BLS_INPUTS},
}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, 0, 0.0, (0.0, 1.0)),
        (1.0, 0, -1.0, (0.0, 1.0)),
        (1.0, 1, 0.9, (0.0, 0.9)),
        (0.7, 5, 0.0, (0.7, 1.0)),
        (0.7, 0, 0.9, (0.7, 0.9)),
        (0.7, 0, 1.0, (0.7, 1.0)),
        (0.0, 0, 0.9, (0.0, 0.9)),
    ],
)
def test_without_top_k_and_top_p_it_is_greedy(
    temperature: float, top_k: int, top_p: float, expected: tuple[float, float]
) -> None:
    assert read_sampling(temperature, top_k, top_p) == expected


def parsed(**tensors: Any) -> BlsRequest:
    arrays = {
        "text_input": np.array([[b"x"]], dtype=np.object_),
        "max_tokens": np.array([[4]], dtype=np.int32),
        **{name: np.array([[value]]) for name, value in tensors.items()},
    }
    limits = Limits(decoupled=True, max_draft_len=3)
    return parse_bls(arrays, {}, limits, INPUTS, acceptance="auto", fresh_seed=7)


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize(
    ("tensors", "sent"),
    [
        ({"temperature": 1.0}, {"runtime_top_k": 1}),
        ({"temperature": 1.0, "top_k": 0, "top_p": 0.0}, {"runtime_top_k": 1}),
        ({"temperature": 1.0, "top_k": 1, "top_p": 0.0}, {"runtime_top_k": 1}),
        ({"temperature": 0.5, "top_k": 7, "top_p": 0.0}, {"temperature": 0.5, "runtime_top_k": 7}),
        ({"temperature": 0.5, "top_p": 1.0}, {"temperature": 0.5, "runtime_top_p": 1.0}),
    ],
)
def test_our_bls_asks_real_engines_for_what_the_client_asked(
    role: Any, tensors: dict[str, Any], sent: dict[str, float]
) -> None:
    inputs = engine_inputs(parsed(**tensors), Prepared((5,), (9,), 9), (5,), 1, role=role)
    names = ("temperature", "runtime_top_k", "runtime_top_p")
    assert {name: inputs[name].item() for name in names if name in inputs} == sent
    assert ("seed" in inputs) is ("temperature" in sent)


@pytest.mark.parametrize("has_end_token", [True, False])
def test_only_an_engine_that_can_tell_its_end_token_is_asked_for_it(has_end_token: bool) -> None:
    inputs = engine_inputs(
        parsed(),
        Prepared((5,), (9,), 9),
        (5,),
        1,
        role="target",
        has_end_token=has_end_token,
    )
    assert ("return_end_token" in inputs) is has_end_token
