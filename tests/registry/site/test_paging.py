"""Pages that would be too large stand on several: blocks packed by bytes, and whole sites of large journals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest
from kernelmark.registry.site import data
from kernelmark.registry.site.build import Settings, build
from kernelmark.registry.site.facts import ROWS, facts, run_of
from kernelmark.registry.site.pages import LISTED, RUNS, Pages
from kernelmark.registry.site.paging import ROOM, Block, Frame, numbered, sheets
from kernelmark.registry.site.sizes import POINTS, parts, swept
from kernelmark.registry.store.journal import Journal

from .conftest import EXPECTED, MakeRun

pytest.importorskip("jinja2", reason="Jinja2 is not installed")

LIMIT = 300_000
"""Bytes of a page beside the data that its script reads."""
CASES, LIBRARIES = 270, 17
"""Three times as many cases as attention has in the reference journals, by as many implementations."""
TABLE = Frame("<table>", "</table>")


def rows_of(count: int, size: int = 10, *frames: Frame, label: str = "") -> list[Block]:
    """Blocks of so many bytes, no two the same."""
    return [Block(f"{i:0{size}d}", frames, label) for i in range(count)]


def test_blocks_stand_in_order_on_as_few_pages_as_hold_them() -> None:
    divided = sheets(rows_of(25), 100)
    assert [len(x.blocks) for x in divided] == [10, 10, 5]
    assert "".join(x.html for x in divided) == "".join(f"{i:010d}" for i in range(25))
    assert [x.html for x in sheets([])] == [""]


def test_frames_are_opened_once_on_each_page_and_count() -> None:
    divided = sheets(rows_of(12, 10, TABLE), 65)
    assert [len(x.blocks) for x in divided] == [5, 5, 2]  # 7 bytes to open it, on each page
    assert divided[2].html == "<table>00000000100000000011</table>"
    inner = Frame("<tbody>", "</tbody>")
    found = [Block("a", (TABLE, inner)), Block("b", (TABLE,)), Block("c")]
    assert sheets(found)[0].html == "<table><tbody>a</tbody>b</table>c"


def test_a_block_that_is_larger_than_a_page_has_one_of_its_own() -> None:
    found = [Block("a" * 10), Block("b" * 1000), Block("c" * 10)]
    assert [x.html[0] for x in sheets(found, 100)] == ["a", "b", "c"]


def test_what_belongs_together_is_not_torn_where_a_page_holds_it() -> None:
    first, second = Frame("<a>", "</a>"), Frame("<b>", "</b>")
    found = [*rows_of(6, 10, first), *rows_of(6, 10, second)]
    assert [len(x.blocks) for x in sheets(found, 100)] == [6, 6]
    # Less than half of a page is no reason for another one, and what no page holds is torn anyway.
    assert [len(x.blocks) for x in sheets([*rows_of(2, 10, first), *rows_of(8, 10, second)], 100)] == [8, 2]
    assert [len(x.blocks) for x in sheets([*rows_of(6, 10, first), *rows_of(12, 10, second)], 100)] == [8, 9, 1]


def test_a_page_is_named_after_its_first_and_last_block() -> None:
    found = [Block("a"), Block("b", label="forward"), Block("c", label="other"), Block("d", label="backward")]
    assert sheets(found)[0].label == "forward to backward"
    assert sheets(found[:2])[0].label == "forward"
    assert [numbered("operator/x", i) for i in (1, 2)] == ["operator/x", "operator/x.2"]


def test_runs_are_listed_on_as_many_pages_as_they_take(make_run: MakeRun) -> None:
    journal = make_run(1)
    run = run_of(journal, facts(journal))
    days = [f"20{i // 28:02d}-01-{1 + i % 28:02d}T00:00:00+00:00" for i in range(2 * RUNS + 11)]
    found = [msgspec.structs.replace(run, name=f"run-{i}", created=x) for i, x in enumerate(days)]
    made = Pages("Kernels", "today", repeated={x.name: "not yet repeated" for x in found}).runs(found)
    listed = [re.findall(r'<a href="run/run-(\d+).html">', x) for x in made]
    assert [len(x) for x in listed] == [RUNS, RUNS, 11]
    assert [int(y) for x in listed for y in x] == list(reversed(range(len(found))))
    (pager, _) = re.findall(r'<p class="pager">.*?</p>', made[1])
    assert re.findall(r'href="([^"]+)"', pager) == ["runs.html", "runs.3.html"]


def test_a_line_of_very_many_points_keeps_ours_and_the_best(literal: Any) -> None:
    records = []
    for size in (2**x for x in range(8)):
        case = literal.case(name=f"S{size}", axes={"S": size}, bytes=10**6 * size)
        for rank in range(POINTS // 4):
            name = "kernelmark" if rank == 60 else f"library{rank:03d}"
            records.append(literal.record(name, 1.0 + rank, case=case, provider=name))
    journal = literal.journal(*records)
    found = facts(journal)
    run = run_of(journal, found)
    (line,) = swept("rms_norm", [(run, x) for x in found])
    assert line.points <= POINTS
    kept = list(line.looks)
    assert kept[0] == "kernelmark"
    assert kept[1:] == [f"library{i:03d}" for i in range(len(kept) - 1)]
    assert line.left_out == POINTS // 4 - len(kept)
    assert [*parts([line, line, line])] == ["forward", "forward-2", "forward-3"]


class Balance(HTMLParser):
    """Whether what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "link", "br", "wbr", "input", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.wrong += not self.open or self.open.pop() != tag


@pytest.fixture(scope="module")
def large(
    literal: Any,
    written: Callable[[Sequence[Journal], Path], list[Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A site of two runs of one operator that has far too many cases for one page, and of a case that fails in
    hundreds of ways.
    """

    def run(number: int) -> Journal:
        records = []
        for i in range(CASES):
            pass_ = ("forward", "backward")[i % 2]
            axes = {"B": 1 + i // 90, "S": 2 ** (i // 2 % 15), "D": 64 + i // 30}
            name = "-".join(f"{x}{y}" for x, y in axes.items()) + f"-{i}-{pass_}"
            case = literal.case(operator="attention", name=name, axes=axes, pass_=pass_, bytes=10**6)
            for rank in range(LIBRARIES):
                library = f"library_{rank:02d}" if rank else "kernelmark"
                ms = (1 + rank / 10) * (1 + i % 7 / 100)
                records.append(literal.record(library, [ms] * 3, case=case, provider=library))
        case = literal.case(operator="attention", name="S1-broken", axes={"S": 1})
        for rank in range(3 * LISTED):
            reason = f"{rank} " + "<b>because</b> " * 60
            records.append(literal.record(f"broken_{rank}", case=case, status="error", reason=reason))
        day = f"2026-11-0{1 + number}T00:00:00+00:00"
        return literal.journal(
            *records, literal.footer(), run=f"run-{number}", created=day, commit=f"{number:040x}"
        )

    folder = tmp_path_factory.mktemp("large")
    build(written([run(0), run(1)], folder / "given"), folder / "out", Settings("Kernels"), EXPECTED)
    return folder / "out"


@pytest.mark.usefixtures("untraced")
def test_no_page_of_a_large_journal_is_large(large: Path) -> None:
    texts = {str(x.relative_to(large)): x.read_text() for x in large.rglob("*.html")}
    bare = {x: re.sub(r'<script type="application/json".*?</script>', "", y, flags=re.S) for x, y in texts.items()}
    assert {x: len(y.encode()) for x, y in bare.items() if len(y.encode()) > LIMIT} == {}
    operator = sorted(x for x in texts if x.startswith("operator/attention"))
    assert len(operator) > 3
    assert max(len(bare[x].encode()) for x in operator) < ROOM + 20_000
    seen = [x for name in operator for x in re.findall(r'<details id="([^"]+)"', texts[name])]
    assert len(seen) == len(set(seen)) == CASES + 1
    for name, text in texts.items():
        found = Balance(text)
        assert (found.open, found.wrong) == ([], 0), name
        assert "<b>because" not in text
    assert f"{2 * LISTED} more: in " in "".join(texts[x] for x in operator)


def test_every_link_and_every_row_of_a_large_journal_is_there(large: Path) -> None:
    texts = {x.resolve(): x.read_text() for x in large.rglob("*.html")}
    ids = {x: set(re.findall(r' id="([^"]+)"', y)) for x, y in texts.items()}
    for path, link in {(x, y) for x, text in texts.items() for y in re.findall(r' href="([^"]+)"', text)}:
        name, _, place = unescape(link).partition("#")
        target = (path.parent / unquote(name)).resolve() if name else path
        assert target.is_file(), (path, link)
        assert not place or unquote(place) in ids[target], (path, link)
    count = CASES * LIBRARIES + 3 * LISTED
    rows = sorted(
        int(y[4:]) for x, found in ids.items() if x.name.startswith("run-0") for y in found if y[:4] == "row-"
    )
    assert rows == list(range(count))
    # As the script finds them.
    drawn = 0
    for path, text in texts.items():
        if path.parent.name == "operator":
            page = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
            asked = [int(x) for x in re.findall(r'data-chart="(\d+)"', text)]
            assert asked == list(range(page["first"], page["first"] + len(page["charts"])))
            drawn += len(asked)
            for line in (x for chart in page["charts"] for x in chart):
                for run, place in zip(line["runs"], line["places"], strict=True):
                    of = page["runs"][run]
                    assert of["each"] == ROWS
                    file = large / "run" / f"{of['file']}.{2 + place // of['each']}.html"
                    assert f"row-{place}" in ids[file.resolve()]
    assert drawn == CASES


def test_pages_that_are_no_longer_needed_are_taken_away(
    literal: Any, written: Callable[[Sequence[Journal], Path], list[Path]], tmp_path: Path
) -> None:
    def run(timed: int) -> Journal:
        found = []
        for i in range(2 * ROWS):
            case = literal.case(name=f"S{i}", axes={"S": i + 1})
            ended = {} if i < timed else {"status": "error", "reason": "it broke"}
            found.append(literal.record("torch", case=case, **ended))
        return literal.journal(*found, run="run-0")

    build(written([run(10)], tmp_path / "a"), tmp_path / "out", Settings(), {})
    assert (tmp_path / "out/run/run-0.3.html").is_file()
    assert not (tmp_path / "out/run/run-0.4.html").exists()
    (tmp_path / "out/run/run-0.4.html").write_text("of a build before")
    build(written([run(2 * ROWS)], tmp_path / "b"), tmp_path / "out", Settings(), {})
    assert not (tmp_path / "out/run/run-0.4.html").exists()


def test_a_comparison_leads_to_the_page_of_a_row(literal: Any) -> None:
    cases = [literal.case(name=f"S{i}", axes={"S": i + 1}) for i in range(ROWS + 1)]
    journal = literal.journal(*(literal.record("torch", 1.0, case=x) for x in cases))
    found = facts(journal)
    run = run_of(journal, found)
    given = json.loads(
        data.values([(run, x) for x in found]).removeprefix("kernelmark.take(").removesuffix(");\n")
    )
    assert given["runs"][0]["each"] == ROWS
    assert run.row(0) == f"run/{run.file}.2.html#row-0"
    assert run.row(ROWS) == f"run/{run.file}.3.html#row-{ROWS}"
    small = msgspec.structs.replace(run, rows=ROWS)
    assert (small.rows_a_page, small.row(5)) == (0, f"run/{run.file}.html#row-5")
