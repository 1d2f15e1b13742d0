"""An engine: a model's own module with any parts, a cache in pages, and decode steps of a batch that changes.

The module of `suite/models` computes whole sequences. Its parts that look at other tokens are put in here by ones
that read and write a cache: attention (pages of a block table, Kwon et al., arXiv 2309.06180), rotary or learned
positions, the convolution and the scan of Mamba-2. All others are the system's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ...model import Chosen, gated, several
from ...operator import BYTES, torch_dtype
from ...system import Assembly
from .. import _inference as inference
from .._graphs import captured
from .._trainer import COMPILED
from .few_rows import few_rows
from .products import FEW, JOINED, Products
from .quantized import quantized

if TYPE_CHECKING:
    import torch

GRAPHED = ("reduce_overhead", "cudagraphs")
"""Executions by which torch.compile makes CUDA graphs."""

SHAPES = 64
"""Shapes of prompts whose parts are kept; an implementation may be chosen by shape."""

CACHE_SHARE = 0.8
"""Of the memory that weights leave, for the cache; the rest is for what is computed."""

APART = 32
"""Between two sizes of a batch that have graphs, from this on: a step of 129 sequences is not one of 256."""

MOST_COMPILED = 128
"""Sequences of the largest batch whose steps are compiled: eight sizes, as often as torch.compile compiles one
function.
"""

CACHED = ("attention", "rope", "convolution", "scan", "loss")
"""Parts that a decode step has of its own."""


class Next(NamedTuple):
    """What a pass gives: logits (B, V) of what comes next, and the token (B,) with the largest of them. A graph's
    lie where its next step writes its own.
    """

    logits: torch.Tensor
    token: torch.Tensor


def moved(values: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the host on a device, by a copy that waits for nothing that runs there: from pinned memory, which
    its allocator keeps until the copy is made.
    """
    import torch

    found = torch.tensor(values, dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


class Engine:
    """One model on one device. `sequences` is the largest batch, `longest` the most tokens of a sequence, prompt
    and answer together; the cache has `cached` tokens (all of that by default) in pages of `page`.

    Page 0 is nobody's: what fills up a batch of a CUDA graph writes there.
    """

    def __init__(
        self,
        assembly: Assembly,
        chosen: Chosen,
        dtype: str,
        weights: inference.Weights,
        sequences: int,
        longest: int,
        page: int = 64,
        cached: int | None = None,
    ) -> None:
        import torch

        assembly, system = assembly.inferring, assembly.system
        if system.execution not in ("eager", "graph", *COMPILED):
            raise NotImplementedError(
                f"the engine compiles a whole step, or none of it, not by {system.execution}"
            )
        if chosen.model.name not in FAMILIES:
            raise NotImplementedError(f"{chosen.model.name} does not generate")
        limit = chosen.model.longest(chosen.configuration)
        if limit is not None and limit < longest:
            raise NotImplementedError(f"{chosen.name} has positions for {limit} tokens, not {longest}")
        drawn = iter(weights)
        first = next(drawn)
        self.device = first[1].device
        if system.execution == "graph" and self.device.type != "cuda":
            raise NotImplementedError("CUDA graphs are of CUDA devices")
        self.assembly, self.chosen, self.dtype = assembly, chosen, dtype
        self.sequences, self.longest, self.page = sequences, longest, page
        self.across = -(-longest // page)
        self.graphs: dict[int, tuple[Any, Next]] | None = {} if system.execution == "graph" else None
        self._compiled: Callable[..., Next] | None = None
        if system.execution in COMPILED:
            if sequences > MOST_COMPILED:
                raise NotImplementedError(
                    f"steps are compiled for batches of up to {MOST_COMPILED}, not {sequences}"
                )
            self._compiled = torch.compile(self._step, dynamic=False, **COMPILED[system.execution])
        self._looked_up = False
        """Whether the parts of all sizes of a batch are known, where steps are compiled."""
        self._shapes: OrderedDict[tuple[int, int], dict[str, Callable[..., Any]]] = OrderedDict()
        self._steps: dict[int, dict[str, Callable[..., Any]]] = {}
        """Parts of steps by the size of a batch, all of which are kept: what they hold, a graph reads."""
        self._now: Any = None
        self.quantized = quantized(assembly, chosen.model.name, dtype, self.device.type)
        plain = assembly if self.quantized is None else assembly.plain
        self.products = Products(plain, dtype, self.device.type)
        self.module = inference.build(chosen, _Delegated(self), dtype, longest, self.device, JOINED)
        with torch.no_grad():
            # One by one: a second copy of all weights would be memory that the cache does not get.
            inference.fill(self.module, chain([first], drawn))
            if self.quantized is not None:
                self.quantized.take(self.module.layers, JOINED)
        self.few = few_rows(self.products, chosen, self.module.layers, dtype, self.quantized)
        """How a step of few sequences is computed, where that is otherwise than one of many."""
        pages = 1 + (-(-cached // page) if cached else self._fitting(sequences * self.across))
        self.memory = FAMILIES[chosen.model.name](self, pages)
        self.pages = pages - 1
        """Pages that sequences may have."""
        self.free = list(range(self.pages, 0, -1))
        self.table = torch.zeros(sequences + 1, self.across, dtype=torch.int32, device=self.device)
        self.lengths = torch.zeros(sequences + 1, dtype=torch.int32, device=self.device)
        self.held: dict[int, list[int]] = {}
        # What a step reads: rows of the table, and (in a graph) the tokens that come in.
        self._rows = torch.full((sequences,), sequences, dtype=torch.int64, device=self.device)
        self._written: list[int] = []
        self._tokens = torch.zeros(sequences, dtype=torch.int64, device=self.device)
        if system.execution in GRAPHED:
            for x in (*self.memory.tensors, self.table, self.lengths):
                torch._dynamo.mark_static_address(x)  # else what a step writes to would be copied, or not captured

    def _fitting(self, pages: int) -> int:
        """So many pages, or what a GPU has memory for. Raises `MemoryError` where no longest sequence fits."""
        import torch

        if self.device.type != "cuda":
            return pages
        free = torch.cuda.mem_get_info(self.device)[0]
        fit = fitting(pages, self.chosen, self.dtype, self.page, free)
        if fit < self.across:
            raise MemoryError(f"a sequence of {self.longest} tokens takes {self.across} pages; {fit} are left")
        return fit

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held, their scales among them."""
        own = sum(int(x.numel() * x.element_size()) for x in self.module.parameters())
        return own + (self.quantized.bytes if self.quantized is not None else 0)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(x.numel() * x.element_size() for x in self.memory.tensors)

    def admits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens, answer included, finds a row and pages now."""
        return len(self.held) < self.sequences and -(-tokens // self.page) <= len(self.free)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens, answer included, finds a row and pages when it is alone."""
        return tokens <= self.longest and -(-tokens // self.page) <= self.pages

    def hold(self, tokens: int) -> int:
        """Takes a row and pages for a sequence of so many tokens; gives the row."""
        import torch

        assert tokens <= self.longest
        assert self.admits(tokens)
        row = next(x for x in range(self.sequences) if x not in self.held)
        pages = [self.free.pop() for _ in range(-(-tokens // self.page))]
        self.held[row] = pages
        self.table[row, : len(pages)] = moved(pages, torch.int32, self.device)
        return row

    def release(self, row: int) -> None:
        """Gives a sequence's row and pages back."""
        self.free += self.held.pop(row)

    def prefill(self, tokens: torch.Tensor, rows: Sequence[int]) -> Next:
        """Takes prompts (B, S) of new sequences into their rows."""
        import torch

        B, S = tokens.shape
        with torch.no_grad():
            at = moved(list(rows), torch.int64, self.device)
            self.lengths.index_fill_(0, at, S)
            self._now = Prefill(self, at, B, S)
            logits = self.module(tokens, tokens)
            return Next(logits, logits.argmax(-1))

    def decode(self, tokens: torch.Tensor, rows: Sequence[int]) -> Next:
        """Takes one more token (B,) of each of these sequences."""
        import torch

        B = len(rows)
        with torch.no_grad():
            size = self._size(B)
            if self.graphs is not None:
                graph, found = self._graph(size)
                self._at(rows, size)
                self._tokens[:B].copy_(tokens)
                graph.replay()
            elif self._compiled is not None:
                self._look_up()
                self._at(rows, size)
                self._tokens[:B].copy_(tokens)
                found = self._run(size)
            else:
                return self._step(tokens, self._at(rows, B))
            return Next(found.logits[:B], found.token[:B])

    @property
    def _sizes(self) -> list[int]:
        """All sizes of a batch."""
        return sorted({self._size(B + 1) for B in range(self.sequences)})

    def _look_up(self) -> None:
        """Finds parts and joined matrices of all sizes outside of what is compiled, by steps of the row that is
        nobody's. A table that grew later would be another one to the compiler.
        """
        if not self._looked_up:
            for size in self._sizes:
                self._step(self._tokens[:size], self._at([], size))
            self._looked_up = True

    def _run(self, size: int) -> Next:
        """A compiled step of what lies in `_tokens` and `_rows`."""
        import torch

        assert self._compiled is not None
        tokens, rows = self._tokens[:size], self._rows[:size]
        if self.assembly.system.execution not in GRAPHED:
            return self._compiled(tokens, rows)
        torch.compiler.cudagraph_mark_step_begin()
        with torch._inductor.config.patch({"triton.cudagraph_or_error": True}):  # else without, in silence
            return self._compiled(tokens, rows)

    def capture(self) -> None:
        """Captures or compiles the steps of all sizes of a batch, so that no request waits for one."""
        import torch

        with torch.no_grad():
            for size in self._sizes:
                if self.graphs is not None:
                    self._graph(size)
                elif self._compiled is not None:
                    self._look_up()
                    self._at([], size)
                    self._run(size)

    def _size(self, B: int) -> int:
        """Sequences of the graph, or of the compiled step, that takes a batch of B: powers of two, and of graphs
        multiples of `APART` above it.
        """
        if self.graphs is not None and B > APART:
            return min(self.sequences, -(-B // APART) * APART)
        return min(self.sequences, 1 << (B - 1).bit_length())

    def _graph(self, size: int) -> tuple[Any, Next]:
        """The graph of a step of so many sequences and what it gives, captured when it is first asked for."""
        assert self.graphs is not None
        if size not in self.graphs:
            # Capturing runs the step, which changes what is kept: of the row that is nobody's.
            self._at([], self.sequences)
            (self.graphs[size],) = captured(
                self._tokens.device, lambda: self._step(self._tokens[:size], self._rows[:size])
            )
        return self.graphs[size]

    def _at(self, rows: Sequence[int], size: int) -> torch.Tensor:
        """These rows on the device, filled up with the one that is nobody's. They are copied when they change and
        not at each step.
        """
        import torch

        wanted = [*rows, *[self.sequences] * (size - len(rows))]
        if wanted != self._written:
            self._rows[:size].copy_(moved(wanted, torch.int64, self.device))
            self._written = wanted
        return self._rows[:size]

    def _step(self, tokens: torch.Tensor, rows: torch.Tensor) -> Next:
        # What fills up a batch has no end, and must not leave its row of the table.
        lengths = (self.lengths[rows] + 1).clamp(max=self.longest)
        self.lengths[rows] = lengths
        self._now = Decode(self, rows, lengths)
        logits = self.module(tokens[:, None], tokens[:, None])
        return Next(logits, logits.argmax(-1))

    def parts_of(self, B: int, S: int) -> dict[str, Callable[..., Any]]:
        """The system's parts for prompts (B, S), whose products are as large as they are."""

        def make() -> dict[str, Callable[..., Any]]:
            # Logits are products: no loss is computed of them.
            found = self.products.assembly.parts(
                self.chosen, B, S, self.dtype, self.device.type, without=("loss",)
            )
            found |= {"head": found["linear"], "several": several(found), "gated": gated(found)}
            return found if self.quantized is None else found | self.quantized.parts(found.get("gate"))

        key = B, S
        if key not in self._shapes:
            self._shapes[key] = make()
            if len(self._shapes) > SHAPES:
                self._shapes.popitem(last=False)
        self._shapes.move_to_end(key)
        return self._shapes[key]

    def decode_parts(self, B: int) -> dict[str, Callable[..., Any]]:
        """The system's parts for one token of each of B sequences."""

        def make() -> dict[str, Callable[..., Any]]:
            chosen = self.chosen
            found = {
                x.name: self._call(x.name, x.operator, dict(x.axes), dict(x.options))
                for x in chosen.model.parts(chosen.configuration, B, 1)
                if x.name not in CACHED
            }
            found |= self.memory.parts(self._call, B)
            gate = found.get("gate")
            found |= self.products.parts(gate)
            found["head"] = found["linear"]
            if self.quantized is not None:
                found |= self.quantized.parts(gate)
            if B <= FEW and self.few is not None:
                found |= self.few.parts(found)
            return found

        if B not in self._steps:
            self._steps[B] = make()
        return self._steps[B]

    def _call(self, part: str, operator: str, axes: dict[str, int], options: dict[str, Any]) -> Callable[..., Any]:
        return self.assembly.call(part, operator, axes, options, self.dtype, self.device.type)


class _Delegated(dict[str, Callable[..., Any]]):
    """The parts that the module was built with: each calls what is under way at the time."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        for name in ("several", "gated"):  # which models ask for, if they are there
            self[name]

    def __missing__(self, name: str) -> Callable[..., Any]:
        engine = self._engine

        def call(*arguments: Any, **named: Any) -> Any:
            return engine._now.part(name)(*arguments, **named)

        self[name] = call
        return call


class _Pass:
    """One pass of the module: which tokens of which sequences it is of. `layer` counts what caches are kept by;
    `table` has the pages of its rows. What all layers have in common is made by the first: `places` in the cache,
    and `tables` of rotary positions.
    """

    def __init__(self, engine: Engine, rows: torch.Tensor, parts: dict[str, Callable[..., Any]]) -> None:
        self.engine, self.rows, self.parts = engine, rows, parts
        self.layer = -1
        self.table = engine.table[rows]
        self.places: Any = None
        self.tables: Any = None

    def part(self, name: str) -> Callable[..., Any]:
        """The callable of a part: this pass's own, the cache's, or the system's."""
        own = getattr(self, name, None)
        if own is None:
            own = getattr(self.engine.memory, f"{self.kind}_{name}", None)
            return self.parts[name] if own is None else (lambda **named: own(self, **named))
        found: Callable[..., Any] = own
        return found

    kind = ""
    positions: Any


class Prefill(_Pass):
    """Whole prompts (B, S)."""

    kind = "prefill"

    def __init__(self, engine: Engine, rows: torch.Tensor, B: int, S: int) -> None:
        import torch

        super().__init__(engine, rows, engine.parts_of(B, S))
        self.S = S
        self.positions = torch.arange(S, device=rows.device).expand(B, S)

    def loss(self, x: Any, weight: Any, target: Any) -> Any:
        """Logits of the last tokens alone."""
        return self.parts["head"](x.view(len(self.rows), self.S, -1)[:, -1], weight)


class Decode(_Pass):
    """One token of each sequence."""

    kind = "decode"

    def __init__(self, engine: Engine, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        super().__init__(engine, rows, engine.decode_parts(len(rows)))
        self.lengths = lengths
        self._positions: Any = None

    @property
    def positions(self) -> Any:
        """Where the tokens are, which is only computed where something asks for it: a launch takes its time."""
        if self._positions is None:
            self._positions = (self.lengths - 1).long()[:, None]
        return self._positions

    def loss(self, x: Any, weight: Any, target: Any) -> Any:
        """Logits of all tokens of the step."""
        return self.parts["head"](x, weight)


class Pages:
    """Keys and values of attention layers, (layers, pages, page, Hkv, D) each."""

    def __init__(self, engine: Engine, pages: int) -> None:
        import torch

        c = engine.chosen.configuration
        self.engine = engine
        self.heads, self.kv_heads, self.head = c.heads, getattr(c, "kv_heads", c.heads), c.head
        shape = (c.layers, pages, engine.page, self.kv_heads, self.head)
        dtype, device = torch_dtype(engine.dtype), engine.device
        # Zeros: what lies beyond a sequence's length is read and weighed with nothing, which NaN survives.
        self.tensors = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
        if hasattr(engine.module, "positions"):
            table = engine.module.positions.detach()
            del engine.module.positions
            engine.module.positions = _Learned(engine, table)

    def parts(self, call: Callable[..., Callable[..., Any]], B: int) -> dict[str, Callable[..., Any]]:
        """What a decode step of B sequences calls."""
        heads = {"H": self.heads, "Hkv": self.kv_heads, "D": self.head}
        engine = self.engine
        axes = {"B": B, "Sq": 1, "S": engine.longest, **heads}
        found = {"cached": call("decode", "attention_decode", axes, {"page": engine.page, "lengths": "mixed"})}
        if not hasattr(engine.module, "cos"):
            return found
        if engine.products.fused("rope_cache_write", "rope", "rope"):
            options = {"page": engine.page, "layout": "half"}
            found["write"] = call("rope", "rope_cache_write", axes, options)
        else:
            found["rope"] = call("rope", "rope", {"B": 1, "S": B, **heads}, {"layout": "half"})
        return found

    def _write(self, now: _Pass, k: Any, v: Any) -> None:
        """Keys and values (B, Hkv, S, D) of this layer's tokens to their pages."""
        page = self.engine.page
        if now.places is None:
            pages = now.table.long().gather(1, now.positions // page)
            now.places = (pages * page + now.positions % page).flatten()
        for cache, x in zip(self.tensors, (k, v), strict=True):
            flat = cache[now.layer].flatten(0, 1)
            flat.index_copy_(0, now.places, x.transpose(1, 2).flatten(0, 1))

    def prefill_rope(self, now: Prefill, q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        """The positions of a prompt are the first of the tables."""
        return now.parts["rope"](q=q, k=k, cos=cos[: now.S], sin=sin[: now.S], layout=layout)

    def decode_rope(self, now: Decode, q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        """Sequences take the place of the positions: each token has one of its own. Where one kernel turns and
        writes, that is what follows.
        """
        if "write" in now.parts:
            now.tables = cos, sin
            return q, k
        if now.tables is None:
            at = now.positions[:, 0]
            now.tables = cos[at], sin[at]
        cos, sin = now.tables
        q, k = (x.permute(2, 1, 0, 3) for x in (q, k))
        q, k = now.parts["rope"](q=q, k=k, cos=cos, sin=sin, layout=layout)
        return q.permute(2, 1, 0, 3), k.permute(2, 1, 0, 3)

    def prefill_attention(self, now: Prefill, q: Any, k: Any, v: Any, mask: str) -> Any:
        """Attention within the prompts, whose keys and values are kept."""
        now.layer += 1
        self._write(now, k, v)
        return now.parts["attention"](q=q, k=k, v=v, mask=mask)

    def decode_attention(self, now: Decode, q: Any, k: Any, v: Any, mask: str) -> Any:
        """Attention to all that is kept, this token included."""
        now.layer += 1
        caches = {"k_cache": self.tensors[0][now.layer], "v_cache": self.tensors[1][now.layer]}
        where = {**caches, "block_table": now.table, "lengths": now.lengths}
        if "write" in now.parts:
            cos, sin = now.tables
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            q = now.parts["write"](q=q, k=k, v=v, cos=cos, sin=sin, layout="half", **where)
        else:
            self._write(now, k, v)
            q = q.transpose(1, 2)
        return now.parts["cached"](q=q, **where).transpose(1, 2)

    @staticmethod
    def page_bytes(chosen: Chosen, dtype: str, page: int) -> int:
        """What a page of so many tokens takes in all layers."""
        return page * Pages.bytes(chosen, dtype, [0])

    @staticmethod
    def bytes(chosen: Chosen, dtype: str, lengths: Sequence[int]) -> int:
        """What a decode step must move of the cache of sequences that are so long: all read, one token written."""
        c = chosen.configuration
        heads = getattr(c, "kv_heads", c.heads)
        return int(2 * c.layers * heads * c.head * (sum(lengths) + len(lengths)) * BYTES[dtype])


class _Learned:
    """GPT-2's table of positions, of which its module takes the first: here those of the tokens under way."""

    def __init__(self, engine: Engine, table: Any) -> None:
        self._engine, self._table = engine, table

    def __getitem__(self, first: slice) -> Any:
        return self._table[self._engine._now.positions]


class States:
    """What Mamba-2 keeps of a sequence, by row: inputs of the convolution and the state of the scan, in fp32."""

    def __init__(self, engine: Engine, pages: int) -> None:
        import torch

        c = engine.chosen.configuration
        rows = engine.sequences + 1
        self.c, self.engine = c, engine
        dtype, device = torch_dtype(engine.dtype), engine.device
        self.inputs = torch.zeros(c.layers, rows, c.convolved, c.window, dtype=dtype, device=device)
        self.scans = torch.zeros(c.layers, rows, c.heads, c.head, c.state, dtype=torch.float32, device=device)
        self.tensors = [self.inputs, self.scans]

    def parts(self, call: Callable[..., Callable[..., Any]], B: int) -> dict[str, Callable[..., Any]]:
        """What a decode step of B sequences calls."""
        c = self.c
        conv = {"B": B, "D": c.convolved, "W": c.window}
        scan = {"B": B, "H": c.heads, "P": c.head, "N": c.state, "G": c.groups}
        return {
            "convolve": call("convolution", "causal_conv1d_update", conv, {"activation": "silu"}),
            "update": call("scan", "selective_state_update", scan, {"form": "head", "state": "fp32"}),
        }

    def prefill_convolution(self, now: Prefill, x: Any, **named: Any) -> Any:
        """The convolution of prompts; their last inputs (B, S, C) are kept."""
        now.layer += 1
        last = x[:, -self.c.window :].transpose(1, 2)
        self.inputs[now.layer, now.rows] = 0
        self.inputs[now.layer, now.rows, :, self.c.window - last.shape[2] :] = last
        return now.parts["convolution"](x=x, **named)

    def decode_convolution(
        self, now: Decode, x: Any, weight: Any, bias: Any, activation: str, **named: Any
    ) -> Any:
        """One more input (B, 1, C)."""
        now.layer += 1
        state = self.inputs[now.layer, now.rows]
        y = now.parts["convolve"](x=x[:, 0], conv_state=state, weight=weight, bias=bias, activation=activation)
        self.inputs[now.layer, now.rows] = state
        return y[:, None]

    def prefill_scan(self, now: Prefill, **named: Any) -> Any:
        """The scan of prompts; the state that it ends in is kept."""
        y, state = now.parts["scan"](**{**named, "return_final_state": True})
        self.scans[now.layer, now.rows] = state.float()
        return y

    def decode_scan(self, now: Decode, x: Any, dt: Any, B: Any, C: Any, **named: Any) -> Any:
        """One more input (B, 1, H, P)."""
        state = self.scans[now.layer, now.rows]
        same = {name: named[name] for name in ("A", "D", "dt_bias", "dt_softplus")}
        y = now.parts["update"](state=state, x=x[:, 0], dt=dt[:, 0], B=B[:, 0], C=C[:, 0], z=None, **same)
        self.scans[now.layer, now.rows] = state
        return y[:, None]

    @staticmethod
    def page_bytes(chosen: Chosen, dtype: str, page: int) -> int:
        """Nothing: a state is as large however many tokens are behind it, and each row has its own."""
        return 0

    @staticmethod
    def bytes(chosen: Chosen, dtype: str, lengths: Sequence[int]) -> int:
        """What a decode step must move of the states of so many sequences: read and written."""
        c = chosen.configuration
        each = c.convolved * c.window * BYTES[dtype] + c.heads * c.head * c.state * 4
        return int(2 * c.layers * each * len(lengths))


FAMILIES: dict[str, type[Pages] | type[States]] = {
    "llama": Pages,
    "mixtral": Pages,
    "olmoe": Pages,
    "gpt2": Pages,
    "mamba2": States,
}
"""What each family keeps of a sequence. BERT sees what comes after a token, and generates nothing."""


def fitting(pages: int, chosen: Chosen, dtype: str, page: int, free: int) -> int:
    """So many pages of `page` tokens, or as many as the cache's share of `free` bytes holds."""
    each = FAMILIES[chosen.model.name].page_bytes(chosen, dtype, page)
    return min(pages, int(CACHE_SHARE * free / each)) if each else pages


def step_bytes(chosen: Chosen, dtype: str, lengths: Sequence[int]) -> int:
    """What a decode step must move: the weights that a token is multiplied with, and the cache."""
    kind = FAMILIES.get(chosen.model.name)
    weights = chosen.model.multiplied(chosen.configuration) * BYTES[dtype]
    return weights + (kind.bytes(chosen, dtype, lengths) if kind else 0)
