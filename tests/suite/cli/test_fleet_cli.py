"""`kernelmark fleet` and `run --parallel`: a user's mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from kernelmark.registry.store.home import Home
from kernelmark.suite import cli
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.choice import Choice
from kernelmark.suite.fleet import order as orders
from kernelmark.suite.fleet.asked import Asked
from kernelmark.suite.fleet.collect import deliveries_of

from ..fleet.test_drive import ORDER, deliver, journal
from ..fleet.test_drive import RUN as FLEET

DIGEST = "registry.example/h100@sha256:" + "0" * 64


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Runs the command line in a home of its own; gives exit code, output and error output."""
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))

    def do(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.run_command(cli.cli, list(arguments))
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return do


RUN = ("fleet", "run", "--operator", "gelu", "--operator", "softmax")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (RUN, "--on says what starts the shards: ray, slurm or kubernetes."),
        (
            (*RUN, "--on", "ray", "--no-wait"),
            "--no-wait is for Slurm: tasks of Ray end with whoever asked for them.",
        ),
        (
            ("fleet", "run", "--resume", "x"),
            "unknown run on a fleet 'x'. Known: none. `kernelmark fleet run` starts one.",
        ),
        (("fleet", "run", "--resume", "x", "--address", "127.0.0.1:6379"), "unknown run on a fleet 'x'."),
        (("fleet", "run", "--resume", "x", "--shards", "3"), "--resume goes on with what its run was asked"),
        ((*RUN, "--on", "slurm", "--container", "pyxis"), "--container pyxis needs --image."),
        ((*RUN, "--on", "slurm", "--image", "h100"), "--image h100: by digest, so that every host runs the same"),
        ((*RUN, "--on", "ray", "--image", DIGEST, "--container", "pyxis"), "--container pyxis is Slurm's"),
        ((*RUN, "--on", "kubernetes"), "a Job needs its image by digest: --image registry/name@sha256:…"),
        ((*RUN, "--on", "slurm", "--control", "gelu/none"), "has no case 'gelu/none' to control with"),
        ((*RUN, "--on", "slurm", "--shards", "999"), "too few for 999 shards"),
        (
            ("fleet", "compare", "--on", "slurm", "--baseline", "HEAD", "--", "--budget", "1m", "--shard=1/2"),
            "--shard=1/2: not behind --, as a fleet gives its shards that itself;",
        ),
        (("fleet", "status"), "unknown run on a fleet 'latest'. Known: none."),
        (("fleet", "cancel", "../x"), "unknown run on a fleet '../x'. Known: none."),
        (("run", "--parallel"), "--parallel needs --gpus: one shard of the plan on each of them."),
        (("run", "--gpus", "0,1", "--device", "cpu"), "--gpus is for device cuda"),
        (("run", "--parallel", "--gpus", "0"), "one shard a GPU, so at least two of them"),
        (("run", "--parallel", "--gpus", "0,x"), "numbers as nvidia-smi lists them"),
        (("run", "--parallel", "--gpus", "0,1", "--run", "a"), "--parallel cuts the plan itself"),
        (
            ("run", "--plan", "30s", "--device", "cpu", "--shard", "1/2", "--run", "x", "--seed", "1"),
            "plan '30s' has budget_s = 30, a limit for a run in one piece: shards would each leave out rows",
        ),
        (("run", "--control", "gelu/x", "--device", "cpu"), "--control is the case that all shards have"),
    ],
)
def test_a_mistake_is_a_message_and_code_2(call, arguments, said):
    code, out, err = call(*arguments)
    assert (code, out) == (2, ""), err
    assert said in " ".join(err.split())


def test_shards_and_their_control_have_something_to_measure(tmp_path):
    catalog = Catalog.default()
    asked = Asked(Choice("standard", implementations=("torchao",)), "cpu")
    plan = asked.measured(catalog)
    cells = asked.choice.cells(plan, catalog, "cpu")
    order = asked.order("slurm", None, catalog, Home(tmp_path), plan)
    with_cell = {f"{x.case.operator}/{x.case.name}" for x in cells}
    assert 1 < order.shards <= len(with_cell) < len(asked.loaded(catalog).cases)
    assert order.control in with_cell


def test_cases_of_more_gpus_than_a_shard_has_are_told_and_control_nothing(call, tmp_path):
    asked = ("fleet", "run", "--on", "kubernetes", "--image", DIGEST, "--plan", "distributed", "--shards", "2")
    asked += ("--operator", "attention", "--operator", "all_reduce")
    for more, told in (((), "will be `unsupported`: more GPUs than --gpus-per-shard 1"), (("8",), "")):
        code, out, err = call(*asked, *(("--gpus-per-shard", *more) if more else ()))
        assert code == 0, err
        assert (told in err) if told else ("unsupported" not in err)
        (container,) = json.loads(out)["spec"]["template"]["spec"]["containers"]
        control = json.loads(container["env"][0]["value"])["control"]
        assert bool(more) or "gpus" not in control


def test_a_plan_with_a_budget_is_not_cut(call, tmp_path):
    path = tmp_path / "mine.toml"
    case = 'operator = "gelu"\naxes = { M = [16, 32], N = 64 }\ndtype = "fp32"\n'
    path.write_text(f"budget_s = 300\n[[cases]]\n{case}")
    for words in (("fleet", "run", "--on", "slurm"), ("run", "--parallel", "--gpus", "0,1", "--device", "cpu")):
        code, _, err = call(*words, "--plan", str(path))
        assert code == 2
        assert "has budget_s = 300, a limit for a run in one piece" in " ".join(err.split())


def test_defaults_that_shards_do_without_are_named(call, tmp_path, monkeypatch):
    config = tmp_path / "config.toml"
    monkeypatch.setenv("KERNELMARK_CONFIG", str(config))
    config.write_text('[defaults.run]\nbudget = "5m"\ndtype = ["fp32"]\nreplicates = 2\n')
    code, _, err = call("run", "--parallel", "--gpus", "0", "--device", "cpu")
    assert code == 2
    assert "--parallel does without these defaults of your configuration: --budget\n" in err


def test_what_goes_on_side_by_side(call, tmp_path):
    """A run of this host, with as many GPUs as it has shards; a fleet's goes on otherwise."""
    home, catalog = Home(tmp_path / "home"), Catalog.default()
    asked = Asked(Choice("standard", operators=("gelu",)), "cpu")
    here, fleet = (asked.order(x, 2, catalog, home, asked.measured(catalog)) for x in ("local", "slurm"))
    for order in (here, fleet):
        orders.save(order, home)

    def own(run: str, *more: str) -> tuple[str, ...]:
        return ("run", "--resume", run, "--parallel", *more)

    for words, said in (
        (own(here.run), "--parallel needs --gpus"),
        (
            own(here.run, "--gpus", "0,1,2"),
            "is in 2 shards, each with a GPU of its own beside the others: --gpus 0,1,2",
        ),
        (
            own(here.run, "--gpus", "0,1", "--seed", "3"),
            "--resume goes on with what its run was asked; leave --seed",
        ),
        (own("nobody", "--gpus", "0,1"), "unknown run on a fleet 'nobody'"),
        (
            own(fleet.run, "--gpus", "0,1"),
            f"is one of a fleet. Go on with: kernelmark fleet run --resume {fleet.run}",
        ),
        (("fleet", "run", "--resume", here.run), f"kernelmark run --resume {here.run} --parallel --gpus, with 2"),
    ):
        code, out, err = call(*words)
        assert (code, out) == (2, ""), err
        assert said in " ".join(err.split())


def test_an_engine_that_is_not_there_leaves_no_order(call, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code, _, err = call(*RUN, "--on", "slurm")
    assert code == 5
    assert "no sbatch, squeue, scancel here: run this where Slurm's commands are" in err
    assert not list((tmp_path / "home").glob("fleet/*/order.json"))


def test_a_job_is_printed_and_collected_from_where_it_delivered(call, tmp_path):
    code, out, err = call(*RUN, "--on", "kubernetes", "--image", DIGEST, "--shards", "2")
    assert code == 0, err
    job = json.loads(out)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    order = json.loads(container["env"][0]["value"])
    assert (job["spec"]["completions"], order["shards"], order["container"]) == (2, 2, "none")
    assert f"kernelmark fleet collect {order['run']} --from FOLDER" in err
    (tmp_path / "empty").mkdir()
    code, out, err = call("fleet", "collect", "--from", str(tmp_path / "empty"))
    assert (code, out) == (4, "[0/2 shards] 0 hosts, 2 not here\n")
    assert err == "missing: shards 1, 2\n"
    code, out, _ = call("fleet", "cancel")
    assert (code, out) == (0, f"kubectl delete job {job['metadata']['name']}\n")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("slurm", f"Go on with: kernelmark fleet run --resume {FLEET}"),
        ("local", f"Go on with: kernelmark run --resume {FLEET} --parallel --gpus, with 3 of them"),
        ("kubernetes", f"Have its Job run again, and then: kernelmark fleet collect {FLEET} --from FOLDER"),
    ],
)
def test_shards_are_taken_out(call, tmp_path, engine, said):
    home = Home(tmp_path / "home")
    orders.save(msgspec.structs.replace(ORDER, engine=engine), home)
    for shard in (1, 2, 3):
        deliver(deliveries_of(home, FLEET), shard, journal(shard))
    assert call("fleet", "collect")[0] == 0
    code, out, err = call("fleet", "drop", FLEET, "3", "1", "3")
    assert (code, err) == (0, "")
    first, second, last = out.splitlines()
    assert [Path(x.removeprefix("kept: ")).name[:7] for x in (first, second)] == ["1-of-3-", "3-of-3-"]
    assert last == f"run {FLEET} is without 2 shards now. {said}"
    code, out, err = call("fleet", "collect")
    assert (code, err) == (4, "missing: shards 1, 3\n")
    code, out, err = call("fleet", "drop", FLEET, "2", "3")
    assert (code, out) == (2, "")
    assert f"of run {FLEET} shard 3 is not here; these are: 2." in " ".join(err.split())
    for wrong in ((), ("0",), ("x",)):
        assert call("fleet", "drop", FLEET, *wrong)[:2] == (2, "")
