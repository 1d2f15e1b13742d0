"""`docs/stages/`: a root of its own, its plan, and the table that `docs/attention.md` shows."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.journal import Journal, read
from kernelmark.registry.store.record import SCHEMA_VERSION, Header, Measurement, Record
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog

HOUSE = Path(__file__).parents[2]
STAGES = HOUSE / "docs" / "stages"


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    monkeypatch.setenv("KERNELMARK_PATH", str(STAGES))
    return Catalog.default()


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stages_table", STAGES / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_root_offers_each_stage_of_the_table(catalog: Catalog, table: ModuleType) -> None:
    stages = [x for x in catalog.of_operator("attention") if x.provider == "stages"]
    assert (*(x.name for x in stages), "kernelmark") == table.STAGES
    assert {x.name for x in stages if "cpu" in x.devices} == {"plain"}


def test_the_plan_asks_every_stage_for_every_case(catalog: Catalog, table: ModuleType) -> None:
    plan = plans.load(str(STAGES / "stages.toml"), catalog, "cuda")
    assert plan.replicates == 3
    assert {(x.axes["D"], x.options["mask"], x.pass_) for x in plan.cases} == {
        (D, mask, pass_) for D in (64, 128) for mask in ("causal", "full") for pass_ in ("forward", "backward")
    }
    cells = plan.cells(catalog, "cuda", ["stages", "kernelmark"])
    assert len(cells) == len(plan.cases) * len(table.STAGES)


def test_plain_holds_no_more_than_it_says(catalog: Catalog) -> None:
    plain = next(x for x in catalog.of_operator("attention") if x.name == "plain").load()
    operator = catalog.operator("attention")
    axes = {"B": 2, "H": 32, "Hkv": 32, "S": 8192, "D": 64}
    plain(operator.case(axes, "bf16", "forward", mask="full"))
    with pytest.raises(NotImplementedError, match=r"scores are more than the"):
        plain(operator.case(axes | {"S": 16384}, "bf16", "forward", mask="full"))


def record(catalog: Catalog, implementation: str, pass_: str, ms: float | None, D: int = 64) -> Record:
    axes = {"B": 2, "H": 32, "Hkv": 32, "S": 8192, "D": D}
    case = catalog.operator("attention").case(axes, "bf16", pass_, mask="causal")
    return Record(
        case=case,
        implementation=implementation,
        provider="stages",
        version=None,
        replicate=0,
        position=0,
        cache="cold",
        status="ok" if ms else "unsupported",
        reason=None if ms else "there is none",
        measurement=Measurement({"latency": (ms,)}, "events") if ms else None,
    )


def test_the_table(catalog: Catalog, table: ModuleType) -> None:
    header = Header(
        schema_version=SCHEMA_VERSION,
        run="20260101-000000-abcd",
        created="2026-01-01T00:00:00Z",
        harness="1",
        commit="0123456789abcdef",
        dirty=False,
        plan="stages",
        seed=1,
        replicates=1,
        device="cuda",
        key="k",
        conditions={"gpu": "GPU"},
        environment={},
    )
    times = {"plain": 8.0, "tiled": 4.0, "tma": None, "kernelmark": 1.0}
    records = tuple(record(catalog, x, "forward", ms) for x, ms in times.items())
    made = table.table(Journal(header, records)).splitlines()
    assert made == [
        "From `registry/reference/20260101-000000-abcd`: GPU, 1 replicates, commit 0123456789ab.",
        "",
        "| forward | D=64 causal |",
        "|---|---|",
        "| plain | 8.00 ms, 68.7 TFLOP/s |",
        "| tiled | 4.00 ms, 137 TFLOP/s, ×2.00 |",
        "| tma | unsupported |",
        "| specialised | – |",
        "| kernelmark | 1.00 ms, 550 TFLOP/s, ×4.00 |",
    ]
    both = table.table(Journal(header, (*records, record(catalog, "tma", "backward", 2.0))))
    assert "| backward | D=64 causal |" in both


def test_the_document_shows_what_its_journal_says(table: ModuleType) -> None:
    text = table.DOCUMENT.read_text()
    assert table.placed(text, "") != text
    named = re.findall(r"^From `(registry/reference/\S+)`", text, re.MULTILINE)
    assert len(named) == 1
    try:
        journal = read(HOUSE / named[0])
    except InputError as error:
        pytest.fail(str(error))
    assert table.placed(text, table.table(journal)) == text
