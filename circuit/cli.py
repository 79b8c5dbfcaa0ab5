"""The commands: options in, one call into the part that does the work, an exit code out.

Nothing heavy is imported before a command runs, so that help is immediate and a compiled artifact
starts fast.
"""

from __future__ import annotations

import typer

from circuit.making import compile, fetch, train
from circuit.usage import Commands
from circuit.using import bench, check, generate, show

app = typer.Typer(
    name="circuit",
    cls=Commands,
    help="Compile a language model and its draft head to native code, and generate text with both.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (fetch, train, compile, generate, check, bench, show):
    app.command()(command)


if __name__ == "__main__":
    app()
