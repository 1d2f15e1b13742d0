"""`kernelmark completion`: what a shell reads to complete commands, options, runs, operators and plans."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

WHERE = {
    "bash": 'eval "$(kernelmark completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(kernelmark completion zsh)"  # in ~/.zshrc, after compinit',
    "fish": "kernelmark completion fish | source  # in ~/.config/fish/config.fish",
}
PROGRAMS = ("kernelmark", "regression_detector")


@click.command("completion", epilog="\b\n" + "\n".join(WHERE.values()))
@click.argument("shell", type=click.Choice(list(WHERE)))
def command_completion(shell: str) -> None:
    """The script by which SHELL completes kernelmark's commands, options, runs, operators and plans, and those of
    regression_detector.
    """
    found = get_completion_class(shell)
    assert found is not None, shell
    for program in PROGRAMS:
        script = found(click.Command(program), {}, program, f"_{program.upper()}_COMPLETE")
        click.echo(script.source_template % script.source_vars())
