"""A ready view of the MLflow UI: which rows, which charts, which columns. Pure, and imports no MLflow.

MLflow keeps a shared view as a tag of the experiment and names it in a link. What it holds is not in MLflow's
documentation; it was read from what its own "share" button writes (3.17). A UI that does not know it says so and
shows the experiment as ever.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from ..errors import InputError

TAG = "mlflow.sharedViewState."
"""What an experiment's tag for a view begins with; the view's key follows."""
SHOWN = 100
"""Rows that a chart compares at most."""
READABLE = 30
"""Of so many rows bars have names that can be read; a view of more is narrowed to one case, then to one run."""
NARROWER = (("operator", "case", "cache"), ("invocation",))
"""The tags by which it is."""
TAGS = ("gpu", "driver", "cuda", "torch", "triton", "version", "commit")
"""Columns beside the metrics: what people tell machines and versions apart by."""
SPEEDUP, LIMIT = "speedup/vs_best_baseline", "limit/fraction"
REST = "all other metrics"
LOWEST, HIGHEST, BESIDE, BAR = 240, 1600, 110, 18
"""Pixels of a chart: its least and greatest height, what is beside its bars, and a bar. Charts stand
below one another: side by side their names are cut.
"""


@dataclass(frozen=True)
class Opened:
    """A view's address, what it shows, and of how many rows that were asked for it shows how many."""

    link: str
    title: str = ""
    rows: int = 0
    asked: int = 0


@dataclass(frozen=True)
class View:
    """The rows that fulfil `conditions` (tags and their values), and the metrics that are drawn, a chart each."""

    title: str
    conditions: Mapping[str, str]
    drawn: Sequence[str]
    """The first of them orders the rows."""
    higher: bool = False
    """Whether more of the first one is better."""
    others: Sequence[str] = ()
    """Metrics that rows have beside: in a section that is folded."""
    rows: int = 0
    """How many rows there are: a chart has a bar for each, and is as high as its names take."""

    @property
    def search(self) -> str:
        """The search, as MLflow's box has it. Names are quoted, as `case` is a word of SQL.

        Raises `InputError` for a value that cannot be quoted.
        """
        return " and ".join(f"tags.`{_name(name)}` = {_quoted(value)}" for name, value in self.conditions.items())

    @property
    def state(self) -> str:
        """What the experiment's tag holds."""
        sections = [(self.title, self.drawn, True), (REST, self.others, False)]
        return json.dumps(
            {
                "searchFilter": self.search,
                "orderByKey": f"metrics.`{self.drawn[0]}`" if self.drawn else "attributes.start_time",
                "orderByAsc": bool(self.drawn) and not self.higher,
                "runsHiddenMode": "SHOW_ALL",
                "hideEmptyCharts": True,
                # Else sections are sorted by name, and what matters need not come first.
                "isAccordionReordered": True,
                "selectedColumns": [
                    *(f"metrics.`{x}`" for x in self.drawn),
                    *(f"tags.`{x}`" for x in TAGS if x not in self.conditions),
                ],
                "compareRunSections": [
                    {"uuid": _id(name), "name": name, "display": shown, "isReordered": True}
                    | {"columns": 1, "cardHeight": min(HIGHEST, max(LOWEST, BESIDE + BAR * self.rows))}
                    for name, _, shown in sections
                ],
                "compareRunCharts": [
                    _chart(metric, section) for section, metrics, _ in sections for metric in metrics
                ],
            }
        )

    @property
    def key(self) -> str:
        """Names the view: the same view has the same link, whoever asks for it."""
        return hashlib.sha256(self.state.encode()).hexdigest()[:24]

    def fragment(self, experiment: str) -> str:
        """The link's part behind the server's address."""
        query = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={quote(self.key)}"
        return f"#/experiments/{quote(experiment)}/runs?{query}"


def drawn(metrics: Iterable[str], primary: str) -> tuple[str, ...]:
    """Of the metrics that rows have those that matter: the primary one, the speedup, the fraction of the limit.

    A time is drawn in µs, as bars carry two decimals.
    """
    there = set(metrics)
    medians = sorted(x for x in there if x.startswith(f"{primary}/median"))
    wanted = (f"{primary}/median_us", *medians)
    first = next((x for x in wanted if x in there), None)
    return tuple(x for x in (first, SPEEDUP, LIMIT) if x is not None and x in there)


def _chart(metric: str, section: str) -> dict[str, object]:
    return {
        "uuid": _id(f"{section}/{metric}"),
        "type": "BAR",
        "metricKey": metric,
        "metricSectionId": _id(section),
        "runsCountToCompare": SHOWN,
        "deleted": False,
        "isGenerated": True,
        "displayName": metric,
    }


def _id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _name(tag: str) -> str:
    if not tag.replace("_", "").replace(".", "").isalnum():
        raise InputError(f"{tag!r} is no tag's name: letters, digits, _ and . make one")
    return tag


def _quoted(value: str) -> str:
    """MLflow's search has no escapes: a value may hold one kind of quotation marks."""
    for mark in "'\"":
        if mark not in value:
            return f"{mark}{value}{mark}"
    raise InputError(f"{value!r} holds both kinds of quotation marks, which MLflow's search cannot express")
