"""One case laid out for its implementations: the same inputs, the same reference, for all of them."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case, Pass
from ..operator import DTYPES, Inputs, Operator, Tolerance
from .group import ALONE, Group
from .verify import Incorrect, flat

if TYPE_CHECKING:
    import torch

FP64_ELEMENTS = 1 << 27
"""Above so many input elements the reference is computed in fp32: fp64 would not fit beside the rest."""


def seed_of(case: Case, seed: int, replicate: int) -> int:
    """The seed of a case's inputs: fresh in every replicate, the same for all implementations."""
    text = f"{seed}/{replicate}/{case.full_name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@dataclass
class Workbench:
    """Inputs of one case in one process; of an operator over ranks, a rank's part of them and of the answer.

    `inputs` are what calls see; `values` and `decoys` are two sets of contents, drawn alike, that can be laid into
    the same memory (for the backward pass the gradients of the outputs, else the inputs themselves).
    `references` is the right answer for `values`, and `reference_s` the seconds that it took.
    """

    case: Case
    operator: Operator
    inputs: Inputs
    gradients: tuple[torch.Tensor, ...]
    varied: list[torch.Tensor]
    values: list[torch.Tensor]
    decoys: list[torch.Tensor]
    references: list[torch.Tensor]
    wide: torch.dtype
    reference_s: float = 0.0
    mixture: frozenset[tuple[int, int]] | None = None
    """The blocks in which a timed call's inputs are the decoys' where its answer is checked (`fresh`)."""
    mixed_references: list[torch.Tensor] | None = None
    """The right answer for the mixture, once it was asked for."""
    group: Group = ALONE
    seed: int = 0
    unquantized_references: list[torch.Tensor] | None = None
    """The right answer for the numbers before they were quantized, once it was asked for."""
    known_gradients: tuple[torch.Tensor, ...] = ()
    """Over ranks, the gradients of the outputs for which the answer is known, of all ranks."""
    still: tuple[torch.Tensor, ...] = ()
    """What calls read, may not write to, and does not vary: inputs of a backward pass alone, gradients of outputs
    in a pass with both. No copies are kept of it, which memory would have to hold, but `digests`.
    """
    digests: tuple[int, ...] = ()

    @classmethod
    def build(
        cls,
        operator: Operator,
        case: Case,
        device: torch.device,
        seed: int,
        group: Group = ALONE,
        fp64: bool = True,
        answered: bool = True,
    ) -> Workbench:
        """Draws two sets of random inputs and computes the reference of the first, in fp64 if the device has it;
        none where it is not to be `answered`.

        Every rank draws the whole, all alike, and keeps its part: outside of any clock.
        """
        import torch

        generator = torch.Generator(device).manual_seed(seed)
        inputs = operator.built(case, device, generator)
        decoy = operator.built(case, device, generator)
        backward = case.pass_ != "forward"
        size = sum(x.numel() for _, x in tensors(inputs))
        wide = torch.float32 if operator.fp32_reference or size > FP64_ELEMENTS or not fp64 else torch.float64
        known: tuple[torch.Tensor, ...] = ()
        begin = time.monotonic()
        if answered:
            gradients, references = _references(operator, inputs, case.pass_, wide, generator)
        else:
            gradients, references = _unanswered(operator, inputs, case.pass_, generator), []
        if device.type != "cpu":
            torch.accelerator.synchronize()
        reference_s = time.monotonic() - begin
        if operator.sharding is not None:
            references = _parts(operator, case, references, group.rank)
            sampled = operator.in_part(case)
            laid = operator.sharding.of_output if sampled is None else sampled.lay
            known = () if sampled is None else gradients
            gradients = tuple(laid(x, case, group.rank) for x in gradients)
            inputs, decoy = (_split(operator, case, x, group.rank) for x in (inputs, decoy))
        if backward:
            for name in operator.differentiated(inputs):
                inputs[name].requires_grad_(True)
        if case.pass_ == "backward":
            varied = list(gradients)
            decoys = [torch.empty_like(x).normal_(generator=generator) for x in gradients]
        else:
            varied = [x for _, x in tensors(inputs)]
            decoys = [x for _, x in tensors(decoy)]
        values = [x.detach().clone() for x in varied]
        bench = cls(
            case, operator, inputs, gradients, varied, values, decoys, references, wide, reference_s, group=group,
            seed=seed, known_gradients=known,
        )  # fmt: skip
        apart = {id(x) for x in (*varied, *bench.updated())}
        fixed = () if bench.in_part else gradients  # `known` lays others
        every = (*(x for _, x in tensors(inputs)), *fixed)
        bench.still = tuple(x for x in every if id(x) not in apart)
        bench.digests = tuple(map(_digest, bench.still))
        return bench

    def restore(self) -> None:
        """Lays all that calls read as it was drawn, whatever an implementation has written there."""
        import torch

        self.lay(self.values)
        if tuple(map(_digest, self.still)) == self.digests:
            return
        device = self.varied[0].device
        again = Workbench.build(
            self.operator, self.case, device, self.seed, self.group, self.wide == torch.float64
        )
        with torch.no_grad():
            for target, content in zip(self.still, again.still, strict=True):
                target.detach().copy_(content.detach())

    @property
    def tolerance(self) -> Tolerance:
        """How far an answer may be off."""
        found = self.operator.tolerance(self.case)
        assert found is not None, self.case.dtype
        return found

    def lay(self, contents: list[torch.Tensor]) -> None:
        """Copies contents into the memory that calls read."""
        import torch

        with torch.no_grad():
            for target, content in zip(self.varied, contents, strict=True):
                target.detach().copy_(content)

    @property
    def in_part(self) -> bool:
        """Whether gradients are known for a sample of rows alone."""
        return self.operator.in_part(self.case) is not None

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """Within, gradients of outputs are those for which the answer is known; after it, random in every row."""
        import torch

        sampled = self.operator.in_part(self.case)
        if sampled is None:
            yield
            return
        for x, rows in zip(self.gradients, self.known_gradients, strict=True):
            x.copy_(sampled.lay(rows, self.case, self.group.rank))
        try:
            yield
        finally:
            generator = torch.Generator(self.gradients[0].device).manual_seed(self.seed + self.group.rank)
            for x in self.gradients:
                x.normal_(generator=generator)

    def lay_doubled(self) -> None:
        """Lays the decoys twice as large, so that even a mean over all elements comes out different."""
        import torch

        self.lay(self.decoys)
        with torch.no_grad():
            for x in self.varied:
                if x.is_floating_point() and x.itemsize > 1:  # 8-bit floats have no product; their scales have
                    x.detach().mul_(2)

    def reference(self) -> list[torch.Tensor]:
        """The right answer for what the inputs hold now, in all ranks."""
        operator, case = self.operator, self.case
        given = self.gradients if case.pass_ != "forward" else None
        if operator.sharding is None:
            return _references(operator, self.inputs, case.pass_, self.wide, None, given)[1]
        whole = _mapped(self.inputs, self._whole)
        given = None if given is None else tuple(map(self._whole, given))
        references = _references(operator, whole, case.pass_, self.wide, None, given)[1]
        return _parts(operator, case, references, self.group.rank)

    def unquantized(self) -> list[torch.Tensor] | None:
        """The right answer for the numbers that the inputs were quantized from, drawn again by the same seed; None
        where the operator says none, and in passes with gradients.
        """
        import torch

        if self.operator.unquantized is None or self.case.pass_ != "forward":
            return None
        if self.unquantized_references is None:
            device = self.varied[0].device
            generator = torch.Generator(device).manual_seed(self.seed)
            with torch.no_grad():
                exact = flat(self.operator.unquantized(self.case, device, generator))
            self.unquantized_references = [x.to(self.wide) for x in exact]
        return self.unquantized_references

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        assert self.operator.sharding is not None
        return self.operator.sharding.join(self.group.gathered(part), self.case)

    def changed(self, results: Sequence[torch.Tensor] = ()) -> bool:
        """Whether a call wrote to its inputs, other than these results of it to where the operator allows it."""
        import torch

        updated = {x.data_ptr() for x in self.updated()}
        allowed = updated & {x.data_ptr() for x in results}

        def same(target: torch.Tensor, value: torch.Tensor) -> bool:
            if target.data_ptr() in allowed and not any(_within(x, target) for x in results):
                return True
            if target.data_ptr() in updated:
                value = _overwritten(value, target, results)
            return torch.equal(_bits(target.detach()), _bits(value))

        if not all(map(same, self.varied, self.values)):
            return True
        return tuple(map(_digest, self.still)) != self.digests

    def hold_finite(self) -> None:
        """Raises `Incorrect` unless what calls update in place holds numbers still, after however many calls."""
        import torch

        if not all(bool(torch.isfinite(x).all()) for x in self.updated() if x.is_floating_point()):
            raise Incorrect("what it updates in place is not finite any more after repeated calls")

    def updated(self) -> list[torch.Tensor]:
        """The inputs that calls may write to."""
        return [x for name, x in tensors(self.inputs) if name in self.operator.in_place]

    def kept(self) -> list[torch.Tensor]:
        """The inputs that a model keeps from call to call, in a pass after which no optimizer changes them."""
        names = self.operator.weights if self.case.pass_ == "forward" else ()
        return [x for name, x in tensors(self.inputs) if name in names]

    def call(self, implementation: Callable[..., Any]) -> Callable[[], Any]:
        """What is timed: the pass of this case by one implementation.

        Backward alone runs forward once, here, and is then repeated on its saved tensors.
        """
        import torch

        operator, inputs = self.operator, self.inputs
        if self.case.pass_ == "forward":

            def forward() -> Any:
                with torch.no_grad():
                    return implementation(**inputs)

            return forward
        leaves = [inputs[name] for name in operator.differentiated(inputs)]
        if self.case.pass_ == "backward":
            outputs = differentiable(implementation(**inputs))

            def backward() -> Any:
                return torch.autograd.grad(outputs, leaves, self.gradients, retain_graph=True)

            return backward

        def both() -> Any:
            outputs = differentiable(implementation(**inputs))
            return (*(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, self.gradients))

        return both

    def conversion(self, implementation: Callable[..., Any]) -> Callable[[], Any] | None:
        """The part of a forward pass that only converts layouts as the library demands, where it names one.

        None for passes with gradients, as what undoes the conversion in backward cannot be called alone, and over
        ranks.
        """
        import torch

        convert = getattr(implementation, "conversion", None)
        if convert is None or self.case.pass_ != "forward" or self.group.size > 1:
            return None
        inputs = self.inputs

        def converted() -> Any:
            with torch.no_grad():
                return convert(**inputs)

        return converted

    def shared(self, implementation: Callable[..., Any]) -> int:
        """Bytes of a rank's memory that its peers can read or write, where the implementation says."""
        said = getattr(implementation, "shared", None)
        return 0 if said is None else int(said(**self.inputs))

    def told(self, implementation: Callable[..., Any], name: str) -> tuple[float | None, str]:
        """(number, why there is none) of a metric that only the implementation knows (`Operator.told`)."""
        import torch

        say = getattr(implementation, name, None)
        if say is None:
            return None, "this implementation does not say"
        with torch.no_grad():
            try:
                return float(say(**self.inputs)), ""
            except NotImplementedError as error:
                return None, str(error)

    def other_dtypes(self, outputs: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """What a row is told whose answer is of another dtype than all of its inputs: it moves other bytes than
        its rivals, though as an answer it is right.

        An operator does not state the dtypes of its answer. Nothing is told where they need not be its inputs':
        these differ, or are of 8 bits, or a result has a form of its own; nor of a number alone.
        """
        import torch

        given = {x.dtype for _, x in tensors(self.inputs) if x.is_floating_point()}
        own = getattr(torch, DTYPES[self.case.dtype])
        if given != {own} or own.itemsize == 1 or self.operator.results is not None:
            return ()
        others = dict.fromkeys(x.dtype for x in outputs if x.is_floating_point() and x.dim() and x.dtype != own)
        return tuple(f"its answer is in {_named(x)}, where all inputs are in {_named(own)}" for x in others)

    def held(self) -> int:
        """Bytes of the inputs and of the gradients of outputs."""
        return sum(x.numel() * x.element_size() for x in (*(x for _, x in tensors(self.inputs)), *self.gradients))

    def comparable(self, result: Any, left: Inputs | None = None) -> list[torch.Tensor]:
        """A result in the form of the reference. `left` takes the place of inputs that were updated since."""
        if self.operator.results is not None and self.case.pass_ == "forward":
            found = flat(self.operator.results(result, {**self.inputs, **(left or {})}))
            across = None if self.operator.sharding is None else self.operator.sharding.across
            return found if across is None else across(found, self.group.gathered)
        return _known(self.operator, self.case, flat(result), self.group.rank)


def differentiable(result: Any) -> list[torch.Tensor]:
    """The outputs that have a gradient: a choice that is made on the way, of blocks or of experts, has none."""
    return [x for x in flat(result) if x.is_floating_point()]


def tensors(inputs: Inputs) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of inputs, each with its input's name; those of a list in order."""
    import torch

    for name, value in inputs.items():
        for x in value if isinstance(value, list | tuple) else (value,):
            if isinstance(x, torch.Tensor):
                yield name, x


def _mapped(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    """Inputs with every tensor changed."""
    import torch

    def changed(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [changed(y) for y in x]
        return change(x) if isinstance(x, torch.Tensor) else x

    return {name: changed(x) for name, x in inputs.items()}


def _split(operator: Operator, case: Case, whole: Inputs, rank: int) -> Inputs:
    """A rank's part of whole inputs."""
    sharding = operator.sharding
    assert sharding is not None
    return _mapped(whole, lambda x: sharding.split(x, case, rank))


def _parts(operator: Operator, case: Case, answer: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """A rank's part of the right answer: gradients, which come last, lie as their inputs do."""
    sharding = operator.sharding
    assert sharding is not None
    outputs = len(answer) - (len(operator.gradients) if case.pass_ != "forward" else 0)
    parts = [
        sharding.of_output(x, case, rank) if i < outputs else sharding.split(x, case, rank)
        for i, x in enumerate(answer)
    ]
    return parts[:outputs] + _known(operator, case, parts[outputs:], rank)


def _known(operator: Operator, case: Case, answer: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Of a rank's answer, whose last are gradients, what is known where that is a sample."""
    sampled = operator.in_part(case)
    if sampled is None:
        return answer
    outputs = len(answer) - len(operator.gradients)
    whole = (None,) * outputs + tuple(x not in sampled.like_output for x in operator.gradients)
    return [x if kept else sampled.rows(x, case, rank) for x, kept in zip(answer, whole, strict=True)]


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor is a part of another's memory, and not all of it."""
    begin, end = whole.data_ptr(), whole.data_ptr() + whole.numel() * whole.element_size()
    own = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
    contiguous = part.is_contiguous() and whole.is_contiguous() and part.dtype == whole.dtype
    return contiguous and begin <= own[0] and own[1] <= end and part.numel() < whole.numel()


def _overwritten(value: torch.Tensor, target: torch.Tensor, results: Sequence[torch.Tensor]) -> torch.Tensor:
    """An input's value with the results that were written to a part of it."""
    for x in results:
        if _within(x, target):
            at = (x.data_ptr() - target.data_ptr()) // target.element_size()
            value = value.clone()
            value.view(-1)[at : at + x.numel()] = x.detach().reshape(-1)
    return value


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    dense = tensor.contiguous()
    # One of size 1 is contiguous whatever its stride is, and torch views only a stride of 1 as bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


DIGESTED = 1 << 22
"""Words that are digested at once: what that takes beside them is small."""


def _digest(tensor: torch.Tensor) -> int:
    """A number that is another one for other contents: a sum of all words, each with a weight of its place."""
    import torch

    bits = _bits(tensor.detach())
    if bits.numel() % 4 == 0:
        bits = bits.view(torch.int32)  # a quarter of the products
    generator = torch.Generator(bits.device).manual_seed(0)
    weights = torch.randint(1, 1 << 40, (min(DIGESTED, bits.numel()),), device=bits.device, generator=generator)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for place, part in enumerate(bits.split(DIGESTED)):
        total += (2 * place + 1) * (weights[: part.numel()] * part).sum()
    return int(total)


def _raised(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs with every floating tensor in a higher precision, detached."""

    def raised(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(dtype) if x.is_floating_point() else x

    return _mapped(inputs, raised)


def _forward(operator: Operator, inputs: Inputs, dtype: torch.dtype) -> list[torch.Tensor]:
    import torch

    with torch.no_grad():
        return flat(operator.reference(**_raised(inputs, dtype)))


def _references(
    operator: Operator,
    inputs: Inputs,
    pass_: Pass,
    dtype: torch.dtype,
    generator: torch.Generator | None,
    given: Sequence[torch.Tensor] | None = None,
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """The gradients of the outputs, drawn where none are given, and the right answer of a pass."""
    if pass_ == "forward":
        return (), _forward(operator, inputs, dtype)
    gradients, references = _backward(operator, inputs, dtype, generator, given)
    if pass_ == "forward_backward":
        references = [*_forward(operator, inputs, dtype), *references]
    return gradients, references


def _unanswered(
    operator: Operator, inputs: Inputs, pass_: Pass, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """The gradients of the outputs alone, which have the shapes that a forward pass gives."""
    import torch

    if pass_ == "forward":
        return ()
    with torch.no_grad():
        outputs = flat(operator.reference(**_raised(inputs, torch.float32)))
    return _drawn(operator, inputs, outputs, generator)


def _drawn(
    operator: Operator, inputs: Inputs, outputs: Sequence[torch.Tensor], generator: torch.Generator | None
) -> tuple[torch.Tensor, ...]:
    """Gradients of such outputs, random, in the inputs' dtype and stored as an input that the operator names."""
    import torch

    like = inputs[operator.gradients[0]].dtype

    def drawn(x: torch.Tensor) -> torch.Tensor:
        order = list(range(x.dim()))
        if operator.stored_as is not None:
            strides = inputs[operator.stored_as].stride()
            order.sort(key=lambda i: -strides[i])
        empty = torch.empty([x.shape[i] for i in order], dtype=like, device=x.device)
        return empty.permute([order.index(i) for i in range(x.dim())]).normal_(generator=generator)

    return tuple(map(drawn, outputs))


def _backward(
    operator: Operator,
    inputs: Inputs,
    dtype: torch.dtype,
    generator: torch.Generator | None,
    given: Sequence[torch.Tensor] | None,
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """Gradients of the outputs, random in the inputs' dtype if not given, and those of the inputs for them."""
    import torch

    raised = _raised(inputs, dtype)
    leaves = [raised[name].requires_grad_(True) for name in operator.differentiated(inputs)]
    outputs = flat(operator.reference(**raised))
    gradients = tuple(given or ()) or _drawn(operator, inputs, outputs, generator)
    references = torch.autograd.grad(outputs, leaves, [x.to(dtype) for x in gradients])
    return gradients, [x.detach() for x in references]
