"""The MLflow UI: it answers on loopback, shows two implementations apart, and ends without a trace."""

from __future__ import annotations

import html
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernelmark.registry.errors import HarnessError, InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.tracking import ui
from kernelmark.registry.tracking.store import Store

pytest.importorskip("mlflow", reason="MLflow is not installed")
# MLflow 3.17.2 calls what SQLAlchemy 2.1 deprecates: not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

RUN = "20261120-120000-abcd"
Browse = Callable[..., str]
COMMAND = "from kernelmark.suite.cli.ui import command_ui; command_ui()"


@dataclass(frozen=True)
class Running:
    """`kernelmark ui` as a user starts it, and the link it printed."""

    process: subprocess.Popen[str]
    link: str


def descendants(pid: int) -> list[int]:
    """Processes below one, by /proc."""
    out = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # ended meanwhile
        if int(fields[1]) == pid:
            out += [int(path.parent.name), *descendants(int(path.parent.name))]
    return out


def gone(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(Path(f"/proc/{x}").exists() for x in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, fresh_database: Path, make_journal: Callable[..., Journal]
) -> Iterator[Running]:
    """The UI on a registry with one run of 30 rows."""
    home = Home(tmp_path_factory.mktemp("ui"))
    shutil.copy(fresh_database, home.database)
    Store.open(None, home).ingest(make_journal(cases=15))
    environment = {**os.environ, "KERNELMARK_HOME": str(home.folder)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    process = subprocess.Popen([sys.executable, "-c", COMMAND], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Running(process, process.stdout.readline().strip())
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_it_answers_at_a_ready_comparison(running: Running) -> None:
    address, fragment = running.link.split("#")
    assert address.startswith("http://127.0.0.1:")
    assert "compareRunsMode=CHART" in fragment
    assert "viewStateShareKey=" in fragment
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert b"MLflow" in answer.read()


def test_two_implementations_can_be_told_apart_in_a_browser(running: Running, browse: Browse) -> None:
    page = html.unescape(browse(running.link, "--dump-dom"))
    assert "kernelmark B4-S256-D4096-bf16-forward rms_norm" in page
    assert "torch B4-S256-D4096-bf16-forward rms_norm" in page
    assert "2 matching runs" in re.sub(r"<[^>]+>", "", page)  # of the one case that it opens on
    for drawn in ("latency/median_us", "speedup/vs_best_baseline", "limit/fraction"):
        assert drawn in page
    assert "all other metrics" in page
    assert "noise/cv_between" not in page  # folded
    pictures = os.environ.get("KERNELMARK_TEST_PICTURES")  # a folder: for a person to look at
    if pictures:
        browse(running.link, f"--screenshot={Path(pictures).resolve()}/comparison.png")


def test_ctrl_c_ends_it_with_all_children(running: Running) -> None:
    below = descendants(running.process.pid)
    assert len(below) >= 2
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(30) == 0
    assert gone(below, 1)


@pytest.fixture
def home(tmp_path: Path, fresh_database: Path) -> Home:
    """A home with an initialised, empty registry."""
    home = Home(tmp_path / "home")
    home.folder.mkdir()
    shutil.copy(fresh_database, home.database)
    return home


def test_a_port_in_use_is_named(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1: Address already in use"):
            ui.Ui.start(home, port=port)


def test_a_server_that_does_not_start_is_told(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho this is why\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(HarnessError, match="did not start: this is why"):
        ui.Ui.start(home)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(HarnessError, match="cannot be started"):
        ui.Ui.start(home)


def test_a_server_that_never_answers_is_ended(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = tmp_path / "python"
    deaf.write_text(
        f"#!{sys.executable}\nimport signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)\n"
    )
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    monkeypatch.setattr(ui, "_START_S", 1.0)
    monkeypatch.setattr(ui, "_END_S", 0.5)
    with pytest.raises(HarnessError, match="does not answer"):
        ui.Ui.start(home)
    left = [Path(f"/proc/{x}/cmdline").read_bytes() for x in descendants(os.getpid())]
    assert not [x for x in left if os.fsencode(deaf) in x]


def test_a_server_that_ends_of_itself_is_told(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"], start_new_session=True)
    with pytest.raises(HarnessError, match="code 7"), ui.Ui("link", process, tmp_path / "log") as running:
        running.wait()


def test_a_registry_that_is_a_server_already(
    server: str, home: Home, make_journal: Callable[..., Journal]
) -> None:
    Store.open(server, home).ingest(make_journal(cases=1))
    with ui.Ui.start(home, RUN, uri=server) as there:
        assert not there.started
        assert there.link.startswith(f"{server}/#/experiments/")
        there.wait()
