"""The A/B comparisons on record, decided anew, and the document that shows them."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from kernelmark.registry.detection.eligibility import MINIMUM_PAIRS
from kernelmark.registry.detection.verdict import exit_code

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "calibration.md"


@pytest.fixture(scope="module")
def recorded() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("calibration_recorded", HERE / "recorded.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(HERE))
    patch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    yield module
    patch.undo()


@pytest.mark.usefixtures("untraced")
def test_the_document_shows_what_is_decided_today(recorded: ModuleType) -> None:
    text = DOCUMENT.read_text()
    for name, table in recorded.tables().items():
        assert table in text, name


def test_unchanged_code_on_a_device_is_never_called_changed(recorded: ModuleType) -> None:
    folders = sorted(recorded.RECORDED.glob("unchanged-*"))
    assert folders
    for folder in folders:
        progress, pairs = recorded.decided(folder)
        assert pairs >= MINIMUM_PAIRS
        kinds = Counter(x.kind for x in progress.verdicts)
        assert kinds.keys() <= {"no change", "inconclusive", "skipped"}
        assert kinds["no change"] > 0.9 * kinds.total()
        assert exit_code(progress.verdicts) in (0, 3)  # nothing else got worse either: memory, error


def test_another_environment_is_told_from_the_code(recorded: ModuleType) -> None:
    """Two commits that differ in code which the row does not run, and an older Triton below one of them."""
    folders = sorted(recorded.RECORDED.glob("environment-*"))
    assert folders
    for folder in folders:
        progress, _ = recorded.decided(folder)
        assert exit_code(progress.verdicts) == 1
        attributed = recorded.attributed(folder)
        assert attributed
        for found in attributed:
            assert found.causes == ("environment",)
            assert {x.cause for x in found.parts} == {"code", "environment", "interaction"}


def test_a_planted_delay_of_a_server_is_found(recorded: ModuleType) -> None:
    """Starts of a server on a CPU: 2 ms in each layer's attention of a step, by the whole command."""
    found, pairs = recorded.decided(recorded.RECORDED / "server-delayed-1")
    (verdict,) = found.verdicts
    assert (verdict.kind, pairs, verdict.pairs) == ("regression", 6, 10)
    assert verdict.change == pytest.approx(3.728, abs=0.05)
    said = (recorded.RECORDED / "server-delayed-1" / "said.txt").read_text(encoding="utf-8")
    assert "+372.8 %" in said
    assert said.endswith("exit code 1\n")


def test_unchanged_servers_beside_other_work_are_no_alarm(recorded: ModuleType) -> None:
    found, _ = recorded.decided(recorded.RECORDED / "server-unchanged-1")
    (verdict,) = found.verdicts
    assert verdict.kind not in ("regression", "warning", "improvement")
    assert "1 inconclusive" in (recorded.RECORDED / "server-unchanged-1" / "said.txt").read_text(encoding="utf-8")
