"""Calibrates the regression detector as shipped: its false alarms, its power, its intervals.

    python tests/calibration/calibrate.py [--suites N] [--noise X] [--seed S]

Simulates suites of 200 cases (`noisemodel.py`), passes them through the functions that the command line
calls, and prints a Markdown table. No decision is made here.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
from kernelmark.registry.detection.attribution import CAUSES, Attribution, Cause, arms, attribute
from kernelmark.registry.detection.comparison import Comparison, History, Noise, Options, Side
from kernelmark.registry.detection.decision import DEFAULTS, Progress, decide, stage_one, stored
from kernelmark.registry.detection.noise import run_mean
from kernelmark.registry.detection.verdict import Verdict, exit_code
from kernelmark.registry.store.record import Key


def _beside(name: str) -> ModuleType:
    # By path: the tests are no package, and PYTHONSAFEPATH keeps their folder off the path.
    spec = importlib.util.spec_from_file_location(f"calibration_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


model = _beside("noisemodel")

CASES = 200
EFFECTS = (0.02, 0.05, 0.07, 0.10)
HISTORY = 10
SUITES_PER_DEVICE = 10
LONE_PER_SUITE = 5
STORED_HIT = 0.10
PLANTED: Sequence[Mapping[Cause, float]] = (
    {},
    {"code": 0.05},
    {"environment": 0.05},
    {"tuning": 0.05},
    {"code": 0.05, "environment": 0.05},
    {"interaction": 0.05},
)
"""Slowdowns by cause that the attribution must tell apart."""
KEYS = [Key(f"operator{i // 10:02}", f"case{i % 10}", "kernelmark", "cold") for i in range(CASES)]


@dataclass
class Share:
    """Counts of an event."""

    hits: int = 0
    of: int = 0

    def add(self, hit: bool) -> None:
        self.hits += hit
        self.of += 1

    @property
    def rate(self) -> float:
        return self.hits / self.of if self.of else float("nan")


@dataclass
class Table:
    """What one level of noise gave."""

    noise: float
    suites: int = 0
    alarms: dict[str, list[int]] = field(default_factory=dict)
    """Per rule: warnings and regressions on unchanged code, in each suite."""
    improvements: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    coverage: dict[str, Share] = field(default_factory=dict)
    power: dict[tuple[str, float], Share] = field(default_factory=dict)
    """Found at least as a warning, by rule and effect; and `... fail` as a regression."""
    greens: dict[str, int] = field(default_factory=dict)
    overlooked: dict[tuple[str, float], Share] = field(default_factory=dict)
    reruns: int = 0
    extra: int = 0
    pairs: int = 0
    detectable: list[float] = field(default_factory=list)
    named: dict[str, Share] = field(default_factory=dict)
    """Per planted cause or causes: attributions that name these and no others."""
    innocent: dict[str, Share] = field(default_factory=dict)
    """Per planted cause or causes: attributions that name any other."""

    def unchanged(self, rule: str, verdicts: Sequence[Verdict]) -> None:
        """Counts one suite in which nothing changed."""
        kinds = [v.kind for v in verdicts]
        self.alarms.setdefault(rule, []).append(sum(k in ("regression", "warning") for k in kinds))
        self.improvements[rule] = self.improvements.get(rule, 0) + kinds.count("improvement")
        self.greens[rule] = self.greens.get(rule, 0) + (exit_code(verdicts) == 0)
        counts = self.kinds.setdefault(rule, {})
        for kind in kinds:
            counts[kind] = counts.get(kind, 0) + 1

    def covered(self, what: str, verdict: Verdict, truth: float) -> None:
        """Counts whether an interval holds the truth."""
        if verdict.low is not None and verdict.high is not None:
            self.coverage.setdefault(what, Share()).add(verdict.low <= truth <= verdict.high)

    def attributed(self, planted: Mapping[Cause, float], found: Attribution) -> None:
        """Counts whether the causes were named and the intervals of parts and shares hold the truth."""
        name = " and ".join(planted) or "nothing"
        self.named.setdefault(name, Share()).add(set(found.causes) == planted.keys())
        self.innocent.setdefault(name, Share()).add(bool(set(found.causes) - planted.keys()))
        total = sum(np.log1p(x) for x in planted.values())
        for part in found.parts:
            truth = planted.get(part.cause, 0.0)
            self.coverage.setdefault("attribution, a part", Share()).add(part.low <= truth <= part.high)
            if total and part.share_low is not None and part.share_high is not None:
                held = part.share_low <= np.log1p(truth) / total <= part.share_high
                self.coverage.setdefault("attribution, a share", Share()).add(held)

    def found(self, rule: str, effect: float, verdict: Verdict) -> None:
        """Counts whether a planted slowdown was found."""
        self.power.setdefault((rule, effect), Share()).add(verdict.kind in ("warning", "regression"))
        self.power.setdefault((f"{rule}, fail", effect), Share()).add(verdict.kind == "regression")
        self.overlooked.setdefault((rule, effect), Share()).add(verdict.kind == "no change")


def comparisons(
    base: np.ndarray, current: np.ndarray, histories: Sequence[History], rows: Sequence[int] = range(CASES)
) -> list[Comparison]:
    """Log medians as the detector gets them."""
    base, current = np.exp(base), np.exp(current)
    return [
        Comparison(
            KEYS[i],
            Side(medians=tuple(base[i].tolist())),
            Side(medians=tuple(current[i].tolist())),
            histories[i],
        )
        for i in rows
    ]


class Bench:
    """One device with its cases, its history, and a way to measure."""

    def __init__(self, generator: np.random.Generator, noise: float, options: Options) -> None:
        self.generator, self.options = generator, options
        self.cases = model.draw_cases(generator, CASES, noise)
        self.none = [History()] * CASES
        noises: list[list[Noise]] = [[] for _ in KEYS]
        for _ in range(HISTORY):
            for i, verdict in enumerate(stage_one(self.first(self.none), options).verdicts):
                assert verdict.noise is not None
                noises[i].append(verdict.noise)
        runs = [model.run(generator, self.cases, options.pairs) for _ in range(options.maximum_runs)]
        means = [[run_mean(row) for row in np.exp(run)] for run in runs]
        self.history = [History(tuple(n), tuple(r)) for n, r in zip(noises, zip(*means, strict=True), strict=True)]

    def first(self, histories: Sequence[History], schedule: str = "interleaved") -> list[Comparison]:
        base, current = getattr(model, schedule)(self.generator, self.cases, self.options.pairs)
        return comparisons(base, current, histories)

    def rerun(self, wanted: Mapping[Key, int], effects: Mapping[Key, float], schedule: str) -> list[Comparison]:
        """Fresh pairs of what the detector asked for."""
        out = []
        for pairs in set(wanted.values()):
            rows = [i for i, key in enumerate(KEYS) if wanted.get(key) == pairs]
            some = model.Cases(*(getattr(self.cases, name)[rows] for name in model.Cases.__dataclass_fields__))
            base, current = getattr(model, schedule)(self.generator, some, pairs)
            for row, b, c in zip(rows, np.exp(base), np.exp(current), strict=True):
                slow = c * (1 + effects.get(KEYS[row], 0.0))
                sides = Side(medians=tuple(b.tolist())), Side(medians=tuple(slow.tolist()))
                out.append(Comparison(KEYS[row], *sides))
        return out

    def compare(self, first: Sequence[Comparison], schedule: str = "interleaved") -> Progress:
        """Unchanged code against itself."""
        return decide(first, lambda wanted: self.rerun(wanted, {}, schedule), self.options)

    def lone(self, first: Sequence[Comparison], i: int, effect: float) -> Verdict:
        """The verdict on one slow row among unchanged ones.

        Of the rows that are merely inconclusive only the slow one is rerun: the others are another family and
        cannot change its verdict, and a runner whose budget ends does the same.
        """
        progress = stage_one(first, self.options)  # also the first step of `decide`: asked for what it flags

        def rerun(wanted: Mapping[Key, int]) -> list[Comparison]:
            some = {key: n for key, n in wanted.items() if key == KEYS[i] or key in progress.requests}
            return self.rerun(some, {KEYS[i]: effect}, "interleaved")

        return decide(first, rerun, self.options).verdicts[i]


def slowed(row: Comparison, effect: float) -> Comparison:
    """The row as it would have been measured with slower code."""
    medians = tuple(x * (1 + effect) for x in row.current.medians)
    return Comparison(row.key, row.base, Side(medians=medians), row.history)


def calibrate(suites: int, noise: float, seed: int, options: Options = DEFAULTS) -> Table:
    """Runs `suites` unchanged suites, and a share of them again with planted slowdowns."""
    generator = np.random.default_rng([seed, int(1000 * noise)])
    table = Table(noise)
    for number in range(suites):
        if number % SUITES_PER_DEVICE == 0:
            bench = Bench(generator, noise, options)
        _ab(table, bench, "A/B", bench.history)
        _ab(table, bench, "A/B, no history", bench.none)
        table.unchanged("A/B, blocked", bench.compare(bench.first(bench.history, "blocked"), "blocked").verdicts)
        _stored(table, bench)
        _attribution(table, bench)
        table.suites += 1
    return table


def _ab(table: Table, bench: Bench, rule: str, histories: Sequence[History]) -> None:
    first = bench.first(histories)
    alone = stage_one(first, bench.options)
    for verdict in alone.verdicts:
        table.covered(f"{rule}, stage 1", verdict, 0.0)
    progress = bench.compare(first)
    table.unchanged(rule, progress.verdicts)
    for verdict in progress.verdicts:
        table.covered(f"{rule}, as reported", verdict, 0.0)
    if rule == "A/B":
        table.reruns += len(alone.requests)
        table.extra += len(alone.extra)
        table.pairs += sum({**alone.extra, **alone.requests}.values())
        table.detectable += [v.detectable for v in alone.verdicts if v.detectable is not None]
    for i in bench.generator.choice(CASES, LONE_PER_SUITE, replace=False):
        for effect in EFFECTS:
            hit = [*first[:i], slowed(first[i], effect), *first[i + 1 :]]
            verdict = bench.lone(hit, int(i), effect)
            table.found(rule, effect, verdict)
            if verdict.stage > 1:
                table.covered(f"{rule}, later stages", verdict, effect)


def _stored(table: Table, bench: Bench) -> None:
    new = model.run(bench.generator, bench.cases, bench.options.pairs)
    rows = comparisons(new, new, bench.history)
    progress = stored(rows, bench.options)
    table.unchanged("stored", progress.verdicts)
    for verdict in progress.verdicts:
        table.covered("stored", verdict, 0.0)
    for effect in EFFECTS:
        hit = set(bench.generator.choice(CASES, int(STORED_HIT * CASES), replace=False).tolist())
        slow = [slowed(row, effect) if i in hit else row for i, row in enumerate(rows)]
        verdicts = stored(slow, bench.options).verdicts
        for i in hit:
            table.found("stored", effect, verdicts[i])


def _attribution(table: Table, bench: Bench) -> None:
    """Rows with planted causes, each in rounds of all arms, with the spread that history knows of them."""
    chosen = arms(True, True, True)
    shares: Mapping[Cause, Sequence[bool]] = {
        "code": [arm.code for arm in chosen],
        "environment": [arm.environment for arm in chosen],
        "tuning": [arm.tuning for arm in chosen],
        "interaction": [arm.code and arm.environment for arm in chosen],
    }
    assert set(shares) == set(CAUSES)
    for planted in PLANTED:
        rows = bench.generator.choice(CASES, LONE_PER_SUITE, replace=False)
        some = model.Cases(*(getattr(bench.cases, name)[rows] for name in model.Cases.__dataclass_fields__))
        logs = model.rounds(bench.generator, some, len(chosen), bench.options.rerun_pairs)
        for cause, effect in planted.items():
            logs += np.log1p(effect) * np.asarray(shares[cause], dtype=float)[None, :, None]
        for row, medians in zip(rows, np.exp(logs), strict=True):
            times = {arm: tuple(x.tolist()) for arm, x in zip(chosen, medians, strict=True)}
            noise = bench.history[row].noise[-1]
            table.attributed(planted, attribute(KEYS[row], times, bench.options, noise))


def markdown(tables: Sequence[Table]) -> str:
    """The tables as they stand in the documentation."""
    out = [
        "| noise | rule | false alarms per 200, warnings and failures | false improvements per 200 | no change | "
        "inconclusive | suites that exit 0 | finds 2 / 5 / 7 / 10 % | as failure | calls it no change |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for table in tables:
        for rule, alarms in table.alarms.items():
            counts = table.kinds[rule]
            total = sum(counts.values())
            # 95 % upper bound for none seen in n suites (rule of three).
            rate = f"{sum(alarms) / table.suites:.3f}" if any(alarms) else f"0 (< {3 / table.suites:.3f})"
            powers = [table.power.get((rule, e)) for e in EFFECTS]
            fails = [table.power.get((f"{rule}, fail", e)) for e in EFFECTS]
            overlooked = [table.overlooked.get((rule, e)) for e in EFFECTS]
            out.append(
                f"| x{table.noise:g} | {rule} | {rate} | {table.improvements[rule] / table.suites:.3f} | "
                f"{counts.get('no change', 0) / total:.2%} | {counts.get('inconclusive', 0) / total:.2%} | "
                f"{table.greens[rule] / table.suites:.0%} | {_rates(powers)} | {_rates(fails)} | "
                f"{_rates(overlooked)} |"
            )
    out += ["", "| noise | 95 % interval | holds the truth | of |", "|---|---|---|---|"]
    for table in tables:
        for what, share in table.coverage.items():
            out.append(f"| x{table.noise:g} | {what} | {share.rate:.1%} | {share.of} |")
    out += ["", "| noise | planted, 5 % each | causes named, and no others | an innocent named | of |"]
    out.append("|---|---|---|---|---|")
    for table in tables:
        for name, share in table.named.items():
            wrong = table.innocent[name].rate
            out.append(f"| x{table.noise:g} | {name} | {share.rate:.1%} | {wrong:.1%} | {share.of} |")
    out.append("")
    for table in tables:
        middle = float(np.median(table.detectable))
        out.append(
            f"x{table.noise:g}: {table.suites} suites of {CASES} cases. Of unchanged rows a suite reruns "
            f"{table.reruns / table.suites:.2f} as flagged and {table.extra / table.suites:.1f} as inconclusive, "
            f"at {table.pairs / table.suites / CASES:.2f} pairs per row of the suite after the first 6. "
            f"Median smallest detectable slowdown {middle:.1%}."
        )
    return "\n".join(out)


def _rates(shares: Sequence[Share | None]) -> str:
    return " / ".join("-" if share is None else f"{share.rate:.3f}" for share in shares)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Calibrates the regression detector as shipped.")
    parser.add_argument("--suites", type=int, default=200, help="unchanged suites of 200 cases per noise level")
    parser.add_argument(
        "--noise", type=float, action="append", help="noise multiplier, repeatable (default 1 and 3)"
    )
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    start = time.monotonic()
    tables = [calibrate(chosen.suites, noise, chosen.seed) for noise in chosen.noise or (1.0, 3.0)]
    print(markdown(tables))
    print(f"\nSeed {chosen.seed}, {time.monotonic() - start:.0f} s.")


if __name__ == "__main__":
    main()
