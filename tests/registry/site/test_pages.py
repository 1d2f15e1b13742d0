"""The whole folder: pages well formed, links whole, names harmless, and what is written when."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import json
import re
import sqlite3
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
from kernelmark.registry.analysis.repeated import NOT_YET
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.errors import InputError
from kernelmark.registry.site import data, exports, ledger
from kernelmark.registry.site.build import Built, Settings, _Site, build
from kernelmark.registry.site.data import inlined
from kernelmark.registry.site.facts import facts, file_name, run_of
from kernelmark.registry.site.feeds import atom
from kernelmark.registry.site.pages import _NONE, RECENT, Pages, _titled
from kernelmark.registry.site.pages import _environment as pages_of
from kernelmark.registry.site.scaling import Ahead, _solid, bandwidths, curves, over_lengths, scaling
from kernelmark.registry.site.servers import asked, served, served_as
from kernelmark.registry.site.sizes import glances, swept
from kernelmark.registry.site.standing import standings
from kernelmark.registry.store.journal import Journal, encode
from kernelmark.registry.store.metric import EACH, LATENCY, Equivalence, Metric
from kernelmark.registry.store.record import Exchange, Measurement, Record, Request
from kernelmark.registry.views.grouping import groups
from kernelmark.registry.views.serving import spreads
from kernelmark.registry.views.table import render as text_of
from kernelmark.registry.views.tables import run_table

from .conftest import BREAK, EXPECTED, HOSTILE, STEP, MakeRun

pytest.importorskip("jinja2", reason="Jinja2 is not installed")

Site = tuple[Path, Built, list[Path]]
Written = Callable[[Sequence[Journal], Path], list[Path]]
VOID = {"meta", "link", "br", "wbr", "input", "img"}
SCRIPTS = {"assets/site.js", "assets/uplot.js"}
REFERENCE = Path(__file__).parents[3] / "registry" / "reference"
EXPECTED_TEXT = Path(__file__).with_name("expected")


class Page(HTMLParser):
    """A page taken apart: faults in its nesting, its ids, links, and the text that a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.data = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th", "span", "dt", "dd"):
            self.words.append(" ")
        for name, value in attrs:
            self.attributes.add(name)
            if name == "id":
                self.ids.add(value or "")
            if name in ("href", "src"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data += data
        elif not self.open or self.open[-1] not in ("title", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        """Words as they stand, a line for each line of the source that has any."""
        lines = (" ".join(x.split()) for x in "".join(self.words).splitlines())
        return "\n".join(x for x in lines if x) + "\n"


@pytest.fixture(scope="module")
def pages(site: Site) -> dict[str, Page]:
    """All pages by their names from the site's root."""
    folder = site[0]
    return {str(x.relative_to(folder)): Page(x.read_text()) for x in folder.rglob("*.html")}


def test_every_page_is_there(pages: dict[str, Page], runs: list[Journal]) -> None:
    operators = {f"operator/{file_name(x)}.html" for x in ("rms_norm", HOSTILE)}
    of_runs = {f"run/{file_name(x.header.run)}.html" for x in runs}
    assert {
        *operators,
        *of_runs,
        "index.html",
        "compare.html",
        "coverage.html",
        "scaling.html",
        "serving.html",
    } < pages.keys()
    assert f"scaling/{file_name(HOSTILE)}.forward.html" in pages


def test_pages_are_well_formed_and_load_nothing_from_elsewhere(pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        assert not page.faults, name
        assert not page.open, name
        assert not [x for x in page.links if urlsplit(x).scheme], name


def test_every_link_leads_somewhere(site: Site, pages: dict[str, Page]) -> None:
    folder = site[0].resolve()
    checked = 0
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            target = (folder / name).parent / unquote(parts.path) if parts.path else folder / name
            assert target.resolve().is_file(), (name, link)
            if parts.fragment:
                assert unquote(parts.fragment) in pages[str(target.resolve().relative_to(folder))].ids, (
                    name,
                    link,
                )
            checked += 1
    assert checked > 500


def test_links_that_the_script_makes_lead_somewhere(site: Site, pages: dict[str, Page]) -> None:
    folder = site[0]
    for name in ("rms_norm", HOSTILE):
        page = json.loads(pages[f"operator/{file_name(name)}.html"].data)
        for line in (x for chart in page["charts"] for x in chart):
            for run, place in zip(line["runs"], line["places"], strict=True):
                assert f"row-{place}" in pages[f"run/{page['runs'][run]['file']}.html"].ids
                assert page["runs"][run]["each"] == 0, "all rows stand on the run's first page"
    sources = json.loads(pages["compare.html"].data)["sources"]
    assert len(sources) == 9 + 1 + 1
    for x in sources:
        text = (folder / f"data/{x['file']}.js").read_text()
        given = json.loads(re.fullmatch(r"kernelmark\.take\((.*)\);\n", text)[1])  # type: ignore[index]
        assert all((folder / f"run/{y['file']}.html").is_file() for y in given["runs"])


def test_hostile_names_are_text(site: Site, pages: dict[str, Page]) -> None:
    allowed = {"html", "head", "meta", "title", "link", "body", "nav", "a", "main", "header", "footer", "h1", "h2"}
    allowed |= {
        "h3",
        "h4",
        "p",
        "b",
        "i",
        "br",
        "wbr",
        "code",
        "span",
        "div",
        "section",
        "details",
        "summary",
        "figure",
    }
    allowed |= {
        "dl",
        "dt",
        "dd",
        "ul",
        "li",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "script",
        "noscript",
        "form",
        "button",
    }
    allowed |= {
        "fieldset",
        "legend",
        "label",
        "select",
        "input",
        "svg",
        "g",
        "path",
        "circle",
        "text",
        "figcaption",
    }
    for name, page in pages.items():
        assert page.tags <= allowed, name
        assert not [x for x in page.attributes if x.startswith("on")], name
    assert HOSTILE in pages["index.html"].text
    folder = site[0].resolve()
    assert not [x for x in folder.rglob("*") if re.search(r"[^A-Za-z0-9_.-]", x.name)]
    assert {x.parent for x in folder.rglob("*.html")} == {
        folder,
        *(folder / y for y in ("run", "operator", "scaling")),
    }


@pytest.mark.parametrize("name", ["index", "coverage", "operator/rms_norm", "run/run-09", "serving"])
def test_what_readers_see_is_what_is_expected(name: str, pages: dict[str, Page]) -> None:
    """Without a script. Where a page was changed on purpose, copy the text that the failure prints."""
    expected = EXPECTED_TEXT / f"{name.rpartition('/')[2]}.txt"
    assert pages[f"{name}.html"].text == expected.read_text()


def test_bold_is_a_ratio_whose_interval_leaves_out_one() -> None:
    shown = pages_of().get_template("macros.html").module
    for low, high, strong in ((1.01, 2.0, True), (0.4, 0.99, True), (0.99, 2.0, False), (None, None, False)):
        assert ("<b>" in shown.speedup(1.5, low, high)) == strong
    assert "<b>1.50×</b>" in shown.mean(
        SimpleNamespace(speedup=1.5, bounds=(1.2, 1.8), compared=(1, 2), part="of 1 of 2")
    )
    assert "of 1 of 2" in shown.mean(
        SimpleNamespace(speedup=1.5, bounds=(1.2, 1.8), compared=(1, 2), part="of 1 of 2")
    )
    alone = shown.mean(SimpleNamespace(speedup=1.5, bounds=None, compared=(1,), part=""))
    assert "<b>" not in alone
    assert "no interval" in alone


def test_scaling_names_its_kind_and_the_time_of_one(literal: Any) -> None:
    def at(operator: str, gpus: int, ms: float, **fields: Any) -> Any:
        axes = {"B": 1} | ({"gpus": gpus} if gpus > 1 else {})
        name = f"B1-gpus{gpus}" if gpus > 1 else "B1"
        way = fields.get("options", {}).get("parallel", "causal")
        case = literal.case(operator=operator, name=f"{name}-{way}", axes=axes, **fields)
        return literal.record("torch", ms, case=case)

    single, ddp, fsdp2 = ({"pass_": "program", "options": {"parallel": x}} for x in ("single", "ddp", "fsdp2"))
    journal = literal.journal(
        at("attention", 1, 8.0),
        at("attention_context_parallel", 4, 2.5),
        at("all_reduce", 2, 1.0),
        at("train", 1, 90.0, **single),
        at("train", 2, 95.0, **ddp),
        at("train", 8, 100.0, **ddp),
        at("train", 2, 96.0, **fsdp2),
        at("train", 8, 120.0, **fsdp2),
    )
    found = facts(journal)
    measured = [(run_of(journal, found), x) for x in found]
    (text,) = Pages("Kernels", "today", None).scaling(
        scaling(measured), {"rms_norm": {"forward": (), "forward_backward-2": ()}}
    )
    page = Page(text)
    assert not page.faults
    assert page.text == (EXPECTED_TEXT / "scaling.txt").read_text()
    # A way to spread steps has a drawing of its own.
    seen = [re.findall(r"torch on \d GPUs: \d+ %", x) for x in text.split("</svg>")]
    assert [x for x in seen if x] == [
        ["torch on 2 GPUs: 95 %", "torch on 8 GPUs: 90 %"],
        ["torch on 2 GPUs: 94 %", "torch on 8 GPUs: 75 %"],
    ]


def test_collectives_are_drawn_over_bytes_beside_the_copy_engines(literal: Any) -> None:
    """And × NCCL says what NCCL lacked."""

    def at(operator: str, name: str, size: int, ms: float, **beside: Any) -> Any:
        axes = {"N": size, "gpus": 2}
        case = literal.case(operator=operator, name=f"N{size}-gpus2-in", axes=axes)
        provider = "kernelmark" if name.startswith("kernelmark") else "torch_distributed"
        return literal.record(name, ms, case=case, provider=provider, beside=beside)

    metrics = (LATENCY, *(Metric(x, "GB/s", "higher") for x in ("algbw", "busbw", "link_rate")))
    lines = [at("peer_copy", "kernelmark", 2**20, 1.0, link_rate=[376.0])]
    for size in (2**15, 2**20, 2**27):
        for name, ms in (("kernelmark", 0.01), ("kernelmark_push", 0.015), ("torch_distributed", 0.02)):
            rate = 2 * size / ms / 1e6
            lines.append(at("all_reduce", name, size, ms, algbw=[rate], busbw=[rate]))
    # As a journal of somebody else may say.
    lines.append(at("all_reduce", "torch_distributed", 2**10, 0.02, algbw=[-1.0], busbw=[-1.0]))
    lines.append(at("all_reduce", "torch_distributed", 0, 0.02, algbw=[1.0], busbw=[1.0]))
    conditions = {"gpu": "NVIDIA H200", "env/NCCL_NVLS_ENABLE": "0"}
    journal = literal.journal(*lines, metrics=metrics, conditions=conditions)
    found = facts(journal)
    measured = [(run_of(journal, found), x) for x in found]
    steps = scaling(measured)
    (drawn,) = bandwidths(steps)
    for text in (
        ">64 KiB<",
        ">256 MiB<",
        ">copy engines 376<",
        "torch_distributed (NCCL, NVLS off), N32768-gpus2-in",
    ):
        assert text in drawn.drawing
    assert drawn.of == "in place · NVIDIA H200"
    # Measured: whole lines and filled shapes, each implementation's another.
    assert drawn.drawing.count("stroke-dasharray") == 1, "that of the copy engines"
    assert {(x.dash, x.fill) for x in drawn.looks.values()} == {("", 0)}
    assert len({(x.colour, x.shape) for x in drawn.looks.values()}) == 3
    (page,) = Pages("Kernels", "today").scaling(steps, {})
    assert "predictions" not in Page(page).text
    assert "torch_distributed is NCCL, NVLS off" in Page(page).text
    (standing,) = standings("all_reduce", [x for x in measured if x[1].operator == "all_reduce"])
    assert standing.rival == ("torch_distributed (NCCL, NVLS off)", 3)
    shown = text_of(run_table(journal))
    assert "(geometric means; × NCCL, NVLS off)" in " ".join(shown.split())
    assert "! × NCCL, NVLS off: what is over torch_distributed" in shown


def test_no_two_implementations_over_gpus_look_alike(charted: dict[tuple[str, str], list[Any]]) -> None:
    """Of all that could meet there: colour and shape are all that they have."""
    for (operator, device), found in charted.items():
        named = [SimpleNamespace(implementation=x.name, provider=x.provider) for x in found]
        looks = _solid([MagicMock(row=MagicMock(return_value=x)) for x in named])
        assert len({(x.colour, x.shape) for x in looks.values()}) == len(named), (operator, device)


def test_groups_of_cases_stand_by_their_sizes_and_kinds_as_they_come(literal: Any) -> None:
    made = [
        literal.case(name=f"M{m}-N{n}-{x}", axes={"M": m, "N": n}, dtype=x)
        for x in ("bf16", "fp16")
        for m in (64, 1, 16)
        for n in (1024, 2048, 4096, 8192, 16384)
    ]
    found = groups(rows(literal.journal(*(literal.record(case=x) for x in made))))
    assert [title for title, *_ in _titled(found)] == [
        f"forward · {x} · M{m}" for x in ("bf16", "fp16") for m in (1, 16, 64)
    ]


@pytest.mark.parametrize("many", [False, True])
def test_changes_that_are_not_listed_lead_to_their_histories(many: bool) -> None:
    def event(operator: str) -> Any:
        key = SimpleNamespace(operator=operator, case="B1")
        run = SimpleNamespace(file="run", name="run", created="2026-11-21", commit="c", short="c", dirty=False)
        change = SimpleNamespace(worse=False, change=-0.1)
        return SimpleNamespace(line=SimpleNamespace(key=key, device="H200"), change=change, run=run, page="p.html")

    found = [event(x) for x in ["softmax"] * (RECENT - 1) + ["rope"] * (1 + many)]
    (page,) = Pages("Kernels", "today").overview([], 0, {}, {}, {}, found, {})
    more = f"All {RECENT + 1}, drawn in the histories of softmax {RECENT - 1}, rope 2"
    assert (more in Page(page).text) == many
    assert page.count("p.html") == RECENT
    assert ('<a href="operator/rope.html">' in page) == many


@pytest.mark.parametrize(("ms", "told"), [(3.99, False), (3.9, True)])
def test_more_than_the_whole_is_explained(ms: float, told: bool, literal: Any) -> None:
    one = literal.case(operator="attention", name="B1", axes={"B": 1})
    two = literal.case(operator="attention_context_parallel", name="B1-gpus2", axes={"B": 1, "gpus": 2})
    journal = literal.journal(literal.record("torch", 8.0, case=one), literal.record("torch", ms, case=two))
    found = facts(journal)
    (page,) = Pages("Kernels", "today").scaling(scaling([(run_of(journal, found), x) for x in found]), {})
    assert ("another power state" in Page(page).text) == told


def test_what_nobody_measured_is_dashed_and_called_a_prediction(literal: Any) -> None:
    def at(gpus: int, ms: float) -> Any:
        axes = {"B": 1} | ({"gpus": gpus} if gpus > 1 else {})
        name = f"B1-gpus{gpus}" if gpus > 1 else "B1"
        options = {"parallel": "ddp" if gpus > 1 else "single"}
        case = literal.case(operator="train", name=f"{name}-x", axes=axes, pass_="program", options=options)
        return literal.record("torch", ms, case=case)

    journal = literal.journal(at(1, 90.0), at(2, 95.0))
    found = facts(journal)
    run = run_of(journal, found)
    steps = scaling([(run, x) for x in found])
    assert curves(steps, {}) == ()
    (drawn,) = curves(steps, {run.name: (Ahead("train", "B1-x", "torch", 2, 4, 0.91, None),)})
    assert "PREDICTION of torch on 4 GPUs: 91.0 %" in drawn.drawing
    assert "stroke-dasharray" in drawn.drawing
    assert ">prediction<" in drawn.drawing
    (page,) = Pages("Kernels", "today").scaling(
        steps, {}, {run.name: (Ahead("train", "B1-x", "torch", 2, 4, 0.91, None),)}
    )
    assert "open marks are predictions" in Page(page).text


def test_a_sequence_of_no_length_is_in_no_drawing(literal: Any) -> None:
    def at(operator: str, size: int, gpus: int, ms: float) -> Any:
        axes = {"S": size} | ({"gpus": gpus} if gpus > 1 else {})
        name = f"S{size}-gpus{gpus}" if gpus > 1 else f"S{size}"
        return literal.record("torch", ms, case=literal.case(operator=operator, name=name, axes=axes))

    sizes = (0, 1024, 2048)
    lines = [at("attention", x, 1, 8.0) for x in sizes]
    journal = literal.journal(*lines, *(at("attention_context_parallel", x, 2, 5.0) for x in sizes))
    found = facts(journal)
    steps = scaling([(run_of(journal, found), x) for x in found])
    assert [x.fact.axes["S"] for x in steps] == [*sizes]
    (drawn,) = over_lengths(steps)
    assert drawn.drawing.count("<title>torch, ") == 2


def test_cases_stand_by_size_under_titles_of_what_is_there(literal: Any) -> None:
    """The few that have nothing in common stand together; those of a server say their load in words."""

    def case(name: str, size: int, **options: Any) -> Any:
        given = literal.case(operator="attention", name=name, axes={"S": size, "Sk": 0}, options=options)
        return literal.record("torch", 1.0, case=given)

    lines = [case(f"S{x}-Sk0-causal", x, causal=True, sinks=False) for x in (1048576, 4096, 32768)]
    lines += [case("S1-Sk0-sinks", 1, causal=False, sinks=True), case("S2-Sk0-x", 2, causal=False, sinks=False)]
    journal = literal.journal(*lines)
    found = facts(journal)
    run = run_of(journal, found)
    here = standings("attention", [(run, x) for x in found])
    (page,) = Pages("Kernels", "today", None, {run.name: NOT_YET}).operator("attention", here, (), [run], (), {})
    text = Page(page).text
    assert "Sk0" not in text
    assert "not " not in text.replace("not yet", "")
    assert [text.index(x) for x in ("S4096", "S32768", "S1048576")] == sorted(
        text.index(x) for x in ("S4096", "S32768", "S1048576")
    )
    axes = {"rate": 26000, "users": 0, "requests": 1000, "input": 1024, "output": 128}
    assert (
        served_as(axes, {"load": "search"})
        == "search from 26 requests/s, 1,000 requests, 1,024 tokens in, 128 out"
    )
    assert served_as({"users": 1}, {"load": "closed"}) == "1 user"
    assert asked("2000-100") == "first token within 2,000 ms, a token within 100 ms"
    assert asked("none") == asked("²-100") == asked(f"1-{'9' * 5000}") == ""


def test_a_number_in_a_label_is_no_axis_of_nothing() -> None:
    shown = {
        "llama-clip0.0": "llama-clip0.0",
        "N10000-lr0.001-target1.2": "N10000-lr0.001-target1.2",
        "S4096-Sk0-Sv0-causal": "S4096-causal",
        "Sk0-causal": "causal",
        "S1-Sk0": "S1",
    }
    assert {x: _NONE.sub("", x) for x in shown} == shown


def test_a_memory_of_another_layout_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "site.db"
    assert ledger.Ledger(path).fresh
    ledger.Ledger(path).remember([("probes", "", b"as another layout has it")])
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {ledger.LAYOUT - 1}")
    again = ledger.Ledger(path)
    assert again.fresh
    assert again.remembered("probes", "") is None


def test_a_feed_without_entries_is_dated_by_the_newest_run() -> None:
    assert "<updated>2026-11-18T00:00:00+00:00</updated>" in atom([], "Kernels", "", "2026-11-18T00:00:00+00:00")


def test_scaling_is_held_to_the_slowest_gpu_that_computed_the_whole(literal: Any) -> None:
    """Its own median, not the largest of each sample."""

    def at(operator: str, ms: float, **beside: Any) -> Any:
        case = literal.case(operator=operator, name="B1-gpus2-causal", axes={"B": 1, "gpus": 2})
        return literal.record("torch", ms, case=case, beside=beside)

    journal = literal.journal(
        at("attention", 8.4, each_gpu=[7.5, 8.0]), at("attention_context_parallel", 5.0), metrics=(LATENCY, EACH)
    )
    found = facts(journal)
    (step,) = scaling([(run_of(journal, found), x) for x in found])
    assert step.scaled is not None
    assert (step.scaled.alone, step.scaled.efficiency) == (8.0, 0.8)
    (text,) = Pages("Kernels", "today", None).scaling([step], {})
    assert "5.000 ms 1 process strong 8.000 ms torch 80 %" in Page(text).text


def test_a_line_over_sizes_joins_one_key_and_leads_to_journals(make_run: MakeRun) -> None:
    sizes = (1024, 2048, 4096)
    measured = []
    # The driver changes at the last: older keys give what it lacks, and are in no line of its own.
    for number, found in ((0, sizes), (BREAK - 1, sizes), (BREAK, sizes), (BREAK + 1, sizes[:2])):
        journal = make_run(number, sizes=found)
        measured += [(run_of(journal, facts(journal)), x) for x in facts(journal)]
    (line,) = swept("rms_norm", measured)
    assert line.sweep.sizes == sizes
    assert {line.found[x.identity][0].key for _, case in line.sweep.cases for x in case.ok} == {"key-590.1"}
    newest = [line.found[case.first.identity][0].name for _, case in line.sweep.cases]
    assert newest == [f"run-{x}" for x in (BREAK + 1, BREAK + 1, BREAK)]
    (glance,) = glances([line], "../")
    assert (glance.what, list(glance.looks)) == ("share of the limit", ["kernelmark", "torch"])
    drawing = line.drawn("../") or ""
    assert drawing.count('<a href="../run/run-') == 3 * 2
    assert f'<a href="../run/run-{BREAK}.html#row-' in drawing


def test_servers_show_what_a_run_had_without_its_journal(servers: Journal, make_run: MakeRun) -> None:
    found = facts(servers)
    measured = [(run_of(servers, found), x) for x in found]
    (of_model,) = served(measured, {"run-servers": spreads(servers)})
    assert [x.caption.partition(",")[0] for x in of_model.pictures.loads] == [
        "p99 of first token", "p99 of time a token", "p99 of end to end",
        "Output tokens/s a GPU", "Output tokens/s a GPU",
    ]  # fmt: skip
    assert list(of_model.spreads) == ["1 user", "4 users", "4 requests/s, poisson", "8 requests/s, poisson"]
    assert of_model.pictures.loads[0].drawing.count('<a href="run/run-servers.html#row-') == 4
    marked = re.findall(
        r"kernelmark: (p\d+) ([\d.]+) ms(?: \(([^)]*)\))? of (\d+)",
        of_model.spreads["4 requests/s, poisson"][0].drawing,
    )
    # Nearest rank of (140 + 0 … 49) / 4, ten times each; of 500 the ranks 490 and 500 hold the 99th percentile.
    assert marked == [
        ("p50", "41.00", "", "500"),
        ("p90", "46.00", "", "500"),
        ("p99", "47.25", "95 % by order statistics 47.00 to 47.25 ms", "500"),
    ]
    assert not served([(run_of(x, facts(x)), y) for x in [make_run(0)] for y in facts(x)], {})


def test_the_script_compares_what_was_chosen(
    site: Site, pages: dict[str, Page], browse: Callable[..., str]
) -> None:
    def told(asked: str) -> str:
        seen = browse((site[0] / "compare.html").as_uri() + asked, "--dump-dom")
        seen = re.sub(r"<script.*?</script>|<select.*?</select>", "", seen, flags=re.S)
        return " ".join(re.sub(r"<[^>]*>", " ", seen).split())

    assert "geometric mean of 2 rows 0 better 2 worse 0 within their intervals" in told(
        "#m=kernelmark&n=the+best+other+of+each+case"
    )
    sources = json.loads(pages["compare.html"].data)["sources"]
    of_device = [x["file"] for x in sources if x["device"] == sources[0]["device"]]
    apart = told(f"#a={of_device[0]}&b={of_device[-1]}")
    assert "No row of the two can be compared" in apart
    assert "Without a ratio: 2 rows, driver: 580.1 → 590.1" in apart


def test_the_script_compares_two_libraries_whose_versions_are_of_their_keys(
    literal: Any, written: Written, browse: Callable[..., str], tmp_path: Path
) -> None:
    ours = literal.record("kernelmark", 1.0, provider="kernelmark", version=None)
    journal = literal.journal(ours, literal.record("torch", 2.0), conditions={"python": "3.12"})
    assert len({x.key for x in facts(journal)}) == 2
    build(written([journal], tmp_path / "given"), tmp_path / "out", Settings(journals="none"), {})
    seen = browse((tmp_path / "out" / "compare.html").as_uri() + "#m=kernelmark&n=torch", "--dump-dom")
    assert "Nothing is decided: 0.500×, geometric mean of 1 row; above 1 B is better" in seen


def test_ours_and_its_best_other_are_compared_within_a_run(
    literal: Any, written: Written, browse: Callable[..., str], tmp_path: Path
) -> None:
    """A later run of the commit has ours alone, and another run a faster other alone."""
    header = {"commit": "a" * 40, "conditions": {"gpu": "NVIDIA H200"}}
    ours = [literal.record("kernelmark", x, provider="kernelmark") for x in (1.0, 5.0)]
    journals = [
        literal.journal(*lines, run=f"run-{day}", created=f"2026-11-0{day}T00:00:00+00:00", **header)
        for day, lines in enumerate(
            ([ours[0], literal.record("torch", 2.0)], [ours[1]], [literal.record("torch", 0.5)]), 1
        )
    ]
    build(written(journals, tmp_path / "given"), tmp_path / "out", Settings(journals="none"), {})
    asked = "#m=the+best+other+of+each+case&n=kernelmark"
    seen = browse((tmp_path / "out" / "compare.html").as_uri() + asked, "--dump-dom")
    assert "Nothing is decided: 2.000×, geometric mean of 1 row; above 1 B is better" in seen


def test_a_winner_is_named_by_rows_that_have_intervals_and_others_are_counted_apart(
    literal: Any, written: Written, browse: Callable[..., str], tmp_path: Path
) -> None:
    journals = []
    for commit, certain, single in (("a", 2.0, 1.0), ("b", 1.0, 9.0)):
        lines = [
            literal.record(
                "kernelmark", certain * x, case=literal.case(name="two"), provider="kernelmark", replicate=i
            )
            for i, x in enumerate((1.0, 1.001))
        ]
        lines.append(literal.record("kernelmark", single, case=literal.case(name="one"), provider="kernelmark"))
        fields = {"commit": commit * 40, "created": f"2026-11-01T00:00:0{len(journals)}+00:00", "replicates": 2}
        journals.append(literal.journal(*lines, run=f"run-{commit}", **fields))
    build(written(journals, tmp_path / "given"), tmp_path / "out", Settings(journals="none"), {})
    page = tmp_path / "out" / "compare.html"
    assert "1 better 0 worse 0 within their intervals 1 of one process: not decided" in Page(page.read_text()).text
    seen = browse(page.as_uri(), "--dump-dom")
    told = re.sub(r"<[^>]*>", " ", seen[seen.index('<div id="result"') :])
    assert re.search(r"B is better by 2.000× \[1.9\d\d, 2.0\d\d\], geometric mean of 1 of 2 rows ", told)
    assert "1 better  0 worse  0 within their intervals  1 of one process: not decided" in told


@pytest.mark.parametrize("name", ["compare", "runs"])
def test_a_phone_shows_every_cell_and_values_beside_their_units(
    name: str, site: Site, browse: Callable[..., str], tmp_path: Path
) -> None:
    for room in ("assets", "data"):
        (tmp_path / room).symlink_to(site[0] / room)
    script = """<script>setTimeout(() => {
      const cells = [...document.querySelectorAll(".cards tbody tr > *")].filter((x) => x.getClientRects().length);
      const box = (node) => {
        const range = document.createRange();
        range.selectNode(node);
        return range.getBoundingClientRect();
      };
      const gap = (y) => (y.previousSibling ? box(y).left - box(y.previousSibling).right : 0);
      const far = (x) => [...x.children].some((y) => gap(y) > 8);
      const out = cells.filter((x) => box(x).right > innerWidth || x.scrollWidth > x.clientWidth);
      document.body.dataset.seen = [cells.length, out.length, cells.filter(far).length].join();
    }, 1000);</script>"""
    (tmp_path / "page.html").write_text((site[0] / f"{name}.html").read_text() + script)
    seen = browse((tmp_path / "page.html").as_uri(), "--window-size=500,1400", "--dump-dom")
    cells, out, far = map(int, re.search(r'data-seen="(\d+),(\d+),(\d+)"', seen).groups())  # type: ignore[union-attr]
    assert cells >= 8
    assert (out, far) == (0, 0)


def test_history_has_the_step_the_break_and_the_band(pages: dict[str, Page]) -> None:
    page = json.loads(pages["operator/rms_norm.html"].data)
    line = next(x for x in page["charts"][0] if x["name"] == "kernelmark")
    names = [page["runs"][x]["name"] for x in line["runs"]]
    ((run, change, worse, machine),) = line["changes"]
    assert page["runs"][run]["name"] == f"run-{STEP:02d}"
    assert change == pytest.approx(0.1, abs=0.01)
    assert (worse, machine) == (True, None)
    ((broken, what),) = line["breaks"]
    assert page["runs"][broken]["name"] == f"run-{BREAK:02d}"
    assert [page["strings"][x] for x in what] == ["driver: 580.1 → 590.1"]
    assert names == [f"run-{x:02d}" for x in range(18)]
    assert len(set(line["keys"])) == 2
    for first, last, low, high in line["bands"]:
        inside = [v for x, v in zip(line["runs"], line["values"], strict=True) if first <= x <= last]
        assert min(inside) > low * 0.998
        assert max(inside) < high * 1.002
        assert high / low < 1.02


def test_feeds_hold_the_regression_and_no_improvement(site: Site) -> None:
    feed = ElementTree.fromstring((site[0] / "regressions.atom").read_text())
    space = "{http://www.w3.org/2005/Atom}"
    entries = feed.findall(f"{space}entry")
    titles = sorted(x.findtext(f"{space}title") or "" for x in entries)
    assert [x.split(":")[0] for x in titles] == ["rms_norm S1024", "rms_norm S2048"]
    link = entries[0].find(f"{space}link")
    assert link is not None
    assert link.get("href") == "https://example.org/k/operator/rms_norm.html#1-S1024-cold"
    items = json.loads((site[0] / "regressions.json").read_text())["items"]
    assert {x["id"] for x in items} == {x.findtext(f"{space}id") for x in entries}
    texts = sorted(x["content_text"] for x in items)
    assert "1.001 ms before, 1.102 ms in run run-08" in texts[0]


def test_rows_lie_beside_the_pages(site: Site) -> None:
    with open(site[0] / "rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == site[1].rows == 20 * 2 * 3 + 3 + 8
    first = next(x for x in rows if x["run"] == "run-00" and x["implementation"] == "kernelmark")
    assert float(first["value"]) == pytest.approx(1.00025)
    assert (first["unit"], first["case"]) == ("ms", "S1024")
    assert (site[0] / first["journal"]).is_file()
    record = json.loads((site[2][0]).read_text().splitlines()[int(first["lines"].split()[0]) - 1])
    assert (record["implementation"], record["case"]["name"]) == ("kernelmark", "S1024")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    table = parquet.read_table(site[0] / "rows.parquet")
    assert table.num_rows == len(rows)
    assert table.column_names == list(rows[0])
    assert table.column("value").to_pylist()[0] == pytest.approx(float(rows[0]["value"]))


def test_a_formula_is_text_in_csv() -> None:
    given = ["=1+1", "@x", "-x", "x", -1.0, None]
    assert exports._harmless(given) == ["'=1+1", "'@x", "'-x", "x", -1.0, None]


def test_without_news_nothing_is_written_and_a_day_is_added(
    site: Site, make_run: MakeRun, written: Written, tmp_path: Path
) -> None:
    settings = Settings("Kernels", "https://example.org/k")
    day = written([make_run(18)], tmp_path / "day")
    build(site[2][:4], tmp_path / "grown", settings, EXPECTED)
    assert build(site[2][:4], tmp_path / "grown", settings, EXPECTED).written == 0
    grown = build(day, tmp_path / "grown", settings, EXPECTED)
    assert (grown.added, grown.runs) == (1, 5)
    build([*site[2][:4], *day], tmp_path / "whole", settings, EXPECTED)
    for path in (x for x in (tmp_path / "whole").rglob("*") if x.is_file() and x.name != "site.db"):
        same = tmp_path / "grown" / path.relative_to(tmp_path / "whole")
        assert path.read_bytes() == same.read_bytes(), path.name


def test_a_row_has_its_newest_runs_on_pages_and_all_beside_them(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "DRAWN", 4)
    built = build(site[2], tmp_path, Settings(), EXPECTED)
    page = json.loads(Page((tmp_path / "operator/rms_norm.html").read_text()).data)
    ours = next(x for x in page["charts"][0] if x["name"] == "kernelmark")
    assert [page["runs"][x]["name"] for x in ours["runs"]] == ["run-14", "run-15", "run-16", "run-17"]
    assert "run-l4" in (tmp_path / "operator/rms_norm.html").read_text(), "the other device's only run"
    assert built.rows == site[1].rows
    assert (tmp_path / "rows.csv").read_bytes() == (site[0] / "rows.csv").read_bytes()
    for x in (site[0] / "data").iterdir():
        assert (tmp_path / "data" / x.name).read_bytes() == x.read_bytes(), (
            "a comparison has all of a commit's rows"
        )


@pytest.mark.parametrize("how", ["csv", "parquet", "metric", "replaced"])
def test_rows_beside_the_pages_are_whole_whatever_was_there(
    how: str, make_run: MakeRun, written: Written, servers: Journal, tmp_path: Path
) -> None:
    first = make_run(1)
    begun = dataclasses.replace(first, records=first.records[:-2], lines=first.lines[:-2])
    paths = written([begun if how == "replaced" else first], tmp_path / "given")
    build(paths, tmp_path / "grown", Settings(), {})
    if how == "csv":
        with open(tmp_path / "grown" / "rows.csv", "a") as file:
            file.write("what a build wrote that was killed")
    if how == "parquet":
        (tmp_path / "grown" / "rows.parquet").write_bytes(b"torn")
    more = {"metric": [servers], "replaced": [first]}.get(how, [make_run(2)])
    paths += written(more, tmp_path / "more")
    build(paths[1:], tmp_path / "grown", Settings(), {})
    build(paths[1:] if how == "replaced" else paths, tmp_path / "whole", Settings(), {})
    for name in ("rows.csv", "rows.parquet"):
        if (tmp_path / "whole" / name).exists():
            assert (tmp_path / "grown" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_a_column_goes_behind_texts_that_have_quotes_and_line_ends(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "CHUNK", chunk)
    path = tmp_path / "rows.csv"
    before = {"text": ["two\nlines", 'a "quote"\n', "plain"], "value, ms": [1.5, None, 2.5]}
    size = exports.write_csv(before, path)
    with open(path, "a") as file:
        file.write("what a build wrote that was killed")
    after = before | {"energy J": [None] * 3, 'a "new" one': [None] * 3}
    assert exports.widen(path, size, after, 2) == path.stat().st_size
    whole = tmp_path / "whole.csv"
    exports.write_csv(after, whole)
    assert path.read_bytes() == whole.read_bytes()


def test_a_verification_that_comes_later_is_told_on_all_pages(
    make_run: MakeRun, written: Written, tmp_path: Path
) -> None:
    settings = Settings("Kernels")
    build(written([make_run(1)], tmp_path / "day"), tmp_path / "out", settings, {})
    again = make_run(2, commit=f"{0:040x}", request=Request(verifies="run-01"))
    build(written([again], tmp_path / "next"), tmp_path / "out", settings, {})
    told = "repeated by run run-02: 4 of 6 rows agree, 0 disagree, 2 undecided"
    for name, text in {
        "run/run-01.html": told,
        "run/run-02.html": "not yet repeated",
        "runs.html": told,
        "operator/rms_norm.html": "1 of 2 runs repeated by another team, 1 not yet repeated",
    }.items():
        assert text in (tmp_path / "out" / name).read_text(), name


def test_another_title_renews_all_pages_from_the_sites_own_journals(site: Site, tmp_path: Path) -> None:
    build(site[2][:3], tmp_path / "out", Settings("One"), {})
    assert build([], tmp_path / "out", Settings("Two"), {}).added == 0
    assert all("Two</a>" in x.read_text() for x in (tmp_path / "out").rglob("*.html"))


def test_journals_elsewhere_or_nowhere(site: Site, tmp_path: Path) -> None:
    build(site[2][:1], tmp_path / "away", Settings(journals="https://example.org/j"), {})
    page = (tmp_path / "away/run/run-00.html").read_text()
    assert 'href="https://example.org/j/journals/run-00.jsonl.gz"' in page
    build(site[2][:1], tmp_path / "none", Settings(journals="none"), {})
    assert ".jsonl.gz" not in (tmp_path / "none/run/run-00.html").read_text()
    assert not (tmp_path / "none/journals").exists()


def test_a_run_that_went_on_takes_the_place_of_what_it_was(make_run: MakeRun, tmp_path: Path) -> None:
    journal = make_run(0)
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    lines = [journal.header, *journal.records]
    whole.write_bytes(b"".join(map(encode, lines)))
    part.write_bytes(b"".join(map(encode, lines[:4])))
    for order in ([part, whole], [whole, part]):
        built = build(order, tmp_path / order[0].stem, Settings(), {})
        assert (built.runs, built.rows) == (1, 6)


def test_of_two_journals_of_a_run_the_longer_counts(make_run: MakeRun, literal: Any, tmp_path: Path) -> None:
    """Its beginning has as many rows, and where a later process was wrong even more with a value."""
    journal = make_run(0)
    first = [x for x in journal.records if x.replicate == 0]
    wrong = literal.record(
        "kernelmark", case=first[0].case, provider="kernelmark", replicate=1, status="incorrect", reason="apart"
    )
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    part.write_bytes(b"".join(map(encode, [journal.header, *first])))
    whole.write_bytes(part.read_bytes() + encode(wrong))
    for order in ([part, whole], [whole, part]):
        build(order, tmp_path / order[0].stem, Settings(journals="none"), {})
        table = (tmp_path / order[0].stem / "rows.csv").read_text()
        assert ",incorrect," in table, "what turned out wrong is not shown as right"


def test_shards_of_a_run_are_one_run_whenever_they_come(make_run: MakeRun, tmp_path: Path) -> None:
    """Another case is in each of the first two, and other seeds of a third case in the last two."""
    journal = make_run(0, sizes=(1024, 2048, 4096))
    cases = {x.case.full_name: x.case for x in journal.records}
    one, two, three = cases
    parts = {1: {one: (0, 1)}, 2: {two: (0, 1), three: (1,)}, 3: {three: (0,)}}
    files = []
    for number, part in parts.items():
        request = msgspec.structs.replace(
            journal.header.request,
            cases=tuple(cases[x] for x in part),
            seeds={x: numbers for x, numbers in part.items() if len(numbers) == 1},
            shard=(number, 3),
        )
        records = [x for x in journal.records if x.replicate in part.get(x.case.full_name, ())]
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_bytes(
            b"".join(map(encode, [msgspec.structs.replace(journal.header, request=request), *records]))
        )
    build(files, tmp_path / "once", Settings(), {})
    for day in (2, 0, 1):
        built = build(files[day : day + 1], tmp_path / "daily", Settings(), {})
    assert (built.runs, built.rows, built.skipped) == (1, 9, [])
    for name in ("run/run-00.html", "journals/run-00.jsonl.gz", "operator/rms_norm.html"):
        assert (tmp_path / "daily" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()
    assert build(files, tmp_path / "daily", Settings(), {}).written == 0
    begun = tmp_path / "begun.jsonl"
    begun.write_bytes(b"".join(files[1].read_bytes().splitlines(keepends=True)[:3]))
    copy = tmp_path / "daily" / "journals" / "shards" / "run-00.2-of-3.jsonl.gz"
    before = copy.read_bytes()
    built = build([begun], tmp_path / "daily", Settings(), {})
    assert (built.rows, built.skipped) == (9, [])
    assert copy.read_bytes() == before  # the beginning of a shard takes no longer one's place
    bare = Settings(journals="none")
    assert build(files[1:], tmp_path / "bare", bare, {}).rows == 6
    built = build(files[:1], tmp_path / "bare", bare, {})
    assert built.rows == 6
    assert built.skipped == [
        f"{files[0]}: the site has rows of run run-00 that no shard here has; give all of its shards at once"
    ]
    built = build(files, tmp_path / "bare", bare, {})
    assert (built.rows, built.skipped) == (9, [])


def test_what_was_taken_from_a_site_is_made_again(make_run: MakeRun, literal: Any, tmp_path: Path) -> None:
    """As of a folder that a job restored in part."""
    files = []
    first, second = make_run(0), make_run(1)
    request = msgspec.structs.replace(second.header.request, verifies=first.header.run)
    second = dataclasses.replace(second, header=msgspec.structs.replace(second.header, request=request))
    for journal in (first, second):
        files.append(tmp_path / f"{journal.header.run}.jsonl")
        files[-1].write_bytes(b"".join(map(encode, [journal.header, *journal.records])))
    out = tmp_path / "out"
    build(files, out, Settings(), {})
    page, copy = out / "run/run-00.html", out / "journals/run-00.jsonl.gz"
    before = page.read_bytes(), copy.read_bytes()
    page.unlink()
    assert build(files[1:], out, Settings(), {}).skipped == []  # of the site's own copy of its journal
    assert page.read_bytes() == before[0]
    page.unlink()
    copy.unlink()
    told = f"1 run whose page or journal is not in {out} any more; give their journals again: run-00"
    assert build(files[1:], out, Settings(), {}).skipped == [told]
    assert build(files, out, Settings(), {}).skipped == []
    assert (page.read_bytes(), copy.read_bytes()) == before


def test_bad_journals_cost_themselves_only(site: Site, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    built = build([tmp_path / "bad.jsonl", site[2][0]], tmp_path / "out", Settings(), {})
    assert built.added == 1
    assert "bad.jsonl: line 1" in built.skipped[0]
    with pytest.raises(InputError, match=r"no journal could be read; .*bad\.jsonl"):
        build([tmp_path / "bad.jsonl"], tmp_path / "none", Settings(), {})


def test_two_builds_at_once_come_one_after_the_other(site: Site, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda x: build([x], tmp_path / "out", Settings(), {}), site[2][:2]))
    assert sorted(x.runs for x in built) == [1, 2]


def test_a_folder_of_somebody_else_is_not_written_to(site: Site, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="is not empty and holds no site"):
        build(site[2], tmp_path, Settings(), {})


def test_json_within_a_page_cannot_end_its_script() -> None:
    text = inlined({"a": "</script><!--&\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert msgspec.json.decode(text) == {"a": "</script><!--&\u2028"}


def test_names_share_no_file() -> None:
    names = ["a", "A", "a/b", "a-b", "../a", "", ".", "-a", "ä", "x" * 90, "x" * 91, "\ud800"]
    files = [file_name(x) for x in names]
    assert len({x.lower() for x in files}) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_][a-z0-9_-]*", x) for x in files)
    assert file_name("20261121-013846-d039") == "20261121-013846-d039"


def test_vendored_files_are_as_published() -> None:
    folder = Path(data.__file__).parent / "vendor"
    known = dict(re.findall(r"`(uPlot[\w.]+)` sha256 ([0-9a-f]{64})", (folder / "README.md").read_text()))
    assert known == {
        x: hashlib.sha256((folder / "uplot" / x).read_bytes()).hexdigest()
        for x in ("uPlot.iife.min.js", "uPlot.min.css")
    }


def test_what_all_pages_share_is_small(site: Site) -> None:
    shared = sum((site[0] / "assets" / x).stat().st_size for x in ("site.css", "site.js", "uplot.js", "uplot.css"))
    assert shared < 110_000


@pytest.mark.usefixtures("untraced")
def test_pages_of_all_reference_journals_are_small_and_their_links_whole(tmp_path: Path) -> None:
    """300 kB beside the data that the script reads: a page is there at once on a phone."""
    built = build(sorted(REFERENCE.rglob("*.jsonl.gz")), tmp_path, Settings(), {})
    assert built.skipped == []
    texts = {x: x.read_text() for x in tmp_path.rglob("*.html")}
    large = {}
    for path, text in texts.items():
        size = len(re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S).encode())
        large |= {path.relative_to(tmp_path): size} if size > 300_000 else {}
    assert not large
    ids = {x: set(re.findall(r' id="([^"]+)"', text)) for x, text in texts.items()}
    links = {(x, y) for x, text in texts.items() for y in re.findall(r' href="([^"]+)"', text)}
    assert len(links) > 5_000
    for path, link in links:
        name, _, place = unescape(link).partition("#")
        target = (path.parent / unquote(name)).resolve() if name else path
        assert target.is_file(), (path, link)
        assert not place or unquote(place) in ids[target], (path, link)


def test_fresh_forgets_what_the_site_holds_and_leaves_what_is_not_its_own(site: Site, tmp_path: Path) -> None:
    build(site[2][:2], tmp_path, Settings(), {})
    (tmp_path / "CNAME").write_text("example.org")
    assert build(site[2][2:3], tmp_path, Settings(), {}, fresh=True).runs == 1
    assert [x.name for x in (tmp_path / "run").iterdir()] == ["run-02.html"]
    assert (tmp_path / "CNAME").is_file()


@pytest.mark.parametrize("when", ["page", "copy", "facts"])
def test_a_build_that_is_killed_loses_no_page(
    when: str, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(site[2][:1], tmp_path, Settings(), {})
    with monkeypatch.context() as patched:
        write = _Site._write

        def killed(self: _Site, name: str, text: str | bytes) -> None:
            if name.startswith({"page": "run/", "copy": "journals/"}[when]):
                raise KeyboardInterrupt
            write(self, name, text)

        if when == "facts":
            patched.setattr(ledger, "_encode", MagicMock(side_effect=KeyboardInterrupt))
        else:
            patched.setattr(_Site, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            build(site[2][1:2], tmp_path, Settings(), {})
    assert build(site[2][1:2], tmp_path, Settings(), {}).added == 1
    assert (tmp_path / "run" / "run-01.html").is_file()
    assert (tmp_path / "journals" / "run-01.jsonl.gz").is_file()
    assert build([], tmp_path, Settings(), {}).rows == build(site[2][:2], tmp_path / "whole", Settings(), {}).rows


def test_a_build_that_is_killed_before_its_pages_loses_no_value_to_compare(
    make_run: MakeRun, written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [make_run(2, sizes=(1024,)), make_run(3, sizes=(1024,), commit=f"{1:040x}")]  # of one commit
    runs = written(both, tmp_path / "given")
    build(runs[:1], tmp_path / "out", Settings(), {})
    with monkeypatch.context() as patched:
        patched.setattr(_Site, "write", MagicMock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(runs[1:], tmp_path / "out", Settings(), {})
    build(runs[1:], tmp_path / "out", Settings(), {})
    build(runs, tmp_path / "whole", Settings(), {})
    (whole,) = (tmp_path / "whole" / "data").iterdir()
    assert (tmp_path / "out" / "data" / whole.name).read_text() == whole.read_text()


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="rows.parquet takes pyarrow")
def test_a_column_that_was_empty_takes_its_first_text_on_a_later_day(
    make_run: MakeRun, written: Written, tmp_path: Path
) -> None:
    first = make_run(1)
    alone = tuple(x for x in first.records if x.implementation == "kernelmark")  # no reason, no best baseline
    days = [dataclasses.replace(first, records=alone, lines=first.lines[: len(alone)]), make_run(2)]
    for path in written(days, tmp_path / "given"):
        assert build([path], tmp_path / "out", Settings(), {}).parquet
    from pyarrow import parquet

    rows = parquet.ParquetFile(tmp_path / "out" / "rows.parquet").read().to_pylist()
    assert {x["reason"] for x in rows} == {None, "liger is not installed"}
    assert {x["best_baseline"] for x in rows} == {None, "torch"}


def test_a_runs_page_says_whether_another_way_of_training_is_as_good(literal: Any) -> None:
    rule = Equivalence(0.0025)
    bits = Metric("bits_per_byte", "bit", summary="last", judged=rule)
    curve = Metric("bits_by_step", "bit", shown="never", abscissa="validated_step")
    step = Metric("validated_step", "1", better="neither", shown="never")
    how = {"axes": {"N": 2}, "options": {"lr": 1e-3}, "primary": "bits_per_byte"}
    case = literal.case(operator="converge", name="N2", pass_="program", **how)
    records = []
    for seed in range(5):
        for name, off in (("torch", 1.0), ("near", 1.001), ("<b>far", 1.03)):
            seen = tuple(x * off * (1 + 1e-4 * (seed * len(name) % 5)) for x in (8.0, 2.0, 1.5))
            beside = {"bits_per_byte": seen[-1:], "bits_by_step": seen, "validated_step": (0.0, 1.0, 2.0)}
            made = Measurement(beside, "own clock")
            records.append(Record(case, name, "torch", None, seed, 0, "cold", "ok", None, made))
    journal = Journal(literal.header(metrics=(bits, curve, step), replicates=5), tuple(records))
    pages, found = Pages("Kernels", "today", None), facts(journal)
    run = run_of(journal, found)
    (text,) = pages.run(journal, run, found)
    page = Page(text)
    assert not page.faults
    section = text[text.index('id="convergence"') :]
    section = section[: section.index("</section>")]
    assert [x in section for x in ("+0.10%", "+3.00%", "&lt;b&gt;far", "<b>far")] == [True, True, True, False]
    # Of each arm its last step's verdict, and its own.
    assert section.count('class="left good"') == section.count('class="left bad"') == 2
    assert section.count("<path") > 3  # curves in their bands
    here = standings("converge", [(run, x) for x in found])
    (own,) = Pages("Kernels", "today", None, {run.name: NOT_YET}).operator("converge", here, (), [run], (), {})
    assert f'run/{run.file}.html#convergence">' in own
    (without,) = pages.run(literal.journal(literal.record("torch", 1.0)), run, found[:0])
    assert 'id="convergence"' not in without


def test_a_runs_page_says_what_kernels_are_worth(literal: Any) -> None:
    step = literal.case(operator="train", name="B4-tiny", pass_="program")
    part = literal.case(operator="attention", name="B4-H16")
    exchanges = tuple(
        Exchange(f"base+{x}", "base", "attention", "train", "B4-tiny", "attention", "B4-H16", x, "torch", 16)
        for x in ("fa4", "<b>absent")
    )
    rows = [
        *(literal.record(name, ms, case=step) for name, ms in (("base", 200.0), ("base+fa4", 190.0))),
        *(literal.record(name, ms, case=part) for name, ms in (("torch", 2.0), ("fa4", 1.5))),
    ]
    plain = literal.journal(*rows)
    journal = dataclasses.replace(
        plain, header=msgspec.structs.replace(plain.header, request=Request(exchanges=exchanges))
    )
    pages, found = Pages("Kernels", "today", None), facts(journal)
    (text,) = pages.run(journal, run_of(journal, found), found)
    page = Page(text)
    assert not page.faults
    assert "<td>16</td><td>1.33</td><td>1.0417</td><td>1.0526</td><td>–</td><td>10.000</td><td>8.000</td>" in text
    assert "attention &lt;b&gt;absent</p>" in text
    (without,) = pages.run(plain, run_of(plain, facts(plain)), facts(plain))
    assert 'id="worth"' not in without
