"""Which schedule a product takes on Hopper: one that fits, of whatever size, the same each time."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.kernels.matmul import _dispatch as dispatch
from kernelmark.suite.plan_file import Drawn

from .tune_matmul import description

SIZES = st.integers(1, 40000)
KINDS = (dispatch.SIXTEEN, dispatch.FAST, dispatch.PROMOTED, dispatch.GROUPED)


@given(st.sampled_from(KINDS), SIZES, SIZES, SIZES, st.booleans(), st.sampled_from([1, 78, 132]))
def test_chooses(kind, M, N, K, gated, programs):
    gated &= kind == dispatch.SIXTEEN
    chosen = dispatch.choose(kind, M, N, K, gated, programs)
    count = dispatch.tiles(chosen.schedule, M, N)
    assert 0 <= chosen.dealt <= count
    assert chosen.schedule.shared == (chosen.dealt < count)
    assert chosen.schedule.gated == gated
    # Products that kernels compute in 32 bits: of steps that are shared out, and programs.
    shared = (count - chosen.dealt) * -(-K // chosen.schedule.step)
    assert (shared + 1) * programs < 1 << 31


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_candidates_fit(kind, gated):
    """Tiles in flight and on their way out in 227 KiB, accumulators in registers."""
    for x in dispatch.candidates(kind, gated):
        size = 2 if x.step == 64 else 1
        stage = (x.groups * x.rows + x.columns * (2 if x.gated else 1)) * x.step * size
        if x.staged:
            stage += 4 * (x.groups * x.a_scales + x.b_scales)
        written = x.buffers * x.groups * 64 * x.chunk * 2
        assert x.stages * (stage + 16) + written + 1024 <= 227 << 10
        sums = x.rows * x.columns * (2 if x.gated else 1) // 128
        assert sums <= 128
        if x.promoted:  # and those of the steps on their way
            sums += 64 * x.columns // 128 * (2 if x.ahead else 1)
        assert sums < x.registers - 8
        # Of 65,536 the producer's warps have at least 24 each.
        assert 128 * (x.groups * x.registers + 24) <= 65536 or x.groups == 1
        assert x.ahead % 2 == 0
        assert x.staged or not x.ahead
        assert x.promoted == (kind in (dispatch.PROMOTED, dispatch.GROUPED) and not gated)


@pytest.mark.parametrize(
    ("size", "copied"),
    [
        ((16, 4096, 16383), True),
        ((16, 4096, 16256), False),
        ((17, 4096, 1920), False),
        ((17, 4096, 1921), True),
        ((7001, 8192, 512), True),
    ],
)
def test_scales_are_copied_for_long_products_alone(size, copied):
    assert dispatch.copied(*size, 132) == copied


@given(st.sampled_from(KINDS), st.integers(1, 200), SIZES, st.booleans())
def test_rows_that_are_not_there_are_not_loaded(kind, M, N, gated):
    gated &= kind == dispatch.SIXTEEN
    chosen = dispatch.choose(kind, M, N, 4096, gated, 132).schedule
    filled = dispatch.filled(chosen, M)
    assert filled in (0, 16, 32)
    assert filled >= M or filled == 0
    assert (filled > 0) == (M <= 32)  # nothing else is chosen for so few


@given(st.sampled_from(["block", "row"]), st.integers(1, 300), st.integers(1, 4000), SIZES)
def test_groups_take_lower_tiles_where_others_would_leave_programs_idle(recipe, E, rows, N):
    chosen = dispatch.grouped(recipe, E, rows, N, 132)
    assert chosen.scales == recipe
    assert 128 % chosen.height == 0  # groups that follow each other begin at multiples of it
    wide = E * dispatch.tiles(dispatch.GROUPED_FP8[recipe], rows, N)
    low = recipe == "block" and (rows <= 64 or wide < 264)
    assert (chosen.height == 64) == low


def test_schedules_of_groups_fit():
    """Groups begin at multiples of 128 rows; the two products of a mixture have tiles as high."""
    schedules = [
        dispatch.grouped(x, 32, *y, 132) for x in ("block", "row") for y in ((64, 256), (999, 128), (999, 256))
    ]
    for kind, some in dispatch.MIXTURES.items():
        for _, chosen in some:
            schedules += chosen.gated, chosen.plain
            assert {x.height for x in (chosen.gated, chosen.plain)} == {chosen.height}
            assert chosen.plain.promoted == chosen.gated.promoted == (kind == dispatch.PROMOTED)
    for x in schedules:
        size = 2 if x.step == 64 else 1
        stage = (x.groups * x.rows + x.columns * x.pieces) * x.step * size
        assert x.stages * (stage + 16) + 2 * x.groups * 64 * 64 * 2 + 1024 <= 227 << 10
        assert x.rows * x.columns * x.pieces // 128 <= 128


@given(st.sampled_from([*dispatch.MIXTURES]), st.floats(0, 1e5))
def test_a_mixture_takes_the_schedules_of_the_most_rows_that_it_has(kind, each):
    fitting = [(least, x) for least, x in dispatch.MIXTURES[kind] if least <= each]
    assert dispatch.mixture(kind, each) == max(fitting, key=lambda x: x[0])[1]


def test_what_is_tuned_is_there():
    """The table names candidates, by heights that are looked up."""
    for (kind, M, _, _), (nth, _, section) in dispatch.TUNED.items():
        gated = kind == dispatch.GATED
        assert nth < len(dispatch.candidates(dispatch.SIXTEEN if gated else kind, gated))
        assert dispatch.height(M) == M
        assert section > 0


def test_the_table_has_a_journal_and_is_made_of_it():
    """Each kind has a source, and where that is a journal no schedule of a line of the table is slow in it."""
    folder = Path(__file__).parents[2] / "registry" / "reference"
    assert set(dispatch.SOURCES) == {*KINDS, dispatch.GATED}
    times = {}
    for source in set(dispatch.SOURCES.values()):
        for line in map(json.loads, gzip.decompress((folder / source).read_bytes()).splitlines()):
            if "schedule" in line and line["off"] < 0.01 and dispatch.SOURCES[line["kind"]] == source:
                at = line["kind"], dispatch.height(line["M"]), line["N"], line["K"]
                which = json.dumps(line["schedule"], sort_keys=True), line["shared"], line["section"]
                times.setdefault(at, {})[which] = line["us"]
    for at, (nth, shares, section) in dispatch.TUNED.items():
        gated = at[0] == dispatch.GATED
        schedule = dispatch.candidates(dispatch.SIXTEEN if gated else at[0], gated)[nth]
        chosen = json.dumps(description(schedule), sort_keys=True), int(shares), section
        assert times[at][chosen] < 1.02 * min(times[at].values()), at
    assert (folder / dispatch.GROUPED_SOURCE).is_file()
    assert (folder / dispatch.FEW_SOURCE).is_file()
    assert (folder / dispatch.DUAL_SOURCE).is_file()


def test_the_plans_random_shapes_are_off_the_table():
    """And take the cheapest schedule by the rule, the same each time."""
    plan = tomllib.loads((Path(__file__).parents[2] / "suite/plans/matmul.toml").read_text())
    (drawn,) = [x["random"] for x in plan["cases"] if "random" in x and x["operator"] == "matmul"]
    shapes = msgspec.convert(drawn, Drawn).sizes()
    assert len(shapes) == 50
    for kind, x in itertools.product(KINDS, shapes):
        size = x["M"], x["N"], x["K"]
        assert (kind, dispatch.height(x["M"]), x["N"], x["K"]) not in dispatch.TUNED
        chosen = dispatch.choose.__wrapped__(kind, *size, False, 132)
        costs = [dispatch.estimate(y, *size, 132) for y in dispatch.candidates(kind, False)]
        assert chosen.schedule == dispatch.candidates(kind, False)[costs.index(min(costs))]
        assert chosen == dispatch.choose(kind, *size, False, 132)


def test_what_chooses_loads_no_kernel_for_hopper():
    names = ("fp8_matmul", "grouped_fp8_matmul", "matmul", "moe")
    code = "import sys\n" + "".join(f"import kernelmark.kernels.matmul.{x}\n" for x in names)
    code += "print([x for x in sys.modules if x.endswith('_hopper')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
