"""How small a planted slowdown the detector finds on this machine: real kernels, real commits, the real command.

    python tests/calibration/planted.py --output FOLDER [--effects none,plus2,...] [--repeats 10] [--budget 8m]

Makes a repository of two commits whose kernel differs by planted shares of its own work (`planted_root/`), and
runs `regression_detector` on it once: each effect stands in as many cases as it is to be repeated, so that one
process measures all of them and start-up is paid once. A case is a comparison of its own, with its own pairs
of process medians; what they share is the process, as the rows of any plan do. `none` is unchanged code (A/A).
The journals and the verdicts as JSON stay in the folder; the table is printed as Markdown.

A process on a GPU takes 6 to 8 s to start and, by estimate, 0.15 s for each case: the default, 5 effects 10
times, 30 processes in all and about 7 minutes, of which 2 to 3 for the first stage. What the budget does not
suffice for stays inconclusive.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).with_name("planted_root")
EFFECTS = ("none", "plus2", "plus5", "plus10", "minus10")
COMMAND = "from kernelmark.suite.cli.regression import main; main()"
FOUND = {True: ("warning", "regression"), False: ("improvement",)}
PLAN = """replicates = 5
cache = "cold"
deadline_s = 60

[sampling]
min_samples = 20
max_samples = 100
min_seconds = 0.01
max_seconds = {seconds}
warmup_s = 0.05

[[cases]]
operator = "planted"
axes = {{ M = {rows}, D = {columns}, R = {repeats} }}
options = {{ effect = {effects} }}
dtype = "{dtype}"
"""


def repository(folder: Path) -> None:
    """Two commits: the kernel, and the kernel that does more of its work twice."""

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=kernelmark", "-c", "user.email=kernelmark@example.org")
        subprocess.run(["git", *who, "-C", str(folder), *arguments], check=True, capture_output=True)

    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message", "As it was")
    commit = folder / "kernels" / "_commit.py"
    commit.write_text(commit.read_text().replace("SLOW = False", "SLOW = True"))
    git("commit", "--quiet", "--all", "--message", "Does part of the work twice")


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[int, dict[str, Any]]:
    """The command's exit code and its verdicts."""
    repository(folder / "planted")
    cuda = arguments.device == "cuda"
    plan = folder / "planted.toml"
    plan.write_text(
        PLAN.format(
            seconds=0.1 if cuda else 0.2,
            rows=32768 if cuda else 16,
            columns=4096 if cuda else 64,
            repeats=list(range(arguments.repeats)),
            effects=json.dumps(arguments.effects.split(",")),
            dtype="bf16" if cuda else "fp32",
        )
    )
    asked = ["--baseline", "HEAD~1", "--mode", "ab", "--plan", str(plan), "--device", arguments.device]
    asked += ["--budget", arguments.budget, "--json", "--output", str(arguments.output.resolve())]
    if arguments.seed is not None:
        asked += ["--seed", str(arguments.seed)]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *asked],
        cwd=folder / "planted",
        env={**os.environ, "KERNELMARK_PATH": str(folder / "planted"), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if not done.stdout.strip():
        sys.exit(done.returncode or 5)
    return done.returncode, json.loads(done.stdout)


def table(report: dict[str, Any]) -> str:
    """Markdown: an effect a line, with how often it was found and what was estimated."""
    by_effect: dict[str, list[dict[str, Any]]] = {}
    for row in report["verdicts"]:
        by_effect.setdefault(_effect(row["case"]), []).append(row)
    out = [
        "| planted | comparisons | found | verdicts | estimate, median and range | interval holds | detectable |",
        "|---|---|---|---|---|---|---|",
    ]
    for effect, rows in sorted(by_effect.items(), key=lambda x: truth(x[0])):
        planted = truth(effect)
        wanted = FOUND[planted > 0] if planted else ("no change",)
        found = sum(x["kind"] in wanted for x in rows)
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(x["kind"] for x in rows).most_common())
        timed = [x for x in rows if x["change"] is not None]
        changes = [x["change"] for x in timed]
        held = sum(x["low"] <= planted <= x["high"] for x in timed)
        told = "–"
        if changes:
            told = f"{statistics.median(changes):+.2%} [{min(changes):+.2%}, {max(changes):+.2%}]"
        least = statistics.median([x["detectable"] for x in timed]) if timed else math.nan
        out.append(
            f"| {planted:+.1%} | {len(rows)} | {found} | {kinds} | {told} | {held} of {len(timed)} | {least:.2%} |"
        )
    return "\n".join(out)


def truth(effect: str) -> float:
    """The change in time that an effect is, where time goes by work: an improvement undoes a slowdown."""
    if effect == "none":
        return 0.0
    share = int(effect.removeprefix("plus").removeprefix("minus")) / 100
    return share if effect.startswith("plus") else 1 / (1 + share) - 1


def _effect(case: str) -> str:
    return next(x for part in case.split("-") for x in [part.removeprefix("effect")] if _known(x))


def _known(word: str) -> bool:
    number = word.removeprefix("plus").removeprefix("minus")
    return word == "none" or (number != word and number.isdigit())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Plants slowdowns and counts what the detector finds.")
    parser.add_argument("--output", type=Path, required=True, help="folder for journals and verdicts.json")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--effects", default=",".join(EFFECTS), help="of none, plus1 to plus10, minus5, minus10")
    parser.add_argument("--repeats", type=int, default=10, help="cases of each effect")
    parser.add_argument("--budget", default="8m", help="as regression_detector takes it")
    parser.add_argument("--seed", type=int)
    chosen = parser.parse_args(arguments)
    chosen.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        code, report = measure(chosen, Path(folder))
    (chosen.output / "verdicts.json").write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))
    print(f"\nExit code {code}: {report['headline']}. Journals and verdicts.json are in {chosen.output}.")


if __name__ == "__main__":
    main()
