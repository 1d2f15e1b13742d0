"""A plain canvas in pixels that becomes inline SVG in the colours and fonts of the page around it.

Colours are CSS variables of the page, text stays text, and nothing depends on the time or on chance: the same
calls give the same bytes. A drawing stands on its own, so that any page can take it in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby, pairwise
from operator import itemgetter

FONT = 11
CHARACTER = 0.63 * FONT
"""Mean width of letters and digits, in the widest of the fonts that a page may get."""
DASHES = ("", "6 3", "2 2.5", "9 2.5 2 2.5")
"""How lines differ beside their colour: whole, dashed, dotted, both."""
_ANCHORS = {"left": "start", "center": "middle", "right": "end"}
_CORNERS: dict[str, Sequence[tuple[float, float]]] = {
    "s": ((-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)),
    "D": ((0, -1.12), (1.12, 0), (0, 1.12), (-1.12, 0)),
    "^": ((0, -1.05), (1, 0.85), (-1, 0.85)),
    "v": ((0, 1.05), (1, -0.85), (-1, -0.85)),
    "p": tuple((1.08 * math.sin(0.4 * math.pi * i), -1.08 * math.cos(0.4 * math.pi * i)) for i in range(5)),
    "h": tuple((1.08 * math.sin(math.pi / 3 * i), -1.08 * math.cos(math.pi / 3 * i)) for i in range(6)),
    "|": ((-0.28, -1), (0.28, -1), (0.28, 1), (-0.28, 1)),
}
_PLUS = tuple(
    zip((-1, 1, 1, 3, 3, 1, 1, -1, -1, -3, -3, -1), (-3, -3, -1, -1, 1, 1, 3, 3, 1, 1, -1, -1), strict=True)
)
_CORNERS["P"] = tuple((x * 0.36, y * 0.36) for x, y in _PLUS)
_CORNERS["X"] = tuple(((x - y) * 0.26, (x + y) * 0.26) for x, y in _PLUS)
MARKERS = ("o", *_CORNERS)
"""Shapes of dots: a circle, square, diamond, triangles, pentagon, hexagon, bar, plus and cross."""
FILLS = 4
"""Ways to fill a shape: whole, open, open with a dot, tinted."""


def marker(
    x: float,
    y: float,
    variable: str,
    shape: str,
    size: float,
    fill: int = 0,
    tip: str = "",
    link: str | None = None,
) -> str:
    """A shape of a diameter of `size` about a place as an SVG element, in a colour of the page. `link` is where a
    click on it leads.
    """
    style, *body = _marker(x, y, variable, shape, size, fill, tip, link)
    return f' style="{style}"'.join(body)


def _marker(
    x: float, y: float, variable: str, shape: str, size: float, fill: int, tip: str, link: str | None
) -> tuple[str, str, str]:
    """A marker's style, and what stands before and after that."""
    r = size / 2
    colour = f"var({variable})"
    if fill == 0:
        # A rim of the page's colour sets it off from what lies below.
        style = f"fill:{colour};stroke:var(--paper);stroke-width:.8"
    else:
        inside = "var(--paper)" if fill < 3 else f"color-mix(in srgb,{colour} 30%,var(--paper))"
        style, r = f"fill:{inside};stroke:{colour};stroke-width:{min(1.5, size / 4):g}", r - 0.5
    told = f"<title>{escape(tip)}</title>" if tip else ""
    if shape == "o":
        head, tail = f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(r)}"', f">{told}</circle>"
    else:
        corners = [(x + a * r, y + b * r) for a, b in _CORNERS[shape]]
        head, tail = f'<path d="{_way(corners)}Z"', f">{told}</path>"
    if fill == 2:
        tail += f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(max(r / 3, 0.9))}" style="fill:{colour}"/>'
    return (style, f'<a href="{escape(link)}">{head}', f"{tail}</a>") if link else (style, head, tail)


def _n(x: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{x:.1f}".removesuffix(".0") if math.isfinite(x) else "0"


def _way(points: Sequence[tuple[float, float]]) -> str:
    """A path through points, each relative to the one before: so digits are few, and a page has thousands."""
    tenths = [tuple(round(10 * v) if math.isfinite(v) else 0 for v in point) for point in points]
    steps = ((_n((x - a) / 10), _n((y - b) / 10)) for (a, b), (x, y) in pairwise(tenths))
    rest = " ".join(number for step in steps for number in step).replace(" -", "-")
    x, y = tenths[0]
    return f"M{_n(x / 10)} {_n(y / 10)}" + (f"l{rest}" if rest else "")


@dataclass
class Canvas:
    """Draws in pixels, y downwards, in colours of the page (CSS variables)."""

    width: float
    height: float
    _parts: list[tuple[str, str, str]] = field(default_factory=list)
    """Elements as their style, and what stands before and after that: those of one style share it."""

    def line(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        variable: str,
        width: float = 1,
        dash: str = "",
        opacity: float = 1,
    ) -> None:
        """A line through points."""
        self.lines([[*zip(xs, ys, strict=True)]], variable, width, dash, opacity)

    def lines(
        self,
        ways: Iterable[Sequence[tuple[float, float]]],
        variable: str,
        width: float = 1,
        dash: str = "",
        opacity: float = 1,
    ) -> None:
        """Several lines in one look, each through its points."""
        way = "".join(map(_way, ways))
        style = f"fill:none;stroke:var({variable});stroke-width:{width:g}"
        style += f";stroke-dasharray:{dash}" if dash else ""
        style += f";opacity:{opacity:g}" if opacity < 1 else ""
        if way:
            self._parts.append((style, f'<path d="{way}"', "/>"))

    def area(
        self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], variable: str, opacity: float
    ) -> None:
        """What lies between two lines over the same places."""
        ends = [*zip(xs, lows, strict=True), *reversed([*zip(xs, highs, strict=True)])]
        self._parts.append((f"fill:var({variable});opacity:{opacity:g}", f'<path d="{_way(ends)}Z"', "/>"))

    def dot(
        self,
        x: float,
        y: float,
        variable: str,
        shape: str,
        size: float,
        tip: str,
        fill: int = 0,
        link: str | None = None,
    ) -> None:
        """A marker with a tooltip; see `marker`."""
        self._parts.append(_marker(x, y, variable, shape, size, fill, tip, link))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        variable: str = "--ink",
        align: str = "left",
        size: float = FONT,
        bold: bool = False,
    ) -> None:
        """A line of text, centred on y."""
        style = f"fill:var({variable});font-size:{size:g}px" + (";font-weight:600" if bold else "")
        style += "" if align == "left" else f";text-anchor:{_ANCHORS[align]}"
        self._parts.append((style, f'<text x="{_n(x)}" y="{_n(y)}" dy=".35em"', f">{escape(text)}</text>"))

    def band(self, top: float, bottom: float, variable: str) -> None:
        """A stripe over the whole width."""
        self.box(0, self.width, top, bottom, variable)

    def box(self, left: float, right: float, top: float, bottom: float, variable: str, opacity: float = 1) -> None:
        """A filled rectangle."""
        style = f"fill:var({variable})" + (f";opacity:{opacity:g}" if opacity < 1 else "")
        size = f'width="{_n(right - left)}" height="{_n(bottom - top)}"'
        self._parts.append((style, f'<rect x="{_n(left)}" y="{_n(top)}" {size}', "/>"))

    def svg(self, label: str) -> str:
        """The drawing as an `<svg>` element."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}"'
        body = "\n".join(_styled(style, [*found]) for style, found in groupby(self._parts, key=itemgetter(0)))
        return f'<svg {size} role="img" aria-label="{escape(label)}">{body}</svg>'


def _styled(style: str, found: Sequence[tuple[str, str, str]]) -> str:
    """Elements of one style that follow each other: that of several stands once, about them."""
    if len(found) == 1:
        return f' style="{style}"'.join(found[0][1:])
    return f'<g style="{style}">' + "\n".join(head + tail for _, head, tail in found) + "</g>"


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels."""

    place: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]
    left: float
    right: float

    def clipped(self, value: float) -> float:
        """Where a value lies, or the frame's edge: beyond it an interval only says that it is wide."""
        return min(max(self.place(value), self.left), self.right) if value > 0 else self.left


def log_axis(low: float, high: float, left: float, right: float) -> Axis:
    """A logarithmic axis over low…high with ticks at 1, 2 and 5 where they fit."""
    begin, end = math.log10(low) - 0.02, math.log10(high) + 0.02
    if end - begin < 0.3:
        begin, end = begin - 0.15, end + 0.15
    ticks: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(begin), math.ceil(end) + 1)
        ticks = [x * 10.0**e for e in decades for x in digits if begin <= math.log10(x * 10.0**e) <= end]
        if len(ticks) <= 7:
            break
    if len(ticks) < 3:  # less than half a decade: round numbers at equal steps
        ticks = _round(10**begin, 10**end)
    scale = (right - left) / (end - begin)
    return Axis(lambda x: left + (math.log10(x) - begin) * scale, [(x, f"{x:g}") for x in ticks], left, right)


def linear_axis(high: float, left: float, right: float, text: Callable[[float], str]) -> Axis:
    """An axis from 0 to a little more than `high`."""
    # A journal of somebody else may hold any number, and a drawing must not cost its report.
    step = next(x * 10.0**e for e in range(-12, 308) for x in (1, 2, 2.5, 5) if high / (x * 10.0**e) <= 5)
    end = high * 1.02
    ticks = [step * x for x in range(math.floor(end / step) + 1)]
    return Axis(lambda x: left + x / end * (right - left), [(x, text(x)) for x in ticks], left, right)


def span_axis(low: float, high: float, left: float, right: float) -> Axis:
    """A linear axis over low…high, which need not hold 0."""
    span = (high - low) or abs(high) or 1.0
    begin, end = low - 0.03 * span, high + 0.03 * span
    ticks = _round(begin, end)
    scale = (right - left) / (end - begin)
    return Axis(lambda x: left + (x - begin) * scale, [(x, f"{x:.6g}") for x in ticks], left, right)


def _round(begin: float, end: float) -> list[float]:
    """Round numbers at equal steps within an axis, five or so."""
    span = end - begin
    step = next(x * 10.0**e for e in range(-300, 300) for x in (1, 2, 2.5, 5) if span / (x * 10.0**e) <= 5.3)
    return [step * x for x in range(math.ceil(begin / step), math.floor(end / step) + 1)]


def speedup_axis(low: float, high: float, left: float, right: float) -> Axis:
    """A logarithmic axis that always shows 1× and something on either side of it."""
    begin, end = math.log2(min(low, 0.8)) - 0.1, math.log2(max(high, 1.6)) + 0.1
    choices = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)
    ticks = [x for x in choices if begin <= math.log2(x) <= end]
    scale = (right - left) / (end - begin)
    if scale * math.log2(1.25) < 34:  # labels nearer than this run into one another
        ticks = [x for x in ticks if x not in (0.8, 1.2, 1.5, 3)]
    return Axis(lambda x: left + (math.log2(x) - begin) * scale, [(x, f"{x:g}×") for x in ticks], left, right)
