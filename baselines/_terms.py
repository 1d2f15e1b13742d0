"""The terms on which a library takes part, said once for all files here.

A library may force work on its user beside its own: a copy of what it overwrites, inputs side by side or in
another order. That work is inside the call, because without it the call does not answer the case, and it is
named: `forcing(call, conversion)` sets `call.conversion`, which takes the operator's inputs by keyword and does
that part alone. The suite times it alone too, in forward passes, as the column `conversion_ms` (`conv ms` in
tables); the time of the call is what the user pays, conversion included. In passes with gradients the
conversion has a part in backward that this function does not do, so there it is not timed. A strided view that
the library takes as it is costs nothing and is no conversion.

Of a weight that a model keeps, what a library makes once when it loads the model is made once here too, and not in
each call: `keeping`.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]
Factory = Callable[[Any], Call]
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What libraries call a case's dtype; of torch an attribute."""


def forcing(call: Call, conversion: Call) -> Call:
    """`call`, which does `conversion` as a part of its work."""
    call.conversion = conversion  # type: ignore[attr-defined]  # functions take attributes
    return call


def telling(call: Call, **functions: Callable[..., float]) -> Call:
    """`call`, which says of itself what the suite cannot see, by metric: `tiles_left_out=function`, of the
    operator's inputs by keyword. A function that cannot say raises `NotImplementedError` with the reason.
    """
    for name, function in functions.items():
        setattr(call, name, function)
    return call


def keeping(prepare: Call, *names: str) -> Call:
    """What `prepare` makes of the inputs `names`, weights that a model keeps (`Operator.weights`): made once, as
    when a model is loaded, and anew where PyTorch counts a write to one of them since, or it lies elsewhere.
    """
    held: tuple[Any, Any] | None = None

    def prepared(**inputs: Any) -> Any:
        nonlocal held
        given = {name: inputs[name] for name in names}
        at = [(x.data_ptr(), x._version) for x in given.values() if x is not None]
        if held is None or held[0] != at:
            held = None  # its memory first
            held = at, prepare(**given)
        return held[1]

    return prepared


def sparing(call: Call) -> Call:
    """`call` for a library whose backward pass overwrites what forward saved: it gets copies of that.

    So a gradient can be asked for twice, and inputs that were saved as they are stay what they were.
    """

    def spared(**inputs: Any) -> Any:
        import torch

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, torch.clone):
            return call(**inputs)

    return spared


def forward_only(library: str) -> Callable[[Factory], Factory]:
    """For a factory of a library that has no backward pass of the operator."""

    def decorate(factory: Factory) -> Factory:
        def checked(case: Any) -> Call:
            if case.pass_ != "forward":
                raise NotImplementedError(f"{library} has no backward pass of it")
            return factory(case)

        checked.__doc__ = factory.__doc__
        return checked

    return decorate


def refusing(call: Call, *errors: type[Exception], saying: str | tuple[str, ...] = ()) -> Call:
    """`call`, whose errors of these types at its first run mean that the library does not take the case.

    Only what checks of arguments raise may be named: `AssertionError`, `ValueError`, `TypeError`. A RuntimeError
    is also what PyTorch raises when the device fails or its memory is full: of a library that refuses by one,
    `saying` is a part of the words it does that with, or several such.
    """
    words = (saying,) if isinstance(saying, str) else saying
    taken = False

    def checked(**inputs: Any) -> Any:
        nonlocal taken
        if taken:
            return call(**inputs)
        try:
            result = call(**inputs)
        except Exception as error:
            said = isinstance(error, RuntimeError) and any(x in str(error) for x in words)
            if not (said or isinstance(error, errors)):
                raise
            raise NotImplementedError(_said(error)) from error
        taken = True
        return result

    if hasattr(call, "conversion"):
        return forcing(checked, call.conversion)
    return checked


def _said(error: Exception) -> str:
    """An error's message, or the line that raised it: assertions are often bare."""
    message = str(error).strip()
    if message:
        return message.splitlines()[0]
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return type(error).__name__
    return linecache.getline(frame.tb_frame.f_code.co_filename, frame.tb_lineno).strip() or type(error).__name__
