"""lm-evaluation-harness on logits of bytes: its interface of a language model, and tasks: its own, and two of the
corpus, which need no download.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
GENERATED = 256
"""Bytes that are generated where a task does not say how many."""
LOADERS = ("datasets", "huggingface_hub", "httpx", "requests", "urllib3", "fsspec")
"""Packages by which lm-eval has its data: what they raise says that the data are not here."""


def score(logits: Logits, B: int, S: int, device: Any, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """(log-likelihood in nats, whether greedy decoding gives it) of each (context, continuation).

    Of what is longer than S the last bytes count. Rows are filled up on the right, which no byte before can see.
    """
    import torch

    found: list[tuple[float, bool]] = []
    for first in range(0, len(pairs), B):
        rows, spans = [], []
        for context, continuation in pairs[first : first + B]:
            tail = continuation.encode()
            whole = ((context.encode() or b"\n") + tail)[-(S + 1) :]
            rows.append(whole[:-1])
            spans.append((max(0, len(whole) - 1 - len(tail)), torch.tensor(list(whole[1:]))))
        likely = logits(_filled(rows, B, S).to(device)).log_softmax(-1).cpu()
        for row, (begin, wanted) in enumerate(spans):
            own = likely[row, begin : len(wanted)]
            wanted = wanted[begin:]
            total = float(own.gather(-1, wanted[:, None]).sum())
            found.append((total, bool((own.argmax(-1) == wanted).all())))
    return found


def continued(
    logits: Logits, B: int, S: int, device: Any, asked: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[str]:
    """What follows each context by greedy decoding, up to one of the strings `until` or `max_gen_toks` bytes.

    Of what is longer than S the last bytes count. Raises NotImplementedError where something is to be drawn.
    """
    found: list[str] = []
    for first in range(0, len(asked), B):
        rows = [_Continued(*x) for x in asked[first : first + B]]
        while any(x.more for x in rows):
            seen = [bytes(x.text[-S:]) for x in rows]
            tokens = _filled(seen, B, S)
            likely = logits(tokens.to(device))[:, :, :256].argmax(-1).cpu()
            for row, (x, own) in enumerate(zip(rows, seen, strict=True)):
                if x.more:
                    x.text.append(int(likely[row, len(own) - 1]))
        found += [x.told for x in rows]
    return found


@dataclass
class _Continued:
    """A context and what follows it so far."""

    context: str
    asked: Mapping[str, Any]
    text: bytearray = field(init=False)
    before: int = field(init=False)

    def __post_init__(self) -> None:
        if self.asked.get("do_sample") or self.asked.get("temperature"):
            raise NotImplementedError("a checkpoint of bytes generates greedily; this task draws")
        self.text = bytearray(self.context.encode() or b"\n")
        self.before = len(self.text)

    @property
    def ends(self) -> list[str]:
        """The strings that end it."""
        given = self.asked.get("until") or []
        return [x for x in ([given] if isinstance(given, str) else given) if x]

    @property
    def written(self) -> str:
        """All that was generated."""
        return self.text[self.before :].decode("utf-8", "replace")

    @property
    def more(self) -> bool:
        """Whether it goes on."""
        most = int(self.asked.get("max_gen_toks", GENERATED))
        return len(self.text) - self.before < most and not any(x in self.written for x in self.ends)

    @property
    def told(self) -> str:
        """What was generated before the first end."""
        written = self.written
        return written[: min((at for x in self.ends if (at := written.find(x)) >= 0), default=len(written))]


def _filled(rows: Sequence[bytes], B: int, S: int) -> torch.Tensor:
    """int64 (B, S): rows of bytes, filled up on the right, which no byte before can see."""
    import torch

    tokens = torch.zeros(B, S, dtype=torch.int64)
    for row, own in enumerate(rows):
        tokens[row, : len(own)] = torch.tensor(list(own))
    return tokens


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
            return continued(logits, B, S, device, [x.args for x in requests])

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

    given: dict[str, Any] = {"limit": most, "bootstrap_iters": 0, "log_samples": False}
    if isinstance(task, str):
        name = task
    else:
        from lm_eval.tasks import TaskManager

        name = task.task_name
        # Reading what tasks the library has takes it half a minute; this one is none of them.
        given["task_manager"] = TaskManager(include_defaults=False)
    try:
        found = simple_evaluate(model=model, tasks=[task], **given)
    except Exception as error:
        if not (isinstance(error, OSError) or _loading(error)):
            raise
        said = first_line(error, "not here")[:200]
        raise Unavailable(
            f"data: {name}: {said}; fetch it where there is a network, into HF_DATASETS_CACHE"
        ) from None
    return float(found["results"][name]["acc,none"])


def _loading(error: BaseException) -> bool:
    """Whether an exception came out of one of `LOADERS`, whatever its type: some are ValueErrors."""
    frame = error.__traceback__
    while frame is not None:
        if str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in LOADERS:
            return True
        frame = frame.tb_next
    return False
