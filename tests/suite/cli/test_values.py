"""Values that options take: seeds that a journal can hold, in every command that has one; amounts of memory."""

from __future__ import annotations

import click
import pytest
from kernelmark.registry.store.bounds import SEEDS
from kernelmark.suite.cli import cli
from kernelmark.suite.cli.regression import command
from kernelmark.suite.cli.values import Memory, Seed


def test_what_a_journal_can_hold_is_taken() -> None:
    for seed in (0, -5, *SEEDS):
        assert Seed().convert(str(seed), None, None) == seed


@pytest.mark.parametrize("seed", [SEEDS[0] - 1, SEEDS[1] + 1, "x", "1.5", 10**400])
def test_what_it_cannot_is_refused(seed: object) -> None:
    with pytest.raises(click.BadParameter, match="is not within|is not a valid integer") as error:
        Seed().convert(str(seed), None, None)
    assert len(str(error.value)) < 300


def test_every_command_asks_for_it_so() -> None:
    context = click.Context(cli)
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context)} | {"detector": command}
    types = {name: y.type for name, x in found.items() if x is not None for y in x.params if y.name == "seed"}
    assert {"run", "worth", "judge", "checkpoint", "detector"} <= types.keys()
    assert [name for name, kind in types.items() if not isinstance(kind, Seed)] == []


@pytest.mark.parametrize("size", ["512m", "16g", "1.5G", "16GB", "6291456", "2MB"])
def test_amounts_of_memory_are_dockers(size: str) -> None:
    parse_bytes = pytest.importorskip("docker.utils", reason="the Docker SDK is not installed").parse_bytes
    assert parse_bytes(Memory().convert(f" {size} ", None, None)) > 0


@pytest.mark.parametrize("size", ["junk", "", "-5", "0", "0.0g", "16gib", "1t", "1e3", "²", "inf", "16 gb x"])
def test_what_is_no_amount_of_memory_is_refused(size: str) -> None:
    with pytest.raises(click.BadParameter, match="is no amount of memory"):
        Memory().convert(size, None, None)


def test_every_command_with_a_container_asks_for_memory_so() -> None:
    context = click.Context(cli)
    found = {name: cli.get_command(context, name) for name in ("bench", "container-cost")}
    kinds = [y.type for x in found.values() if x is not None for y in x.params if y.name in ("memory", "shm_size")]
    assert [isinstance(x, Memory) for x in kinds] == [True] * 4
