"""The corpus in GPT-2's tokens: with a stand-in of tiktoken, as neither it nor its file of merges need be here."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.record import Measurement
from kernelmark.suite.corpus import encoding, place
from kernelmark.suite.corpus.build import sha256
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Unavailable
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _text, converge

MERGES = b"\n".join(base64.b64encode(bytes([97 + i])) + b" %d" % i for i in range(26)) + b"\nYWI= 26\n"
TRAIN, VALIDATION = b"abc\0xyz ab\0" * 40, b"ab" * 500 + b"\0"


class Encoding:
    """By `ab` and letters; what it does not know is 30."""

    def __init__(
        self, name: str, pat_str: str, mergeable_ranks: dict[bytes, int], special_tokens: dict[str, int]
    ) -> None:
        assert special_tokens == {"<|endoftext|>": encoding.BETWEEN}
        self.ranks = mergeable_ranks

    def encode_ordinary_batch(self, texts: list[str]) -> list[list[int]]:
        return [self._one(x.encode()) for x in texts]

    def _one(self, data: bytes) -> list[int]:
        found, at = [], 0
        while at < len(data):
            size = 2 if data[at : at + 2] in self.ranks else 1
            found.append(self.ranks.get(data[at : at + size], 30))
            at += size
        return found


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a corpus of two parts, and an encoder beside it."""
    tiktoken = ModuleType("tiktoken")
    tiktoken.Encoding = Encoding  # type: ignore[attr-defined]  # modules take attributes
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken)
    monkeypatch.setattr(encoding, "ENCODER", sha256(MERGES))
    monkeypatch.delenv(encoding.VARIABLE, raising=False)
    parts = {"train": SimpleNamespace(bytes=len(TRAIN)), "validation": SimpleNamespace(bytes=len(VALIDATION))}
    monkeypatch.setattr(place, "load", lambda: SimpleNamespace(parts=parts, digest="d"))
    monkeypatch.setattr(place, "folder", lambda manifest=None: tmp_path)
    (tmp_path / "merges").write_bytes(MERGES)
    (tmp_path / "train.txt").write_bytes(TRAIN)
    (tmp_path / "validation.txt").write_bytes(VALIDATION)
    return tmp_path


def test_texts_are_tokens_with_one_between(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"data: .*kernelmark corpus encode.*openai-whisper"):
        _text.source(_text.ENCODED)
    monkeypatch.setattr(encoding, "TOGETHER", 16)
    found = encoding.encode(place.load(), corpus, encoding.encoder(corpus / "merges"))
    given = _text.source(_text.ENCODED)
    assert found == {"train": 9 * 40, "validation": 501}
    assert given.train.tolist() == [26, 2, encoding.BETWEEN, 23, 24, 25, 30, 26, encoding.BETWEEN] * 40
    assert given.validation.tolist() == [26] * 500 + [encoding.BETWEEN]
    assert given.share == 501 / 1001
    assert given.train.dtype == np.uint16
    assert sorted(x.suffix for x in corpus.iterdir()) == ["", ".txt", ".txt", ".u16", ".u16"]


def test_an_encoder_that_is_missing_or_anothers_says_what_to_do(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=encoding.VARIABLE):
        encoding.encoder()
    (corpus / "merges").write_bytes(MERGES + b"eg== 27\n")
    monkeypatch.setenv(encoding.VARIABLE, str(corpus / "merges"))
    with pytest.raises(InputError, match="merges has sha256"):
        encoding.encoder()
    (corpus / "merges").write_bytes(MERGES)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(InputError, match="needs the package tiktoken"):
        encoding.encoder()


def test_bits_are_of_bytes_and_a_model_has_room_for_all_tokens(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding.encode(place.load(), corpus, encoding.encoder(corpus / "merges"))
    axes = {"B": 2, "S": 16, "N": 5}
    options = {"model": "gpt2-tiny", "data": _text.ENCODED, "target": 4.0}
    case = converge.WORKLOAD.case(axes, "fp32", "program", **options)
    with pytest.raises(NotImplementedError, match="512 tokens, GPT-2's are 50257"):
        converge.assemble(case, Assembly(System("arm"), converge.catalog()))
    asked = []

    def measure(case: Any, *rest: Any) -> Measurement:
        asked.append(case.options["target"])
        bits = dict.fromkeys(("bits_per_byte", "bits_by_step", "bits_per_byte@1000", "last_quarter_bits"), (4.0,))
        samples = {**bits, "copying_bits": (2.0,), "needle_bits": (3.0,), "training_loss": (5.0,)}
        return Measurement(samples=samples, timer="own clock")

    monkeypatch.setattr(converge, "measure", measure)
    session = Session(Cpu(), 1, 0, Sampling(), Stages())
    told = converge.measured(case, None, session, None).samples  # type: ignore[arg-type]  # unused
    share = 501 / 1001
    assert asked == [pytest.approx(4.0 / share)]
    assert told["bits_per_byte@1000"] == told["bits_by_step"] == pytest.approx((4.0 * share,), rel=1e-5)
    assert told["copying_bits"] == pytest.approx((2.0 * share,), rel=1e-5)
    assert (told["needle_bits"], told["training_loss"]) == ((3.0,), (5.0,))
