"""`kernelmark history` on a million rows: `make test-load`."""

from __future__ import annotations

import random
import time

import pytest
from kernelmark.registry.detection.history import RUNS as NEWEST
from kernelmark.registry.detection.history import over_commits, runs_by_operator
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.index import Index, pack
from kernelmark.registry.store.journal import encode

pytestmark = pytest.mark.load
RUNS, OPERATORS, CASES = 5000, 20, 5
SECONDS = 2.0
"""Of a processor, not of a clock: the machine may have other work."""


@pytest.mark.timeout(600)
def test_a_history_out_of_a_million_rows(literal, tmp_path):
    home = Home(tmp_path)
    home.journals.mkdir()
    names = [f"2026{i:04d}-000000-aaaa" for i in range(RUNS)]
    for i, name in enumerate(names):
        created = f"2026-01-01T{i // 3600:02d}:{i // 60 % 60:02d}:{i % 60:02d}+00:00"
        home.journal(name).write_bytes(encode(literal.header(run=name, created=created, commit=f"{i:040x}")))
    generator = random.Random(0)
    keys = [(f"o{i}", f"c{j}", x) for i in range(OPERATORS) for j in range(CASES) for x in ("kernelmark", "torch")]
    index = Index(home)
    with index._connection as connection:  # the journals themselves would be gigabytes
        for name in names:
            size = home.journal(name).stat().st_size
            connection.execute("INSERT INTO sizes VALUES (?,?)", (name, size))
            rows = [
                (name, o, c, x, "cold", x, "spec/events", pack([generator.gauss(1, 0.01)] * 5)) for o, c, x in keys
            ]
            connection.executemany("INSERT INTO processes VALUES (?,?,?,?,?,?,?,?)", rows)
        assert connection.execute("SELECT count(*) FROM processes").fetchone() == (1_000_000,)
    begin = time.process_time()
    index = Index(home)
    runs, others = runs_by_operator((x, index.processes(x)) for x in index.runs(limit=NEWEST))["o7"]
    asked = time.process_time() - begin
    history = over_commits(runs, "o7", others, {})
    whole = time.process_time() - begin  # what is added does not hang on how many rows there are
    print(f"asked for in {asked:.2f} s, with change points of {len(history.series)} series {whole:.2f} s")
    assert (len(runs), len(history.series), others) == (200, 2 * CASES, 0)
    assert asked < SECONDS
