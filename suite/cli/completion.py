"""`kernelmark completion`: what a shell reads to complete commands, options, runs, operators and plans."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

WHERE = {
    "bash": 'eval "$(kernelmark completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(kernelmark completion zsh)"  # in ~/.zshrc',
    "fish": "kernelmark completion fish | source  # in ~/.config/fish/config.fish",
}


@click.command("completion", epilog="\b\n" + "\n".join(WHERE.values()))
@click.argument("shell", type=click.Choice(list(WHERE)))
@click.pass_context
def command_completion(ctx: click.Context, shell: str) -> None:
    """The script by which SHELL completes kernelmark's commands, options, runs, operators and plans."""
    found = get_completion_class(shell)
    assert found is not None, shell
    root = ctx.find_root()
    script = found(root.command, {}, "kernelmark", "_KERNELMARK_COMPLETE")
    click.echo(script.source_template % script.source_vars())
