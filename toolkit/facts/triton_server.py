"""Versions of tritonserver, and the published holes in them."""

from __future__ import annotations

import re

__all__ = ["BULLETIN", "CVES", "MENDED", "WHEEL_VERSIONS", "triton_version"]

# nvidia-pytriton -> the version of the tritonserver in it (its release notes). 2.51 is that of the
# container 24.10.
WHEEL_VERSIONS = {"0.7.0": "2.51.0"}
# NVIDIA's security bulletin of August 2025, which names the container 25.07 for the first of these
# and 25.08 for all. 25.08 has 2.60.
BULLETIN = "NVIDIA's security bulletin 5687"
CVES = tuple(f"CVE-2025-{number}" for number in (23310, 23316, 23317, 23319, 23320, 23334))
MENDED = (2, 60)


def triton_version(text: str) -> tuple[int, int] | None:
    """`2.51.0` -> (2, 51); None for another text."""
    match = re.match(r"(\d+)\.(\d+)(\.|$)", text.strip())
    return None if match is None else (int(match[1]), int(match[2]))
