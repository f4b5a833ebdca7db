from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from caldera.tracking import Series, svg_curve
from caldera.tracking.curves import _smooth, _tick_labels, _ticks

NAMESPACE = "{http://www.w3.org/2000/svg}"
MANY = Series("reward <a & b>", [(float(k), math.sin(k)) for k in range(60)])
FEW = Series("accuracy", [(0.0, 0.25), (10.0, 0.5), (20.0, 0.75)])


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(root: ElementTree.Element, prefix: str = "") -> list[str]:
    return [element.text or "" for element in root.iter(f"{prefix}text")]


def test_inline_chart_takes_the_colours_of_the_page() -> None:
    svg = svg_curve([FEW, MANY], "Title & <more>", "step", "y")
    root = parse(svg)
    shown = texts(root)
    for text in ("Title & <more>", "step", "y", "accuracy", "reward <a & b>"):
        assert text in shown
    assert "var(--series-1," in svg and "var(--series-2," in svg
    assert root.find("rect") is None


def test_standalone_chart_has_fixed_colours_and_a_white_background() -> None:
    svg = svg_curve([FEW, MANY], "Title", "step", "y", 500, 250, standalone=True)
    root = parse(svg)
    assert root.tag == f"{NAMESPACE}svg" and root.get("viewBox") == "0 0 500 250"
    background = root.find(f"{NAMESPACE}rect")
    assert background is not None and background.get("fill") == "#ffffff"
    assert "var(" not in svg
    assert "Title" in texts(root, NAMESPACE)


def test_few_points_are_marked_and_many_are_smoothed() -> None:
    root = parse(svg_curve([FEW, MANY], "Title", "step", "y"))
    few, many = root.findall("g")
    assert [line.get("class") for line in few.findall("polyline")] == ["strong"]
    assert len(few.findall("circle")) == 3
    assert [line.get("class") for line in many.findall("polyline")] == ["raw", "strong"]
    assert few.get("data-values") == "0:0.25 10:0.5 20:0.75"


def test_points_are_placed_by_value() -> None:
    root = parse(svg_curve([FEW], "Title", "step", "y", 640, 320, y_range=(0.0, 1.0)))
    circles = root.findall("g/circle")
    pixels = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in circles]
    (x0, y0), (x1, y1), (x2, y2) = pixels
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    # 0.5 lies in the middle of (0, 1), and larger values lie higher.
    bottom, top = 320 - 44.0, 34.0 + 18.0
    assert y1 == pytest.approx((bottom + top) / 2, abs=0.06)
    assert y0 - y1 == pytest.approx((bottom - top) / 4, abs=0.11) and y2 < y1


def test_values_that_cannot_be_drawn() -> None:
    holes = Series("holes", [(1.0, math.nan), (2.0, 1.0), (3.0, math.inf), (4.0, 2.0)])
    root = parse(svg_curve([holes], "Title", "step", "y"))
    group = root.find("g")
    assert group is not None and group.get("data-values") == "2:1 4:2"
    beyond = parse(svg_curve([FEW], "Title", "step", "y", 640, 320, y_range=(0.0, 0.5)))
    assert min(float(c.attrib["cy"]) for c in beyond.findall("g/circle")) == 34.0 + 18.0


@pytest.mark.parametrize(
    "points", [[], [(5.0, 2.0)], [(0.0, 0.0)], [(1.0, 3.0), (2.0, 3.0)], [(1.0, 1e-9), (2.0, 3e9)]]
)
def test_degenerate_series_still_make_a_chart(points: list[tuple[float, float]]) -> None:
    root = parse(svg_curve([Series("x", points)], "Title", "step", "y"))
    assert ("no values" in texts(root)) == (not points)


def test_many_long_names_take_more_rows_of_legend() -> None:
    one = parse(svg_curve([FEW], "Title", "step", "y", y_range=(0, 1)))
    names = [Series(f"val-core/source-{k}/acc/mean@1", FEW.points) for k in range(4)]
    four = parse(svg_curve(names, "Title", "step", "y", y_range=(0, 1)))
    assert len({t.get("y") for t in four.iter("text") if "source" in (t.text or "")}) == 2
    highest = [min(float(c.attrib["cy"]) for c in root.iter("circle")) for root in (one, four)]
    assert highest[1] > highest[0]


def test_ticks_are_round_numbers_within_the_range() -> None:
    assert _ticks(0.0, 1.0, most=6) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert _ticks(0.07, 0.31, most=6) == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    assert _ticks(0.0, 3.0, most=8, whole=True) == [0.0, 1.0, 2.0, 3.0]
    assert _tick_labels([0.0, 0.05, 0.1]) == ["0.00", "0.05", "0.10"]
    assert _tick_labels([1000.0, 1500.0]) == ["1,000", "1,500"]
    assert _tick_labels([0.0, 2e-5]) == ["0", "2e-05"]


def test_smoothing_keeps_a_straight_line_and_calms_noise() -> None:
    line = [(float(k), 2.0 * k + 1.0) for k in range(40)]
    assert [y for _, y in _smooth(line)] == pytest.approx([y for _, y in line])
    noise = [(float(k), float((-1) ** k)) for k in range(40)]
    assert max(abs(y) for _, y in _smooth(noise)) < 0.5
