"""A recorded run repeated in its image, and the image against bare metal: the same cells, comparable rows."""

from __future__ import annotations

import json

import pytest
from kernelmark.registry.store.home import Home

pytestmark = pytest.mark.image


def test_repro_executes_in_the_image_of_the_digest(machine, image, small_plan, tmp_path):
    there = machine.with_home(tmp_path)
    arguments = ("--plan", small_plan, "--implementation", "torch", "--seed", "11", "--no-report")
    done = there.kernelmark("bench", image.id, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    (first,) = Home(tmp_path).runs()
    done = there.kernelmark("repro", first, "--execute")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"kernelmark bench {image.id} --plan {tmp_path}/plans/{first}/small.toml" in done.stdout
    before, after = (Home(tmp_path).load(x) for x in Home(tmp_path).runs())
    assert after.header.run != first
    assert after.header.seed == before.header.seed == 11
    assert after.header.key == before.header.key
    assert after.header.request == before.header.request
    order = [[(x.case, x.implementation, x.position) for x in y.records] for y in (before, after)]
    assert order[0] == order[1]
    gone = there.kernelmark("repro", first, "--json")
    assert json.loads(gone.stdout)["image"] == image.id


def test_what_the_container_costs(machine, image, small_plan, tmp_path):
    """A budget of one pair: the two sides are comparable, and one pair is not enough to decide."""
    there = machine.with_home(tmp_path)
    done = there.kernelmark(
        "container-cost", image.id, "--plan", small_plan, "--implementation", "torch", "--budget", "5s", "--json"
    )
    assert done.returncode == 3, done.stdout + done.stderr
    found = json.loads(done.stdout)
    text = json.dumps(found)
    assert "bare metal" in text
    assert "image cpu" in text
    bare, contained = sorted((Home(tmp_path).load(x) for x in Home(tmp_path).runs()), key=_digest)
    assert (_digest(bare), _digest(contained)) == ("", image.id)
    assert bare.header.seed == contained.header.seed
    different = {
        name
        for name in bare.header.conditions.keys() | contained.header.conditions.keys()
        if bare.header.conditions.get(name) != contained.header.conditions.get(name)
    }
    assert {"image_digest"} <= different <= {"image_digest", "python"}
    notes = [x["notes"] for x in found["verdicts"]]
    assert all(any(y.startswith("python: ") for y in x) is ("python" in different) for x in notes)
    assert there.left() == []


def _digest(journal) -> str:
    return str(journal.header.conditions["image_digest"] or "")
