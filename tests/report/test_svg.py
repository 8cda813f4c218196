from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.records.report import ValidationReport
from toolkit.report.plots import plots
from toolkit.report.svg import Drawing, Scale, ticks


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    high = low + width
    if not high > low:
        return
    found = ticks(low, high)
    assert len(found) <= 6
    slack = 1e-6 * max(abs(low), abs(high), 1e-12)
    assert all(low - slack <= value <= high + slack for value in found)
    assert found == sorted(set(found))


def test_ticks_are_the_ones_a_person_would_choose() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0.97, 2.1) == [1.0, 1.25, 1.5, 1.75, 2.0]


def test_numbers_of_an_axis_are_written_alike() -> None:
    def labels(*values: float) -> list[str]:
        drawing = Drawing("")
        drawing.x_axis(Scale(0, 1, 0, 100), 10, 0, values, "unit")
        texts = [text for one in ET.fromstring(drawing.render()).iter() if (text := one.text)]
        return texts[:-1]

    assert labels(0, 5e-5, 1e-4, 1.5e-4) == ["0", "5e-5", "1e-4", "1.5e-4"]
    assert labels(0, 0.05, 0.1) == ["0", "0.05", "0.1"]
    assert labels(1e-5, 0.001, 0.1, 10) == ["1e-5", "1e-3", "0.1", "10"]


def test_scales_map_ends_to_ends() -> None:
    scale = Scale(1, 100, 0, 200, log=True)
    assert (scale(1), scale(10), scale(100)) == (0, pytest.approx(100), 200)
    assert Scale(3, 3, 0, 10)(3) == 5


def test_text_and_tips_are_escaped() -> None:
    drawing = Drawing('<a "b">')
    drawing.text(0, 0, "<script>")
    drawing.bar(0, 0, 1, 1, "spec", "a & <b>")
    root = ET.fromstring(drawing.render())
    assert root.attrib["aria-label"] == '<a "b">'
    assert [element.text for element in root.iter() if element.text] == ["<script>", "a & <b>"]


@pytest.mark.parametrize(
    ("which", "least"), [("passing", 10), ("failing", 11), ("plain_only", 7), ("advised", 15)]
)
def test_plots_are_well_formed_and_inside_their_frame(
    which: str, least: int, request: pytest.FixtureRequest
) -> None:
    report: ValidationReport = request.getfixturevalue(which)
    found = plots(report)
    assert len(found) >= least
    for plot in found:
        root = ET.fromstring(plot.svg)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for element in root.iter():
            for name, limit in (
                ("x", width),
                ("x1", width),
                ("x2", width),
                ("cx", width),
                ("y", height),
                ("y1", height),
                ("cy", height),
            ):
                if name in element.attrib:
                    assert -1 <= float(element.attrib[name]) <= limit + 1, (
                        plot.title,
                        element.attrib,
                    )


def test_a_report_shows_the_plots_people_look_for(failing: ValidationReport) -> None:
    titles = {plot.title for plot in plots(failing)}
    assert titles >= {
        "Speed-up",
        "Output tokens/s",
        "Acceptance by position",
        "Time to first token",
        "Divergences",
    }
    for role in ("target", "draft"):
        assert {f"KL by layer: {role}", f"Quantization error by layer: {role}"} <= titles


def test_plots_of_expectations_need_their_data(
    failing: ValidationReport, advised: ValidationReport
) -> None:
    expected = {
        "Speed-up over draft length",
        "Precisions of target and draft",
        "Throughput over concurrency",
        "Speed-up over concurrency",
        "Memory, planned and measured",
    }
    assert expected <= {plot.title for plot in plots(advised)}
    assert not expected & {plot.title for plot in plots(failing)}


def test_measured_speed_ups_stand_beside_the_predicted(advised: ValidationReport) -> None:
    (plot,) = (plot for plot in plots(advised) if plot.title == "Speed-up over draft length")
    tips = [
        element.text or "" for element in ET.fromstring(plot.svg).iter() if element.tag == "title"
    ]
    assert any(tip.startswith("greedy, length 4: run 1.70x") for tip in tips)
    assert advised.speedup is not None
    assert any(
        tip.startswith(f"greedy: {advised.speedup.estimate:.2f}x on the endpoint") for tip in tips
    )


def test_bars_begin_at_zero_and_are_as_long_as_their_values(advised: ValidationReport) -> None:
    (plot,) = (plot for plot in plots(advised) if plot.title == "Memory, planned and measured")
    bars = {
        element[0].text: float(element.attrib["width"])
        for element in ET.fromstring(plot.svg).iter("rect")
        if element[0].text and "GB" in element[0].text
    }
    assert bars["serve: measured 0.944 GB"] / bars["serve: planned 0.631 GB"] == pytest.approx(
        900 / 602, rel=0.01
    )
