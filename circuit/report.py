"""What a command prints: text or one JSON object on stdout, progress and errors on stderr."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from circuit.models.errors import NotAModel, PathMissing
from circuit.options import BadOption
from ir.errors import CircuitError
from proposers.errors import LeverRefused
from proposers.rules.errors import BadLadder, BadTreeShape

if TYPE_CHECKING:
    from types import FrameType

Record = Mapping[str, object]
Report = Callable[[str, int, int], None]

OK, FAILURE, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
GRACE = 3.0  # seconds
NOTHING_LEFT = "nothing is left half-written"
AGAIN = "Run the command again; a training goes on with --resume."


class UsageError(CircuitError):
    """The command line names something that is not there or cannot be meant."""


class NoSuchPath(UsageError):
    says = "{path} does not exist."
    hint = "{hint}"


USAGE_ERRORS = (
    UsageError, BadOption, PathMissing, NotAModel, LeverRefused, BadLadder, BadTreeShape,
)  # fmt: skip


class Screen:
    """Where a command writes. With `as_json`, stdout is kept for the one object of its result."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.on_terminal = sys.stderr.isatty()

    def say(self, line: str = "") -> None:
        """Prints a line for a person."""
        print(line, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def stream(self, text: str) -> None:
        """Prints a part of a text at once, without a line's end."""
        if not self.as_json:
            print(text, end="", flush=True)

    @contextmanager
    def progress(self, title: str) -> Iterator[Report]:
        """Gives a `report(stage, done, total)` that draws a bar per
        stage; quiet where stderr is a file.

        Without a terminal each stage is one line, printed when it begins.
        """
        if not self.on_terminal:
            yield self._plain(title)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:<34}"), BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bars:
            tasks: dict[str, int] = {}

            def report(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(f"{title}: {stage}", total=total)
                bars.update(tasks[stage], completed=done, total=max(total, 1))

            yield report

    @staticmethod
    def _plain(title: str) -> Report:
        seen: set[str] = set()

        def report(stage: str, done: int, total: int) -> None:
            if stage not in seen:
                seen.add(stage)
                print(f"{title}: {stage}", file=sys.stderr, flush=True)

        return report


def carry_out(action: Callable[[Screen], Record], *, as_json: bool, debug: bool) -> int:
    """Runs `action` and prints its record if `as_json`; the exit code of the command.

    Every failure is one sentence and a hint on stderr, and, with `as_json`, an object with `error`
    on stdout. `debug` shows the traceback as well.
    """
    sys.stderr = sys.stderr or io.StringIO()  # closed: what is for it must not go to stdout
    screen, stop = Screen(as_json), _Stop()
    with stop.heeded():
        try:
            _set_up(debug)
            record = action(screen)
            if as_json:
                print(json.dumps(record), flush=True)
        except (KeyboardInterrupt, SystemExit) as end:
            return _ended(screen, end)
        except BrokenPipeError:
            _forget(sys.stdout, sys.stderr)
            return FAILURE
        except Exception as error:  # the edge: every failure becomes one sentence and an exit code
            if stop.asked is not None:  # C code may turn what stops it into an error of its own
                return _ended(screen, stop.asked)
            if debug:
                import traceback

                traceback.print_exc()
            return _failed(screen, *_told(error))
    code = record.get("exit_code", OK)
    return code if isinstance(code, int) else FAILURE


def _set_up(debug: bool) -> None:
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, stream=sys.stderr, format="%(message)s"
    )
    logging.captureWarnings(True)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a letter that it lacks is written by its number
        sys.stdout.reconfigure(errors="backslashreplace")


def _forget(*streams: TextIO) -> None:
    """Lets the interpreter write what is left for streams that take no more to nobody."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(nobody, stream.fileno())
    os.close(nobody)


class _Stop:
    """The signals that ask a command to end. They unwind the stack, so that temporary files are
    removed; while that goes on, for `GRACE` seconds, further ones do nothing.
    """

    def __init__(self) -> None:
        self.asked: KeyboardInterrupt | SystemExit | None = None
        self._since = -GRACE

    def _leave(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._since < GRACE:
            return
        self._since = now
        interrupted = number == signal.SIGINT
        self.asked = KeyboardInterrupt() if interrupted else SystemExit(TERMINATED)
        raise self.asked

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Heeds SIGTERM, and SIGINT unless the process was born to ignore it, in the block."""
        if threading.current_thread() is not threading.main_thread():  # signals are not ours there
            yield
            return
        numbers = [signal.SIGTERM]
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            numbers.append(signal.SIGINT)
        before = {number: signal.signal(number, self._leave) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _ended(screen: Screen, end: KeyboardInterrupt | SystemExit) -> int:
    """The exit code of a command that was asked to end, and a sentence that says so."""
    if isinstance(end, KeyboardInterrupt):
        return _failed(screen, INTERRUPTED, "Interrupted", f"Interrupted; {NOTHING_LEFT}.", AGAIN)
    if end.code == TERMINATED:
        return _failed(screen, TERMINATED, "Terminated", f"Terminated; {NOTHING_LEFT}.", AGAIN)
    return end.code if isinstance(end.code, int) else FAILURE


def interrupted_early() -> int:
    """Tells that the run was interrupted before a command could tell it; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _ended(Screen("--json" in sys.argv), KeyboardInterrupt())


def _told(error: Exception) -> tuple[int, str, str, str]:
    """Exit code, class, sentence and hint of an error."""
    kind = type(error).__name__
    if isinstance(error, CircuitError):
        usage = isinstance(error, USAGE_ERRORS)
        return USAGE if usage else FAILURE, kind, error.sentence, error.advice
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        sentence = f"{where}{error.strerror or error}."
        return FAILURE, kind, sentence, "Check the path, its permissions and the free space."
    if isinstance(error, MemoryError):
        return FAILURE, kind, "There is not enough memory.", "Use a smaller context or model."
    hint = "This is a fault of the program; run the command again with --debug for its traceback."
    return FAILURE, kind, f"{kind}: {error}", hint


def _failed(screen: Screen, code: int, kind: str, sentence: str, hint: str = "") -> int:
    print(f"error: {sentence}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)
    print_failure(code, kind, sentence, hint, screen.as_json)
    return code


def print_failure(code: int, kind: str, sentence: str, hint: str, as_json: bool = True) -> None:
    """Prints the object of a failed command where one is asked for, if stdout still takes it."""
    told = {"error": {"kind": kind, "says": sentence, "hint": hint}, "exit_code": code}
    try:
        if as_json:
            print(json.dumps(told))
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # stderr has said what there is to say
        _forget(sys.stdout)


def table(headings: list[str], rows: list[list[str]]) -> str:
    """The rows under their headings in aligned columns; the first column
    to the left, others to the right.
    """
    widths = [max(map(len, column)) for column in zip(headings, *rows)]
    lines = [headings, ["-" * width for width in widths], *rows]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:]))]).rstrip()

    return "\n".join(map(line, lines))
