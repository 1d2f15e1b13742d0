"""What the kernels share: checks of arguments, registration with torch, and sizes of a launch."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ._launch import _PLAIN, _device, _transforming, prepared

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton interprets (`TRITON_INTERPRET=1`), which is how the kernels run on a CPU."""

INTERPRETING: tl.constexpr = tl.constexpr(INTERPRETED)
"""The same for kernels."""


@triton.constexpr_function
def assembles() -> bool:
    """Whether the target takes PTX: an NVIDIA GPU's compiler, not the interpreter's or AMD's."""
    return not INTERPRETING and bool(tl.target_info.is_cuda())


@triton.constexpr_function
def tf32() -> str:
    """The precision of products whose fp32 operands may be rounded: to TF32, on NVIDIA's GPUs. Numbers of 16 bits
    are multiplied as they are.
    """
    return "tf32" if INTERPRETING or tl.target_info.is_cuda() else "ieee"


FLOATING = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels read and write; they compute in fp32."""

_HERE = contextlib.nullcontext()
_library = torch.library.Library("kernelmark", "FRAGMENT")


def check(
    name: str,
    tensor: Any,
    *,
    dtypes: Sequence[torch.dtype] = FLOATING,
    like: torch.Tensor | None = None,
    shape: Sequence[int] | None = None,
    dim: int | None = None,
) -> None:
    """Raises TypeError or ValueError that names the argument and says what is wrong with it.

    `like` is a tensor on the device that this one must be on as well.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected {' or '.join(str(x) for x in dtypes)}")
    if dim is not None and tensor.dim() != dim:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {dim} dimensions")
    if shape is not None and tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if not (tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu")):
        raise ValueError(f"{name} is on {tensor.device}, expected a CUDA device")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {like.device}")


def choice(name: str, value: Any, values: Sequence[str]) -> None:
    """Raises ValueError that names the argument and the values it can have."""
    if value not in values:
        raise ValueError(f"{name} is {value!r}, expected {' or '.join(repr(x) for x in values)}")


def operator(
    schema: str,
    launch: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    check: Callable[..., None] | None = None,
    hidden: int = 0,
) -> Callable[..., Any]:
    """Registers `kernelmark::<schema>` and returns the call of it.

    `launch` computes; `fake` only allocates the results; `save(ctx, inputs, output)` and
    `backward(ctx, *gradients)` make it differentiable. `check` raises for wrong arguments where the registered
    operator sees them before `launch`. The last `hidden` results are for `save` alone: eager mode leaves them out.
    Plain tensors in eager mode go around the dispatcher, which costs as long a call in Python as some of these
    kernels run; torch.compile, fake tensors and subclasses see the registered operator.
    """
    name, _, signature = schema.partition("(")
    # Each argument's type and name; places that it writes to, but for lists, whose operators count themselves.
    taken = [x.strip().split() for x in signature.rpartition(" -> ")[0].rstrip(")").split(",")]
    written = [i for i, (kind, _) in enumerate(taken) if kind.startswith("Tensor(") and not kind.endswith("[]")]
    if isinstance(launch, prepared):
        launch.numbers = {i: x for i, (kind, x) in enumerate(taken) if kind in ("float", "int", "bool")}
    registered = below = _defined(name, signature, launch, fake)
    eager = launch
    if backward is not None:
        assert save is not None, schema
        below = _defined(f"{name}_below_autograd", signature, launch, fake)
        _library.impl(f"kernelmark::{name}", _registered_autograd(name, below, save, backward), "Autograd")
        eager = _differentiable(name, launch, save, backward, hidden)

    def dispatched(*arguments: Any) -> Any:
        if check is not None:
            check(*arguments)
        return registered(*arguments)

    def called(*arguments: Any) -> Any:
        # First of all: what is registered would give a derivative of zero, to torch.func.jvp too.
        if forward_ad._current_level >= 0 and any(map(_dual, arguments)):
            raise NotImplementedError(f"{name} has no derivative in forward mode")
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return dispatched(*arguments)
        if _transforming():
            if backward is None and torch.is_grad_enabled() and any(map(_followed, arguments)):
                # torch.func.grad would take it for a constant.
                raise NotImplementedError(f"{name} has no backward pass")
            return dispatched(*arguments)
        if isinstance(launch, prepared):
            plan, differentiate = launch.find(arguments)
            if plan is None:
                return dispatched(*arguments)
            if differentiate and eager is not launch:
                return eager(plan, *arguments)
            found = launch.run(plan, arguments)
        else:
            differentiate = False
            for x in arguments:
                if isinstance(x, torch.Tensor):
                    # Not of a subclass, nor is its memory the negative of what it is, as a conjugate's `imag` is.
                    if type(x) not in _PLAIN or x.is_neg():
                        return dispatched(*arguments)
                    differentiate |= x.requires_grad
            found = (eager if differentiate and torch.is_grad_enabled() else launch)(*arguments)
        for i in written:
            # As PyTorch's operators in place do: autograd refuses gradients by what was there before.
            if not arguments[i].is_inference():
                torch.autograd.graph.increment_version(arguments[i])
        return found

    if not isinstance(launch, prepared) or written:
        return called
    launch.around = called, None if eager is launch else eager

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():  # first of all: C cannot be traced
            return called(*arguments)
        front = launch.front
        return called(*arguments) if front is None else front(*arguments)

    return call


def _dual(x: Any) -> bool:
    """Whether forward-mode derivatives are asked for by an argument."""
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(_unbatched(x)).tangent is not None


def _followed(x: Any) -> bool:
    """Whether a gradient is asked for by an argument."""
    return isinstance(x, torch.Tensor) and _unbatched(x).requires_grad


def _unbatched(x: torch.Tensor) -> torch.Tensor:
    """What torch.vmap, where it is the innermost transform, has made an argument of."""
    while torch._C._functorch.is_batchedtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def _defined(name: str, signature: str, launch: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """`kernelmark::name`, on the devices that kernels run on, and on fake tensors."""
    _library.define(f"{name}({signature}")
    for key in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
        _library.impl(f"kernelmark::{name}", launch, key)
    defined = getattr(torch.ops.kernelmark, name).default
    torch.library.register_fake(f"kernelmark::{name}", _announced(defined, fake), lib=_library)
    return defined


def _announced(defined: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """What is called on fake tensors, where Inductor traces before it compiles: it is told of the operator there.

    An operator that Inductor meets without knowing it is named in a message, with its inputs and all that they are
    computed of. Before torch 2.13 that text is made whether anybody reads it or not; of layers that read the one
    before twice it doubles with each, and GPT-2's twelve took longer than minutes.
    """
    told = False

    def call(*arguments: Any) -> Any:
        nonlocal told
        lowering = sys.modules.get("torch._inductor.lowering")
        if not told and lowering is not None:
            told = True
            _announce(defined, lowering)
        return fake(*arguments)

    return call


def _announce(defined: Any, lowering: Any) -> None:
    """Has Inductor call an operator as it is, as it would of itself."""
    with contextlib.suppress(AttributeError, TypeError):  # a version that names these otherwise
        if defined not in lowering.lowerings:
            tag = lowering.get_layout_constraint_tag(defined, with_default=True)
            lowering.make_fallback(defined, lowering.tag_to_layout_constraint(tag), warn=False)


def _registered_autograd(
    name: str, below: Callable[..., Any], save: Callable[..., None], gradients: Callable[..., Any]
) -> Callable[..., Any]:
    """What the dispatcher calls of a differentiable operator for autograd.

    As `torch.library.register_autograd` makes it, but that it calls another operator below, which is not
    differentiable: torch.compile's graphs then hold that one, and a call of theirs does not ask again in Python
    whether autograd wants to know of it, which takes the host nearly as long as the call.
    """

    class Registered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = below(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            return _once(name, gradients, ctx, given) if torch.is_grad_enabled() else gradients(ctx, *given)

    def call(*inputs: Any) -> Any:
        if needs_gradient(*inputs):
            return Registered.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return below(*inputs)

    return call


def _differentiable(
    name: str, launch: Callable[..., Any], save: Callable[..., None], gradients: Callable[..., Any], hidden: int
) -> Callable[..., Any]:
    """The call of an operator in eager mode; of one that is prepared, behind what was found for its arguments."""
    known = isinstance(launch, prepared)
    nothing = (None,) * hidden

    def direct(ctx: Any, *given: Any) -> Any:
        found = gradients(ctx, *given, *nothing)
        if not known:
            return found
        return (None, *found) if isinstance(found, tuple) else (None, found)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            if known:
                plan, inputs = inputs[0], inputs[1:]
                output = launch.run(plan, inputs)  # type: ignore[attr-defined]  # it is prepared
            else:
                output = launch(*inputs)
            save(ctx, inputs, output)
            # Each result that autograd knows of costs the host two microseconds.
            return output[:-hidden] if hidden else output

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            return _once(name, direct, ctx, given) if torch.is_grad_enabled() else direct(ctx, *given)

    # Autograd's engine calls this; PyTorch's own looks in Python for `backward` and others first, at each call.
    Eager._backward_cls.apply = Eager.backward  # type: ignore[attr-defined]  # the metaclass makes it
    # Not `Eager.apply`, which asks for transforms of torch.func again: `operator` has and goes the other way.
    apply: Callable[..., Any] = super(torch.autograd.Function, Eager).apply
    return apply


def _once(name: str, gradients: Callable[..., Any], ctx: Any, given: tuple[Any, ...]) -> Any:
    """Gradients of which a graph is made, as `create_graph` asks for: differentiating them raises RuntimeError.

    As constants they would have a derivative of zero, without a word. They are that to `once_differentiable` of
    torch.autograd where what is given requires no gradient, though what was saved does, and to who asks for the
    second derivative by its input.
    """
    kept = _Kept(ctx)
    with torch.no_grad():
        found = gradients(kept, *given)
    sources = [x for x in (*given, *kept.saved_tensors) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not sources and getattr(ctx, "made_forward", False):
        # Of inputs that nobody kept: somebody who stands for them.
        sources = [torch.empty(0, requires_grad=True)]
    if not sources:
        return found
    several = found if isinstance(found, tuple) else (found,)
    refusing = _Refusing.apply(name, len(several), *several, *sources)
    return refusing if isinstance(found, tuple) else refusing[0]


class _Kept:
    """A context whose saved tensors are taken out once, as checkpoints demand."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Refusing(torch.autograd.Function):
    """The first `count` tensors, computed of those behind them in a way that has no derivative."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.name = name
        return tuple([None if x is None else x.clone() for x in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"{ctx.name} is differentiable once: its gradients have no derivative")


def needs_gradient(*arguments: Any) -> bool:
    """Whether autograd wants to know of what is computed of these."""
    if torch.is_grad_enabled():
        for x in arguments:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
    return False


def on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The device of a tensor as the current one, for the launch inside."""
    index = tensor.get_device()
    return _HERE if index < 0 or index == _device() else torch.cuda.device(index)


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """(…, D) as (N, D) whose last dimension has stride 1; a copy only where strides demand one."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def in_rows(tensor: torch.Tensor) -> bool:
    """Whether `rows` takes a tensor where it lies."""
    return tensor.numel() == 0 or rows(tensor).data_ptr() == tensor.data_ptr()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def multiprocessors(tensor: torch.Tensor) -> int:
    """Streaming multiprocessors of a tensor's device; 3 under the interpreter, so that loops turn."""
    return _multiprocessors(tensor.device) if tensor.is_cuda else 3


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """An NVIDIA GPU's compute capability; (0, 0) without one: for the interpreter, and for AMD's GPUs, whose
    numbers mean other things.
    """
    if device.type != "cuda" or torch.version.hip:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def roomy(capability: tuple[int, int]) -> bool:
    """Whether a program may have 227 KiB of shared memory: on Hopper and the Blackwell of data centres. On A100 it
    is 163 KiB, on Ada and the other Ampere and Blackwell 99.
    """
    return capability[0] in (9, 10, 11)


def most_registers(tensor: torch.Tensor, most: int | None) -> dict[str, int]:
    """The launch option for the most registers of a thread, which only NVIDIA's compiler takes."""
    return {} if most is None or capability(tensor.device) == (0, 0) else {"maxnreg": most}


E4M3_OF_AMD = ("gfx942", "gfx950", "gfx12")
"""AMD's architectures that convert to E4M3, by how their names begin: MI300's in software, the others' by
instructions. For RDNA 3, in software too, LLVM does not end with a product within a quarter of an hour.
"""


def converts_to_e4m3(architecture: tuple[int, int] | str) -> bool:
    """Whether a GPU converts to E4M3, by its compute capability or the name of AMD's architecture."""
    if isinstance(architecture, str):
        return architecture.startswith(E4M3_OF_AMD)
    return architecture >= (8, 9)


def architecture(device: torch.device) -> tuple[int, int] | str:
    """A GPU's compute capability, or the name of AMD's architecture: `gfx942`."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    return capability(device)


def needs_e4m3(name: str, tensor: torch.Tensor) -> None:
    """Raises NotImplementedError on GPUs that do not convert to E4M3."""
    if tensor.is_cuda and not converts_to_e4m3(architecture(tensor.device)):
        raise NotImplementedError(
            f"{name} needs a GPU that converts to E4M3: compute capability 8.9 or later, {', '.join(E4M3_OF_AMD)}"
        )


def dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialized memory of a tensor's shape and dtype, contiguous; the fastest way to it from Python."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def lined(x: torch.Tensor) -> torch.Tensor:
    """x itself where its last dimension has stride 1, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def cdiv(size: int, block: int) -> int:
    """Blocks that cover a size. `triton.cdiv` says the same, more slowly on the host."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(size - 1, 0).bit_length()


@triton.jit
def add_parts(parts, sums, P, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Sum over programs of (P, D) to (D,), in fp32 and in the same order each time."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < P)[:, None] & (col < D)[None, :]
        total += tl.load(parts + row.to(tl.int64)[:, None] * D + col[None, :], inside, 0.0)
    tl.store(sums + col, tl.sum(total, 0).to(sums.dtype.element_ty), col < D)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """1 / (1 + exp(-x)) in fp32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def packed(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """x as it is, two 16-bit numbers a register. Behind a wait the compiler would else hold them as the fp32 that
    was computed of them before it, in twice the registers.
    """
    if x.dtype.primitive_bitwidth == 16 and assembles():
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def tanh_slope(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(s, slope): gelu's tanh form is x · s, with s = sigmoid(2 √(2/π) (x + 0.044715 x³)); its derivative."""
    square = x * x
    s = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square))
    return s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * square)


@triton.jit
def on_e4m3(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """fp32 numbers of at most 448 in magnitude, rounded to E4M3's (to nearest, to even) and still fp32.

    By adding and taking away what has no digits beyond three of a fraction. Not by conversion there and back:
    where the 8-bit number is stored too, ptxas 12.8 reads some of what it converts back from another register.
    """
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000)
    shift = ((exponent + 0x0A000000) | 0x00400000).to(tl.float32, bitcast=True)
    return (x + shift) - shift
