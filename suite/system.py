"""What workloads compare: systems, each a choice of implementation for every part of a model, and how the rest of
the model is executed.

A system becomes an `Implementation` of its workload, so that plans, journals, rows and comparisons need no other
type. Without any file there is one for each provider that has a part (`kernelmark`, `torch`, `liger`, …: every
part by that provider, and by `torch` what it lacks), and some with another execution. A plan file names others:

    [[systems]]
    name = "torch_fa4"
    base = "torch"
    parts = { attention = "flash_attn_4" }
    execution = "compile"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec

from ..registry.errors import InputError, unknown
from ..registry.store.record import EAGER, PROVIDER, YARDSTICK, Case
from .implementation import Implementation
from .model import LINEAR, Chosen, Model, Part, linear_part
from .model import chosen as configured
from .products import Asks, asks, by_blocks, by_rows, linear

if TYPE_CHECKING:
    from .operator import Operator
    from .workload import Workload

Execution: TypeAlias = Literal[
    "eager", "compile", "blocks", "reduce_overhead", "max_autotune", "aot_eager", "cudagraphs", "graph"
]
"""`blocks` compiles one layer, which serves them all, and the loss; `graph` captures forward and backward in one
CUDA graph by hand; the others but `eager` are torch.compile's.
"""

Precision: TypeAlias = Literal[
    "case",
    "float8_tensorwise",
    "float8_tensorwise_e5m2",
    "float8_rowwise",
    "float8_1x128",
    "parts_rowwise",
    "parts_1x128",
    "parts_1x128_fused",
    "te_tensorwise",
    "te_delayed",
    "te_1x128",
]
"""Of the products inside layers: the case's dtype; torchao's float8 training, E4M3 throughout or with gradients in
E5M2; Transformer Engine's `Linear` with a scale a tensor, of the tensor itself or of those before it, or with
block scales, for systems whose `base` it is, which run in its environment; or the system's own `fp8_quant` and
`fp8_matmul`, E4M3 with a scale a row (`parts_rowwise`), or for 128 elements of a row and 128 × 128 of a weight
(`parts_1x128`, as DeepSeek-V3 trains), with norms, gates and GELU that write 8 bits themselves
(`parts_1x128_fused`). Where these two are our kernels, a decode step of up to 16 sequences multiplies weights of
`parts_rowwise` by inputs in 16 bits.
"""

Recompute: TypeAlias = Literal[
    "none",
    "every_layer",
    "every_second",
    "by_cost",
    "by_part",
    "by_part_wide",
    "budget_25",
    "budget_50",
    "budget_75",
]
"""What of a training step's activations is computed again for the backward pass, each with the same answer:

* `every_layer`, `every_second`: whole layers, by `torch.utils.checkpoint`.
* `by_cost`: in every layer all but attention and the products that sum over no less than they give.
* `by_part`: results of norms and gates, from what their own backward passes keep; `by_part_wide`: in two of three
  layers the products that feed gates, too.
* `budget_25`, …: what torch.compile chooses for `activation_memory_budget` 0.25, ….
"""

States: TypeAlias = Literal["device", "host_copied", "host_streamed", "host_updated"]
"""Where the optimizer's moments, and masters, lie between updates. From the host they are copied to the device
and back: all after the backward pass (`host_copied`) or bucket by bucket while it runs (`host_streamed`); or
weights are updated there, by the host (`host_updated`).
"""

OPTIMIZER = "optimizer"
"""The part that updates weights, which no model has and every training has."""

NAMED = (LINEAR, "qkv_rope", "gate_up_swiglu")
"""Operators that are another's than PyTorch's only where a system names them: products, and what stands for some
of them together with other parts. `kernelmark` itself has none: with ours of the first two a step was slower on an
H200, and with the last one process found .6 % for it, which is within its noise.
"""

TRACED = (EAGER, PROVIDER)
"""Providers whose parts torch.compile looks into; those of others it calls as they are."""

PREFERRED: Mapping[tuple[str, str], str] = {("torch", "adamw"): "torch_fused"}
"""Of a provider with several implementations of an operator, the one that its users are told to take."""


LEAST_LOST = 4
"""Of an arm that leaves out updates, the first that may be: those before are held to the model's own."""


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an arm does to training besides its parts: changes of the recipe, for workloads that ask if they cost
    quality. Others have no such system.

    * `model`: another architecture, of as many parameters.
    * `dtype`: of weights and activations, masters in fp32: fp16 with a scaled loss, bf16; or fp32 throughout,
      products in fp32 or in TF32.
    * `products`: those inside layers with inputs rounded to E4M3 (gradients, where it says so, to E5M2), one scale
      a tensor, a row, or 128 elements (128 × 128 of a weight). Emulated: rounded, and multiplied in the case's
      dtype.
    * `optimizer`: a library's, in place of the part; `twin_adamw_8bit`: moments rounded as those of 8 bits are,
      and kept in fp32, on any device; `torch_muon` in a case whose recipe has Muon, there alone.
    * `gradients`: compressed, what is lost added to the next step's.
    * `attention`: `linear`, or a pattern of blocks and the percentage that is left out: `static-75`, `window-90`;
      `learned-75` by gates that learn beside the model.
    * `weights`: two of four kept in the products, by magnitude, at each step anew.
    * `lost`: `1/20`: of each twenty steps the last one's update is not made. An arm is worse so by as much as one
      likes.
    * `fault`: planted, for the doctor.
    """

    model: str = ""
    dtype: Literal["", "fp16", "bf16", "fp32", "tf32"] = ""
    products: Literal["", "e4m3_tensorwise", "e4m3_tensorwise_e5m2", "e4m3_rowwise", "e4m3_1x128"] = ""
    optimizer: Literal[
        "",
        "torchao_adamw_8bit",
        "bitsandbytes_adamw_8bit",
        "twin_adamw_8bit",
        "torchao_cpu_offload",
        "torch_muon",
    ] = ""
    gradients: Literal["", "int8", "fp8", "topk"] = ""
    attention: str = ""
    weights: Literal["", "2:4"] = ""
    lost: str = ""
    fault: Literal["", "scale_stuck", "no_bias_correction", "mask_off_by_one", "unscaled_momentum"] = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"|linear|(static|window|random|dynamic|learned)-(50|75|90)", self.attention):
            raise ValueError(
                f"attention is {self.attention[:40]!r}; there is linear, and static, window, random, dynamic or "
                f"learned with -50, -75 or -90"
            )
        if self.lost and not (re.fullmatch(r"1/[1-9][0-9]{0,5}", self.lost) and self.losing >= LEAST_LOST):
            raise ValueError(
                f"lost is {self.lost[:40]!r}; there is 1/{LEAST_LOST} and less, as 1/20: the first steps are "
                f"checked"
            )

    @property
    def losing(self) -> int:
        """Of how many steps one's update is not made; 0 where all are."""
        return int(self.lost.removeprefix("1/") or 0)

    @property
    def left_out(self) -> float | None:
        """The share of attention's blocks that the arm is named by; None where it leaves out none."""
        percent = self.attention.partition("-")[2]
        return int(percent) / 100 if percent else None

    @property
    def same_function(self) -> bool:
        """Whether loss and gradients should be those of the model, within the precision's bound."""
        return not (self.model or self.gradients or self.attention or self.weights)

    @property
    def only_stored(self) -> bool:
        """Whether nothing is changed but what weights and states are stored in."""
        return Changes(dtype=self.dtype, optimizer=self.optimizer) == self


NO_CHANGES = Changes()


class System(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A system, as a plan's `[[systems]]` table gives it.

    `parts` maps a part of a model, or an operator for all parts that are one, to an implementation's name.
    Training has more of them: the optimizer, and by FSDP2 `all_gather` and `reduce_scatter`.
    """

    name: str
    base: str = EAGER
    parts: dict[str, str] = {}
    execution: Execution = "eager"
    precision: Precision = "case"
    recompute: Recompute = "none"
    states: States = "device"
    changes: Changes = NO_CHANGES

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_.+-]*", self.name):
            raise ValueError(f"a system's name is of a-z, 0-9, '_', '-', '.', '+', not {self.name!r}")

    @property
    def trains(self) -> bool:
        """Whether it says something that only training has."""
        return self.precision != "case" or self.recompute != "none" or self.states != "device"


def builtin(providers: Iterable[str]) -> tuple[System, ...]:
    """The systems that need no file, of these providers."""
    known = [x for x in dict.fromkeys(providers) if x not in (YARDSTICK, "torch_compile")]
    plain = [System(x, base=x) for x in known]
    compiled: list[System] = []
    if EAGER in known:
        compiled += [
            System("torch_compile", execution="compile"),
            System("torch_compile_blocks", execution="blocks"),
            System("torch_compile_reduce_overhead", execution="reduce_overhead"),
            System("torch_compile_max_autotune", execution="max_autotune"),
            System("torch_aot_eager", execution="aot_eager"),
            System("torch_cudagraphs", execution="cudagraphs"),
            System("torch_graph", execution="graph"),
        ]
    if PROVIDER in known:
        compiled.append(System("kernelmark_compile", base=PROVIDER, execution="compile"))
        compiled.append(System("kernelmark_compile_blocks", base=PROVIDER, execution="blocks"))
        compiled.append(System("kernelmark_graph", base=PROVIDER, execution="graph"))
    return (*plain, *compiled)


class Stock(Protocol):
    """What systems take their parts from: a catalog, which knows systems and is not known here."""

    @property
    def parts(self) -> tuple[Implementation, ...]:
        """Implementations that a file has."""
        ...

    @property
    def models(self) -> Mapping[str, Model]:
        """Models by name."""
        ...

    @property
    def systems(self) -> tuple[System, ...]:
        """Those that a plan names."""
        ...

    @property
    def code(self) -> Mapping[str, str]:
        """Folders of other commits' kernels and baselines, by root's folder."""
        ...

    def own_file(self, folder: str, name: str) -> Any:
        """A file of one of the program's own folders, loaded."""
        ...

    def operator(self, name: str) -> Operator:
        """The operator of that name. Raises `InputError` where there is none."""
        ...

    def of_operator(self, operator: str) -> tuple[Implementation, ...]:
        """The implementations of one operator."""
        ...


@dataclass(frozen=True)
class Assembly:
    """A system with what its parts come from: what a workload makes its program of."""

    system: System
    catalog: Stock
    heard: Callable[[int], None] | None = None
    """Told how many operations each product of 8 bits by `fp8_matmul` is."""
    gradients: bool = True
    """Whether parts are asked for gradients. Where not, libraries without a backward pass take part."""

    @property
    def plain(self) -> Assembly:
        """The same with products in the case's dtype."""
        plain = msgspec.structs.replace(self.system, precision="case")
        return type(self)(plain, self.catalog, gradients=self.gradients)

    @property
    def inferring(self) -> Assembly:
        """The same for a program that takes no gradients."""
        return replace(self, gradients=False)

    def implementation(self, part: str, operator: str, device: str) -> Implementation:
        """What is put in for a part: the one named, else the base's, else PyTorch's.

        Raises `InputError` for a name that does not exist, `NotImplementedError` where nobody has the operator
        here.
        """
        there = self.catalog.of_operator(operator)
        named = self.system.parts.get(part, self.system.parts.get(operator))
        if named is not None:
            for x in there:
                if x.name == named:
                    return x
            raise unknown(f"implementation of {operator}", named, [x.name for x in there])
        for provider in (EAGER,) if operator in NAMED else (self.system.base, EAGER):
            if found := _preferred(there, provider, operator, device):
                return found
        raise NotImplementedError(f"no implementation of {operator} by {self.system.base} or PyTorch on {device}")

    def call(
        self,
        part: str,
        operator: str,
        axes: Mapping[str, int],
        options: Mapping[str, Any],
        dtype: str,
        device: str,
    ) -> Callable[..., Any]:
        """The callable of one part. Raises `NotImplementedError` with its part's name where it cannot be made."""
        spec = self.catalog.operator(operator)
        if dtype not in spec.dtypes:
            raise NotImplementedError(f"{part}: {operator} is of {', '.join(spec.dtypes)}, this case of {dtype}")
        case = spec.case(dict(axes), dtype, spec.passes[-1], **options)
        chosen = self.implementation(part, operator, device)
        if (reason := chosen.unavailable(device)) is not None:
            raise NotImplementedError(f"{part}: {reason[1]}")
        try:
            # Inputs of a part are dead after its backward pass, which comes once: no library needs copies of them.
            pass_ = "program" if self.gradients else "forward"
            found = chosen.load()(msgspec.structs.replace(case, pass_=pass_))
        except NotImplementedError as error:
            raise NotImplementedError(f"{part}: {error}") from None
        return found if self.system.execution == "eager" or chosen.provider in TRACED else _untraced(found)

    def parts(
        self, chosen: Chosen, B: int, S: int, dtype: str, device: str, without: Collection[str] = ()
    ) -> dict[str, Callable[..., Any]]:
        """The callables of all parts of a model but those `without`, and how its layers multiply."""
        if self.system.base != EAGER and not self.system.parts:
            self._taking_part(chosen, B, S, device, without)
        found = {
            part.name: self.call(part.name, part.operator, part.axes, part.options, dtype, device)
            for part in chosen.model.parts(chosen.configuration, B, S)
            if part.name not in without
        }
        for part in chosen.model.named(chosen.configuration, B, S):
            if {part.name, part.operator} & self.system.parts.keys():
                changes = self.system.changes
                if self.system.precision != "case" or changes.products or changes.weights:
                    raise NotImplementedError(f"{part.name} multiplies by itself, not as this system's layers do")
                found[part.name] = self.call(part.name, part.operator, part.axes, part.options, dtype, device)
        self._take_fused(found, chosen, B, S, device)
        products = chosen.model.products(chosen.configuration, B, S)
        if self.system.precision == "parts_1x128_fused":
            found |= self._fused_blocks(chosen, dtype, device, products)
        return found | {"linear": self.linear(dtype, device, products)}

    def _take_fused(
        self, found: dict[str, Callable[..., Any]], chosen: Chosen, B: int, S: int, device: str
    ) -> None:
        """Attention and layer norms that are our kernels for GPUs, with what they are fused of."""
        for part in chosen.model.parts(chosen.configuration, B, S):
            if part.name in found:
                found[part.name] = self.beside(part.name, part.operator, found[part.name], device)

    def beside(self, part: str, operator: str, call: Callable[..., Any], device: str) -> Callable[..., Any]:
        """A part that is our kernel for GPUs with what it is fused of for attributes, where the system is ours:
        part of another, it is the operator.
        """
        if device != "cuda" or self.system.base != PROVIDER:
            return call
        from . import fused_blocks

        known: dict[str, Callable[..., Callable[..., Any]]] = {
            "attention": fused_blocks.packed,
            "adamw": fused_blocks.clipped,
        }
        # A layer that is computed again keeps the stream, and not its norm too.
        if self.system.recompute == "none":
            known["layer_norm"] = fused_blocks.added
        if operator not in known or self.implementation(part, operator, device).provider != PROVIDER:
            return call
        return known[operator](self.catalog, call)

    def _takes(self, argument: str, operator: str, device: str) -> bool:
        """Whether what products in 8 bits are made of is our own kernel, and takes an argument that the operator
        lacks; that of an older commit may not.
        """
        chosen = self.implementation("linear", operator, device)
        if chosen.provider != PROVIDER:
            return False
        call = chosen.load()(None)  # type: ignore[arg-type]  # a kernel of ours is one function for every case
        return argument in signature(call).parameters

    def _fused_blocks(
        self, chosen: Chosen, dtype: str, device: str, products: Sequence[Part]
    ) -> dict[str, Callable[..., Any]]:
        """Norms and gates with the products behind them, by our own kernels."""
        from . import fused_blocks

        names = chosen.model.fused(chosen.configuration)
        if not names:
            raise NotImplementedError(f"{chosen.name} has no norm or gate before its products that is fused")
        if self.system.base != PROVIDER or self.system.parts or self.system.recompute.startswith("by_part"):
            raise NotImplementedError("norms and gates that write 8 bits are our own kernels, not parts by choice")
        if device != "cuda":
            raise NotImplementedError(f"norms and gates that write 8 bits have kernels for CUDA, not for {device}")
        given = self.catalog, *self.eight_bits(dtype, device, _asked(by_blocks, products))
        return {name: getattr(fused_blocks, name)(*given) for name in names}

    def linear(self, dtype: str, device: str, products: Sequence[Part] = ()) -> Callable[..., Any]:
        """`linear(x, weight, bias=None)`, by which layers multiply. Raises as `call` does.

        What a step asks of `products` is looked for at once: torch.compile would trace how.
        """
        if self.system.precision == "case" and any(x.partition("_")[0] == LINEAR for x in self.system.parts):
            return self._named_products(dtype, device, products)
        if self.system.precision == "case" and self._sums_in_products(device):
            from . import fused_blocks

            return fused_blocks.multiplied(self.catalog)
        if not self.system.precision.startswith("parts_"):
            return linear(self.system.precision)
        by = by_rows if self.system.precision == "parts_rowwise" else by_blocks
        return by(*self.eight_bits(dtype, device, _asked(by, products)))

    def _sums_in_products(self, device: str) -> bool:
        """Whether layers multiply as in `fused_blocks.multiplied`: of our own system in a CUDA graph, where Python
        costs nothing. What is computed again keeps how its products were made.
        """
        system = self.system
        return (
            device == "cuda"
            and system.base == PROVIDER
            and system.execution == "graph"
            and system.recompute == "none"
        )

    def _named_products(self, dtype: str, device: str, products: Sequence[Part]) -> Callable[..., Any]:
        """`linear` by the implementation that the system names for all weights or for those of a shape."""
        plain, names = linear("case"), self.system.parts

        def made(M: int, N: int, K: int, bias: bool) -> Callable[..., Any]:
            part = linear_part(N, K)
            if not {part, LINEAR} & names.keys():
                return lambda x, weight, bias: plain(x, weight, bias)
            return self.call(part, LINEAR, {"M": M, "N": N, "K": K}, {"bias": bias}, dtype, device)

        found = _once(made)
        for x in products:
            found(x.axes["M"], x.axes["N"], x.axes["K"], bool(x.options["bias"]))

        def multiply(x: Any, weight: Any, bias: Any = None) -> Any:
            N, K = weight.shape
            return found(x.numel() // K, N, K, bias is not None)(x=x, weight=weight, bias=bias)

        return multiply

    def eight_bits(
        self, dtype: str, device: str, asked: Iterable[Asks] = ()
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The system's `quantize(x, granularity)`, `product(a, b, scale_a, scale_b, recipe, bias=None)` in E4M3.

        The operator has no bias: our own kernels add one before they round, those of others get it after. Scales
        of an input's blocks, of a multiple of four rows, lie as products load them where our own kernel quantizes.
        """
        if dtype != "bf16":
            raise NotImplementedError(f"products of 8 bits by fp8_matmul are bf16, this case's are {dtype}")

        def quantizing(granularity: str, M: int, N: int) -> Callable[..., Any]:
            options = {"granularity": granularity, "format": "e4m3"}
            return self.call("linear", "fp8_quant", {"M": M, "N": N}, options, dtype, device)

        def multiplying(recipe: str, M: int, N: int, K: int) -> Callable[..., Any]:
            options = {"recipe": recipe, "layout": "nt"}
            return self.call("linear", "fp8_matmul", {"M": M, "N": N, "K": K}, options, "e4m3", device)

        quantizer, multiplier = _once(quantizing), _once(multiplying)
        for x in asked:
            for granularity, shape in x.quantized:
                quantizer(granularity, *shape)
            for recipe, sizes in x.multiplied:
                multiplier(recipe, *sizes)

        own = self._takes("bias", "fp8_matmul", device)
        laid = {"layout": "matmul"} if self._takes("layout", "fp8_quant", device) else {}

        def quantize(x: Any, granularity: str) -> Any:
            call = quantizer(granularity, x.shape[0], x.shape[1])
            within = laid if granularity == "block" else {}
            return call(x=x, granularity=granularity, format="e4m3", **within)

        if device == "cuda" and self.implementation("linear", "fp8_quant", device).provider == PROVIDER:
            from . import fused_blocks

            fused_blocks.quantized(self.catalog, quantize)

        def product(a: Any, b: Any, scale_a: Any, scale_b: Any, recipe: str, bias: Any = None) -> Any:
            M, N, K = a.shape[0], b.shape[1], a.shape[1]
            if self.heard is not None:
                self.heard(2 * M * N * K)
            within = {"bias": bias} if own and bias is not None else {}
            call = multiplier(recipe, M, N, K)
            out = call(a=a, b=b, scale_a=scale_a, scale_b=scale_b, recipe=recipe, **within)
            return out if bias is None or within else out + bias

        return quantize, product

    def _taking_part(self, chosen: Chosen, B: int, S: int, device: str, without: Collection[str]) -> None:
        """Raises `NotImplementedError` for a base without any of these parts of the model: PyTorch's row again."""
        given = (x.provider for part, x in self.table(chosen, B, S, device) if part.name not in without)
        if self.system.base not in given:
            raise NotImplementedError(f"{self.system.base} has no part of {chosen.name}")

    def table(self, chosen: Chosen, B: int, S: int, device: str) -> Iterator[tuple[Part, Implementation]]:
        """Each part of a model with what is put in for it."""
        for part in chosen.model.parts(chosen.configuration, B, S):
            yield part, self.implementation(part.name, part.operator, device)


def _preferred(
    there: Sequence[Implementation], provider: str, operator: str, device: str
) -> Implementation | None:
    """The implementation of a provider that its users would take on this device."""
    own = [x for x in there if x.provider == provider and device in x.devices]
    wanted = PREFERRED.get((provider, operator), provider)
    return next((x for x in own if x.name == wanted), own[0] if own else None)


def _asked(by: Callable[..., Any], products: Iterable[Part]) -> list[Asks]:
    """What layers ask that multiply so."""
    return [asks(by, x.axes["M"], x.axes["N"], x.axes["K"]) for x in products]


def _once(made: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """What is made for such arguments, once. A dictionary: torch.compile looks through a cache of functools and
    traces what is behind.
    """
    table: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def found(*given: Any) -> Callable[..., Any]:
        if given not in table:
            table[given] = made(*given)
        return table[given]

    return found


def _untraced(call: Callable[..., Any]) -> Callable[..., Any]:
    """A part of another library within a compiled model: called as it is, outside of the graph."""
    import torch

    untraced: Callable[..., Any] = torch.compiler.disable(call)
    return untraced


ANYWHERE = ("eager",)
"""Executions that are compared on a CPU too; there compiling a step takes minutes, and a CPU has no launches."""


def implementations(workload: Workload, catalog: Stock) -> Iterator[Implementation]:
    """The systems of a catalog as implementations of a workload.

    Raises `InputError` for a base or a part that nobody has.
    """
    assert workload.assemble is not None, workload.name
    by_provider: dict[str, list[Implementation]] = {}
    for x in catalog.parts:
        by_provider.setdefault(x.provider, []).append(x)
    of_models = {x.operator for x in _all_parts(catalog)}
    several = [
        x for x, own in by_provider.items() if len({y.operator for y in own if not y.on_request} & of_models) > 1
    ]
    for system in (*builtin(several), *catalog.systems):
        if system.base not in by_provider:
            raise unknown("provider", system.base, sorted(by_provider))
        if system.changes.model:
            configured(catalog.models, system.changes.model)
        own = by_provider[system.base]
        named = [_named(catalog, what, name) for what, name in system.parts.items()]
        here = ("cuda", "cpu") if system.execution in ANYWHERE else ("cuda",)
        yield Implementation(
            operator=workload.name,
            name=system.name,
            # With a part of ours it is nobody's baseline: what changes our kernels changes it.
            provider=PROVIDER if any(x.provider == PROVIDER for x in named) else system.base,
            requires=tuple(dict.fromkeys(x for y in (own[0], *named) for x in y.requires)),
            environment=_environment(system, (own[0], *named)),
            no_environment=next((x.no_environment for x in (own[0], *named) if x.no_environment), ""),
            devices=tuple(
                x for x in here if any(x in y.devices for y in own) and all(x in y.devices for y in named)
            ),
            load=partial(_factory, Assembly(system, catalog), workload.assemble),
            assembled=True,
            parts_of=tuple(dict.fromkeys(x.root for x in (own[0], *named))),
        )


def _all_parts(catalog: Stock, named: bool = False) -> Iterator[Part]:
    """The parts of every model, for the least of inputs; those that a system must name too, if asked for."""
    for model in catalog.models.values():
        for name, configuration in model.configurations.items():
            yield from model.parts(configuration, 1, 1)
            if named:
                yield from Chosen(model, name, configuration).named(1, 1)


def _factory(assembly: Assembly, assemble: Callable[[Case, Assembly], Any]) -> Callable[[Case], Any]:
    return lambda case: assemble(case, assembly)


def _named(catalog: Stock, what: str, name: str) -> Implementation:
    """The implementation that a table names for a part or an operator."""
    operators = {what, *(x.operator for x in _all_parts(catalog, True) if x.name == what)}
    if what == OPTIMIZER:
        operators.add("adamw")
    there = [x for x in catalog.parts if x.operator in operators]
    if not there:
        raise unknown("part", what, sorted({x.name for x in _all_parts(catalog)} | {OPTIMIZER}))
    for x in there:
        if x.name == name:
            return x
    raise unknown(f"implementation of {what}", name, [x.name for x in there])


def _environment(system: System, implementations: Sequence[Implementation]) -> str:
    """The one environment that all parts can be had in."""
    apart = {x.environment for x in implementations} - {"core"}
    if len(apart) > 1:
        raise InputError(
            f"system {system.name!r} has parts of environments that cannot be one: {', '.join(sorted(apart))}."
        )
    return apart.pop() if apart else "core"
