"""`kernelmark report`: a page into a file, tables onto the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from kernelmark.registry.errors import HarnessError, InputError
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


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    page.write_text("the one before")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(HarnessError, match="cannot be written to .*page.html: No space left on device"):
        report("--output", str(page))
    assert page.read_text() == "the one before"
    assert [x.name for x in tmp_path.iterdir() if x.is_file()] == ["page.html"]


def test_a_table_goes_into_what_is_no_file() -> None:
    assert "/dev/null" in report("--style", "goals", "--output", "/dev/null")
    assert not Path("/dev/null").is_file()
