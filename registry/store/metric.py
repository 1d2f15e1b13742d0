"""What is measured, as data: a name, a unit, a direction, and how two commits are judged by it.

Rows, tables, charts, MLflow, detection and history walk over the metrics that a journal's header names; none of
them knows one by name. Names are unique within a journal: "loss" means the same in all its cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Literal, TypeAlias

import msgspec

Better: TypeAlias = Literal["lower", "higher", "neither"]
Summary: TypeAlias = Literal["median", "mean", "last", "maximum", "minimum", "p5", "p90", "p95", "p99"]
"""How the samples of one process become its value."""


class Ratio(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="by", tag="ratio"):
    """Two commits are judged by the ratio of their values; `above` is how much worse fails, as a fraction.

    A case's primary metric goes through the confirmed rule, with the thresholds of the comparison. For another one
    `test` says what must lie above: the 99.9 % `interval` of the ratio; the `median` alone, for what repeats
    exactly; or, by `separation`, each process of one side against each of the other, for what differs between
    processes by design. Values up to `floor` count as `floor`.
    """

    above: float = 0.05
    test: Literal["interval", "median", "separation"] = "interval"
    floor: float = 0.0


class Equivalence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="by", tag="equivalence"):
    """Two commits are equivalent if the 95 % interval of their paired difference lies within ±`margin`.

    `relative` takes the difference as a fraction of the base's value.
    """

    margin: float
    relative: bool = True


Judged: TypeAlias = Ratio | Equivalence


class Metric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One quantity that a measurement holds samples of.

    `abscissa` names the metric that a curve is drawn over (loss by step): both have as many samples, the curve is
    drawn and never judged; what is judged of it is a metric of its own, with one value at a declared point.
    """

    name: str
    unit: str
    """As it is printed: ms, B, J, tokens/s; 1 for a plain number."""
    better: Better = "lower"
    summary: Summary = "median"
    across: Literal["median", "maximum"] = "median"
    """How the values of several processes become a row's."""
    judged: Judged | None = None
    abscissa: str | None = None
    label: str = ""
    """The heading of its column; its name where empty."""
    about: str = ""
    """What it is, in a sentence for readers of a table."""
    shown: Literal["table", "report", "never"] = "report"
    """Where it has a column: in the terminal's table and the report, in the report alone, or nowhere."""

    def __post_init__(self) -> None:
        if self.abscissa is not None and self.judged is not None:
            raise ValueError(f"metric {self.name!r} is a curve, and curves are not judged")

    @property
    def heading(self) -> str:
        """What stands above its column, with its unit. Bytes and joules carry theirs themselves."""
        name = self.label or self.name.replace("_", " ")
        said = self.unit in ("", "1", "B", "J", name) or name.endswith(f" {self.unit}")
        return name if said else f"{name} {self.unit}"


def summarized(samples: Sequence[float], summary: Summary) -> float:
    """A process's value: its samples as one number."""
    match summary:
        case "median":
            return median(samples)
        case "mean":
            return fmean(samples)
        case "last":
            return samples[-1]
        case "maximum":
            return max(samples)
        case "minimum":
            return min(samples)
        case _:
            import numpy as np  # here: listing reads metrics and computes nothing

            return float(np.percentile(np.asarray(samples, dtype=np.float64), int(summary[1:])))


def finite(samples: Sequence[float]) -> bool:
    """Whether JSON can hold them."""
    return all(map(math.isfinite, samples))


LATENCY = Metric("latency", "ms", judged=Ratio(), shown="table", about="Device time of a call.")
"""The primary metric of an operator's cases."""
LAUNCH = Metric(
    "launch",
    "ms",
    label="incl. launch",
    about="The host's wall time of single, unqueued calls, launch and synchronization included.",
)
CONVERSION = Metric(
    "conversion",
    "ms",
    label="conv",
    shown="table",
    about="The part of a call that only converts layouts as its library demands of its user, timed alone.",
)
MEMORY = Metric(
    "memory",
    "B",
    across="maximum",
    judged=Ratio(test="median"),
    label="peak memory",
    about="Most bytes allocated during a call beyond what was allocated before it, largest over replicates.",
)
ENERGY = Metric(
    "energy",
    "J",
    summary="mean",
    judged=Ratio(),
    about="Of a call among others back to back, with nothing between them: board power, from whole steps of the "
    "board's energy counter, times the time of a call there. One sample a window.",
)
BACK_TO_BACK = Metric(
    "back_to_back",
    "ms",
    better="neither",
    about="The time of a call while its energy was measured: energy over it is the board's power. Clocks may fall "
    "below those of single samples there, and inputs that fit stay in the cache.",
)
ERROR = Metric(
    "error",
    "1",
    across="maximum",
    judged=Ratio(above=1.0, test="separation", floor=1e-6),
    label="relative error",
    about="Relative norm of the deviation from the reference, the largest over outputs and replicates.",
)
ERROR_UNQUANTIZED = Metric(
    "error_unquantized",
    "1",
    across="maximum",
    judged=Ratio(above=1.0, test="separation", floor=1e-6),
    label="error, unquantized",
    about="Relative norm of the deviation from the exact answer for the numbers before they were quantized or "
    "pruned.",
)
"""Measured of operators that say what that answer is, beside `ERROR`, which is against the quantized ones'."""

HOST_PEAK = Metric(
    "host_peak",
    "B",
    across="maximum",
    about="Most memory that the process took of its host so far, this system's and earlier ones'.",
)
SAMPLES_PER_S = Metric(
    "samples_per_s",
    "samples/s",
    better="higher",
    label="samples/s",
    shown="table",
    about="Sequences over time: of a step, or of passes that are queued one behind the other. On several GPUs, of "
    "each.",
)
PEAKS = (MEMORY.name, "peak_allocated", "pass_memory", "generation_memory")
"""Metrics that are a device's peak memory, each by whoever measures it: an operator's case, `train`, `forward`,
`generate`. A row has one at most, and rows of one case have the same."""

ERRORS = (ERROR.name, ERROR_UNQUANTIZED.name, "loss_error", "gradient_error", "logits_error", "generation_error")
"""Metrics that are a numerical error, in the same way."""

RANK_LATENCY = Metric(
    "rank_latency",
    "ms",
    better="neither",
    shown="never",
    about="Every rank's own time of each sample of the latency, which is the largest of them: rank after rank, "
    "sample after sample.",
)
SPREAD = Metric(
    "rank_spread",
    "1",
    label="spread over ranks",
    about="How much less the quickest rank took than the slowest, as a share of that; by sample.",
)
HELD = Metric(
    "rank_memory",
    "B",
    across="maximum",
    judged=Ratio(test="median"),
    label="memory of a rank",
    about="Most bytes that a rank holds during a call: peak memory, its inputs and gradients of outputs, and what "
    "peers can read or write of its memory where the implementation says how much that is. Without the device's "
    "context, the buffers of NCCL and what the harness keeps for its checks.",
)
EXPOSED = Metric(
    "exposed_communication",
    "ms",
    about="What a call or a step takes longer than the same without what is sent and received: communication that "
    "nothing hides. Only where it can be left out.",
)
RANK_METRICS: tuple[Metric, ...] = (RANK_LATENCY, SPREAD, HELD, EXPOSED)
"""What is measured besides of a case on several GPUs."""

EACH = Metric(
    "each_gpu",
    "ms",
    summary="maximum",
    label="slowest GPU",
    about="Of a case that every GPU computes whole, at once with the others: the median of each, rank after rank. "
    "Its value is the slowest one's, which is what several GPUs that share the work are held against.",
)
EACH_METRICS: tuple[Metric, ...] = (RANK_LATENCY, SPREAD, EACH)
"""What is measured besides where a case may be computed whole by each of several GPUs."""

POWER = Metric(
    "power",
    "W",
    better="neither",
    about="The board, mean: back to back where energy was measured, else over a second of sampling or more.",
)
TEMPERATURE = Metric("temperature", "°C", better="neither", across="maximum", about="Of the GPU after sampling.")
CLOCK = Metric("sm_clock", "MHz", better="neither", label="SM clock", about="Median while sampling.")
UTILIZATION = Metric(
    "utilization",
    "%",
    better="neither",
    about="Share of the time in which a kernel ran, as NVML gives it: back to back where energy was measured, "
    "else mean over a second of sampling or more.",
)
BOARD_METRICS: tuple[Metric, ...] = (BACK_TO_BACK, POWER, TEMPERATURE, CLOCK, UTILIZATION)
"""What NVML says of a GPU around an operator's samples, beside the energy."""

OPERATOR_METRICS: tuple[Metric, ...] = (LATENCY, LAUNCH, CONVERSION, MEMORY, ENERGY, ERROR)
"""What is measured of an operator's case, the primary metric first. All journals of schema 1 have these."""
