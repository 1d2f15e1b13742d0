"""`kernelmark report`: a page into a file, tables onto the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from kernelmark.registry.errors import InputError
from kernelmark.suite.cli.report import command_report

RUN = Path(__file__).parents[3] / "registry" / "reference" / "20261121-105752-509e.jsonl.gz"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))


def report(*arguments: str) -> str:
    found = CliRunner().invoke(command_report, [str(RUN), *arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def test_a_page_goes_into_a_file_and_a_table_is_printed(tmp_path: Path) -> None:
    path = Path(report().strip())
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert path.parent == tmp_path / "home" / "reports"
    assert report("--style", "kernels", "--against", "tma").startswith("| Kernel | Our Latency (ms) |")
    assert "| goal | asked for | measured |" in report("--style", "goals")
    assert "| peer | case | published | on | measured |" in report("--style", "fidelity")
    table = tmp_path / "folder" / "table.txt"
    assert report("--style", "configurations", "--output", str(table)).strip() == str(table)
    assert "Median Speedup: " in table.read_text()


def test_a_baseline_is_for_tables() -> None:
    with pytest.raises(InputError, match="--style kernels or configurations"):
        report("--against", "torch")
