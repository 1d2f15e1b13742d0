"""A ready view: its search, its charts, its key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.tracking.saved_view import REST, TAG, View, drawn
from kernelmark.registry.tracking.store import Store

NAMES = (
    "latency/median_ms",
    "latency/median_us",
    "latency/ci_low_ms",
    "limit/fraction",
    "speedup/vs_best_baseline",
)


def test_what_matters_is_drawn_and_the_rest_is_folded() -> None:
    shown = drawn(NAMES, "latency")
    assert shown == ("latency/median_us", "speedup/vs_best_baseline", "limit/fraction")
    others = [x for x in NAMES if x not in shown]
    state = json.loads(View("rms_norm", {"operator": "rms_norm"}, shown, others=others).state)
    first, rest = state["compareRunSections"]
    assert (first["name"], first["display"], rest["name"], rest["display"]) == ("rms_norm", True, REST, False)
    charts = {x["metricKey"]: x["metricSectionId"] for x in state["compareRunCharts"]}
    assert charts.keys() == set(NAMES)  # what had no chart here MLflow would add, unfolded
    assert {charts[x] for x in shown} == {first["uuid"]}
    assert {charts[x] for x in others} == {rest["uuid"]}
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`latency/median_us`", True)
    assert "tags.`gpu`" in state["selectedColumns"]


def test_a_rate_is_drawn_as_it_is_with_the_most_first() -> None:
    shown = drawn(["tokens_per_s/median_tokens_per_s"], "tokens_per_s")
    assert shown == ("tokens_per_s/median_tokens_per_s",)
    assert json.loads(View("", {}, shown, higher=True).state)["orderByAsc"] is False


def test_the_same_view_has_the_same_link() -> None:
    first, second = (View("x", {"gpu": x}, ()) for x in ("H100", "H200"))
    assert first.key == View("x", {"gpu": "H100"}, ()).key != second.key
    assert first.fragment("7").endswith(f"compareRunsMode=CHART&viewStateShareKey={first.key}")


def test_a_search_cannot_be_broken_out_of() -> None:
    assert View("", {"gpu": "NVIDIA H200", "case": "it's"}, ()).search == (
        "tags.`gpu` = 'NVIDIA H200' and tags.`case` = \"it's\""
    )
    with pytest.raises(InputError, match="both kinds of quotation marks"):
        _ = View("", {"gpu": "'\""}, ()).search
    with pytest.raises(InputError, match="no tag's name"):
        _ = View("", {"gpu` = 'x' or tags.`y": "z"}, ()).search


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_the_registry_keeps_the_view_of_the_first_case(
    tmp_path: Path,
    fresh_database: Path,
    make_journal: Callable[..., Journal],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

    home = Home(tmp_path)
    shutil.copy(fresh_database, home.database)
    store = Store.open(None, home)
    store.ingest(make_journal(cases=2))
    opened = store.saved_view({"gpu": "NVIDIA H200"})
    assert (opened.title, opened.rows, opened.asked) == ("rms_norm · B4-S256-D4096-bf16-forward", 2, 4)
    link = opened.link
    experiment = store._client.get_experiment_by_name("kernelmark")
    key = link.rpartition("=")[2]
    state = json.loads(experiment.tags[f"{TAG}{key}"])
    assert state["searchFilter"] == (
        "tags.`kind` = 'row' and tags.`status` = 'ok' and tags.`gpu` = 'NVIDIA H200' and "
        "tags.`operator` = 'rms_norm' and tags.`case` = 'B4-S256-D4096-bf16-forward' and tags.`cache` = 'cold'"
    )
    whole = store.saved_view({"operator": "rms_norm"}).link
    tags = store._client.get_experiment_by_name("kernelmark").tags
    assert "`case`" not in json.loads(tags[f"{TAG}{whole.rpartition('=')[2]}"])["searchFilter"]
    refused = MlflowException("no", error_code=PERMISSION_DENIED)
    monkeypatch.setattr(store._client, "set_experiment_tag", Mock(side_effect=refused))
    assert "searchFilter=tags.%60kind%60" in store.saved_view({"gpu": "NVIDIA H200"}).link  # read-only
    monkeypatch.setattr("kernelmark.registry.tracking.store.READABLE", 1)
    narrow = store.saved_view({"operator": "rms_norm"})
    assert (narrow.title, narrow.rows, narrow.asked) == ("rms_norm · B4-S256-D4096-bf16-forward", 2, 4)
    assert "invocation" in narrow.link
    with pytest.raises(InputError, match="has gpu 'T4'; there are: NVIDIA H200"):
        store.saved_view({"operator": "rms_norm", "gpu": "T4"})
