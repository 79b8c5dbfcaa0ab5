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
        try:
            code = super().main(words, *rest, **{**given, "standalone_mode": False})
        except Exception as error:
            if not hasattr(error, "format_message"):  # the marks of wrong usage in every version
                raise
            code = _told(error, "--json" in words)
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was named."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(interrupted_early())


def _told(error: Any, as_json: bool) -> int:
    """Tells wrong usage as every failure is told; the exit code."""
    kind, sentence = type(error).__name__, error.format_message()
    where = getattr(getattr(error, "ctx", None), "command_path", "circuit")
    hint = f"`{where} --help` lists what it takes."
    if kind.startswith("NoArgs"):  # its sentence is the help itself
        error.show()
        sentence = "No command is given."
    else:
        print(f"error: {sentence}\n  hint: {hint}", file=sys.stderr)
    print_failure(USAGE, kind, sentence, hint, as_json)
    return USAGE
