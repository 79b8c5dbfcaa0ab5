"""What ends a run before a command begins: wrong usage and interrupts, told as an object too, for
those who read the commands with a program.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from typer.core import TyperGroup

from circuit.report import USAGE, interrupted_early, print_failure


class Commands(TyperGroup):
    """The commands; words that cannot be read are told on stdout too where --json is among them."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **given: Any) -> Any:
        """Runs the command that the words name and ends with its exit code."""
        words = list(sys.argv[1:] if args is None else args)
        if "--json" not in words:
            return super().main(words, *rest, **given)
        try:
            code = super().main(words, *rest, **{**given, "standalone_mode": False})
        except Exception as error:
            if not hasattr(error, "format_message"):  # the marks of wrong usage in every version
                raise
            error.show()
            where = getattr(getattr(error, "ctx", None), "command_path", "circuit")
            hint = f"`{where} --help` lists what it takes."
            print_failure(USAGE, type(error).__name__, error.format_message(), hint)
            code = USAGE
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was named."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(interrupted_early())
