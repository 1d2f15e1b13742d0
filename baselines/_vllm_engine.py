"""vLLM's engine in this process, on a model's weights of ours: what `generate` measures of it."""

from __future__ import annotations

import csv
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from . import _transformers_models
from ._terms import DTYPES

ALONE = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""It asks nobody outside this machine, its own address among it."""
VARIABLES = {**ALONE, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Of this process, before vllm is imported: the engine in it, so that its logits can be read."""
BLOCK = 16
"""Tokens of a block of its cache."""
LONGEST = 16384
"""Tokens that every engine is made for at the least. vLLM compiles a model anew for another greatest length: cases
share what was compiled for one.
"""
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def cache_bytes(c: Any, B: int, longest: int, itemsize: int) -> int:
    """Bytes of a cache that holds B sequences of `longest` tokens, at least one of `LONGEST`, in whole blocks; a
    block more for each sequence, which is scheduled a step ahead, and the block that is nobody's.
    """
    blocks = max(B * (-(-longest // BLOCK) + 1), -(-max(longest, LONGEST) // BLOCK)) + 1
    return int(2 * c.layers * c.kv_heads * c.head * itemsize * BLOCK * blocks)


def trimmed(distribution: str = "vllm") -> tuple[str, ...]:
    """What rows of it say where it is not installed as a whole: which of its shared libraries are missing, or have
    another size than the package says.
    """
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:  # a checkout on the path has no list to hold it to
        return ()
    # From Python 3.12 on `files` leaves out those that are missing.
    listed = csv.reader((found.read_text("RECORD") or "").splitlines())
    own = {Path(str(found.locate_file(name))): size for name, _, size in listed if name.endswith(".so")}
    lost = [at for at, size in own.items() if not at.exists() or str(at.stat().st_size) != size]
    names = ", ".join(sorted({x.name for x in lost}))
    said = f"trimmed: {len(lost)} of {distribution}'s {len(own)} shared libraries are missing or cut: {names}"
    return (said,) if lost else ()


class Given:
    """In the place of an engine's sampler: keeps the logits after the prompt and after each given token, and makes
    the next given one the largest. `rows` names each request's row; `kept` holds logits (V) by row and step.
    """

    def __init__(self, sampler: Any, rows: Mapping[str, int], S: int, given: list[list[int]]) -> None:
        self._sampler, self._rows, self._first, self._given = sampler, rows, S - 1, given
        self.kept: list[dict[int, Any]] = [{} for _ in given]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: Any, batch: Any) -> Any:
        places = batch.positions[batch.logits_indices].tolist()
        for number, (name, place) in enumerate(zip(batch.req_ids, places, strict=True)):
            row, step = self._rows[name], place - self._first
            if step < 0:  # a piece of the prompt, after which nothing is chosen
                continue
            self.kept[row][step] = logits[number].clone()
            if step < len(self._given[row]):
                logits[number].fill_(float("-inf"))
                logits[number, self._given[row][step]] = 0.0
        return self._sampler(logits, batch)


class Generate:
    """`LLMEngine`, stepped here, as `LLM` has it but for prefixes, which it would keep from one generation to the
    next: scheduled a step ahead, compiled, in CUDA graphs. Prompts are read in pieces as its scheduler cuts them,
    so sequences may be some tokens apart; a token is there when every sequence has it.
    """

    cache_bytes: int | None = None
    remarks: tuple[str, ...] = ()

    def load(self, chosen: Any, B: int, S: int, N: int, dtype: str, weights: Any) -> None:
        """Builds the engine, then writes our weights over those that it drew."""
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        import torch
        from vllm import LLM

        self.remarks = trimmed()
        longest = max(S + N, LONGEST)
        config = _transformers_models.configuration(chosen, longest)
        if config.model_type not in ARCHITECTURES:
            raise NotImplementedError(f"this baseline generates with {', '.join(ARCHITECTURES)}")
        config.architectures = [ARCHITECTURES[config.model_type]]
        self.cache_bytes = cache_bytes(chosen.configuration, B, S + N, 4 if dtype == "fp32" else 2)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            llm = LLM(
                folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=DTYPES[dtype],
                max_model_len=longest,
                max_num_seqs=B,
                block_size=BLOCK,
                kv_cache_memory_bytes=self.cache_bytes,
                gpu_memory_utilization=0.2,  # has to be free at the start, no more: the cache has its bytes
                enable_prefix_caching=False,
            )
        self._engine: Any = llm.llm_engine
        self._end = weakref.finalize(self, _shut, llm)
        self._runner: Any = llm.collective_rpc(lambda worker: worker.model_runner)[0]
        named = _transformers_models.renamed(chosen.model.name, weights)
        with torch.no_grad():
            llm.apply_model(lambda model: model.load_weights(named))
        self._count = 0
        self._beside = torch.cuda.Stream()

    def _ask(self, prompt: Any, N: int) -> dict[str, int]:
        """Gives the engine prompts (B, S), for N tokens each; rows by the engine's names of the requests."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        found = {}
        for row, tokens in enumerate(prompt.tolist()):
            how = SamplingParams(
                temperature=0.0,
                max_tokens=N,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            name = f"{self._count}-{row}"
            found[self._engine.add_request(name, {"type": "token", "prompt_token_ids": tokens}, how)] = row
        self._count += 1
        return found

    def _steps(self, B: int, step: Callable[[int], None]) -> list[list[int]]:
        """Runs the engine to the end of all requests; `step` is told how many tokens every sequence has."""
        found: list[list[int]] = [[] for _ in range(B)]
        while self._engine.has_unfinished_requests():
            for one in self._engine.step():
                found[int(one.request_id.split("-")[1])] += one.outputs[0].token_ids
            step(min(map(len, found)))
        return found

    def generate(self, prompt: Any, N: int, stamp: Callable[[], None]) -> Any:
        """N tokens (B, N)."""
        import torch

        self._ask(prompt, N)
        stamped = 0

        def step(there: int) -> None:
            nonlocal stamped
            # The engine's stream holds the next step already: on another, which is idle, an event is of now.
            with torch.cuda.stream(self._beside):
                for _ in range(stamped, there):
                    stamp()
            stamped = there

        return torch.tensor(self._steps(len(prompt), step), device=prompt.device)

    def forced(self, prompt: Any, following: Any) -> Any:
        """Logits (B, n + 1, V) after the prompt and given tokens, by the engine's own decode steps."""
        import torch

        sampler = self._runner.sampler
        rows = self._ask(prompt, following.shape[1] + 1)
        given = Given(sampler, rows, prompt.shape[1], following.tolist())
        self._runner.sampler = given
        try:
            self._steps(len(prompt), lambda there: None)
        finally:
            self._runner.sampler = sampler
        steps = range(following.shape[1] + 1)
        return torch.stack([torch.stack([row[x] for x in steps]) for row in given.kept])


def _shut(llm: Any) -> None:
    """Gives back what an engine holds."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
