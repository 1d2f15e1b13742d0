"""The MLflow UI on the registry: started on loopback, opened at a ready comparison, ended without a trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ..errors import HarnessError, InputError
from ..store.home import Home
from .saved_view import Opened
from .store import Store, resolve

_HOST = "127.0.0.1"
_START_S = 120.0  # 14 s on two idle cores
_END_S = 10.0


class Ui:
    """A running UI: `with Ui.start(home) as ui: ui.wait()`. It ends with the block, children and all."""

    def __init__(self, opened: Opened, process: subprocess.Popen[bytes] | None, log: Path) -> None:
        self.opened = opened
        self.log = log
        self._process = process

    @classmethod
    def start(
        cls,
        home: Home,
        run: str | None = None,
        port: int | None = None,
        uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Ui:
        """Starts the UI on the registry and returns when it answers.

        Where the registry is a server already there is nothing to start, and only the link is made.
        It opens on the rows of `run` with these tags, as `Store.saved_view` has it. `run` defaults to the newest
        one in the registry; where tags are given, to all of them.
        """
        uri = resolve(uri, home)
        store = Store.open(uri, home)
        chosen = run if run or tags else store.newest()
        conditions = ({"invocation": chosen} if chosen else {}) | dict(tags or {})
        opened = store.saved_view(conditions) if conditions else Opened(store.deep_link(None))
        log = home.logs / "ui.log"
        if uri.startswith("http"):
            return cls(opened, None, log)
        port = _free(port)
        process = _spawn(uri, port, home, log)
        ui = cls(replace(opened, link=f"http://{_HOST}:{port}/{opened.link}"), process, log)
        try:
            ui._await(f"http://{_HOST}:{port}/ajax-api/2.0/mlflow/experiments/search?max_results=1")
        except BaseException:
            ui.stop()
            raise
        return ui

    @property
    def link(self) -> str:
        """Where it can be looked at."""
        return self.opened.link

    @property
    def started(self) -> bool:
        """Whether a server of our own runs behind the link."""
        return self._process is not None

    def wait(self) -> None:
        """Waits until the server ends, which it does not do of itself. Raises `HarnessError` if it does."""
        if self._process is not None:
            code = self._process.wait()
            raise HarnessError(f"the MLflow server ended with code {code}; see {self.log}")

    def stop(self) -> None:
        """Ends the server and everything it started."""
        if self._process is None:
            return
        for number, patience in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
            # The group and not the process: the server's workers outlive it by seconds otherwise.
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            if _group_ended(self._process, patience):
                break
        self._process.wait()

    def _await(self, address: str) -> None:
        """An API path is asked, since /health says yes even where every real request is refused."""
        assert self._process is not None
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise HarnessError(f"the MLflow server did not start: {_last_line(self.log)} ({self.log})")
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        raise HarnessError(f"the MLflow server does not answer after {_START_S:.0f} s; see {self.log}")

    def __enter__(self) -> Ui:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _free(port: int | None) -> int:
    """The port asked for if it is free, else any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port or 0))
        except OSError as error:
            raise InputError(
                f"port {port} of {_HOST}: {error.strerror}; leave --port out for a free one"
            ) from None
        return int(probe.getsockname()[1])


def _spawn(uri: str, port: int, home: Home, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        # By environment and not by option: a database's password does not belong into the process list.
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_ARTIFACTS_DESTINATION": str((home.folder / "artifacts").resolve()),
        # One worker and no job runners: 2 processes of 0.5 GB instead of 14 of 2.3 GB, in half the time.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "mlflow", "server", "--host", _HOST, "--port", str(port), "--workers", "1"]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                # Ctrl-C in the terminal reaches us alone: we end the group, in order.
                start_new_session=True,
            )
    except OSError as error:
        raise HarnessError(f"the MLflow server cannot be started: {error}") from None


def _group_ended(process: subprocess.Popen[bytes], patience: float) -> bool:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        process.poll()  # else it stays in its own group as a zombie
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "no output"
    return lines[-1] if lines else "no output"
