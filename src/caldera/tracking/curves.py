"""Line charts as self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

COLOURS = ("#c2410c", "#2563eb", "#15803d", "#7c3aed", "#be185d", "#0e7490")
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,sans-serif"
MIN_POINTS_TO_SMOOTH = 30
LEFT = 74.0  # of the plot: room for the label of the axis and seven characters
LEGEND_ROW = 18.0
CHARACTER = 6.4  # a generous mean width of one character of the 11 px legend


@dataclass(frozen=True)
class Series:
    """A named line. Points whose value is not finite are left out of the drawing."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class _Frame:
    """The plot's rectangle in pixels and the ranges of data that fill it."""

    left: float
    top: float
    right: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        value = min(max(value, low), high)  # a range that was asked for may not hold every value
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)


def svg_curve(
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    width: int = 640,
    height: int = 320,
    y_range: tuple[float, float] | None = None,
    *,
    standalone: bool = False,
) -> str:
    """Draw lines over steps: every value light, a smoothed line strong.

    To be inlined in HTML, text and grid take the page's text colour and line k the CSS variable
    `--series-k` (from 1). As a separate file (`standalone`), colours and background are fixed.
    """
    drawn = [Series(s.name, [p for p in s.points if math.isfinite(p[1])]) for s in series]
    legend, legend_height = _legend([s.name for s in drawn], width, standalone)
    points = [point for s in drawn for point in s.points]
    frame = _Frame(
        left=LEFT,
        top=34.0 + legend_height,
        right=width - 16.0,
        bottom=height - 44.0,
        x_range=_span([x for x, _ in points]),
        y_range=y_range or _padded(_span([y for _, y in points])),
    )
    root = (
        f'xmlns="http://www.w3.org/2000/svg" style="color:#1f2933;font-family:{FONT}"'
        if standalone
        else f'class="curve" style="font-family:{FONT}"'
    )
    return "\n".join(
        [
            f'<svg {root} viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(title)}">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>' if standalone else "",
            _text(frame.left, 20, title, size=14, weight=600),
            legend,
            *_axes(frame, x_label, y_label, with_ticks=bool(points)),
            *(_line(s, k, frame, standalone) for k, s in enumerate(drawn)),
            "</svg>",
        ]
    )


def _colour(index: int, standalone: bool) -> str:
    colour = COLOURS[index % len(COLOURS)]
    return colour if standalone else f"var(--series-{index + 1},{colour})"


def _text(
    x: float,
    y: float,
    content: str,
    *,
    size: int,
    anchor: str = "start",
    weight: int = 400,
    opacity: float = 1.0,
    turned: bool = False,
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="currentColor" fill-opacity="{opacity}"{turn}>'
        f"{escape(content)}</text>"
    )


def _legend(names: Sequence[str], width: int, standalone: bool) -> tuple[str, float]:
    """The legend's drawing and the height it takes; names that do not fit a row start the next."""
    x, y = LEFT, 40.0
    parts: list[str] = []
    for index, name in enumerate(names):
        entry_width = 22 + CHARACTER * len(name) + 14
        if x > LEFT and x + entry_width > width - 16:
            x, y = LEFT, y + LEGEND_ROW
        parts.append(
            f'<line x1="{x:.1f}" x2="{x + 16:.1f}" y1="{y - 4:.1f}" y2="{y - 4:.1f}" '
            f'stroke="currentColor" stroke-width="3" stroke-linecap="round" '
            f'style="color:{_colour(index, standalone)}"/>'
        )
        parts.append(_text(x + 22, y, name, size=11, opacity=0.75))
        x += entry_width
    return "\n".join(parts), (y - 40.0 + LEGEND_ROW if names else 0.0)


def _axes(frame: _Frame, x_label: str, y_label: str, *, with_ticks: bool) -> list[str]:
    middle_x = (frame.left + frame.right) / 2
    middle_y = (frame.top + frame.bottom) / 2
    parts = [
        _text(middle_x, frame.bottom + 38, x_label, size=11, anchor="middle", opacity=0.75),
        _text(14, middle_y, y_label, size=11, anchor="middle", opacity=0.75, turned=True),
        _rule(frame.left, frame.bottom, frame.right, frame.bottom, opacity=0.5),
    ]
    if not with_ticks:
        parts.append(_text(middle_x, middle_y, "no values", size=12, anchor="middle", opacity=0.6))
        return parts
    y_ticks = _ticks(*frame.y_range, most=6)
    for value, label in zip(y_ticks, _tick_labels(y_ticks), strict=True):
        y = frame.y(value)
        parts.append(_rule(frame.left, y, frame.right, y, opacity=0.13))
        parts.append(_text(frame.left - 8, y + 4, label, size=11, anchor="end", opacity=0.75))
    x_ticks = _ticks(*frame.x_range, most=8, whole=True)
    for value, label in zip(x_ticks, _tick_labels(x_ticks), strict=True):
        x = frame.x(value)
        parts.append(_rule(x, frame.bottom, x, frame.bottom + 5, opacity=0.5))
        parts.append(_text(x, frame.bottom + 19, label, size=11, anchor="middle", opacity=0.75))
    return parts


def _rule(x1: float, y1: float, x2: float, y2: float, *, opacity: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="currentColor" stroke-opacity="{opacity}"/>'
    )


def _line(series: Series, index: int, frame: _Frame, standalone: bool) -> str:
    """One series; `data-values` lets a page's script show the values under the pointer."""
    smoothed = len(series.points) >= MIN_POINTS_TO_SMOOTH
    values = " ".join(f"{x:g}:{y:.6g}" for x, y in series.points)
    parts = [
        f'<g class="series" style="color:{_colour(index, standalone)}" '
        f'data-name="{escape(series.name)}" data-values="{values}">',
        _polyline(series.points, frame, width=1.2 if smoothed else 2.2, light=smoothed),
    ]
    if smoothed:
        parts.append(_polyline(_smooth(series.points), frame, width=2.4, light=False))
    else:
        parts += [
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.2" fill="currentColor"/>'
            for x, y in series.points
        ]
    return "\n".join([*parts, "</g>"])


def _polyline(points: Sequence[Point], frame: _Frame, *, width: float, light: bool) -> str:
    pixels = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    kind, opacity = ("raw", 0.35) if light else ("strong", 1)
    return (
        f'<polyline class="{kind}" points="{pixels}" fill="none" stroke="currentColor" '
        f'stroke-width="{width}" stroke-opacity="{opacity}" stroke-linejoin="round" '
        f'stroke-linecap="round"/>'
    )


def _smooth(points: Sequence[Point]) -> list[Point]:
    """A weighted straight line through the neighbours of every point, taken at that point.

    Unlike a trailing average it shows no change late, and unlike a centred one it neither bends
    nor turns ragged at the two ends, where the neighbours are all on one side.
    """
    reach = max(4, len(points) // 16)
    smooth: list[Point] = []
    for index, (x, _) in enumerate(points):
        first, last = max(0, index - reach), min(len(points), index + reach + 1)
        weights = [1 - abs(at - index) / (reach + 1) for at in range(first, last)]
        near = points[first:last]
        total = sum(weights)
        mean_x = sum(w * p[0] for w, p in zip(weights, near, strict=True)) / total
        mean_y = sum(w * p[1] for w, p in zip(weights, near, strict=True)) / total
        spread = sum(w * (p[0] - mean_x) ** 2 for w, p in zip(weights, near, strict=True))
        joint = sum(
            w * (p[0] - mean_x) * (p[1] - mean_y) for w, p in zip(weights, near, strict=True)
        )
        slope = joint / spread if spread > 0 else 0.0
        smooth.append((x, mean_y + slope * (x - mean_x)))
    return smooth


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The range of the values, widened where they are all the same."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    return low, high


def _padded(span: tuple[float, float]) -> tuple[float, float]:
    """Some room above and below, yet no negative axis for values that are never negative."""
    low, high = span
    margin = (high - low) * 0.06
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


def _ticks(low: float, high: float, *, most: int, whole: bool = False) -> list[float]:
    """At most `most` + 1 round numbers (steps of 1, 2 or 5 times a power of ten) in the range."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _tick_labels(ticks: Sequence[float]) -> list[str]:
    """All with the decimals that distinguish neighbours; powers where that would be too long."""
    if len(ticks) < 2:
        return [f"{tick:.4g}" for tick in ticks]
    step = ticks[1] - ticks[0]
    if step < 1e-4 or max(abs(ticks[0]), abs(ticks[-1])) >= 1e6:
        return ["0" if tick == 0 else f"{tick:.3g}" for tick in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:,.{decimals}f}" for tick in ticks]
