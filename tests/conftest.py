"""Fixtures that cost are made once per run."""

from __future__ import annotations

import os

from toolkit.process.policies import POLICIES

# As the command line does, and before anything loads OpenMP or gRPC.
os.environ.update({**POLICIES, **os.environ})

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.checkpoints import write_checkpoint, write_pair
from tests.support.judged_reports import (
    advised_report,
    failing_report,
    passing_report,
    plain_only_report,
)
from tests.support.serving import add_bls_variant, package_pair
from toolkit.engines.vllm.environment import VllmEnvironment, find_environment
from toolkit.errors import BackendUnavailable
from toolkit.records.build import TritonRepository
from toolkit.records.report import ValidationReport
from toolkit.triton.process.server import TritonServer

# No test is timed: what takes a millisecond takes 200 on a machine that is busy with something
# else.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden/ anew instead of comparing with it",
    )
    parser.addoption(
        "--screenshots",
        type=Path,
        help="keep what the tests of pages see in this folder",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # by the number of tests; ours below knows better


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `vllm` are skipped where its environment is missing or broken, and say which.

    Where files go to several processes whole, those with most slow tests go first, and then
    those with most tests: no process starts a long file while the others end.
    """
    skip_without_vllm([item for item in items if item.get_closest_marker("vllm")])
    if hasattr(config, "workerinput"):
        tests = Counter(item.path for item in items)
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: (-slow[item.path], -tests[item.path], str(item.path)))


def skip_without_vllm(items: list[pytest.Item]) -> None:
    if not items:
        return
    try:
        find_environment()
    except BackendUnavailable as error:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f"{error.what}: {error.hint}"))


@pytest.fixture(scope="session")
def vllm_environment() -> VllmEnvironment:
    """The environment with vLLM, for tests marked `vllm`."""
    return find_environment()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """compare(file name, text): the text is the reviewed one in tests/golden/; --update-golden
    writes it there.
    """

    def compare(name: str, text: str) -> None:
        if request.config.getoption("--update-golden"):
            (GOLDEN / name).write_text(text, encoding="utf-8")
        assert text == (GOLDEN / name).read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target, draft): seeded two-layer and one-layer Llama checkpoints with the byte tokenizer."""
    return write_pair(tmp_path_factory.mktemp("tiny_pair"))


@pytest.fixture(scope="session")
def vllm_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """As `tiny_pair`, with heads of a size that vLLM's attention has on a CPU."""
    folder = tmp_path_factory.mktemp("vllm_pair")
    target = write_checkpoint(folder / "target", head_dim=32)
    draft = write_checkpoint(folder / "draft", seed=1, num_hidden_layers=1, head_dim=32)
    return target, draft


@pytest.fixture(scope="session")
def tiny_repository(
    tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> TritonRepository:
    """The tiny pair, packaged: eager float64 engines, so that results do not depend on the
    batch.
    """
    return package_pair(tiny_pair, tmp_path_factory.mktemp("tiny_repository"))


@pytest.fixture(scope="session")
def tiny_bls_server(
    tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """The same pair in the bls layout, one server for the whole run. Beside its BLS model there are
    others on the same engines, named by what they do otherwise: they take no time to load.
    """
    repository = package_pair(
        tiny_pair, tmp_path_factory.mktemp("tiny_bls"), layout="bls", on_draft_failure="plain"
    )
    variants = {
        "strict": {"on_draft_failure": "error"},
        "lost_draft": {"tensorrt_llm_draft_model_name": "nowhere", "on_draft_failure": "error"},
        "lost_draft_plain": {"tensorrt_llm_draft_model_name": "nowhere"},
        "accumulating": {"accumulate_tokens": "true", "stream_text": "cumulative"},
        "seeds_by_call": {"seeds": "call"},
        "adaptive": {"adaptive": '{"probe_every_tokens": 8}', "max_prompt_tokens": "20"},
    }
    for name, parameters in variants.items():
        add_bls_variant(repository.path, f"bls_{name}", parameters)
    with TritonServer(repository.path) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_server(tiny_repository: TritonRepository) -> Iterator[TritonServer]:
    """A real tritonserver on the tiny pair's repository, one for the whole run."""
    with TritonServer(tiny_repository.path) as server:
        yield server


@pytest.fixture(scope="session")
def passing(tmp_path_factory: pytest.TempPathFactory) -> ValidationReport:
    return passing_report(tmp_path_factory.mktemp("passing"))


@pytest.fixture(scope="session")
def failing(tmp_path_factory: pytest.TempPathFactory) -> ValidationReport:
    """With every kind of trouble."""
    return failing_report(tmp_path_factory.mktemp("failing"))


@pytest.fixture(scope="session")
def plain_only(tmp_path_factory: pytest.TempPathFactory) -> ValidationReport:
    return plain_only_report(tmp_path_factory.mktemp("plain_only"))


@pytest.fixture(scope="session")
def advised(failing: ValidationReport) -> ValidationReport:
    return advised_report(failing)
