"""What Linux says of cores and memory, from files as it writes them."""

from __future__ import annotations

import pytest
from kernelmark.suite.measure import host


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(host, "PROCESS", tmp_path)
    monkeypatch.setattr(host, "SYSTEM", tmp_path)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: {0, 2, 4})

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def test_a_process_under_numactl(linux):
    linux(
        status="Name:\tpython\nMems_allowed:\t00000003\nMems_allowed_list:\t0-1\n",
        numa_maps="00400000 default file=/usr/bin/python3 mapped=2\n"
        "01a3c000 interleave:0-1 heap anon=60 dirty=60 N0=30 N1=30 kernelpagesize_kB=4\n",
        maps="7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/x86_64-linux-gnu/libjemalloc.so.2\n",
        kernel__mm__transparent_hugepage__enabled="always [madvise] never\n",
        devices__system__cpu__smt__active="1\n",
    )
    found = host.facts()
    assert found.pop("vectors")
    assert found == {
        "cores": 3,
        "memory_nodes": "0-1",
        "memory_policy": "interleave:0-1",
        "huge_pages": "madvise",
        "allocator": "jemalloc",
        "smt": True,
    }


def test_what_is_not_said_is_left_out(linux):
    assert host.facts().keys() == {"cores", "vectors"}
    linux(maps="7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libc.so.6\n", numa_maps="00400000 bind:1 file=/x\n")
    found = host.facts()
    assert (found["allocator"], found["memory_policy"]) == ("libc", "bind:1")
