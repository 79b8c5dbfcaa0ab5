"""`circuit show`: what a program launches, moves and keeps, as text, as a picture, or as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from circuit.feed import in_order
from circuit.loaded import Loaded
from circuit.options import BadOption
from circuit.picture import PlanView
from circuit.report import Record, Screen, table
from codegen.artifact import Part
from codegen.plan import Plan, Space
from codegen.store import write_atomically
from ir.key import GraphKey

if TYPE_CHECKING:
    from ir.graph import Graph

LEVELS = {"traced": "trace", "typed": "split", "fused": "fuse", "ordered": "order"}


@dataclass(frozen=True)
class ShowRequest:
    """What to show: one program of one part (or of each), perhaps its graph at a level."""

    folder: Path
    level: str | None
    key: GraphKey
    part: str
    format: str
    out: Path | None

    @staticmethod
    def read(*, level: str | None, key: str, **given: object) -> ShowRequest:
        """The request that the options stand for; BadOption if one cannot be read."""
        if level is not None and level.lower() not in LEVELS:
            raise BadOption(
                name="--level", given=level, problem="there is no such level",
                advice=f"Levels are {', '.join(LEVELS)}.",
            )  # fmt: skip
        try:
            wanted = GraphKey.parse(key.upper())
        except (KeyError, ValueError) as error:
            raise BadOption(
                name="--key", given=key, problem="it is not a key",
                advice="Keys are DECODE, VERIFY_2, BATCH_4, PREFILL_256, CHAIN_3 and so on.",
            ) from error  # fmt: skip
        return ShowRequest(level=level and level.lower(), key=wanted, **given)


def show_artifact(request: ShowRequest, screen: Screen) -> Record:
    """Shows the programs that are asked for; the record describes their launches."""
    loaded = Loaded.read(request.folder)
    parts = _parts(loaded, request)
    if request.level is not None and request.format != "text":
        graphs = {f"{p.name} {request.key}": graph_at(loaded, p, request) for p in parts}
        content = graph_page(graphs, request.format)
    elif request.level is not None:
        content = "\n\n".join(graph_text(loaded, part, request) for part in parts)
    else:
        content = WRITERS[request.format](loaded, parts, request.key)
    if request.out is not None:
        write_atomically(request.out, content.encode("utf-8"))
        screen.say(f"{request.out}: {len(content.encode('utf-8'))} bytes")
    elif not screen.as_json:
        screen.say(content)
    return {
        "path": str(request.folder),
        "digest": loaded.digest,
        "key": str(request.key),
        "parts": {part.name: plan_record(part.plan(request.key)) for part in parts},
        "out": str(request.out) if request.out else None,
    }


def _parts(loaded: Loaded, request: ShowRequest) -> list[Part]:
    """The parts that have the program; BadOption if none has it."""
    if request.part and request.part not in loaded.parts:
        raise BadOption(
            name="--part", given=request.part, problem="there is no such part",
            advice=f"There are {', '.join(loaded.parts)}.",
        )  # fmt: skip
    named = [loaded.parts[request.part]] if request.part else loaded.parts.values()
    found = [part for part in named if request.key in part.keys]
    if not found:
        served = sorted({str(k) for part in named for k in in_order(part.keys)})
        raise BadOption(
            name="--key", given=str(request.key), problem="no part has this program",
            advice=f"There are {', '.join(served)}.",
        )  # fmt: skip
    return found


def plan_record(plan: Plan) -> dict[str, object]:
    """A plan as JSON values: totals, and every launch in order."""
    return {
        "launches": len(plan.launches),
        "bytes": sum(n.bytes for n in plan.launches),
        "flops": sum(n.flops for n in plan.launches),
        "arena_bytes": plan.arena_bytes,
        "digest": plan.digest,
        "list": [
            {
                "kernel": n.kernel, "label": n.label, "bytes": n.bytes, "flops": n.flops,
                "numerics": list(n.numerics),
            }
            for n in plan.launches
        ],
    }  # fmt: skip


def graph_text(loaded: Loaded, part: Part, request: ShowRequest) -> str:
    """The printed graph of a part's program at a level; before ORDERED it is traced again."""
    if request.level == "ordered":
        return part.graph_text(request.key)
    from ir.show import text

    return text(graph_at(loaded, part, request))


def graph_at(loaded: Loaded, part: Part, request: ShowRequest) -> Graph:
    """The graph of a part's program at a level, traced again."""
    from circuit.backends import BACKENDS
    from circuit.bindings import rebind
    from ir.passes.manager import run_pipeline

    bound, seen = rebind(loaded.artifact), {}
    graph = bound.bindings[part.name].graph(request.key)
    facts = BACKENDS[loaded.recipe.choices.backend](()).pass_facts()
    run_pipeline(graph, facts, observers=[lambda name, after: seen.update({name: after})])
    return seen[LEVELS[request.level]]


def graph_page(graphs: Mapping[str, Graph], format: str) -> str:
    """Graphs by title, drawn side by side: as an SVG, or as a page with their texts below."""
    from ir.picture import svg
    from ir.show import text

    drawn = svg(*graphs.values(), titles=tuple(graphs))
    if format == "svg":
        return drawn
    texts = "".join(
        f"<details><summary>{escape(t)} as text</summary><pre>{escape(text(g))}</pre></details>"
        for t, g in graphs.items()
    )
    head = f"<!doctype html>\n<meta charset='utf-8'><title>{escape(', '.join(graphs))}</title>"
    return f"{head}{drawn}{texts}\n"


def amount(number: float) -> str:
    """`number` in thousands: `1.2 k`, `34 M`."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} T"


def text_page(loaded: Loaded, parts: list[Part], key: GraphKey) -> str:
    """Programs of every part with their totals, then the launches of
    one program by what they compute.
    """
    rows = [
        [part.name, str(k), str(len(plan.launches)),
         f"{amount(sum(n.bytes for n in plan.launches))}B",
         f"{amount(sum(n.flops for n in plan.launches))}flop", f"{amount(plan.arena_bytes)}B"]
        for part in loaded.parts.values()
        for k in in_order(part.keys)
        for plan in [part.plan(k)]
    ]  # fmt: skip
    blocks = [table(["part", "program", "launches", "moves", "computes", "arena"], rows)]
    for part in parts:
        plan = part.plan(key)
        states = len(plan.named(Space.STATE))
        heading = f"{part.name} {key}: {len(plan.launches)} launches, {states} states"
        blocks.append(f"{heading}\n{launch_table(plan)}")
    return "\n\n".join(blocks)


def launch_table(plan: Plan) -> str:
    """Launches in order; runs of one sequence of kernels (layers) are
    written once, with their number.
    """
    rows = []
    for first, length, times in repeats([n.kernel for n in plan.launches]):
        for at in range(first, first + length):
            n = plan.launches[at]
            share = sum(plan.launches[at + length * turn].bytes for turn in range(times)) / max(
                1, sum(m.bytes for m in plan.launches)
            )
            rows.append(
                [f"{at:>3} {n.label}", f"x{times}" if times > 1 else "", f"{amount(n.bytes)}B",
                 f"{share:.1%}", f"{amount(n.flops)}flop", " ".join(n.numerics)]
            )  # fmt: skip
    return table(["launch", "", "moves", "of all", "computes", "numerics"], rows)


def repeats(names: list[str]) -> list[tuple[int, int, int]]:
    """(first, length, times) of the runs that `names` is made of, each as long in all as can be."""
    found, at = [], 0
    while at < len(names):
        best = (1, 1)
        for length in range(1, min(32, (len(names) - at) // 2) + 1):
            times = 1
            while names[at : at + length] == names[at + times * length : at + (times + 1) * length]:
                times += 1
            if times > 1 and times * length > best[0] * best[1]:
                best = (length, times)
        found.append((at, *best))
        at += best[0] * best[1]
    return found


def kernels_of(plan: Plan) -> Counter[str]:
    """How often each kernel is launched."""
    return Counter(n.kernel for n in plan.launches)


def svg_page(loaded: Loaded, parts: list[Part], key: GraphKey) -> str:
    """The picture of the program of every part, one below the other."""
    from circuit.picture import picture

    return picture([PlanView.of(part.name, part.plan(key)) for part in parts])


def html_page(loaded: Loaded, parts: list[Part], key: GraphKey) -> str:
    """A page that stands alone: totals, the picture, launches, the typed graph."""
    from circuit.page import page

    return page(loaded, parts, key)


WRITERS: dict[str, Callable[[Loaded, list[Part], GraphKey], str]] = {
    "text": text_page,
    "svg": svg_page,
    "html": html_page,
}
