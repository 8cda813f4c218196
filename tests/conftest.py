"""Fixtures that cost are made once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import write_pair

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ anew instead of comparing with it")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """compare(file name, text): the text is the reviewed one in tests/golden/; --update-golden writes it there."""

    def compare(name: str, text: str) -> None:
        if request.config.getoption("--update-golden"):
            (GOLDEN / name).write_text(text, encoding="utf-8")
        assert text == (GOLDEN / name).read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target, draft): seeded two-layer and one-layer Llama checkpoints with the byte tokenizer."""
    return write_pair(tmp_path_factory.mktemp("tiny_pair"))
