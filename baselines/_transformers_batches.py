"""Transformers' continuous batching, what `generate_batch` runs on: what `generate` measures of it."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

from . import _transformers_models

PAGE = 256
"""Tokens of a page of its cache, its default."""
WAIT_S = 600.0
"""For a token of a request; beyond it its thread is taken for dead."""


def given_logits(given: list[list[int]]) -> Any:
    """A processor of logits that keeps those of each request and step, and makes the next given token the largest.
    Requests are named by their generation and their rows.
    """
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingLogitsProcessor,
    )

    class Given(ContinuousBatchingLogitsProcessor):
        supported_kwargs: dict[str, type] = {}  # noqa: RUF012  # as its class has it
        ignored_kwargs: tuple[str, ...] = ()

        def __init__(self) -> None:
            self.kept: list[list[Any]] = [[] for _ in given]
            self._rows: list[int] = []

        def fill_defaults(self, int32_tensor: Any) -> None:
            int32_tensor.zero_()

        def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Any:
            import torch

            self._rows = [_row(x.state.request_id) for x in requests_with_new_token]
            return torch.zeros(len(self._rows), dtype=torch.int32)

        def __call__(self, scores: Any, tensor_arg: Any) -> Any:
            for number, row in enumerate(self._rows):
                kept = self.kept[row]
                kept.append(scores[number].clone())
                if len(kept) <= len(given[row]):
                    scores[number].fill_(float("-inf"))
                    scores[number, given[row][len(kept) - 1]] = 0.0
            return scores

    return Given()


def _page() -> str:
    """What its settings call a page's tokens: `block_size` before 5.18."""
    from transformers import ContinuousBatchingConfig

    return next(x for x in ("page_size", "block_size") if x in signature(ContinuousBatchingConfig).parameters)


class Generate:
    """Its manager, which works in a thread of its own and as it chooses by itself: attention, graphs, steps.
    Prefixes are not kept from one generation to the next. A token is there when every sequence has it.
    """

    cache_bytes: int | None = None

    def load(self, chosen: Any, B: int, S: int, N: int, dtype: str, weights: Any) -> None:
        """Builds the model, its weights ours."""
        from transformers import GenerationConfig

        if chosen.model.name not in ("llama", "gpt2"):
            raise NotImplementedError(f"continuous batching takes models with attention, not {chosen.model.name}")
        c = chosen.configuration
        blocks = B * (-(-(S + N) // PAGE) + 1) + 1
        self._model = _transformers_models.build(chosen, S + N, weights)
        self._device = self._model.device
        kind: Any = GenerationConfig  # it is not annotated
        self._config = kind(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._sizes: dict[str, Any] = {
            _page(): PAGE,
            "num_blocks": blocks,
            "max_batch_tokens": max(B, min(B * S, 8192)),
        }
        heads = getattr(c, "kv_heads", c.heads)
        itemsize = next(self._model.parameters()).element_size()
        self.cache_bytes = 2 * c.layers * heads * c.head * itemsize * PAGE * blocks
        self._manager: Any = None
        self._count = 0

    def _made(self, processors: int = 0, **changed: Any) -> Any:
        """A manager that runs. Of processors of ours it counts none by itself."""
        from transformers import ContinuousBatchingConfig

        how = ContinuousBatchingConfig(allow_block_sharing=False, **self._sizes, **changed)
        manager = self._model.init_continuous_batching(
            generation_config=self._config, continuous_batching_config=how
        )
        manager.logit_processor.tensors_required += processors
        manager.start()
        return manager

    def _tokens(self, manager: Any, prompt: Any, N: int, there: Callable[[int], None]) -> list[list[int]]:
        """N tokens of each row; `there` is told how many every one has."""
        found: list[list[int]] = [[] for _ in prompt]
        self._count += 1
        names = {f"{self._count}-{row}": tokens for row, tokens in enumerate(prompt.tolist())}
        for name, tokens in names.items():
            manager.add_request(tokens, request_id=name, max_new_tokens=N, streaming=True)
        begin = time.monotonic()
        while min(map(len, found)) < N:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("continuous batching ended before its requests did")
                if time.monotonic() - begin > WAIT_S:
                    raise RuntimeError(f"continuous batching gave no token for {WAIT_S:g} s")
                continue
            begin = time.monotonic()
            if result.request_id not in names:  # of a generation that was given up
                continue
            if result.error is not None:
                raise RuntimeError(f"continuous batching: {result.error}")
            found[_row(result.request_id)] = list(result.generated_tokens)
            there(min(map(len, found)))
        return found

    def generate(self, prompt: Any, N: int, stamp: Callable[[], None]) -> Any:
        """N tokens (B, N)."""
        import torch

        if self._manager is None:
            self._manager = self._made()
            weakref.finalize(self, _stop, self._manager)
        stamped = 0

        def there(count: int) -> None:
            nonlocal stamped
            with _beside(self._device):
                for _ in range(stamped, count):
                    stamp()
            stamped = max(stamped, count)

        return torch.tensor(self._tokens(self._manager, prompt, N, there), device=prompt.device)

    def forced(self, prompt: Any, following: Any) -> Any:
        """Logits (B, n + 1, V) after the prompt and given tokens, by a manager without graphs, whose steps
        are read as they are made.
        """
        import torch
        from transformers import LogitsProcessorList

        given = given_logits(following.tolist())
        self._model._get_logits_processor = lambda *_, **__: LogitsProcessorList([given])
        try:
            manager = self._made(1, use_cuda_graph=False, use_async_batching=False)
        finally:
            del self._model._get_logits_processor
        try:
            self._tokens(manager, prompt, following.shape[1] + 1, lambda count: None)
        finally:
            _stop(manager)
        return torch.stack([torch.stack(row) for row in given.kept])


@contextlib.contextmanager
def _beside(device: Any) -> Iterator[None]:
    """Another stream, which is idle: an event on it is of now."""
    import torch

    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def _row(name: str) -> int:
    return int(name.partition("-")[2])


def _stop(manager: Any) -> None:
    manager.stop(block=True, timeout=30)
    manager.destroy()
