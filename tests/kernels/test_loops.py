"""What Triton takes for unchanged in a loop though it is not, and no interpreter or simulator shows.

Triton finds what a loop carries by running its body once: a name that then is the very value that it was before
is not carried. So with `before = cursor` in front of a loop of `before = cursor; cursor = cursor.next()`, a use of
`before` in it sees the first cursor each time. A kernel that releases its stages so waits for ever.
"""

from __future__ import annotations

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"


def aliases(nodes: list[ast.stmt]) -> dict[str, str]:
    """The plain names and attributes that names are assigned, in these statements and those inside them."""
    return {
        node.targets[0].id: ast.dump(node.value)
        for statement in nodes
        for node in ast.walk(statement)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Name | ast.Attribute)
    }


def lost(source: str) -> list[str]:
    """Names that begin as what a loop assigns them again."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not any(
            "jit" in ast.dump(x) for x in function.decorator_list
        ):
            continue
        for block in (getattr(node, "body", []) for node in ast.walk(function)):
            for index, node in enumerate(block if isinstance(block, list) else []):
                if isinstance(node, ast.For | ast.While):
                    before, inside = aliases(block[:index]), aliases(node.body)
                    found += [
                        f"{function.name}: {x}" for x in before.keys() & inside.keys() if before[x] == inside[x]
                    ]
    return found


def test_finds_it():
    loop = "@jit\ndef f(cursor):\n    before = {}\n    while more:\n        use(before)\n        before = cursor\n"
    assert lost(loop.format("cursor")) == ["f: before"]
    assert lost(loop.format("cursor + 0")) == []


def test_no_kernel_loses_a_name():
    assert {x.name: found for x in KERNELS.rglob("*.py") if (found := lost(x.read_text()))} == {}
