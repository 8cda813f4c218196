"""A stand-in for the Python package `tensorrt_llm`, as far as the PyTorch flow uses it.

The package lies in a folder of its own, so that a server finds it by a link in a model's folder or
by its path, and nothing else finds it by accident.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["PACKAGE", "RELEASE_VARIABLE"]

PACKAGE = Path(__file__).with_name("tensorrt_llm")
RELEASE_VARIABLE = "TENSORRT_LLM_STAND_IN"  # of the environment; it chooses the release
