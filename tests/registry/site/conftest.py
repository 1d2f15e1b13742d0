"""Literal runs over commits and devices, and a site made of them once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kernelmark.registry.analysis.releases import Package, Releases
from kernelmark.registry.site import pages as site_pages
from kernelmark.registry.site.build import Built, Settings, build
from kernelmark.registry.site.coverage import Expected
from kernelmark.registry.store.journal import Journal, encode
from kernelmark.registry.store.record import Ceiling, Measurement, Telemetry
from kernelmark.suite.workloads import serve

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&;"
STEP, BREAK = 8, 14
"""Runs at which ours gets slower, and from which the driver is another."""
EXPECTED = {
    "rms_norm": Expected(
        {"kernelmark": ("cuda",), "torch": ("cuda", "cpu"), "liger": ("cuda",)}, ("S1024", "S9999")
    ),
    "softmax": Expected({"kernelmark": ("cuda",)}, ("S1",)),
}

MakeRun = Callable[..., Journal]


def ours(number: int) -> float:
    """Ours in ms, at a run: 1.0, from `STEP` on 1.1, with a little noise that repeats."""
    return (1.1 if number >= STEP else 1.0) * (1 + 0.001 * (number % 3))


@pytest.fixture(scope="session", autouse=True)
def _releases() -> Iterator[None]:
    """Of torch alone, so that no page depends on what an index says today."""
    days = {"1.0": date(2026, 11, 1), "1.1": date(2026, 11, 20)}
    known = Releases(date(2026, 11, 24), {"torch": "torch"}, {"torch": Package("1.1", days)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_pages, "releases", lambda: known)
        site_pages._environment.cache_clear()
        yield
    site_pages._environment.cache_clear()


@pytest.fixture(scope="session")
def make_run(literal: Any) -> MakeRun:
    """A run of two commits a piece: two cases, ours beside torch, an unavailable liger."""

    def make(
        number: int,
        gpu: str = "NVIDIA H200",
        operator: str = "rms_norm",
        sizes: Sequence[int] = (1024, 2048),
        **header: Any,
    ) -> Journal:
        seen = Telemetry(
            sm_mhz=(1500 + number, 1980), power_w=650.0, temperature_c=60, reasons=("software power cap",)
        )
        out: list[Any] = [Ceiling("copy", 10**6, 0.5, 0), Ceiling("copy", 10**9, 500.0, 0)]
        for size in sizes:
            case = literal.case(operator=operator, name=f"S{size}", axes={"S": size}, bytes=10**6 * size // 1024)
            for replicate in range(2):
                jitter = 1 + 0.0005 * replicate
                more = {
                    "case": case,
                    "replicate": replicate,
                    "telemetry": seen,
                    "throttled": (0,) if replicate else (),
                }
                time = ours(number) * size / 1024 * jitter
                out.append(literal.record("kernelmark", [time] * 3, provider="kernelmark", **more))
                out.append(
                    literal.record("torch", [2 * size / 1024 * jitter * (1 + 0.0005 * (number % 2))] * 3, **more)
                )
            out.append(literal.record("liger", case=case, status="unavailable", reason="liger is not installed"))
        day = f"2026-11-{number + 1:02d}T00:00:00+00:00"
        driver = "590.1" if number >= BREAK else "580.1"
        fields = {"run": f"run-{number:02d}", "created": day, "commit": f"{number // 2:040x}", "replicates": 2} | {
            "key": f"key-{driver}",
            "conditions": {"gpu": gpu, "driver": driver},
        }
        return literal.journal(*out, literal.footer(), **(fields | header))

    return make


@pytest.fixture(scope="session")
def servers(literal: Any) -> Journal:
    """A run of two servers, one with a hostile name, at two rates and for two numbers of users."""
    lines = []
    for name, slow in (("kernelmark", 1.0), (HOSTILE, 2.0)):
        for rate, users, requests in ((4000, 0, 500), (8000, 0, 500), (0, 1, 40), (0, 4, 40)):
            axes = {"rate": rate, "users": users, "requests": requests, "input": 32, "output": 16}
            options = {"load": "closed" if users else "poisson", "model": HOSTILE, "slo": "2000-100"}
            case = literal.case(
                operator=serve.WORKLOAD.name,
                name=f"{rate}-{users}",
                axes=axes,
                options=options,
                pass_="program",
                primary="request",
                bytes=0,
                flops=0,
            )
            values = [slow * (100 + rate / 100 + users + i % 50) for i in range(requests)]
            samples = {
                x: tuple(y / part for y in values) for x, part in (("request", 1), ("ttft", 4), ("tpot", 20))
            }
            samples |= {
                "output_per_s": (1000 * max(users, 2) / slow,),
                "dispatch": (0.1,) * requests,
                "failed": (0.0,),
            }
            if rate:
                samples |= {f"{x}_p99": (samples[x][49],) for x in ("request", "ttft", "tpot")}
                samples["goodput"] = (rate / 1000,)
            lines.append(
                msgspec.structs.replace(
                    literal.record(name, cache="hot"), case=case, measurement=Measurement(samples, "monotonic")
                )
            )
    fields = {"run": "run-servers", "created": "2026-11-01T00:00:00+00:00", "commit": f"{0:040x}"}
    return literal.journal(*lines, literal.footer(), metrics=serve.METRICS, **fields)


@pytest.fixture(scope="session")
def written() -> Callable[[Sequence[Journal], Path], list[Path]]:
    """Writes journals to a folder."""

    def do(journals: Sequence[Journal], folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for number, journal in enumerate(journals):
            lines = (journal.header, *journal.ceilings, *journal.records, *journal.footers)
            paths.append(folder / f"{number}.jsonl")
            paths[-1].write_bytes(b"".join(map(encode, lines)))
        return paths

    return do


@pytest.fixture(scope="session")
def runs(make_run: MakeRun, servers: Journal) -> list[Journal]:
    """18 runs of 9 commits on an H200, one on an L4, one with everything hostile that can be, and servers."""
    out = [make_run(x) for x in range(18)]
    out.append(make_run(2, "NVIDIA L4", run="run-l4"))
    out.append(
        # Runs and commits have forms that a journal is held to when it is read.
        make_run(
            3,
            HOSTILE,
            operator=HOSTILE,
            sizes=(1024, 2048, 4096),
            run="RUN_hostile",
            plan=HOSTILE,
            commit="HEAD.hostile",
            key=HOSTILE,
        )
    )
    return [*out, servers]


@pytest.fixture(scope="session")
def site(
    runs: list[Journal],
    written: Callable[[Sequence[Journal], Path], list[Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Built, list[Path]]:
    """The site's folder, what its build did, and the journals that it was made of."""
    pytest.importorskip("jinja2", reason="Jinja2 is not installed")
    folder = tmp_path_factory.mktemp("site")
    paths = written(runs, folder / "given")
    return (
        folder / "out",
        build(paths, folder / "out", Settings("Kernels", "https://example.org/k"), EXPECTED),
        paths,
    )
