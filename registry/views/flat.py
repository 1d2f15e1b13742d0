"""A row as flat names and plain values: a line of CSV, a row of a data frame."""

from __future__ import annotations

from typing import Any

from ..analysis.rows import Row, category


def flat(row: Row) -> dict[str, Any]:
    """One name a value: axes and options by their own names, a metric as `latency_ms`, `latency_low`,
    `latency_high`. What is unknown is None.
    """
    out: dict[str, Any] = {
        "operator": row.operator,
        "case": row.case,
        "pass": row.pass_,
        "dtype": row.dtype,
        "cache": row.cache,
        **{f"axis_{name}": size for name, size in row.axes.items()},
        **{f"option_{name}": value for name, value in row.options.items()},
        "implementation": row.implementation,
        "provider": row.provider,
        "version": row.version,
        "status": row.status,
        "reason": row.reason,
        "replicates": row.replicates,
        "timer": row.timer,
        "converged": row.converged,
        "throttled": row.throttled,
    }
    for name, value in row.metrics.items():
        # Tokens in tokens/s need no unit twice.
        named = (
            name
            if value.unit in ("", "1")
            else value.unit
            if value.unit.startswith(name)
            else f"{name}_{value.unit}"
        )
        out |= {named: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
    return out | {
        "limit": row.limit,
        "fraction_of_limit": row.fraction_of_limit,
        "above_limit": row.above_limit,
        "best_baseline": row.best_baseline,
        "speedup_vs_best_baseline": row.speedup_vs_best_baseline,
        "speedup_low": row.speedup_ci_low,
        "speedup_high": row.speedup_ci_high,
        "speedup_vs_eager": row.speedup_vs_eager,
        "standing": category(row),
    }
