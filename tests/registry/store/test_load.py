"""`kernelmark history` on a million rows, `show` and `compare` on 200,000 records: `make test-load`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

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
    history = over_commits(runs, "o7", {}, others)
    whole = time.process_time() - begin  # what is added does not hang on how many rows there are
    print(f"asked for in {asked:.2f} s, with change points of {len(history.series)} series {whole:.2f} s")
    assert (len(runs), len(history.series), others) == (200, 2 * CASES, [])
    assert asked < SECONDS


RECORDS, REPLICATES = 200_000, 10
LARGE_SECONDS, LARGE_MIB = 8.0, 400
"""What 200,000 records may take: of a processor that does nothing else, and of all of a process's memory."""
MEASURED = """
import json, resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, used.ru_utime + used.ru_stime, used.ru_maxrss >> 10]))
"""
"""Of a process that was started by a small one: what it may take has its parent's memory in it."""
BUSY = 2.0
"""How much longer a processor takes whose caches others use too."""


@pytest.fixture(scope="module")
def large(literal, tmp_path_factory):
    """Journals of so many records of 22 samples each: two of half of `RECORDS`, two of all."""
    generator = random.Random(0)
    paths = []
    for name, records in (("a", RECORDS // 2), ("b", RECORDS // 2), ("c", RECORDS), ("d", RECORDS)):
        paths.append(tmp_path_factory.mktemp("large") / f"{name}.jsonl")
        with open(paths[-1], "wb") as file:
            file.write(encode(literal.header(run=f"20261120-120000-{name * 4}", replicates=REPLICATES)))
            for replicate in range(REPLICATES):
                for number in range(records // REPLICATES // 2):
                    case = literal.case(operator=f"o{number % 40}", name=f"S{number}", axes={"S": number})
                    for implementation in ("kernelmark", "torch"):
                        samples = [round(generator.gauss(1, 0.01), 6) for _ in range(20)]
                        beside = {"memory": 1e6, "error": 1e-3}
                        fields = {"samples": samples, "replicate": replicate, "case": case, "beside": beside}
                        file.write(encode(literal.record(implementation, **fields)))
    return paths


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("command", "journals", "records"),
    [
        ("show", slice(2, 3), RECORDS),
        ("compare", slice(0, 2), RECORDS),
        ("compare", slice(2, 4), 2 * RECORDS),
    ],
)
def test_large_journals_take_neither_long_nor_much_memory(command, journals, records, large):
    told = [str(x) for x in large[journals]]
    program = Path(sys.executable).with_name("kernelmark")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, program, command, *told], capture_output=True, check=True
    )
    code, seconds, mib = json.loads(done.stdout)
    print(f"{command} of {records:,} records: {seconds:.1f} s of a processor, {mib} MiB")
    assert code == 0
    assert seconds < BUSY * LARGE_SECONDS * records / RECORDS
    assert mib < LARGE_MIB
