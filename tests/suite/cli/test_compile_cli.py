"""`kernelmark compile` as a user calls it."""

from __future__ import annotations

import re


def test_rows_are_compiled_and_what_failed_is_told(program, plan_file):
    plan = str(plan_file([16, 32]))
    names = ("plain", "fails", "unable", "absent")
    chosen = [y for x in names for y in ("--implementation", x)]
    code, out, err = program.run("compile", "--plan", plan, *chosen, "--processes", "2", "--device", "cpu")
    assert code == 0, err
    assert re.fullmatch(r"2 rows of 6 compiled in \d+\.\d s\n", out)
    assert "2 rows cannot run here\n  2 rows error: compile: ValueError: no such luck\n" in err
    log = re.search(r"what their processes printed is in (.+\.log)", err)[1]
    assert str(program.home) in log
    assert not list(program.home.glob("scratch/*"))
    assert not list((program.home / "journals").iterdir())  # it is no run


def test_a_shard_is_the_runs(program, plan_file):
    plan = str(plan_file([16, 32, 64]))
    given = ("--plan", plan, "--implementation", "plain", "--device", "cpu", "--processes", "1")
    code, out, err = program.run("compile", *given, "--shard", "2/3")
    assert (code, out[:16]) == (0, "1 row of 1 compi"), err


def test_nothing_to_compile_is_a_message(program, plan_file):
    code, _, err = program.run("compile", "--plan", str(plan_file([16])), "--implementation", "absent")
    assert code == 2
    assert err == (
        "kernelmark: plan tiny has no row that can be compiled ahead here: rows of operators can, by one device, "
        "whose library is there. kernelmark run --dry-run lists what can run.\n"
    )


def test_gpus_are_for_gpus(program, plan_file):
    code, _, err = program.run("compile", "--plan", str(plan_file([16])), "--gpus", "0", "--device", "cpu")
    assert code == 2
    assert "--gpus is for device cuda" in err
