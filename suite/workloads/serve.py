"""Serving: a server in a process of its own, asked by clients in processes of their own.

Latencies count from the schedule on which users come (open loads) or from when a user was ready to ask (closed
loads); the two are never mixed. The definitions are in `_serving/latencies.py`. A replicate is a start of the
server.

An answer is checked where the server has our weights and its text is words of the vocabulary: the tokens of some
requests, random ones of the load among them, are held to the model in fp32, once the server has given its memory
back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from ...registry.store.metric import Metric, Ratio
from ...registry.store.record import Case, Measurement
from ..definition import Option
from ..measure.rounding import rounded
from ..system import Assembly
from . import _inference as inference
from ._serving import children, latencies, load
from ._serving.loaded import STAMP_METRICS, Loaded, figures, remarks
from ._serving.messages import EngineSpec, Seen, Spec, Task
from ._serving.search import PROBES, Search
from .forward import Inference, catalog, read

if TYPE_CHECKING:
    from ..measure.session import Session
    from ..measure.telemetry import Nvml, Watch
    from ..model import Chosen

METRICS = (
    Metric(
        "request",
        "ms",
        judged=Ratio(),
        label="end to end",
        shown="table",
        about="e − s: from the schedule to the end of the answer's stream; requests of the steady window.",
    ),
    Metric(
        "request_p99", "ms", label="end to end p99", about="Its 99th percentile, nearest rank; of 500 at least."
    ),
    Metric(
        "ttft",
        "ms",
        judged=Ratio(),
        label="TTFT",
        shown="table",
        about="f − s: from the schedule to the first chunk with text.",
    ),
    Metric("ttft_p99", "ms", label="TTFT p99", shown="table", about="Its 99th percentile, of 500 at least."),
    Metric(
        "tpot",
        "ms",
        judged=Ratio(),
        label="TPOT",
        shown="table",
        about="(t − f) / (N − tokens of the first chunk): time a token after the first chunk.",
    ),
    Metric("tpot_p99", "ms", label="TPOT p99", shown="table", about="Its 99th percentile, of 500 at least."),
    Metric("itl", "ms", label="ITL", about="Gaps between chunks with text, pooled over requests."),
    Metric("itl_p99", "ms", label="ITL p99", about="Its 99th percentile, of 500 at least."),
    Metric(
        "ttft_sent",
        "ms",
        label="TTFT from sending",
        about="f − q: what the server took, its user's wait left out.",
    ),
    Metric("request_sent", "ms", label="end to end from sending", about="e − q."),
    Metric("dispatch", "ms", label="dispatch delay", about="q − s: from the schedule to the first byte sent."),
    Metric(
        "served_per_s",
        "requests/s",
        better="higher",
        label="requests/s",
        shown="table",
        about="Requests that ended well in the steady window, over its length.",
    ),
    Metric(
        "output_per_s",
        "tokens/s",
        better="higher",
        label="output tokens/s",
        shown="table",
        about="Tokens that came in the steady window, over its length.",
    ),
    Metric(
        "goodput",
        "requests/s",
        better="higher",
        shown="table",
        about="Requests of the window that met the limits of first token and time a token, over its length.",
    ),
    Metric(
        "slo_rate",
        "requests/s",
        better="higher",
        judged=Ratio(),
        label="highest rate within SLO",
        shown="table",
        about="The highest Poisson rate tried at which all but a hundredth of the requests met the limits. A "
        "remark says where time or the number of rates ended the search before it was known to a tenth.",
    ),
    Metric(
        "probe_met",
        "1",
        better="higher",
        shown="never",
        abscissa="probe_rate",
        about="Share that met, by rate tried.",
    ),
    Metric("probe_rate", "requests/s", better="neither", shown="never", about="The rates that `probe_met` is of."),
    *(
        Metric(
            f"probe_{name}_p99",
            "ms",
            shown="never",
            abscissa="probe_rate",
            about=f"99th percentile of {name.upper()}, by rate tried; a request that did not end well counts as "
            "what one may take.",
        )
        for name in ("ttft", "tpot")
    ),
    Metric(
        "probe_saturated",
        "1",
        shown="never",
        abscissa="probe_rate",
        about="1 where the backlog grew to the load's end, else 0; by rate tried.",
    ),
    Metric("failed", "1", summary="mean", about="Share of all requests that did not end well; a reason says how."),
    Metric(
        "backlog",
        "requests",
        shown="never",
        abscissa="backlog_at",
        about="Requests that had come and were not over.",
    ),
    Metric(
        "backlog_at", "s", better="neither", shown="never", about="The moments of the window that `backlog` is of."
    ),
    Metric("server_start", "ms", about="From starting the server's process to its first answer."),
    Metric(
        "client_late",
        "ms",
        summary="p99",
        about="How late the clients' own event loops were. Above 1 ms the row is client_bound.",
    ),
    *STAMP_METRICS,
)

CHECKED = 4
"""Requests whose tokens are held to the model."""
LEAD_S = 1.0
"""From starting clients to the begin of their schedule."""
TIMEOUT_S = 60.0
"""What a request may take."""
CLOSED_S = 600.0
"""What a closed load may take."""
START_S = 600.0
"""What a server may take to start."""
BATCH = 256
"""Sequences that our server works on at a time, at the most."""
STARTED_S = 20.0
"""What a server of some billion parameters takes to start, and its answers to be checked, about."""
TOKEN_S = 0.01
"""What a user waits for a token, about, while others are served too."""
TRIES = 3
"""A search takes as long as so many loads at its first rate, about: each doubled rate takes half of the time."""
RECOVERIES = 5
"""Requests, one after the other, that a server is asked after a rate at which none ended well."""
KEPT = 0.25
"""Share of the time that a search finds left at its begin, which it leaves for the check of the answers."""


def read_load(case: Case) -> load.Load:
    """The load of a case, rates in requests/s."""
    kind = str(case.options["load"])
    chosen = read(case)
    return load.Load(
        kind="poisson" if kind == "search" else kind,
        rate=case.axes["rate"] / 1000,
        users=case.axes["users"],
        requests=case.axes["requests"],
        input=case.axes["input"],
        output=case.axes["output"],
        lengths=str(case.options["lengths"]),
        vocabulary=chosen.configuration.vocabulary - 1,  # the last is what ends an answer
    )


def lasts(case: Case) -> float:
    """About the seconds that a row takes: an open load has its schedule, and users wait for their tokens."""
    asked = read_load(case)
    if asked.users:
        return STARTED_S + asked.requests / asked.users * asked.output * TOKEN_S
    searching = case.options["load"] == "search"
    return STARTED_S + (TRIES if searching else 1) * asked.requests / asked.rate if asked.rate else STARTED_S


def primary(case: Case) -> str:
    """A search asks for the highest rate: how long requests take at it says nothing of the server."""
    return "slo_rate" if case.options["load"] == "search" else METRICS[0].name


def limits(case: Case) -> tuple[float, float] | None:
    """The case's limits of first token and time a token in ms; None where it states none."""
    name = str(case.options["slo"])
    return None if name == "none" else load.SLOS[name]


def prepare(case: Case, session: Session) -> None:
    """Only whether the case can be: what the server says is held to the model when it has ended."""
    asked, kind = read_load(case), str(case.options["load"])
    if (kind == "closed") != (asked.users > 0) or (kind == "closed") == (asked.rate > 0):
        raise NotImplementedError(
            "a closed load has users and rate 0, an open one a rate and users 0: the two are never mixed"
        )
    if asked.requests < max(10, 3 * asked.users):
        raise NotImplementedError(f"{asked.requests} requests leave no steady window; at least 10, and 3 a user")
    if kind == "search" and limits(case) is None:
        raise NotImplementedError("a search needs limits: option slo")
    if kind == "search" and (held := latencies.opened(asked.requests)) < latencies.ENOUGH:
        raise NotImplementedError(
            f"the window of {asked.requests} requests holds {held}; the 99th percentiles that a search is judged "
            f"by take {latencies.ENOUGH}: at least {latencies.enough()} requests"
        )
    longest = read(case).model.longest(read(case).configuration)
    if longest is not None and longest < asked.longest:
        raise NotImplementedError(f"{read(case).name} has positions for {longest} tokens, not {asked.longest}")


@dataclass(frozen=True)
class Order:
    """What a server is to be: of which model, with the weights of which seed, for which load."""

    case: Case
    chosen: Chosen
    session: Session
    load: load.Load
    folder: Path

    @property
    def sequences(self) -> int:
        """Requests that may be under way at a time."""
        return min(BATCH, self.load.users or self.load.requests)


class PartsServes:
    """Our server over our engine on a system's parts."""

    checked = True

    def __init__(self, assembly: Assembly, products: str = "dtype") -> None:
        self.assembly = assembly
        engine_of(assembly)
        inference.allowed(assembly, products)
        self.products = "dtype" if assembly.system.precision == "case" else products

    def start(self, order: Order) -> children.Running:
        """The server, when it listens."""
        import torch

        case, device = order.case, order.session.device
        spec = EngineSpec(
            system=msgspec.to_builtins(self.assembly.system),
            model=str(case.options["model"]),
            slice=str(case.options["slice"]),
            dtype=case.dtype,
            seed=order.session.seed,
            device=device.kind,
            sequences=order.sequences,
            longest=order.load.longest,
            page=64 if device.kind == "cuda" else 16,
            code=dict(self.assembly.catalog.code),
            threads=torch.get_num_threads() if device.kind == "cpu" else None,
        )
        chosen = order.chosen
        path = "/v1/chat/completions" if case.options["api"] == "chat" else "/v1/completions"
        return children.ours(
            Spec(chosen.name, chosen.configuration.vocabulary, order.load.longest, engine=spec), START_S, path
        )


def engine_of(assembly: Assembly) -> None:
    """Raises `NotImplementedError` for what no engine runs, before a server is started for it."""
    if assembly.system.execution not in ("eager", "graph"):
        raise NotImplementedError(f"the engine runs eager or in CUDA graphs, not by {assembly.system.execution}")


def first_model(running: children.Running, url: str) -> str:
    """The name of the first model that a server has. Raises `ServerFailed` for what is no list of models."""
    try:
        found = running.get("/v1/models")
    except (OSError, ValueError) as error:
        raise children.ServerFailed(f"{url}/v1/models has no list of models: {error}") from None
    models = found.get("data") if isinstance(found, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(name, str):
        raise children.ServerFailed(f"{url}/v1/models has no list of models")
    return name


def start(system: Any, order: Order) -> children.Running:
    """A system's server: ours, one that is there already (`url`), or another's program (`command`)."""
    if isinstance(system, PartsServes):
        return system.start(order)
    if (url := getattr(system, "url", None)) is not None:
        host, port = children.loopback(url)
        running = children.Running(host, port, system.path, "", system.words, dict(system.extra))
        running.model = first_model(running, url)
        return running
    case, session = order.case, order.session
    weights = inference.initial(order.chosen, case.dtype, session.seed, session.device.torch_device)
    system.prepare(order.chosen, order.load.longest, weights, order.folder)
    session.device.release()
    port = children.free_port()
    argv = system.command(order.folder, port, order.load.longest, session.device.kind)
    return children.started(
        argv,
        port,
        system.path,
        str(order.folder),
        order.folder,
        START_S,
        system.words,
        dict(system.extra),
        dict(system.variables),
    )


def measure(case: Case, system: Any, session: Session, prepared: None) -> Measurement:
    """One start of one server: asked a little, then a load; its answers checked when it has ended."""
    with TemporaryDirectory() as folder:
        run = Run(case, system, session, Path(folder))
        try:
            with session.stage("warm up"):
                run.warm_up()
            with session.stage("sample"):
                run.search() if case.options["load"] == "search" else run.one_load()
            run.still_there()
        finally:
            run.stop()
    with session.stage("verify"):
        run.verify()
    with session.stage("summarize"):
        return run.summarize()


class NoneWell(children.ServerFailed):
    """Of what was asked nothing ended well."""


class Run:
    """One start of one server."""

    nvml: Nvml | None = None
    """The board that the server is on, as far as is known: not of one that was there already."""
    watch: Watch | None = None
    """Of the last load."""
    watched: Watch | None = None
    """Of the load that is recorded."""

    def __init__(self, case: Case, system: Any, session: Session, folder: Path) -> None:
        self.case, self.system, self.session = case, system, session
        self.load, self.limits = read_load(case), limits(case)
        self.to_check: list[tuple[str, load.Asked, Seen]] = []
        self.searched: Search | None = None
        self.found: Loaded | None = None
        self.probes: list[tuple[float, float, float, bool]] = []
        """Of each rate that a search tried, with the 99th percentiles of first token and time a token, and whether
        it was saturated.
        """
        self.nvml = None if getattr(system, "url", None) else session.device.nvml
        begin = time.monotonic()
        self.server = start(system, Order(case, read(case), session, self.load, folder))
        self.start_ms = (time.monotonic() - begin) * 1e3

    def stop(self) -> None:
        """Ends the server."""
        self.server.stop()

    def still_there(self) -> None:
        """Raises where the server has ended by itself: what it left undone is no latency."""
        if not self.server.alive():
            raise children.ServerFailed(f"the server went away: {self.server.said()}")

    def ask(
        self, asked: Sequence[load.Asked], users: int, chunks_per_s: float
    ) -> tuple[list[Seen], list[float], int]:
        """One load: what was seen in the order asked, the clients' lateness, and the begin."""
        span = max(x.at_s for x in asked)
        deadline = CLOSED_S if users else span + TIMEOUT_S
        parts = [x for x in load.split(asked, children.clients_for(chunks_per_s), users > 0) if x]
        begin = time.monotonic_ns() + round(LEAD_S * 1e9)
        server = self.server
        tasks = [
            Task(
                server.host,
                server.port,
                server.path,
                server.model,
                part,
                users,
                begin,
                TIMEOUT_S,
                deadline,
                server.words,
                dict(server.extra),
            )
            for part in parts
        ]
        results = children.Clients(tasks).results()
        self.still_there()
        seen = sorted((x for result in results for x in result.seen), key=lambda x: x.number)
        for one, wanted in zip(seen, sorted(asked, key=lambda x: x.number), strict=True):
            if one.outcome == "ok" and one.tokens is not None and one.tokens != wanted.output:
                one.outcome = "short"
        return seen, [x for result in results for x in result.late_ms], begin

    def warm_up(self) -> None:
        """Two requests for each that may be under way, up to 64; the first is kept to be checked."""
        count = min(64, 2 * min(BATCH, self.load.users or 4))
        few = replace(self.load, kind="closed", users=max(1, count // 2), rate=0.0, requests=count)
        asked = few.draw(self.session.seed + 1)
        seen, _, _ = self.ask(asked, few.users, 0.0)
        self._well(seen)
        self.to_check += [("a request before the load", x, y) for x, y in zip(asked[:1], seen[:1], strict=True)]

    def _well(self, seen: Sequence[Seen], of: str = "") -> None:
        """Raises where not one request ended well."""
        if all(x.outcome != "ok" for x in seen):
            said = ", ".join(f"{n} × {what}" for what, n in latencies.outcomes(seen).items())
            raise NoneWell(f"no request{of} ended well: {said or 'there was none'}")

    def loaded(self, wanted: load.Load, number: int = 0) -> Loaded:
        """One load from begin to end."""
        from ..measure.telemetry import Watch

        asked = wanted.draw(self.session.seed + 2 + number)
        rate = wanted.rate or float(wanted.users)
        self.watch = Watch(self.nvml)
        with self.watch.beside():
            seen, late, begin = self.ask(asked, wanted.users, rate * wanted.output)
        self._well(seen)
        users = {x.number: x.user for x in asked} if wanted.users else None
        window = latencies.window(seen, users)
        if window is None:
            raise children.ServerFailed(
                "the load had no steady window: a user had no answer before another had its last"
            )
        over = not wanted.users and latencies.saturated(latencies.waiting(seen), window)
        return Loaded(wanted, asked, seen, window, begin, late, over)

    def one_load(self) -> None:
        """The case's load. Raises `NotImplementedError` for an open one that the server cannot follow."""
        found = self.loaded(self.load)
        if found.saturated:
            served = len([x for x in found.seen if found.window.holds(x.end)]) / found.window.seconds
            raise NotImplementedError(
                f"saturated: at {self.load.rate:g} requests/s the backlog grew to the end of the load; "
                f"{served:.3g} requests/s were answered"
            )
        self._well(found.counted, " of the steady window")
        self.found, self.watched = found, self.watch

    def search(self) -> None:
        """The highest rate that meets the limits. No rate is tried that may take longer than is left: what is
        known by then is what is told. A rate of which no request ends well is one that does not meet them, unless
        that is so of all: then the server is at fault, and not its rate.
        """
        assert self.limits is not None
        kept = KEPT * max(0.0, self.session.left_s)
        search = self.searched = Search(self.load.rate)
        none_well: NoneWell | None = None
        answered = False
        while search.next is not None and len(search.tried) < PROBES:
            wanted = replace(self.load, rate=search.next)
            if LEAD_S + self.load.requests / search.next + TIMEOUT_S > self.session.left_s - kept:
                search.out_of_time = True
                break
            try:
                found = self.loaded(wanted, len(search.tried))
            except NoneWell as error:  # too much for this server, which may do well at a lower rate
                none_well = error
                search.tell(0.0, met=False)
                self.probes.append((wanted.rate, TIMEOUT_S * 1e3, TIMEOUT_S * 1e3, True))  # all of it waited
                self._recovered(kept)
                continue
            answered = True
            counted = found.counted
            share = sum(latencies.meets(x, self.limits) for x in counted) / max(1, len(counted))
            met = latencies.within(counted, self.limits) and not found.saturated
            search.tell(share, met)
            first = latencies.tail(counted, latencies.first_token, TIMEOUT_S)
            each = latencies.tail(counted, latencies.token_time, TIMEOUT_S)
            self.probes.append((wanted.rate, first, each, found.saturated))
            if met:
                self.found, self.watched = found, self.watch
        if none_well is not None and not answered and not search.out_of_time:
            count = len(search.tried)
            raise NoneWell(f"{none_well}" + f"; nor at any other of the {count} rates tried" * (count > 1))
        if self.found is None:
            raise NotImplementedError(search.said)

    def _recovered(self, kept: float) -> None:
        """Asks one request after the other until one ends well, a few at most: a server may still work on what was
        given up.
        """
        one = replace(self.load, kind="closed", users=1, rate=0.0, requests=1)
        for number in range(RECOVERIES):
            if self.session.left_s < kept + TIMEOUT_S:
                return
            seen, _, _ = self.ask(one.draw(self.session.seed - 1 - number), 1, 0.0)
            if any(x.outcome == "ok" for x in seen):
                return

    def verify(self) -> None:
        """Holds the tokens of some requests to the model in fp32; a random choice, the same for all systems."""
        found = self.found
        assert found is not None
        if not self.system.checked:
            return
        pairs = [(x, y) for x, y in zip(found.asked, found.seen, strict=True) if y.outcome == "ok"]
        chosen = random.Random(f"{self.session.seed}/checked").sample(pairs, min(CHECKED - 1, len(pairs)))
        self.to_check += [("a request of the load", x, y) for x, y in chosen]
        for what, asked, seen in self.to_check:
            self._check(what, asked, seen)

    def _check(self, what: str, asked: load.Asked, seen: Seen) -> None:
        import torch

        from ..measure.verify import Incorrect
        from ._serving.protocol import Refused, words

        try:
            tokens = words(seen.text)
        except Refused as error:
            raise Incorrect(f"{what}: {error}") from None
        if len(tokens) != asked.output:
            raise Incorrect(f"{what}: {len(tokens)} tokens, asked for {asked.output}")
        device = self.session.device.torch_device
        own = torch.tensor([tokens], device=device)
        if int(own.max()) >= read(self.case).configuration.vocabulary:
            raise Incorrect(f"{what}: a token is not of the vocabulary")
        whole = torch.cat((torch.tensor([asked.prompt], device=device), own), 1)
        steps = inference.positions(len(tokens), self.session.seed)
        at = [len(asked.prompt) - 1 + x for x in steps]
        logits = inference.answer(read(self.case), self.case.dtype, self.session.seed, whole, at, catalog())
        if getattr(self.system, "products", "dtype") == "e4m3":
            inference.chosen_well_in_8_bits(what, own[:, steps], logits)
        else:
            inference.chosen_well(what, own[:, steps], logits, self.case.dtype)

    def summarize(self) -> Measurement:
        """What is recorded."""
        found = self.found
        assert found is not None
        samples = figures(found, self.limits)
        samples["server_start"] = rounded([self.start_ms])
        said = (*getattr(self.system, "remarks", ()), *remarks(found, self.system.checked))
        if self.searched is not None:
            met = sorted(self.searched.tried)
            samples["slo_rate"] = rounded([self.searched.low])
            samples["probe_rate"] = rounded([x for x, _ in met])
            samples["probe_met"] = rounded([y for _, y in met])
            probes = sorted(self.probes)
            samples["probe_ttft_p99"] = rounded([first for _, first, _, _ in probes])
            samples["probe_tpot_p99"] = rounded([each for _, _, each, _ in probes])
            samples["probe_saturated"] = rounded([float(over) for _, _, _, over in probes])
            said += (self.searched.said,) if self.searched.said else ()
        telemetry = None if self.watched is None else self.watched.telemetry()
        return Measurement(samples=samples, timer="monotonic", telemetry=telemetry, remarks=said)


def assemble(case: Case, assembly: Assembly) -> PartsServes:
    """Our server on a system's parts."""
    return PartsServes(assembly, str(case.options["products"]))


@cache
def options() -> dict[str, tuple[Option, ...]]:
    """What a case may choose."""
    return {
        "model": tuple(x for model in catalog().models.values() for x in model.configurations),
        "slice": inference.SLICES,
        "load": load.LOADS,
        "lengths": load.LENGTHS,
        "slo": tuple(load.SLOS),
        "api": ("completions", "chat"),
        "products": inference.PRODUCTS,
    }


WORKLOAD = Inference(
    name="serve",
    summary="A server asked over HTTP by schedule or by users: first token, time a token, goodput",
    axes={
        "rate": "requests in 1000 s of an open load; 0 of a closed one",
        "users": "users of a closed load; 0 of an open one",
        "requests": "requests of the load",
        "input": "tokens of a prompt, their median where lengths are log-normal",
        "output": "tokens of an answer, likewise",
    },
    least={"requests": 1, "input": 1, "output": 1},
    options=options(),
    later={"slice": "whole", "api": "completions", "lengths": "fixed", "slo": "none", "products": "dtype"},
    dtypes=("bf16", "fp16", "fp32"),
    # A server's time is of queues as much as of bytes: what a step must move is `generate`'s to say.
    bytes=lambda case: 0,
    flops=lambda case: 0,
    tokens=lambda case: None,
    lasts=lasts,
    primary=primary,
    measured=METRICS,
    prepare=prepare,
    measure=measure,
    assemble=assemble,
    definition=(
        load.Load.draw,
        load.arrivals,
        latencies.token_time,
        latencies.window,
        latencies.saturated,
        inference.chosen_well,
        tuple(inference.GAPS.items()),
    ),
    # Rows of a table came to be looked up by a part of the model, which computes the same.
    continues={
        "201f88007afa": "e391a5e85ece",
        "0bf098964bf9": "0c3a17b0720e",
    },
    plans={},
)
