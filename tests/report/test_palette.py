"""The colours of plots are told apart by readers with each form of colour blindness, and stand
out from the page.
"""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

# Machado, Oliveira and Fernandes 2009, severity 1.0, for linear RGB.
SIGHT = {
    "usual": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
MARKS = ("plain", "spec", "spec2", "bad")
TOGETHER = [("plain", "spec"), ("spec", "spec2"), ("spec", "bad")]  # in one plot
APART = 20.0  # CIE76; 2.3 is a just noticeable difference
GRAPHICS = 3.0  # contrast that WCAG 2.2, 1.4.11, asks of graphics; 4.5 of text
TEXT = 4.5


def schemes() -> dict[str, dict[str, np.ndarray]]:
    """Scheme -> name -> linear RGB, from the style sheet's two :root blocks."""
    style = files("toolkit.report").joinpath("style.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    return {"light": colours(light), "dark": colours(dark)}


def colours(block: str) -> dict[str, np.ndarray]:
    return {name: linear(value) for name, value in re.findall(r"--([\w-]+): #([0-9a-f]{6})", block)}


def linear(hexadecimal: str) -> np.ndarray:
    channels = np.array([int(hexadecimal[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ) @ np.clip(rgb, 0, 1)
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz / [0.9505, 1.0, 1.089]
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    light, dark = sorted(
        (float(np.dot(one, [0.2126, 0.7152, 0.0722])) for one in (a, b)), reverse=True
    )
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_marks_of_one_plot_differ_to_every_eye(scheme: str, sight: str) -> None:
    seen = {name: lab(np.array(SIGHT[sight]) @ schemes()[scheme][name]) for name in MARKS}
    for a, b in TOGETHER:
        assert np.linalg.norm(seen[a] - seen[b]) >= APART, (a, b)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_marks_and_words_stand_out(scheme: str) -> None:
    found = schemes()[scheme]
    for name in MARKS:
        assert contrast(found[name], found["card"]) >= GRAPHICS, name
    for name, ground in itertools.product(("ink", "soft"), ("card", "page")):
        assert contrast(found[name], found[ground]) >= TEXT, (name, ground)
    for outcome in ("pass", "fail", "inconclusive"):
        assert contrast(found[outcome], found["card"]) >= TEXT, outcome
        assert contrast(found[outcome], found[f"{outcome}-wash"]) >= TEXT, outcome
