"""One kernel judged: what is drawn, what counts, and a wrong one from end to end."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.record import Case, Header, Measurement, Record
from kernelmark.suite.catalog import Catalog, Root
from kernelmark.suite.cli import cli, run_command
from kernelmark.suite.cli.judge import _tell
from kernelmark.suite.run import judging
from kernelmark.suite.run.judging import (
    UNSEEN,
    Judge,
    Judgement,
    Shape,
    Speed,
    _found,
    _shapes,
    _speeds,
    apart,
    secret_variables,
    unseen_cases,
)

SEEN = Measurement({"latency": (1.0,) * 6}, "monotonic", remarks=("torch.backends: set to what it was",))


def record(case: str, name: str, status: str = "ok", replicate: int = 0) -> Record:
    made = Case("softmax", case, {}, {}, "fp32", "forward", "5bec", 1, 0)
    ok = status == "ok"
    return Record(
        made, name, name, None, replicate, 0, "cold", status, None if ok else "verify: why", SEEN if ok else None
    )  # fmt: skip


def journal(*records: Record) -> Journal:
    return Journal(Header(2, "r", "", "0", None, False, "p", 0, 1, "cpu", "k", {}, {}), records)


def test_the_shapes_are_others_than_the_known_and_the_seed_decides() -> None:
    for name in ("softmax", "matmul", "attention"):
        operator = Catalog.default().operator(name)
        known = [x for grid in operator.plans["quick_cpu"] for x in operator.expand(grid)]
        drawn = unseen_cases(operator, known, random.Random(1))
        assert len(drawn) == UNSEEN
        assert not {x.name for x in drawn} & {x.name for x in known}
        assert all(x.bytes <= max(y.bytes for y in known) for x in drawn)
        assert drawn == unseen_cases(operator, known, random.Random(1))
        assert drawn != unseen_cases(operator, known, random.Random(2))
    widths = {
        x.axes["D"]
        for x in unseen_cases(Catalog.default().operator("softmax"), known[:0] or _softmax(), random.Random(1))
    }
    assert len(widths) > 1


@pytest.mark.parametrize("name", ["softmax", "rms_norm", "matmul"])
def test_whatever_the_seed_is_a_kernel_meets_odd_sizes(name: str) -> None:
    operator = Catalog.default().operator(name)
    known = [x for grid in operator.plans["quick_cpu"] for x in operator.expand(grid)]
    for seed in range(50):
        drawn = unseen_cases(operator, known, random.Random(seed))
        assert len(drawn) == UNSEEN
        assert any(all(size % 2 for size in x.axes.values()) for x in drawn)


def _softmax() -> list[Case]:
    operator = Catalog.default().operator("softmax")
    return [x for grid in operator.plans["quick_cpu"] for x in operator.expand(grid)]


def test_a_shape_that_nobody_can_compute_is_not_held_against_it() -> None:
    found = _shapes(
        journal(
            record("a", "candidate"), record("a", "torch"),
            record("b", "candidate", "incorrect"), record("b", "torch"),
            record("c", "candidate", "error"), record("c", "torch", "error"),
            record("d", "candidate", "unsupported"), record("d", "torch"),
        ),
        "candidate",
    )  # fmt: skip
    assert list(found) == [
        Shape("a", True),
        Shape("b", False, "incorrect: verify: why"),
        Shape("c", None, "verify: why"),
        Shape("d", None, "verify: why"),
    ]


def test_the_candidate_is_no_baseline_of_itself_and_its_remarks_are_told() -> None:
    given = [record("a", x, replicate=r) for x in ("candidate", "torch") for r in range(3)]
    (speed,) = _speeds(journal(*given), "candidate")
    assert (speed.best_peer, speed.speedup) == ("torch", 1.0)
    told = list(_found([record("a", "candidate"), record("b", "candidate", "incorrect")]))
    assert told == ["put back: torch.backends: set to what it was", "incorrect: verify: why"]


def test_the_worker_has_no_network_or_that_is_said(tmp_path: Path) -> None:
    python, network = apart(tmp_path, tmp_path / "candidate")
    ask = "import os, socket; print(os.environ['KERNELMARK_PATH'], [x for _, x in socket.if_nameindex()])"
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert said.startswith(str(tmp_path / "candidate"))
    if network == "none":
        assert "'lo'" in said
        assert "eth" not in said
    else:
        assert network.startswith("not cut off: ")


def test_a_kernel_that_is_wrong_on_other_shapes(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELMARK_PATH", str(root))
    monkeypatch.setattr("kernelmark.suite.run.judging.FREE", frozenset({"N"}))
    file = tmp_path / "fast.py"
    file.write_text("def double(x):\n    return x * (2 if x.shape[0] in (16, 64) else 2.1)\n")
    with pytest.raises(SystemExit) as ended:
        run_command(
            cli, ["judge", "double", str(file), "--device", "cpu", "--seed", "3", "--budget", "300", "--json"]
        )
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1
    assert (found["compiles"], found["right"], found["speed"]) == (True, False, [])
    ended_as = {x["case"].split("-")[0]: x["ok"] for x in found["shapes"]}
    assert len(ended_as) == 2 + UNSEEN
    assert all(ok == (case in ("N16", "N64")) for case, ok in ended_as.items())
    assert all(x.startswith("incorrect: verify: output: relative error 0.05") for x in found["found"])


def test_what_nobody_can_run_leaves_the_judgement_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[list[Record]] = []
    monkeypatch.setattr(judging._Bench, "measure", lambda *_: journal(*ended.pop(0)))
    monkeypatch.setattr(judging._Bench, "cells", lambda *_: ())
    monkeypatch.setattr(judging, "apart", lambda *_: (tmp_path, "none"))  # and no server: that is no interpreter
    file = tmp_path / "softmax.py"
    file.write_text("def softmax(x):\n    return x\n")

    def right(*phases: list[Record]) -> bool | None:
        ended[:] = phases
        return Judge("softmax", file, "cpu", 1).judge().right

    def both(case: str, mine: str, theirs: str) -> list[Record]:
        return [record(case, "softmax", mine), record(case, "torch", theirs)]

    monkeypatch.setattr(judging._Bench, "name", "softmax")
    monkeypatch.setattr(judging, "unseen_cases", lambda operator, known, draw: known[:1])  # two shapes in all
    assert right(both("a", "error", "error"), both("a", "error", "error")) is None
    fits = both("a", "ok", "ok")
    assert right(fits + both("b", "error", "error"), fits + both("b", "error", "error")) is True
    assert right(fits, fits) is None  # b was not reached in time
    assert right(fits, fits + both("b", "crashed", "ok")) is False
    assert right(fits, fits + both("b", "incorrect", "error")) is False


def test_a_triton_kernel_without_a_gpu_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "verify: RuntimeError: 0 active drivers ([]). There should only be one."
    mine = [
        msgspec.structs.replace(record(x, "softmax", "error"), reason=said, measurement=None) for x in ("a", "b")
    ]
    monkeypatch.setattr(judging._Bench, "cells", lambda *_: ())
    monkeypatch.setattr(judging._Bench, "name", "softmax")
    monkeypatch.setattr(judging, "apart", lambda *_: (tmp_path, "none"))
    file = tmp_path / "softmax.py"
    file.write_text("def softmax(x):\n    return x\n")
    seen = journal(*mine, record("a", "torch"))
    for phases in ([seen], [journal(), seen]):  # peers are not timed, or nothing was reached before they are
        left = list(phases)
        monkeypatch.setattr(judging._Bench, "measure", lambda *_, left=left: left.pop(0))
        found = Judge("softmax", file, "cpu", 1).judge()
        assert (found.right, found.compiles, found.shapes, found.reason) == (None, None, (), judging.NEEDS_GPU)
        assert left == []
    assert judging.undriven(mine, "softmax")
    assert not judging.undriven([*mine, record("c", "softmax", "incorrect")], "softmax")
    assert not judging.undriven([], "softmax")


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({}, ["right     yes: 1 of 1 shapes, seed 7", "speed     a: 2 ms, 1.50× torch, at least 1.20×"]),
        (
            {"compiles": None, "right": None, "shapes": (), "speed": (), "reason": judging.NEEDS_GPU},
            ["right     not judged: a Triton kernel needs a GPU, or TRITON_INTERPRET=1"],
        ),
        (
            {
                "right": None,
                "asked": 8,
                "out_of_time": True,
                "interpreted": True,
                "speed": (Speed("a", 2.0, *[None] * 4),),
            },
            [
                "right     not known: 1 of 8 shapes, seed 7; out of time, try --budget 240",
                "speed     a: 2 ms (Triton's interpreter: no speed of the kernel); no peer measured in this time",
            ],
        ),
        (
            {"right": None, "shapes": (), "speed": (), "out_of_time": True},
            [
                "right     not known: 0 of 1 shapes, seed 7; out of time, try --budget 240",
                "speed     not measured in this time",
            ],
        ),
        (
            {"peers": (), "speed": (Speed("a", 2.0, *[None] * 4),)},
            ["right     yes: 1 of 1 shapes, seed 7", "speed     a: 2 ms; no peer beside it"],
        ),
    ],
)
def test_what_is_told(changed: dict[str, Any], lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = Judgement(
        operator="double", device="cpu", compiles=True, right=True, asked=1, shapes=(Shape("a", True),),
        peers=("torch",), out_of_time=False, interpreted=False, found=(), network="none", seconds=1.0, seed=7,
        speed=(Speed("a", 2.0, 1.5, 1.2, 1.8, "torch"),),
    )  # fmt: skip
    _tell(msgspec.structs.replace(found, **changed), 60)
    told = capsys.readouterr().out.splitlines()
    assert told[1:-2] == lines
    assert told[-2:] == ["found     nothing", "network   none"]


def test_whose_times_are_those_of_tritons_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kernels" / "cpu" / "double.py"
    file.parent.mkdir(parents=True)
    for source, interpreted in (
        ("def f():\n    import triton.language as tl\n", True),
        ("from triton import jit\n", True),
        ("import torch, tritonclient\nfrom .triton import x\n", False),
        ("import triton(", False),
    ):
        file.write_text(source)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert judging.interpreted(tmp_path) is interpreted
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        assert not judging.interpreted(tmp_path)


def test_the_candidate_gets_no_secret_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = (
        "OPENAI_API_KEY",
        "hf_token",
        "MY_SECRET_WORD",
        "PGPASSWORD",
        "AWS_REGION",
        "OTHER_ACCOUNT",
        "ODD.X_KEY",
    )
    for name in (*theirs, "OMP_PROC_BIND"):
        monkeypatch.setenv(name, "canary")
    provider = tmp_path / "own" / "baselines" / "other.py"
    provider.parent.mkdir(parents=True)
    provider.write_text("class Other:\n    needs: tuple[str, ...] = ('OTHER_ACCOUNT',)\n")
    found = secret_variables(Catalog((*Catalog.default().roots, Root(tmp_path / "own"))))
    assert set(theirs) <= set(found)
    python, _ = apart(tmp_path, tmp_path / "candidate", found)
    ask = "import os; print([x for x, y in os.environ.items() if y == 'canary'])"
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "['OMP_PROC_BIND']"
