"""The same faults in real transformers: in the runtime of this process, and served by a real
tritonserver.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import EOS_ID, write_byte_tokenizer
from tests.support.runtime_endpoint import RuntimeEndpoint, noise
from tests.support.runtimes import make_runtime
from tests.support.serving import MAX_DRAFT_LEN, package_pair
from toolkit.client import Client
from toolkit.config.schema import DistributionGates, LatencyGates, ParityGates, ValidationConfig
from toolkit.engines.embedded.engine import EmbeddedEngine, open_checkpoint
from toolkit.engines.registry import loader
from toolkit.records.build import Quality, TritonRepository
from toolkit.records.report import ValidationReport
from toolkit.speculative.text import TextCodec
from toolkit.triton.process.server import TritonServer
from toolkit.validate import diagnose
from toolkit.validate.reference import reference_from_engine
from toolkit.validate.stage import Endpoint, Origin, Reference, References, Served, validate

PROMPTS = [f"def f{number}(x):" for number in range(16)]


def judged(endpoint: Endpoint, reference: Reference, folder: Path) -> ValidationReport:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    config = ValidationConfig(
        prompts=path,
        max_tokens=12,
        rounds=1,
        max_rounds=1,
        parity=ParityGates(max_divergence_rate=0.5, near_tie_margin=1e-3),
        latency=LatencyGates(min_speedup=None),
        distribution=DistributionGates(enabled=False),
    )
    return validate(
        Served(endpoint, MAX_DRAFT_LEN),
        config,
        References(reference),
        Origin("tiny", Quality(None, None), {}, {}),
    )


def named(report: ValidationReport) -> list[str]:
    return [finding.check for finding in report.findings if finding.severity == "error"]


def opened(checkpoint: Path) -> EmbeddedEngine:
    return open_checkpoint(checkpoint, max_batch_size=2, max_seq_len=64, max_step_tokens=32)


def one_too_far(engine: EmbeddedEngine) -> None:
    """Positions and cache of a verify forward begin one place late."""
    run = engine._run

    def shifted(
        tokens: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
    ) -> torch.Tensor:
        is_verify = len(tokens) > len(slots) and bool(lengths.all())
        return run(tokens, slots, lengths + int(is_verify), starts, columns)

    engine._run = shifted


def never_shorter(engine: EmbeddedEngine) -> None:
    """Claims to rewind, and goes on behind what was rejected."""
    rewind = engine.rewind

    def forget(slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            if length == 0:
                rewind([slot], [0])

    engine.rewind = forget  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "name"), [(one_too_far, diagnose.VERIFY), (never_shorter, diagnose.CACHE)]
)
def test_a_fault_of_the_cache_of_a_real_model_is_named(
    fault: Callable[[EmbeddedEngine], None], name: str, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    codec = TextCodec.from_file(tiny_pair[0] / "tokenizer.json")
    target = opened(tiny_pair[0])
    fault(target)
    runtime = make_runtime(target, opened(tiny_pair[1]), max_draft_len=MAX_DRAFT_LEN, codec=codec)
    reference = reference_from_engine(lambda: opened(tiny_pair[0]), codec.encode, (EOS_ID,), noise)
    report = judged(RuntimeEndpoint(runtime, codec.encode), reference, tmp_path)
    assert named(report) == [name]
    assert report.verdict == "FAIL"


def damage_a_weight(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] = (
        tensors["model.layers.1.mlp.down_proj.weight"].roll(1, 0).contiguous()
    )
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


def drop_the_bos(checkpoint: Path) -> None:
    write_byte_tokenizer(checkpoint, bos=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name"), [(damage_a_weight, diagnose.WEIGHTS), (drop_the_bos, diagnose.BOS)]
)
def test_a_fault_that_is_in_every_arm_of_a_served_pair_is_named(
    fault: Callable[[Path], None],
    name: str,
    tiny_pair: tuple[Path, Path],
    tiny_repository: TritonRepository,
    tmp_path: Path,
) -> None:
    """The repository is packaged from a damaged target; the reference is the sound one's engine."""
    faulty = Path(shutil.copytree(tiny_pair[0], tmp_path / "faulty"))
    fault(faulty)
    served = package_pair((faulty, tiny_pair[1]), tmp_path / "served")
    sound = tiny_repository.path.parent / "target"
    codec = TextCodec.from_file(sound / "tokenizer.json")
    reference = reference_from_engine(
        lambda: loader("torch").load(sound, threads=1), codec.encode, (EOS_ID,), noise
    )
    with TritonServer(served.path) as server, Client(server.grpc_url, timeout_s=120) as client:
        report = judged(client, reference, tmp_path)
    assert named(report)[0] == name
    assert report.parity is not None and report.parity.identical == len(PROMPTS)
    assert report.verdict == "FAIL"
