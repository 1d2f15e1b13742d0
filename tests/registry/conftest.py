"""Literal journals, and real MLflow servers on loopback, for the tests of the registry."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import Journal, encode, parse
from kernelmark.registry.store.record import Case, Ceiling, Footer, Header, Line, Measurement, Record
from kernelmark.suite.catalog import Catalog, Implementation

MakeJournal = Callable[..., Journal]
Write = Callable[[Journal, Path], Path]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., str]:
    """What a headless Chromium prints about a page, by the page's address and Chromium's options."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    command = [CHROMIUM, "--headless", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    # A container has no user namespaces for the sandbox; the page is our own, on loopback or in a file.
    command += ["--no-sandbox", f"--user-data-dir={tmp_path}/profile", "--window-size=2000,1400"]
    # Virtual time stands still while something loads: charts are drawn after several rounds of requests.
    command += ["--virtual-time-budget=120000", "--disable-background-networking"]

    def look(link: str, *options: str) -> str:
        done = subprocess.run([*command, *options, link], capture_output=True, timeout=100, check=True)
        return done.stdout.decode()

    return look


def _case(size: int, operator: str) -> Case:
    return Case(
        operator=operator,
        name=f"B4-S{size}-D4096-bf16-forward",
        axes={"B": 4, "S": size, "D": 4096},
        options={},
        dtype="bf16",
        pass_="forward",
        spec="5bec0001",
        bytes=2 * 4 * size * 4096 * 2,
        flops=0,
    )


def _record(case: Case, implementation: str, replicate: int, position: int, wrong: bool) -> Record:
    ours = implementation == "kernelmark"
    ms = case.bytes / 3e9 * (1.0 if ours else 1.6) * (1 + 0.002 * replicate)
    return Record(
        case=case,
        implementation=implementation,
        provider="kernelmark" if ours else "torch",
        version="0.1.0" if ours else "2.13.0",
        replicate=replicate,
        position=position,
        cache="cold",
        status="incorrect" if wrong else "ok",
        reason="relative error 0.3 above 0.01" if wrong else None,
        measurement=None
        if wrong
        else Measurement(
            samples={
                "latency": tuple(ms * (1 + 0.001 * (i % 5)) for i in range(20)),
                "error": (0.001,),
                "memory": (float(case.bytes),),
            },
            timer="cuda_event",
        ),
    )


@pytest.fixture(scope="session")
def make_journal() -> MakeJournal:
    """Builds a journal in memory: cases × implementations × replicates, one wrong row if asked."""

    def make(
        run: str = "20261120-120000-abcd",
        *,
        cases: int = 2,
        implementations: tuple[str, ...] = ("kernelmark", "torch"),
        replicates: int = 2,
        operator: str = "rms_norm",
        wrong: str | None = None,
    ) -> Journal:
        sizes = [256 * (i + 1) for i in range(cases)]
        lines: list[Line] = [
            Header(
                schema_version=2,
                run=run,
                created="2026-11-20T12:00:00Z",
                harness="0.1.0",
                commit="0123456789abcdef0123456789abcdef01234567",
                dirty=False,
                plan="quick",
                seed=1,
                replicates=replicates,
                device="cuda",
                key="00aa11bb22cc33dd",
                conditions={"gpu": "NVIDIA H200", "torch": "2.13.0"},
                environment={"python": "3.12.3"},
            )
        ]
        for replicate in range(replicates):
            lines += [Ceiling("copy", 1 << 20, 0.001, replicate), Ceiling("copy", 1 << 30, 0.3, replicate)]
            lines += [
                _record(_case(size, operator), name, replicate, position, name == wrong)
                for position, (size, name) in enumerate((s, n) for s in sizes for n in implementations)
            ]
        lines.append(Footer("2026-11-20T12:01:00Z", 60.0, True, {"sample": 30.0, "overhead": 10.0}))
        return parse(b"".join(encode(x) for x in lines))

    return make


@pytest.fixture(scope="session")
def write() -> Write:
    """Writes a journal in memory to a file and returns the path."""

    def do(journal: Journal, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (journal.header, *journal.records, *journal.ceilings, *journal.footers)
        path.write_bytes(b"".join(encode(x) for x in lines))
        return path

    return do


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home of its own."""
    return Home(tmp_path / "home")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach a registry of the developer's."""
    for name in ("MLFLOW_TRACKING_URI", "KERNELMARK_EXPERIMENT", "KERNELMARK_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A port of loopback on which nobody listens."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find


@pytest.fixture(scope="session")
def fresh_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialised SQLite file to copy: MLflow takes seconds to make one."""
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    home = Home(tmp_path_factory.mktemp("fresh"))
    code = "from pathlib import Path; from kernelmark.registry.tracking.store import Store; "
    code += f"from kernelmark.registry.store.home import Home; Store.open(None, Home(Path({str(home.folder)!r})))"
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment())
    return home.database


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[str]:
    """The address of a real `mlflow server` on loopback, one for the whole session."""
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/server.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=_environment(), cwd=folder, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/version", timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


def _environment() -> dict[str, str]:
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return {**{x: y for x, y in os.environ.items() if x != "MLFLOW_TRACKING_URI"}, **quiet}


class Literal:
    """Builds journals line by line, for tests that compute their numbers by hand."""

    @staticmethod
    def case(**changes: Any) -> Case:
        """A memory-bound case of 2 MB; `changes` replace its fields."""
        fields: dict[str, Any] = {
            "operator": "rms_norm",
            "name": "B2-S4-D8-bf16-forward",
            "axes": {"B": 2, "S": 4, "D": 8},
            "options": {},
            "dtype": "bf16",
            "pass_": "forward",
            "spec": "0123456789ab",
            "bytes": 2_000_000,
            "flops": 0,
        }
        return Case(**(fields | changes))

    @classmethod
    def record(
        cls,
        implementation: str = "torch",
        samples: float | Sequence[float] = 1.0,
        *,
        case: Case | None = None,
        replicate: int = 0,
        status: str = "ok",
        reason: str | None = None,
        cache: str = "cold",
        provider: str | None = None,
        version: str | None = "1.0",
        beside: Mapping[str, float | Sequence[float] | None] | None = None,
        **measurement: Any,
    ) -> Record:
        """One line; a single number stands for three samples of that time. `beside` are other metrics' samples."""
        times = (samples,) * 3 if isinstance(samples, int | float) else tuple(samples)
        named = {x: (float(y),) if isinstance(y, int | float) else y for x, y in (beside or {}).items()}
        held = {"latency": times} | {x: tuple(y) for x, y in named.items() if y}
        seen = Measurement(held, **({"timer": "events"} | measurement)) if status == "ok" else None
        return Record(
            case=case or cls.case(),
            implementation=implementation,
            provider=provider or implementation,
            version=version,
            replicate=replicate,
            position=0,
            cache=cache,  # type: ignore[arg-type]
            status=status,  # type: ignore[arg-type]
            reason=reason,
            measurement=seen,
            spent_s={"sample": 1.0},
        )

    @staticmethod
    def header(**changes: Any) -> Header:
        """A header of a GPU run; `changes` replace its fields."""
        fields: dict[str, Any] = {
            "schema_version": 2,
            "run": "20261121-000000-aaaa",
            "created": "2026-11-21T00:00:00Z",
            "harness": "0.1.0",
            "commit": "0123456789abcdef0123456789abcdef01234567",
            "dirty": False,
            "plan": "quick",
            "seed": 1,
            "replicates": 1,
            "device": "cuda",
            "key": "key0",
            "conditions": {"gpu": "NVIDIA H200", "driver": "580.1"},
            "environment": {"python": "3.12"},
        }
        return Header(**(fields | changes))

    @classmethod
    def journal(cls, *lines: Line, **header: Any) -> Journal:
        """A journal of these lines, gone through its bytes as a file would."""
        return parse(b"".join(encode(x) for x in (cls.header(**header), *lines)))

    @staticmethod
    def footer(**changes: Any) -> Footer:
        """The end of a complete session."""
        fields: dict[str, Any] = {
            "ended": "2026-11-21T00:01:00Z",
            "wall_s": 60.0,
            "complete": True,
            "spent_s": {"sample": 45.0, "overhead": 15.0},
        }
        return Footer(**(fields | changes))


@pytest.fixture(scope="session")
def charted() -> Mapping[tuple[str, str], Sequence[Implementation]]:
    """What can stand in one chart: all that the catalog has for an operator or workload on a kind of device."""
    found: dict[tuple[str, str], list[Implementation]] = {}
    for x in Catalog.default().implementations:
        for device in x.devices:
            found.setdefault((x.operator, device), []).append(x)
    return found


@pytest.fixture(scope="session")
def literal() -> type[Literal]:
    """See `Literal`."""
    return Literal
