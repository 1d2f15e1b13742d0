"""vLLM's engine in this process: what is asked of it, how its tokens and logits are read; on a stand-in of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernelmark.baselines import _vllm_engine, vllm
from kernelmark.baselines._vllm_engine import Generate, Given, cache_bytes

V = 11


def logits_after(place, last):
    """What the stand-in's model says after a token at a place: a row that depends on both."""
    return torch.linspace(0, 1, V).roll(3 * int(last) + int(place))


class Sampler:
    penalties = "its own"

    def __call__(self, logits, batch):
        return logits.argmax(-1)


class Engine:
    """Reads prompts in pieces of `most` tokens a step, then a token of each, as the scheduler does."""

    def __init__(self, most):
        self.most, self.requests, self.runner = most, {}, SimpleNamespace(sampler=Sampler())

    def add_request(self, name, prompt, params):
        assert prompt["type"] == "token"
        assert params.temperature == 0
        assert params.ignore_eos
        self.requests[f"{name}-7f"] = SimpleNamespace(
            tokens=list(prompt["prompt_token_ids"]), read=0, new=0, asked=params.max_tokens, name=name
        )
        return f"{name}-7f"

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        left, here = self.most, []
        for name, x in self.requests.items():
            if count := min(left, len(x.tokens) - x.read):
                left, x.read = left - count, x.read + count
                here.append((name, x))
        here.reverse()  # an order of its own
        positions = torch.tensor([x.read - 1 for _, x in here])
        batch = SimpleNamespace(
            req_ids=[name for name, _ in here], positions=positions, logits_indices=torch.arange(len(here))
        )
        logits = torch.stack([logits_after(x.read - 1, x.tokens[x.read - 1]) for _, x in here])
        chosen = self.runner.sampler(logits, batch).tolist()
        out = []
        for (name, x), token in zip(here, chosen, strict=True):
            if x.read < len(x.tokens):
                continue
            x.tokens.append(token)
            x.new += 1
            out.append(SimpleNamespace(request_id=x.name, outputs=[SimpleNamespace(token_ids=[token])]))
            if x.new == x.asked:
                del self.requests[name]
        return out


@pytest.fixture
def system(monkeypatch):
    package, parameters = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.SamplingParams = SimpleNamespace
    parameters.RequestOutputKind = SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.inference_mode())
    found = Generate()
    found._engine, found._count, found._beside = Engine(7), 0, None
    found._runner = found._engine.runner
    return found


def greedy(prompt, N):
    rows = []
    for row in prompt.tolist():
        for _ in range(N):
            row.append(int(logits_after(len(row) - 1, row[-1]).argmax()))
        rows.append(row[prompt.shape[1] :])
    return torch.tensor(rows)


def test_generates_and_stamps_when_every_sequence_has_a_token(system):
    prompt = torch.arange(15).view(3, 5) % V
    stamps = []
    tokens = system.generate(prompt, 4, lambda: stamps.append(len(system._engine.requests)))
    assert tokens.tolist() == greedy(prompt, 4).tolist()
    assert len(stamps) == 4
    assert system.generate(prompt.flip(0), 4, lambda: None).tolist() == tokens.flip(0).tolist()


def test_given_tokens_follow_by_its_own_steps(system):
    prompt, given = torch.arange(15).view(3, 5) % V, torch.tensor([[1, 2], [3, 4], [5, 6]])
    sampler = system._runner.sampler
    got = system.forced(prompt, given)
    wanted = torch.stack(
        [
            torch.stack([logits_after(4 + i, token) for i, token in enumerate([row[-1], *more])])
            for row, more in zip(prompt.tolist(), given.tolist(), strict=True)
        ]
    )
    assert torch.equal(got, wanted)
    assert system._runner.sampler is sampler


def test_a_sampler_that_is_asked_for_more_gives_it():
    assert Given(Sampler(), {}, 1, []).penalties == "its own"


def test_cache_of_whole_blocks():
    c = SimpleNamespace(layers=2, kv_heads=3, head=8)
    token = 2 * 2 * 3 * 8 * 2
    assert cache_bytes(c, 64, 4160, 2) == token * 16 * (64 * 261 + 1)
    assert cache_bytes(c, 1, 100, 2) == token * (_vllm_engine.LONGEST + 16)


def test_an_encoder_without_logits_says_so():
    with pytest.raises(NotImplementedError, match="embeddings"):
        vllm.forward(None)


def test_rows_say_which_shared_libraries_are_missing_or_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that gets a part of vLLM measures that part."""
    (tmp_path / "lib").mkdir()
    for name in ("whole.so", "cut.so", "code.py"):
        (tmp_path / "lib" / name).write_bytes(b"1234")
    described = tmp_path / "lib-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: lib\nVersion: 1.0\n")
    files = ("lib/whole.so,,4", "lib/cut.so,,9", "lib/gone.so,,4", "lib/code.py,,7")
    (described / "RECORD").write_text("\n".join(files))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _vllm_engine.trimmed("lib") == (
        "trimmed: 2 of lib's 3 shared libraries are missing or cut: cut.so, gone.so",
    )
    (described / "RECORD").write_text("lib/whole.so,,4")
    assert _vllm_engine.trimmed("lib") == ()
    assert _vllm_engine.trimmed("no-such-distribution") == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_server_is_told_the_dtype_of_its_weights(key, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"{key}": "float32"}}')
    argv = vllm.serve(None).command(tmp_path, 8123, 64, "cuda")
    assert argv[argv.index("--dtype") + 1] == "float32"


@pytest.mark.parametrize("installed", [True, False])
def test_a_server_without_flashinfer_is_told_so_and_its_rows_say_it(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    found = SimpleNamespace() if installed else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found if name == "flashinfer" else None)
    system, name = vllm.serve(None), "VLLM_USE_FLASHINFER_SAMPLER"
    system.command(tmp_path, 8123, 64, "cuda")
    assert system.variables == {**vllm._Serve.variables, **({} if installed else {name: "0"})}
    assert any("flashinfer" in x for x in system.remarks) is not installed
    assert name not in vllm._Serve.variables
