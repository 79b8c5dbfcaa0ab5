"""Names of models and heads on the command line, turned into files."""

from __future__ import annotations

from pathlib import Path

from circuit.options import at_home
from circuit.report import NoSuchPath, Record, Screen, UsageError

DEMO = "demo"
DEMO_HEAD = Path(__file__).parent / "heads" / "smollm2-135m-instruct-mtp.safetensors"


class UnknownDemo(UsageError):
    says = "{name!r} is not a model that can be fetched."
    hint = "`circuit fetch demo` fetches the model of the examples; other models are given by path."


class NoDemoHead(UsageError):
    says = "This installation carries no demo head."
    hint = "Train one with `circuit train`, and give its file to --draft."


def fetch_model(name: str, screen: Screen) -> Record:
    """Puts the model `name` into the cache; the record tells where it is."""
    from circuit.fetch import DEMO as WANTED
    from circuit.fetch import fetch_demo

    if name != DEMO:
        raise UnknownDemo(name=name)
    with screen.progress("fetch") as report:
        path = fetch_demo(progress=report)
    screen.say(str(path))
    return {"path": str(path), "bytes": WANTED.size, "sha256": WANTED.sha256}


def model_source(given: str, screen: Screen) -> str:
    """The path or hub id that `given` stands for; the demo model is fetched if it is not there."""
    return str(fetch_model(DEMO, screen)["path"]) if given == DEMO else given


def head_source(given: str | None) -> Path | None:
    """The file of the draft head that `given` stands for; None if there is to be none."""
    if given is None:
        return None
    if given == DEMO:
        if not DEMO_HEAD.is_file():
            raise NoDemoHead()
        return DEMO_HEAD
    path = at_home(given)
    if not path.exists():
        raise NoSuchPath(path=given, hint="Give the head's safetensors file, or `demo`.")
    return path
