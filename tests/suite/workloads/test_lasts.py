"""How long rows take that follow a clock: the estimates of plans that serve."""

from __future__ import annotations

from typing import Any

import pytest
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.workloads import endpoint, serve

CATALOG = Catalog.default()


def _lasts(load: str, **axes: int) -> float:
    given: dict[str, Any] = {"rate": 0, "users": 0, "requests": 600, "input": 16, "output": 100} | axes
    slo = "2000-100" if load == "search" else "none"
    return (
        serve.lasts(serve.WORKLOAD.case(given, "bf16", "program", model="llama-tiny", load=load, slo=slo))
        - serve.STARTED_S
    )


def test_a_load_takes_as_long_as_its_schedule_or_its_users() -> None:
    assert _lasts("poisson", rate=4000) == 150
    assert _lasts("gamma", rate=8000) == 75
    assert _lasts("closed", users=6) == pytest.approx(100 * 100 * serve.TOKEN_S)
    assert _lasts("search", rate=4000) == 150 * serve.TRIES
    assert _lasts("poisson") == 0  # refused when it is prepared


def test_users_of_an_endpoint_wait_for_their_answers() -> None:
    def lasts(users: int) -> float:
        given = {"users": users, "requests": 32, "words": 10, "output": 50}
        return endpoint.WORKLOAD.lasts(endpoint.WORKLOAD.case(given, "unstated", "program"))

    assert lasts(4) == pytest.approx(8 * 50 * endpoint.TOKEN_S)
    assert lasts(0) == lasts(1) == 4 * lasts(4)


def test_a_plan_that_serves_knows_that_it_takes_long() -> None:
    serving, products = (plans.load(x, CATALOG, "cuda").cells(CATALOG, "cuda") for x in ("serve", "matmul"))
    assert min(x.lasts_s for x in serving) > serve.STARTED_S
    assert {x.lasts_s for x in products} == {0.0}
