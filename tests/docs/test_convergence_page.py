"""`docs/convergence.md` agrees with plans and journals that it tells of; its pictures are parts of a report."""

from __future__ import annotations

import re
from pathlib import Path

from kernelmark.registry.store.journal import read
from kernelmark.suite import plan as plans
from kernelmark.suite.plan import BUILTIN
from kernelmark.suite.workloads import converge

HERE = Path(__file__).resolve().parents[2]
PAGE = (HERE / "docs" / "convergence.md").read_text(encoding="utf-8")


def test_pieces_hold_every_arm_once_each_beside_its_base():
    pieces = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `([\w ]+)` \|$", PAGE, re.MULTILINE)
    assert len({run for run, _, _ in pieces}) == len(pieces)
    by_plan: dict[str, list[str]] = {}
    for _, name, arms in pieces:
        base, *others = arms.split()
        assert base == "torch"
        by_plan.setdefault(name, []).extend(others)
    assert {x for x in BUILTIN if x.startswith("converge_") and _goes_on(x)} == set(by_plan) | {"converge_long"}
    for name, arms in by_plan.items():
        plan = plans.load(name, converge.catalog(), "cuda")
        there = {y for x in plan.cases for y in plan.only[x.full_name]} - {"torch"}
        assert sorted(arms) == sorted(there)


def _goes_on(name: str) -> bool:
    return all(x.axes["P"] for x in plans.load(name, converge.catalog(), "cuda").cases)


def test_what_is_said_of_compressed_gradients_is_what_the_run_has():
    made = read(HERE / "registry" / "reference" / "20261127-154519-e0c8.jsonl.gz")
    last = {
        x.implementation: f"{x.measurement.samples['bits_per_byte'][-1]:.3f}"
        for x in made.records
        if x.case.operator == "converge" and x.measurement is not None
    }
    told = " ".join(PAGE[PAGE.index("## Not yet") :].split())
    (said,) = re.findall(r"run `20261127-154519-e0c8`.*?hardly trains so, [\d.]+\d", told)
    found = re.findall(r"\d\.\d{3}", said)
    assert found == [last[x] for x in ("gradients_int8", "gradients_fp8", "torch", "gradients_topk")]


def test_pictures_of_the_page_are_made_by_the_command(program):
    pictures = program("pictures")
    shown = re.findall(r"\]\(pictures/([\w-]+)\.png\)", PAGE)
    assert shown == ["report-converge", "report-converge-curves"]
    assert set(shown) < set(pictures.REPORTS)
    assert all((pictures.PICTURES / f"{x}.png").is_file() for x in shown)


def test_a_picture_of_parts_of_a_page_is_of_a_copy_with_what_is_folded_open(program, tmp_path):
    pictures = program("pictures")
    page = tmp_path / "page.html"
    page.write_text("<html><head></head><body><details>gradients</details></body></html>")
    picture = pictures.Picture("", 1, 1, style="header { display: none }")
    cut = Path(pictures.address_of(page, picture).removeprefix("file://")).read_text()
    assert "<style>header { display: none }</style></head>" in cut
    assert "<details open>gradients" in cut
    assert "<details>gradients" in page.read_text()
    assert pictures.address_of(page, pictures.Picture("", 1, 1)) == page.as_uri()
