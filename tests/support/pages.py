"""Parts of the documentation that a test makes."""

from __future__ import annotations

from pathlib import Path

import pytest


def check_made_part(
    page: Path, begin: str, end: str, made: str, request: pytest.FixtureRequest
) -> None:
    """Fail if the page has anything else between these two lines; with --update-golden, write it
    there.
    """
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    if request.config.getoption("--update-golden"):
        text = f"{before}{begin}{made}{end}{rest.partition(end)[2]}"
        page.write_text(text, encoding="utf-8")
    assert text.partition(begin)[2].partition(end)[0] == made
