"""The command line. Each command is a module that is imported when it is called, and not before."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NoReturn

import click

from ...registry.errors import Ended, KernelmarkError, first_line, short
from ...registry.escape import lines
from .. import __version__

COMMANDS: Mapping[str, tuple[str, str]] = {
    "list": ("list", "What exists: operators, cases, implementations, and what is available here."),
    "run": ("run", "Measure a plan and record it."),
    "compile": ("compile", "Compile a plan's rows ahead, many at a time, for a run after it."),
    "bench": ("bench", "Measure a plan in a pinned image and record it."),
    "fleet": ("fleet", "One run over many machines, by Ray, Slurm or Kubernetes."),
    "worth": ("worth", "What each kernel is worth in a model's step: alone, expected, measured."),
    "capture": ("capture", "Which operators a program of yours calls, as a plan to measure."),
    "profile": ("profile", "Where a row's time goes: its kernels, ours and products, gaps; a trace."),
    "runs": ("runs", "The runs that are here: names, tags, notes, deleting."),
    "show": ("show", "A run's results as a table, or as JSON, CSV or Markdown."),
    "compare": ("compare", "Two runs side by side, or devices."),
    "predict": ("predict", "A run's steps on more GPUs than it had: predictions."),
    "validate": ("validate", "Six criteria for every row of ours, and one verdict."),
    "verify": ("verify", "Measure some of a run's rows again: agree or disagree, row by row."),
    "judge": ("judge", "One kernel in a file: does it compile, is it right, how fast, is it honest."),
    "history": ("history", "Operators' times over commits, with change points."),
    "site": ("site", "A static folder of pages: every operator on every device, over time."),
    "report": ("report", "One self-contained HTML page of one or several runs."),
    "export": ("transfer", "Copy journals out, for another machine."),
    "import": ("transfer", "Take a journal in, and record it in the registry."),
    "sync": ("transfer", "Record in the registry what is not there yet."),
    "doctor": ("doctor", "Is this machine fit to measure, and does the harness catch planted faults?"),
    "corpus": ("corpus", "The text that models are trained on, rebuilt from pinned packages."),
    "checkpoint": ("checkpoint", "Train a small model on the corpus and keep its weights."),
    "repro": ("repro", "The command that repeats a recorded run, or its execution."),
    "image": ("image", "The pinned images: which there are, building, pinning."),
    "container-cost": ("container_cost", "What a container costs: in turns with bare metal, case by case."),
    "new": ("new", "Write the files of a new operator or baseline, which run as they are."),
    "ui": ("ui", "The MLflow UI on the registry, at a ready comparison."),
    "completion": ("completion", "What a shell reads to complete commands, runs, operators and plans."),
}
"""Command → (module here, one line of help)."""


EXTRAS: Mapping[str, str] = {
    "torch": "torch",
    "triton": "triton",
    "mlflow": "'kernelmark[registry]'",
    "jinja2": "'kernelmark[registry]'",
    "docker": "'kernelmark[images]'",
    "ray": "'kernelmark[fleet]'",
    "openai": "'kernelmark[endpoints]'",
    "anthropic": "'kernelmark[endpoints]'",
    "boto3": "'kernelmark[endpoints]'",
    "lm_eval": "'kernelmark[quality]'",
}
"""Module → what to ask pip for where it is missing: some commands need more than others."""


class Commands(click.Group):
    """Loads a command's module when it is needed; help for all of them loads none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order a user meets them."""
        return [*COMMANDS]  # `list` is a module here as soon as that command was loaded

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of that name."""
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f".{COMMANDS[name][0]}", __package__)
        command: click.Command = getattr(module, f"command_{name.replace('-', '_')}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """A command that does not exist names the nearest one, and those that do."""
        name = args[0]
        if name not in COMMANDS and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {short(name)!r}.{hint} Known: {', '.join(COMMANDS)}.")
        found = super().resolve_command(ctx, args)
        from ...registry.store import settings

        # Path's isfile raises in a home that is closed to us. What the variable names must be there.
        if found[1] is not None and (os.environ.get("KERNELMARK_CONFIG") or os.path.isfile(settings.file())):
            from . import defaults

            ctx.default_map = {name: defaults.of(found[1], name)}
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, from the table above."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kernelmark")
def cli() -> None:
    """Is this GPU kernel faster, by how much, on what, and is it still?

    Results live in $KERNELMARK_HOME, else in .kernelmark of the current directory, else where the user's
    configuration file says (~/.config/kernelmark/config.toml); `kernelmark runs` says which. Exit codes: 0 fine,
    1 regression, or what was asked about is not so, 2 wrong usage or input, 3 inconclusive, not measured or not
    known in time, 4 not comparable or missing, 5 the harness failed.
    """


def run_command(command: click.Command, arguments: list[str] | None = None) -> NoReturn:
    """Runs a command; an error of ours becomes one message and its exit code, never a traceback."""
    _open_streams()
    stdout = sys.stdout
    for number in (signal.SIGTERM, signal.SIGHUP):
        # What was begun is ended in order, as on Ctrl-C. Under nohup the signal is ignored and stays so.
        if signal.getsignal(number) == signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # only the main thread may
                signal.signal(number, _end)
    try:
        code = command.main(arguments, standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except KernelmarkError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        _say_whose(error)
        sys.exit(2 if isinstance(error, click.UsageError) else error.exit_code)
    except Ended as error:
        _say("ended by a signal")
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        sys.exit(130)
    except SystemExit:
        if sys.stdout is not stdout:  # click's 1 for a pipe that broke, and none of our outputs does
            _fault(BrokenPipeError("a pipe to another program broke"))
        raise
    except ModuleNotFoundError as error:
        if (extra := EXTRAS.get((error.name or "").partition(".")[0])) is None:
            _fault(error)
        _say(f"{error.name} is not installed: pip install {extra}")
        sys.exit(2)
    except OSError as error:
        if error.filename is not None:  # a folder of somebody else, say
            _say(f"{error.filename}: {error.strerror}")
            sys.exit(2)
        mute()
        _say(f"the output cannot be written: {error.strerror or error}")
        sys.exit(5)
    except Exception as error:
        _fault(error)


class _Output(io.FileIO):
    """A standard output that goes on to nowhere once its reader went away (`| head -1`): a command's exit code is
    the same whoever reads what it prints.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _nowhere(self.fileno())
            return super().write(data)


def _open_streams() -> None:
    """Python has None for a standard stream that is closed (`>&-`). What is printed then goes nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            # In this order each gets the number that is free, its own: no journal becomes a child's output.
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - open until we end
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _output(stream))


def _output(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The stream as one whose reader may go away, and which in ASCII shows ? for what it lacks."""
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if type(raw) is not io.FileIO:  # in memory, as in tests
        stream.reconfigure(errors="replace")
        return stream
    stream.flush()
    ours = _Output(raw.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        ours if stream.buffer is raw else io.BufferedWriter(ours),
        stream.encoding,
        "replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _fault(error: Exception) -> NoReturn:
    """Ends with the harness's own exit code, one line, and the traceback in a file."""
    said = first_line(error)[:300]
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    _say(f"a fault of kernelmark's own: {what}. {_log(error)}")
    sys.exit(5)


def _log(error: Exception) -> str:
    """Keeps the traceback of a fault; says where. Where no file can be written it is what is said."""
    import tempfile
    import traceback
    from pathlib import Path

    from ...registry.store.home import Home

    text = "".join(traceback.format_exception(error))
    for folder in (Home().logs, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="fault-", suffix=".log", dir=folder)
            with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"kernelmark {__version__}, arguments {sys.argv[1:]}\n{text}")
            return f"The traceback is in {name}"
    return f"No log can be written; the traceback:\n{text}"


def mute() -> None:
    """From now on what is printed goes nowhere: the disk of our output is full."""
    with contextlib.suppress(OSError, ValueError):
        _nowhere(sys.stdout.fileno())


def _nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(number)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(click.style("kernelmark: ", fg="red", bold=True) + lines(message), err=True)


def _say_whose(error: click.ClickException) -> None:
    """Of a value that nobody typed, where it stands."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return
    if error.ctx.get_parameter_source(str(error.param.name)) is click.core.ParameterSource.DEFAULT_MAP:
        from ...registry.store import settings

        _say(f"{settings.file()} says so in [defaults.{error.ctx.info_name}].")


def main() -> NoReturn:
    """Entry point of `kernelmark`."""
    run_command(cli)
