"""The page of a verdict: everything is on it, nothing is loaded, and hostile names stay text."""

from __future__ import annotations

from html.parser import HTMLParser

import msgspec
import pytest
from kernelmark.registry.detection.attribution import Attribution, Part
from kernelmark.registry.detection.bisection import Finding, Suspect
from kernelmark.registry.detection.comparison_report import ComparisonReport
from kernelmark.registry.detection.decision import Progress
from kernelmark.registry.detection.verdict import KINDS, Flag, Verdict
from kernelmark.registry.store.record import Key
from kernelmark.registry.views.verdict_page import render_verdict


def verdict(kind: str, name: str = "B4-S2048", change: float | None = 0.08, **more: object) -> Verdict:
    bounds = {} if change is None else {"low": change - 0.01, "high": change + 0.01, "detectable": 0.035}
    out = Verdict(Key("rms_norm", name, "kernelmark", "cold"), kind, f"because {kind}", change=change, **bounds)  # type: ignore[arg-type]
    return msgspec.structs.replace(out, base_value=0.1, current_value=0.108, **more)


def report(*verdicts: Verdict, **more: object) -> ComparisonReport:
    return msgspec.structs.replace(ComparisonReport("main @ 1a2b", "HEAD @ 3c4d", Progress(verdicts)), **more)


KEY = verdict("regression").key
ATTRIBUTION = Attribution(
    KEY,
    "code",
    ("code",),
    (
        Part("code", 0.07, 0.06, 0.08, 0.9, 0.8, 1.0),
        Part("environment", 0.005, -0.005, 0.015, 0.1, None, None),
    ),
    0.075,
    0.065,
    0.085,
    10,
)
FINDING = Finding(
    KEY,
    (Suspect("abcdef0123456789", "2026-11-20T10:00:00+00:00", "Ada", "Faster <rms>"),),
    "found",
    0.08,
    0.07,
    0.09,
    3,
)


class Page(HTMLParser):
    """The page's text, and whether its tags close."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closes by itself."""

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_everything_is_on_the_page() -> None:
    made = report(
        verdict("regression", flags=(Flag("memory", 1, 2, "peak memory +100.0%"),)),
        verdict("no change", "quiet", 0.001),
        verdict("improvement", "quick", -0.1),
        verdict("missing", "gone", None),
        attributions=(ATTRIBUTION,),
        findings=(FINDING,),
        remarks=("Both sides ran in one environment.",),
    )
    page = Page(render_verdict(made))
    for said in (
        "Regression found", "main @ 1a2b", "HEAD @ 3c4d", "both commits in turns", "+8.0 %", "because missing",
        "peak memory +100.0%", "+7.0 % [+6.0 %, +8.0 %]", "90 % [80 %, 100 %]",
        "abcdef0123 2026-11-20 Ada Faster <rms>", "3 steps", "1 no change: show the rows",
        "Both sides ran in one environment.",
    ):  # fmt: skip
        assert said in page.text, said
    assert page.addresses == []


def test_it_loads_nothing() -> None:
    text = render_verdict(report(verdict("regression")))
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_alone(kind: str) -> None:
    page = Page(render_verdict(report(verdict(kind))))
    assert kind in page.text


def test_nothing_compared() -> None:
    page = Page(render_verdict(report()))
    assert "Not comparable, or nothing to compare" in page.text


def test_extremes_stay_in_the_drawing() -> None:
    wild = verdict(
        "inconclusive",
        change=0.0,
    )
    wild = msgspec.structs.replace(wild, low=-0.9999999, high=1e9)
    Page(render_verdict(report(wild, verdict("regression", "b", 3.0))))


def test_hostile_names_stay_text() -> None:
    evil = "<script>alert('x')</script>"
    made = report(
        msgspec.structs.replace(verdict("regression", evil), reason=evil),
        attributions=(msgspec.structs.replace(ATTRIBUTION, reason=evil, notes=(evil,)),),
        remarks=(evil,),
    )
    text = render_verdict(made)
    assert "<script" not in text
    assert evil in Page(text).text
