"""Where a run of `circuit` begins: even what interrupts its first imports ends in one sentence."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line."""
    try:
        from circuit.cli import app

        app()
    except KeyboardInterrupt:
        from circuit.report import interrupted_early

        sys.exit(interrupted_early())


if __name__ == "__main__":
    main()
