"""Validation of a real tritonserver with a real pair: over gRPC, with its own counters, against
its own engine and noise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.bench.counters import read_counters
from toolkit.client import Client, RequestTiming
from toolkit.config.schema import DistributionGates, LatencyGates, ParityGates, ValidationConfig
from toolkit.engines.registry import loader
from toolkit.records.build import Quality, TritonRepository
from toolkit.records.report import ValidationReport
from toolkit.report.render import read_report, write_report
from toolkit.speculative.sampling import ExponentialRace
from toolkit.speculative.text import TextCodec
from toolkit.triton.process.server import TritonServer
from toolkit.validate.parity import ArmTexts, Judge, compare
from toolkit.validate.reference import Reference, reference_from_engine
from toolkit.validate.stage import Endpoint, Origin, References, Served, validate

PROMPTS = tuple(f"def f{number}(x):" for number in range(12))


def noise(seed: int, position: int, vocab: int) -> np.ndarray:
    return ExponentialRace(seed, vocab).gumbel(position)


@pytest.fixture(scope="module")
def client(tiny_server: TritonServer) -> Iterator[Client]:
    with Client(tiny_server.grpc_url, timeout_s=120) as client:
        yield client


@pytest.fixture(scope="module")
def reference(tiny_repository: TritonRepository) -> Reference:
    engine = tiny_repository.path.parent / "target"
    codec = TextCodec.from_file(engine / "tokenizer.json")
    return reference_from_engine(
        lambda: loader("torch").load(engine, threads=1), codec.encode, (257,), noise
    )


def run(
    endpoint: Endpoint, server: TritonServer, reference: Reference, folder: Path, **config: Any
) -> ValidationReport:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    asked: dict[str, Any] = {
        "max_tokens": 12,
        "rounds": 1,
        "max_rounds": 1,
        "parity": ParityGates(max_divergence_rate=0.5),
        "latency": LatencyGates(min_speedup=None),
        "distribution": DistributionGates(enabled=False),
        **config,
    }
    return validate(
        Served(endpoint, 3, counters=lambda: read_counters(server.metrics_url)),
        ValidationConfig(prompts=path, **asked),
        References(reference),
        Origin("tiny", Quality(None, None), {}, {}),
    )


@pytest.mark.slow
def test_a_served_float64_pair_is_identical_in_both_checks(
    client: Client, tiny_server: TritonServer, reference: Reference, tmp_path: Path
) -> None:
    report = run(client, tiny_server, reference, tmp_path)
    assert report.verdict == "PASS"
    assert report.parity is not None and report.parity.identical == len(PROMPTS)
    assert report.sampled.parity is not None and report.sampled.parity.identical == len(PROMPTS)
    assert report.counters and all(check.matches for check in report.counters)
    assert report.acceptance is not None and report.acceptance.drafted > 0
    assert report.arms.plain.tokens_per_s > 0
    assert read_report(write_report(report, tmp_path / "report")[0]) == report


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7, "acceptance": "coupled"}]
)
def test_the_reference_scores_every_served_token_best(
    client: Client, reference: Reference, options: dict[str, Any]
) -> None:
    """The reference's logits, with the runtime's own noise, choose token for token what the
    server chose.
    """
    (timing,) = client.measure(PROMPTS[:1], max_tokens=10, **options)
    ids = list(reference.encode(PROMPTS[0]))
    assert timing.statistics.input_tokens == len(ids)
    assert reference.noise is not None
    for token in timing.token_ids:
        scores = reference.next_logits(ids).astype(np.float64)
        if "seed" in options:
            scores += options["temperature"] * reference.noise(
                options["seed"], len(ids), len(scores)
            )
        assert int(scores.argmax()) == token
        ids.append(token)


class Tampered:
    """A client that alters one token of one prompt's speculative text, as a faulty runtime
    would. A text that ends before it stays: what is drawn without a seed for the latency arms has
    any length.
    """

    def __init__(self, client: Client, prompt: str, position: int) -> None:
        self.client, self.prompt, self.position = client, prompt, position

    def measure(self, prompts: Any, **options: Any) -> list[RequestTiming]:
        timings = self.client.measure(prompts, **options)
        return [
            self._altered(one)
            if one.prompt == self.prompt
            and options.get("num_draft_tokens") != 0
            and len(one.token_ids) > self.position
            else one
            for one in timings
        ]

    def _altered(self, timing: RequestTiming) -> RequestTiming:
        tokens = list(timing.token_ids)
        tokens[self.position] = (tokens[self.position] + 1) % 256
        return replace(timing, token_ids=tuple(tokens))


@pytest.mark.slow
def test_a_wrong_token_between_server_and_client_fails_both_checks(
    client: Client, tiny_server: TritonServer, reference: Reference, tmp_path: Path
) -> None:
    endpoint = Tampered(client, PROMPTS[4], position=2)
    report = run(
        endpoint,
        tiny_server,
        reference,
        tmp_path,
        parity=ParityGates(max_divergence_rate=0.9, near_tie_margin=1e-6),
    )
    assert report.verdict == "FAIL"
    for parity in (report.parity, report.sampled.parity):
        assert parity is not None
        found = {
            (one.prompt_index, one.position, one.kind, one.plain_rank) for one in parity.divergences
        }
        assert found == {(4, 2, "broken", 0)}


@pytest.mark.slow
def test_texts_of_different_seeds_differ_at_near_ties_of_nobody(
    client: Client, reference: Reference
) -> None:
    """The seeded check is not empty: against another seed's noise a text is a fault."""
    first, second = (
        client.measure(PROMPTS[:1], max_tokens=12, temperature=0.8, seed=seed)[0] for seed in (1, 2)
    )
    judge = Judge(reference, 0.05, temperature=0.8, seeds=[1])
    assert compare([first], [ArmTexts("speculative", 3, [[second]])], judge).broken == 1
