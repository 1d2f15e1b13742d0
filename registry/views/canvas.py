"""A plain canvas in pixels that becomes inline SVG in the colours and fonts of the page around it.

matplotlib draws. Every colour it is given is a stand-in that `Canvas.svg` turns into a CSS variable
afterwards, text stays text, and no date or random identifier is left: the same calls give the same bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

FONT = 11
CHARACTER = 0.63 * FONT
"""Mean width of letters and digits, in the widest of the fonts that a page may get."""


@dataclass
class Canvas:
    """Draws in pixels, y downwards, in colours of the page (CSS variables)."""

    width: float
    height: float
    salt: str
    figure: Any = field(init=False)
    axes: Any = field(init=False)
    _colours: dict[str, str] = field(default_factory=dict)
    _tips: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(self.width / 72, self.height / 72))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(0, self.width)
        self.axes.set_ylim(self.height, 0)

    def colour(self, variable: str) -> str:
        """The stand-in of a CSS variable: a colour that nothing else uses."""
        return self._colours.setdefault(variable, f"#a1b2{len(self._colours):02x}")

    def line(self, xs: Sequence[float], ys: Sequence[float], variable: str, width: float = 1, **more: Any) -> None:
        """A line through points."""
        more = {"solid_capstyle": "butt", "clip_on": False} | more
        self.axes.plot(xs, ys, color=self.colour(variable), linewidth=width, **more)

    def dot(self, x: float, y: float, variable: str, marker: str, size: float, tip: str) -> None:
        """A marker with a tooltip, set off from what lies below by a rim of the page's colour."""
        name = f"tip-{len(self._tips)}"
        self._tips[name] = tip
        rim = variable if marker == "|" else "--paper"
        self.axes.plot(
            [x],
            [y],
            marker=marker,
            markersize=size,
            color=self.colour(variable),
            markeredgecolor=self.colour(rim),
            markeredgewidth=2 if marker == "|" else 0.8,
            linestyle="none",
            clip_on=False,
            gid=name,
        )

    def text(
        self, x: float, y: float, text: str, variable: str = "--ink", align: str = "left", **more: Any
    ) -> None:
        """A line of text, centred on y."""
        self.axes.text(
            x,
            y,
            text,
            color=self.colour(variable),
            ha=align,
            va="center_baseline",
            parse_math=False,
            **({"fontsize": FONT} | more),
        )

    def band(self, top: float, bottom: float, variable: str) -> None:
        """A stripe over the whole width."""
        self.box(0, self.width, top, bottom, variable)

    def box(
        self, left: float, right: float, top: float, bottom: float, variable: str, alpha: float | None = None
    ) -> None:
        """A filled rectangle."""
        self.axes.fill(
            [left, right, right, left], [top, top, bottom, bottom], color=self.colour(variable), lw=0, alpha=alpha
        )

    def svg(self, label: str) -> str:
        """The drawing as an `<svg>` element."""
        import matplotlib

        file = io.BytesIO()
        settings: Any = {"svg.fonttype": "none", "svg.hashsalt": self.salt, "font.family": "sans-serif"}
        with matplotlib.rc_context(settings):
            self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue().decode()
        body = text[text.index("</metadata>") + len("</metadata>") : text.rindex("</svg>")]
        body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.S)
        body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.S)
        body = re.sub(r"font(-family|): ([^;\"]*)", _font, body)
        body = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", body)
        for name, tip in self._tips.items():
            body = body.replace(f'<g id="{name}">', f"<g><title>{escape(tip)}</title>", 1)
        body = re.sub(r'<g id="[^"]*">', "<g>", body).replace("xlink:href", "href")
        body = re.sub(r"#a1b2[0-9a-f]{2}", lambda x: f"var({self._variables[x[0]]})", body)
        body = re.sub(r"\s*\n\s*", "\n", body)
        size = f'viewBox="0 0 {self.width:g} {self.height:g}"'
        return f'<svg {size} role="img" aria-label="{escape(label)}">{body}</svg>'

    @property
    def _variables(self) -> Mapping[str, str]:
        return {stand_in: variable for variable, stand_in in self._colours.items()}


def _font(found: re.Match[str]) -> str:
    """The family is the page's; of `font: 600 11px family` size and weight stay."""
    if found[1] == "-family":
        return "font-family: inherit"
    words = found[2].split("px")[0].split()
    return "; ".join([f"font-size: {words[-1]}px"] + [f"font-weight: {x}" for x in words[:-1]])


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
    scale = (right - left) / (end - begin)
    return Axis(lambda x: left + (math.log10(x) - begin) * scale, [(x, f"{x:g}") for x in ticks], left, right)


def linear_axis(high: float, left: float, right: float, text: Callable[[float], str]) -> Axis:
    """An axis from 0 to a little more than `high`."""
    step = next(x * 10.0**e for e in range(-12, 12) for x in (1, 2, 2.5, 5) if high / (x * 10.0**e) <= 5)
    end = high * 1.02
    ticks = [step * x for x in range(math.floor(end / step) + 1)]
    return Axis(lambda x: left + x / end * (right - left), [(x, text(x)) for x in ticks], left, right)


def span_axis(low: float, high: float, left: float, right: float) -> Axis:
    """A linear axis over low…high, which need not hold 0."""
    span = (high - low) or abs(high) or 1.0
    step = next(x * 10.0**e for e in range(-300, 300) for x in (1, 2, 2.5, 5) if span / (x * 10.0**e) <= 5)
    begin, end = low - 0.03 * span, high + 0.03 * span
    ticks = [step * x for x in range(math.ceil(begin / step), math.floor(end / step) + 1)]
    scale = (right - left) / (end - begin)
    return Axis(lambda x: left + (x - begin) * scale, [(x, f"{x:.6g}") for x in ticks], left, right)


def speedup_axis(low: float, high: float, left: float, right: float) -> Axis:
    """A logarithmic axis that always shows 1× and something on either side of it."""
    begin, end = math.log2(min(low, 0.8)) - 0.1, math.log2(max(high, 1.6)) + 0.1
    choices = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)
    ticks = [x for x in choices if begin <= math.log2(x) <= end]
    scale = (right - left) / (end - begin)
    if scale * math.log2(1.25) < 26:  # labels nearer than this run into one another
        ticks = [x for x in ticks if x not in (0.8, 1.2, 1.5, 3)]
    return Axis(lambda x: left + (math.log2(x) - begin) * scale, [(x, f"{x:g}×") for x in ticks], left, right)
