"""What is asked of the package index, and what is made of its answer."""

from __future__ import annotations

import base64
import threading
import traceback
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.error import HTTPError

import pytest
from kernelmark.registry.analysis.releases import Package, parse, releases
from kernelmark.suite import releases as asking
from kernelmark.suite.catalog import Catalog

OWN = Catalog.default()


def file(name: str, day: str | None, **more: Any) -> dict[str, Any]:
    return {"filename": name, **({"upload-time": f"{day}T23:30:00.5Z"} if day else {}), **more}


def test_a_release_is_as_old_as_its_first_file() -> None:
    files = [
        file("my_lib-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", "2026-03-02"),
        file("my_lib-1.0.tar.gz", "2026-03-01"),
        file("my_lib-1.1-py3-none-any.whl", "2026-04-01", yanked="broken"),
        file("my_lib-1.2rc1-py3-none-any.whl", "2026-05-01"),
        file("my_lib-0.9.tar.gz", None),
        file("my_lib-0.8.win32.exe", "2020-01-01"),
    ]
    days = {"1.2rc1": date(2026, 5, 1), "1.1": date(2026, 4, 1), "1.0": date(2026, 3, 1)}
    assert asking.package(files) == Package("1.0", days)
    assert asking.package(files[3:4]).newest == "1.2rc1"
    assert asking.package([]) == Package(None, {})


@pytest.mark.parametrize(
    ("listed", "index"),
    [
        ("", None),
        ("global.cert='/a'\nglobal.index-url='https://b/simple'", "https://b/simple"),
        ("global.index-url='https://b/simple'\n:env:.index-url='https://a/simple'", "https://a/simple"),
    ],
)
def test_the_index_is_the_one_that_pip_has(listed: str, index: str | None) -> None:
    assert asking.setting(listed, "index-url") == index


def test_every_library_is_asked_for_once() -> None:
    seen = []

    def fetch(address: str) -> Any:
        seen.append(address)
        return None if "torch/" in address else {"files": [file("x-1.0.tar.gz", "2026-01-01")]}

    found = asking.asked(OWN, "https://index/simple/", fetch, date(2026, 11, 24))
    assert len(seen) == len(set(seen)) == len(set(asking.needed(OWN).values()))
    assert "https://index/simple/quack-kernels/" in seen
    assert "torch" not in found.packages
    assert parse(asking.text(found).encode()) == found


class Index(BaseHTTPRequestHandler):
    """Asks who it is, sends `/moved/` on to another host, and has nothing else."""

    heard: ClassVar[list[tuple[str, str | None]]] = []
    other: ClassVar[str] = ""

    def do_GET(self) -> None:
        self.heard.append((self.path, self.headers["Authorization"]))
        moved = self.path.startswith("/simple/moved")
        self.send_response(302 if moved else 401 if self.path.startswith("/simple/closed") else 200)
        if moved:
            self.send_header("Location", self.other)
        self.end_headers()
        self.wfile.write(b'{"files": []}')

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_password_is_for_its_index_and_in_nothing_that_is_written(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    Index.other = f"http://localhost:{port}/elsewhere/"
    listed = f"global.index-url='http://me:s%40cret@127.0.0.1:{port}/simple'"
    answers = SimpleNamespace(stdout=listed)
    monkeypatch.setattr(asking, "subprocess", SimpleNamespace(run=lambda *_, **__: answers))
    said = "Basic " + base64.b64encode(b"me:s@cret").decode()
    try:
        monkeypatch.setattr(asking, "needed", lambda catalog: {"a": "lib", "b": "moved"})
        asking.main()
        assert Index.heard == [("/simple/lib/", said), ("/simple/moved/", said), ("/elsewhere/", None)]
        monkeypatch.setattr(asking, "needed", lambda catalog: {"a": "closed"})
        with pytest.raises(HTTPError) as error:
            asking.main()
        traceback.print_exception(error.value)
        error.value.close()
    finally:
        server.shutdown()
        server.server_close()
    written = "".join(capfd.readouterr())
    assert "401" in written
    assert '"lib"' in written
    assert "cret" not in written
    assert said.split()[1] not in written
    assert asking.apart(asking.INDEX) == (asking.INDEX, None)


def test_what_the_file_knows_is_still_so() -> None:
    assert releases().implementations.items() <= asking.needed(OWN).items(), "run `make releases`"
