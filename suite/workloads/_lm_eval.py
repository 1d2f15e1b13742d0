"""lm-evaluation-harness on logits of bytes: its interface of a language model, and tasks: its own, and two of the
corpus, which need no download.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...registry.errors import first_line
from ..measure.verify import Unavailable

if TYPE_CHECKING:
    import torch

Logits = Callable[["torch.Tensor"], "torch.Tensor"]
MADE = ("corpus_lines", "corpus_repeats")
"""Which of four continuations follows in the text; which one did so before, in the same window."""
CHOICES = 4
CONTINUATION = 24
"""Bytes of one."""


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


def examples(task: str, text: Any, S: int, count: int) -> list[dict[str, Any]]:
    """Multiple choices of one of `MADE`, the same for everyone: context, choices, and which of them is right.

    `text` holds bytes, uint8 (n,); context and choice have at most S.
    """
    chance = random.Random(task)
    size = min(CONTINUATION, S // 4)
    given = S - size if task == "corpus_lines" else (S - size) // 2
    found = []
    for _ in range(count):
        starts = [chance.randrange(len(text) - S) for _ in range(CHOICES)]
        before = bytes(text[starts[0] : starts[0] + given])
        if task == "corpus_lines":
            context, right = before, bytes(text[starts[0] + given : starts[0] + given + size])
        else:
            context, right = before + before[:-size], before[-size:]
        wrong = [bytes(text[x : x + size]) for x in starts[1:]]
        gold = chance.randrange(CHOICES)
        choices = [*wrong[:gold], right, *wrong[gold:]]
        # What is cut in the middle of a character is left out.
        told = [x.decode("utf-8", "ignore") for x in (context, *choices)]
        found.append({"context": told[0], "choices": told[1:], "gold": gold})
    return found


def made(task: str, docs: Sequence[dict[str, Any]]) -> Any:
    """An `lm_eval.api.task.Task` of such examples. Raises ImportError where lm_eval is missing."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import MultipleChoiceTask

    class Made(MultipleChoiceTask):  # type: ignore[misc]  # lm_eval is not installed where types are checked
        VERSION = 1

        def __init__(self) -> None:
            super().__init__()
            self.set_config("task", task)

        def download(self, *_: Any, **__: Any) -> None:
            """There is nothing to be had from elsewhere."""

        def has_training_docs(self) -> bool:
            return False

        def has_validation_docs(self) -> bool:
            return False

        def has_test_docs(self) -> bool:
            return True

        def test_docs(self) -> Sequence[dict[str, Any]]:
            return docs

        def doc_to_text(self, doc: dict[str, Any]) -> str:
            return str(doc["context"])

        def construct_requests(self, doc: dict[str, Any], ctx: str, **given: Any) -> list[Any]:
            """As lm_eval's own without the blank that it puts before a choice: the text goes on."""
            return [
                Instance("loglikelihood", doc, (ctx, choice), i, metadata=given["metadata"])
                for i, choice in enumerate(doc["choices"])
            ]

    return Made()


def accuracy(task: Any, model: Any, most: int) -> float:
    """The accuracy of a task over its first examples: one of lm-eval's own by its name, or what `made` gave.

    Raises `Unavailable` where its data are not to be had.
    """
    from lm_eval import simple_evaluate

    name = task if isinstance(task, str) else task.task_name
    try:
        found = simple_evaluate(model=model, tasks=[task], limit=most, bootstrap_iters=0, log_samples=False)
    except (OSError, ValueError, ConnectionError) as error:  # what `datasets` raises without network
        said = first_line(error, "not here")[:200]
        raise Unavailable(f"data: {name}: {said}") from None
    return float(found["results"][name]["acc,none"])
