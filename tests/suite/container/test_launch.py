"""What a container says on its way out."""

from __future__ import annotations

from kernelmark.suite.container.launch import _stream


class Talking:
    """A container whose output comes in pieces of so many bytes."""

    def __init__(self, text: str, size: int) -> None:
        data = text.encode()
        self.pieces = [data[i : i + size] for i in range(0, len(data), size)]

    def attach(self, **how: bool) -> list[bytes]:
        return self.pieces

    def start(self) -> None:
        pass


def test_letters_cut_by_a_chunk_are_whole_again(capsys):
    text = "── ± 1.08× µs\n"
    assert _stream(Talking(text, 1), quiet=False) == text
    assert capsys.readouterr().out == text
