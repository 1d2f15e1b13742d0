"""lm-evaluation-harness on logits of bytes: its interface of a language model, and one of its tasks on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...registry.errors import first_line
from ..measure.verify import Unavailable

if TYPE_CHECKING:
    import torch

Logits = Callable[["torch.Tensor"], "torch.Tensor"]


def score(logits: Logits, B: int, S: int, device: Any, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """(log-likelihood in nats, whether greedy decoding gives it) of each (context, continuation).

    Of what is longer than S the last bytes count. Rows are filled up on the right, which no byte before can see.
    """
    import torch

    found: list[tuple[float, bool]] = []
    for first in range(0, len(pairs), B):
        some = pairs[first : first + B]
        tokens = torch.zeros(B, S, dtype=torch.int64)
        spans = []
        for row, (context, continuation) in enumerate(some):
            tail = continuation.encode()
            whole = (context.encode() or b"\n") + tail
            whole = whole[-(S + 1) :]
            given = torch.tensor(list(whole))
            tokens[row, : len(whole) - 1] = given[:-1]
            spans.append((max(0, len(whole) - 1 - len(tail)), given[1:]))
        likely = logits(tokens.to(device)).log_softmax(-1).cpu()
        for row, (begin, wanted) in enumerate(spans):
            own = likely[row, begin : len(wanted)]
            wanted = wanted[begin:]
            total = float(own.gather(-1, wanted[:, None]).sum())
            found.append((total, bool((own.argmax(-1) == wanted).all())))
    return found


def language_model(logits: Logits, B: int, S: int, device: Any) -> Any:
    """An `lm_eval.api.model.LM`. Raises ImportError where lm_eval is missing."""
    from lm_eval.api.model import LM

    class Bytes(LM):  # type: ignore[misc]  # lm_eval is not installed where types are checked
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return score(logits, B, S, device, [x.args for x in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            found = []
            for request in requests:
                data = request.args[0]
                pieces = [data[x : x + S] for x in range(0, len(data), S)]
                found.append(sum(x for x, _ in score(logits, B, S, device, [("", x) for x in pieces])))
            return found

        def generate_until(self, requests: list[Any]) -> list[str]:
            raise NotImplementedError("a checkpoint of bytes is scored, it does not generate")

    return Bytes()


def accuracy(task: str, model: Any, most: int) -> float:
    """The accuracy of a task of lm-eval's own over its first examples. Raises `Unavailable` where its data are
    not to be had.
    """
    from lm_eval import simple_evaluate

    try:
        found = simple_evaluate(model=model, tasks=[task], limit=most, bootstrap_iters=0, log_samples=False)
    except (OSError, ValueError, ConnectionError) as error:  # what `datasets` raises without network
        said = first_line(error, "not here")[:200]
        raise Unavailable(f"data: {task}: {said}") from None
    return float(found["results"][task]["acc,none"])
