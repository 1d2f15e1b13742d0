"""What engines are given, and what people are told: texts, by literal orders."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.shards import path_of
from kernelmark.suite.fleet.collect import State, Whole
from kernelmark.suite.fleet.manifest import manifest
from kernelmark.suite.fleet.on_ray import bundle
from kernelmark.suite.fleet.on_slurm import script, standing, submission
from kernelmark.suite.fleet.on_this_host import ThisHost
from kernelmark.suite.fleet.order import Order
from kernelmark.suite.fleet.standing import line, table
from kernelmark.suite.fleet.task import command, host_of

IMAGE = "registry.example:5000/kernelmark/h100@sha256:" + "0" * 64
ORDER = Order("r1", "slurm", 4, "quick", "cuda", 7, (10.0, 10.0, 20.0, 20.0), "salt", gpus=1, control="softmax/A")
HERE = Path("/shared/my home/fleet/r1")
EXPECTED = Path(__file__).with_name("expected")


def but(**changes) -> Order:
    return msgspec.structs.replace(ORDER, **changes)


@pytest.mark.parametrize("container", ["none", "docker", "pyxis", "apptainer"])
def test_the_script_of_an_array(container):
    order = ORDER if container == "none" else but(container=container, image=IMAGE)
    assert script(order, HERE, "/py") == (EXPECTED / f"slurm-{container}.sh").read_text()


def test_what_sbatch_is_asked():
    words = submission(but(options=("--partition=h200",)), HERE, [1, 3])
    assert words[1:4] == ["--job-name=kernelmark-r1", "--array=1,3", "--requeue"]
    assert words[-3:] == ["--exclusive", "--gpus-per-node=1", "--partition=h200"]
    assert "--exclusive" not in submission(but(exclusive=False), HERE, [1])


def test_sbatch_does_not_read_the_folder_as_a_pattern():
    words = submission(ORDER, Path("/shared/100%j"), [1])
    assert "--output=/shared/100%%j/log-%a.txt" in words


def test_a_shard_beside_others_takes_no_module_of_the_working_folder(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **given: begun.append(given["env"]))
    ThisHost(but(engine="local"), Home(tmp_path), (5, 6, 7, 8)).submit([1, 4])
    assert [x["CUDA_VISIBLE_DEVICES"] for x in begun] == ["5", "8"]
    assert {x["PYTHONSAFEPATH"] for x in begun} == {"1"}


def test_what_squeue_says():
    said = """1 RUNNING None
3 PENDING Priority

slurm_load_jobs error
7 COMPLETING None
8 PENDING JobHeldAdmin
9 PENDING launch failed requeued held
10 PENDING
"""
    assert standing(said) == {
        1: "running",
        3: "waiting for a host",
        7: "completing",
        8: "held (JobHeldAdmin)",
        9: "held (launch failed requeued held)",
        10: "waiting for a host",
    }


def test_a_job_of_kubernetes():
    made = manifest(but(engine="kubernetes", image=IMAGE), "results", 2)
    assert made == json.loads((EXPECTED / "job.json").read_text())
    alone = manifest(but(engine="kubernetes", image=IMAGE, exclusive=False), "results", None)
    assert "affinity" not in alone["spec"]["template"]["spec"]


def test_a_job_needs_an_image_by_digest_and_an_order_that_fits():
    with pytest.raises(InputError, match="needs its image by digest"):
        manifest(but(image="kernelmark:latest"), "results", None)
    with pytest.raises(InputError, match="put the plan file into the image"):
        manifest(but(image=IMAGE, plan_text="x" * 200_000), "results", None)


def test_what_ray_holds_for_a_shard():
    assert bundle(but(options=("accelerator_type:H200=0.001",))) == {
        "CPU": 1.0,
        "GPU": 1.0,
        "host_exclusive": 1.0,
        "accelerator_type:H200": 0.001,
    }
    with pytest.raises(InputError, match="a resource and how much of it"):
        bundle(but(options=("--partition=x",)))


def test_a_shard_is_the_ordinary_command():
    words = command(but(arguments=("--replicates", "2")), 3, Path("/w/home"), None, {})
    assert words[1:] == [
        *("-m", "kernelmark.suite", "run", "--journal-only", "--device", "cuda", "--plan", "quick"),
        *("--shard", "3/4", "--replicates", "2", "--seed", "7", "--output", "/w/home"),
        *("--run", "r1", "--control", "softmax/A"),
    ]
    image = but(container="docker", image="sha256:1")
    words = command(image, 3, Path("/w/home"), Path("/w/p.toml"), {"CUDA_VISIBLE_DEVICES": "2"})
    assert words[3:9] == ["bench", "sha256:1", "--gpus", "2", "--journal-only", "--plan"]
    assert words[9] == "/w/p.toml"


def test_a_shard_that_was_begun_in_its_home_goes_on(tmp_path):
    begun = path_of(Home(tmp_path), "r1", (3, 4))
    begun.parent.mkdir(parents=True)
    begun.touch()
    assert command(ORDER, 2, tmp_path, None, {})[5:7] == ["--device", "cuda"]
    for over in (False, True):
        words = command(ORDER, 3, tmp_path, None, {}, any_board=over)
        assert words[3:] == [
            *("run", "--journal-only", "--resume", str(begun)),
            *(["--any-board"] if over else []),
            *("--output", str(tmp_path)),
        ]


def test_hosts_are_told_apart_and_not_named():
    seen = {host_of(ORDER, node, {"CUDA_VISIBLE_DEVICES": gpu}) for node in ("gpu-a", "gpu-b") for gpu in "01"}
    assert len(seen) == 4
    assert not any("gpu" in x for x in seen)
    assert host_of(ORDER, "gpu-a", {}) == host_of(but(run="r2"), "gpu-a", {})
    assert host_of(ORDER, "gpu-a", {}) != host_of(but(salt="other"), "gpu-a", {})
    uuid = host_of(ORDER, "gpu-a", {"CUDA_VISIBLE_DEVICES": "GPU-8d1c"})
    assert "8d1c" not in uuid
    assert uuid.isidentifier()


NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("whole", "held", "said"),
    [
        ({}, {}, "[0/4 shards] 0 hosts, 4 not asked for"),
        ({1: 600.0}, {2: "running", 3: "running", 4: "waiting for a host"}, "[1/4 shards] 1 host, 2 running, "
         "1 waiting for a host, ends about 12:25 UTC"),
        ({1: 600.0, 2: 1200.0}, {3: "running"}, "[2/4 shards] 2 hosts, 1 running, 1 not asked for, ends about "
         "13:00 UTC"),
        ({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, {}, "[4/4 shards] 4 hosts"),
    ],
)  # fmt: skip
def test_how_a_run_stands(whole, held, said):
    state = State(ORDER, tuple(Whole(i, f"h{i}", 5, wall) for i, wall in whole.items()))
    assert line(state, held, NOW) == said


def test_what_an_engine_has_that_was_not_asked_is_not_called_lost():
    state = State(ORDER, (Whole(1, "ha", 5, 600.0),))
    assert line(state, {2: "delivered"}, NOW, known=False) == (
        "[1/4 shards] 1 host, 1 delivered, 2 not here, ends about 12:50 UTC"
    )


def test_shards_by_host():
    state = State(ORDER, (Whole(1, "ha", 5, 60.0), Whole(2, "hb\x1b[2J", 5, 60.0), Whole(4, "ha", 6, 30.0)))
    assert table(state) == [
        "  ha: shards 1, 4; 11 measurements in 90 s",
        "  hb�[2J: shards 2; 5 measurements in 60 s",
    ]
