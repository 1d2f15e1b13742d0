"""What documents, docstrings and comments name is there: files, commands, options, plans, targets of make."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from kernelmark.suite import cli
from kernelmark.suite.cli import regression
from kernelmark.suite.plan import BUILTIN

HERE = Path(__file__).resolve().parents[2]
ROOMS = (
    "suite",
    "kernels",
    "baselines",
    "registry",
    "tests",
    "docs",
    "docker",
    "examples",
    "requirements",
    ".github",
)
ENDINGS = r"md|py|toml|txt|json|ya?ml|html|css|png|svg|sh|cff|jsonl\.gz"
FILES = sorted(
    path
    for path in (*HERE.iterdir(), *(x for room in ROOMS for x in (HERE / room).rglob("*")))
    if path.is_file() and "__pycache__" not in path.parts
)
READ = [x for x in FILES if x.suffix in (".md", ".py", ".toml", ".yml", ".yaml", ".cff") or x.name == "Makefile"]
DOCUMENTS = [x for x in READ if x.suffix == ".md"]
NAMES = {str(path.relative_to(HERE)) for path in FILES}
LAST = {path.name for path in FILES}
NAMED = re.compile(rf"(?<![\w./$()<{{*@-])(?:\.{{1,2}}/)*[\w.-]+(?:/[\w.-]+)*\.(?:{ENDINGS})(?![\w/(*]|\.\w)")
PLACEHOLDER = re.compile(r"\b(NAME|RUN|FILE|SIDE|MACHINE|FOLDER|OPERATOR|FAMILY|JOURNAL)\b")
EXAMPLES = ("swish", "mine", "theirs", "trial", "mylib", "triple", "thrice", "double", "many", "absent", "planted")
"""Names that pages and tests give to files which a reader, or a test, makes."""
ELSEWHERE = {
    "requirements/torch-rocm.txt": "what `make lock-rocm` writes",
    "mamba_ssm/__init__.py": "a library's",
    **dict.fromkeys(
        (
            "configuration_bert.py",
            "llm/bert/model/bert.py",
            "litgpt/config.py",
            "model_preset.py",
            "fms/models/granite.py",
            "mamba_ssm/modules/mamba2.py",
            "gpt/model/ssm.py",
            "olmoe_provider.py",
        ),
        "where a configuration's numbers are from",
    ),
    "after.json": "what a command in a docstring writes",
    "before.json": "what a command in a docstring writes",
    "captured.toml": "what a command writes",
    **dict.fromkeys(("config.toml", "kernelmark/config.toml"), "a user's own"),
    "comment.md": "what a job writes",
    "kernelmark.html": "what a job writes",
    "page.html": "what a command in a page writes",
    "file.json": "an error's form",
    "Canvas.svg": "a method",
    ".gitlab-ci.yml": "the user's",
    ".github/workflows/kernelmark.yml": "the user's",
    ".github/workflows/kernelmark-site.yml": "the user's",
    **dict.fromkeys(
        ("index.html", "public/index.html", "regressions.json"),
        "what a site has",
    ),
}
"""Names that are not those of files of this repository, and what they are."""


def told(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of the lines that a file has for its readers: a document's; a program's comments and
    docstrings.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from enumerate(str(node.value.value).splitlines(), node.lineno)


def there(name: str, path: Path) -> bool:
    """Whether a file names one that exists: from the root, from beside it, or by its last parts."""
    if any((start / name).exists() for start in (HERE, *path.parents) if start.is_relative_to(HERE)):
        return True
    return name in LAST if "/" not in name else any(x.endswith(f"/{name}") for x in NAMES)


def missing(path: Path) -> list[str]:
    """References of a file to files that do not exist."""
    return [
        f"{path.relative_to(HERE)}:{number}: {name}"
        for number, line in told(path)
        for name in NAMED.findall(line)
        if name not in ELSEWHERE
        and not PLACEHOLDER.search(name)
        and Path(name).stem.removeprefix("test_").removesuffix("_torch") not in EXAMPLES
        and not there(name, path)
    ]


@pytest.mark.usefixtures("untraced")  # it reads files, and calls nothing of the house
@pytest.mark.parametrize("room", sorted({path.relative_to(HERE).parts[0] for path in READ}))
def test_files_that_are_named_exist(room):
    here = [x for x in READ if x.relative_to(HERE).parts[0] == room and x.parent != HERE / "docker" / "registry"]
    assert [x for path in here for x in missing(path)] == []


def test_a_file_that_is_not_there_is_found(tmp_path):
    """In a document, a docstring and a comment; not in code, and not where a name stands for any."""
    page = HERE / "docs" / "never-written.md"
    assert not there("reference/regression.md", page)
    assert not there("docs/attention.markdown.md", page)
    assert there("attention.md", page)
    program = tmp_path / "x.py"
    program.write_text('"""See docs/a.md."""\n\n# and b/c.py, not $HOME/d.py, e.py(), FILE.toml\nx = "f/g.py"\n')
    assert [y for _, x in told(program) for y in NAMED.findall(x) if not PLACEHOLDER.search(y)] == [
        "b/c.py",
        "docs/a.md",
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda x: str(x.relative_to(HERE)))
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)  # of prose: a launch in code looks like one
    inside = [x for x in links if "://" not in x and not x.startswith("mailto:")]
    assert [x for x in inside if not (path.parent / x).exists()] == []


def commands() -> list[tuple[str, list[str]]]:
    """Every command of a code block, with where it stands, line continuations joined."""
    found = []
    for path in DOCUMENTS:
        blocks = re.findall(r"^```\w*\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            words = [x for x in line.partition(" #")[0].split() if "=" not in x or x.startswith("-")]
            if words and words[0].rpartition("/")[2] in ("kernelmark", "regression_detector", "make"):
                found.append((f"{path.relative_to(HERE)}: {line.strip()}", words))
    return found


def test_commands_in_documents_exist():
    """So do their options, the plans they name, and the targets of make."""
    targets = set(re.findall(r"^([\w$(){}/.-]+):", (HERE / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for where, words in commands():
        program, rest = words[0].rpartition("/")[2], [x.strip("[]…|") for x in words[1:]]
        if program == "make":
            wrong += [where for x in rest if re.fullmatch(r"[a-z][a-z-]+", x) and x not in targets]
            continue
        rest = list(itertools.takewhile(lambda x: x != "--", rest))  # what follows is another program's
        command: click.Command | None = regression.command
        if program == "kernelmark":
            context = click.Context(cli.cli)
            command = cli.cli.get_command(context, rest[0]) if rest and not rest[0].startswith("-") else cli.cli
            if isinstance(command, click.Group) and len(rest) > 1 and re.fullmatch(r"[a-z][a-z-]+", rest[1]):
                command = command.get_command(context, rest[1])
        if command is None:
            wrong.append(where)
            continue
        known = {y for x in command.params for y in (*x.opts, *x.secondary_opts)} | {"--help", "--version"}
        wrong += [f"{where}: {x}" for x in rest if x.startswith("--") and x.partition("=")[0] not in known]
        plans = [y for x, y in itertools.pairwise(rest) if x == "--plan"]
        wrong += [f"{where}: {x}" for x in plans if not re.search(r"[A-Z]|\.toml", x) and x not in BUILTIN]
    assert wrong == []
