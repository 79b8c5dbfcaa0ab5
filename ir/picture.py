"""A graph as a drawing: one card a launch (or a node), in order, with what flows past in arcs.

The layout is our own. Cards stand in one column in the order they run; a value that the next card
reads goes straight down, any other goes around in a lane of its own (lanes are a colouring of the
intervals). Layers that repeat are drawn once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import networkx as nx
import torch.fx

from ir.graph import Graph, Level, Role, kind_of, op_of
from ir.op import Kind
from ir.region import Region, is_output, regions_of
from ir.show import amount

FILL = {
    Kind.ANCHOR: ("#1f3a5f", "#ffffff"), Kind.STATE: ("#6a4c93", "#ffffff"),
    Kind.ROW: ("#fde6c4", "#6b4510"), Kind.POINTWISE: ("#dbe8f7", "#23415f"),
    Kind.VIEW: ("#ffffff", "#7b8794"),
}  # fmt: skip
SAID = {
    Kind.ANCHOR: "anchor: owns the tiling", Kind.STATE: "state write", Kind.ROW: "row reduction",
    Kind.POINTWISE: "pointwise", Kind.VIEW: "view: no data moves",
}  # fmt: skip
INK, FAINT, LINE, PAPER, BAR = "#1f2933", "#7b8794", "#cbd2d9", "#ffffff", "#e08a2e"
FLOW, CACHE = "#3b6fb6", "#6a4c93"
FONT = "font-family='Inter,Helvetica,Arial,sans-serif'"
LEFT, CARD, LANE, GAP, PILL = 170, 640, 26, 22, 22


@dataclass
class Card:
    """What is drawn of one region or node: its nodes, the operands it reads, what it gives."""

    number: int
    nodes: tuple[torch.fx.Node, ...]
    weights: list[str]
    outputs: list[str]
    bytes: int
    flops: int
    pills: list[list[tuple[torch.fx.Node, float, float]]] = field(default_factory=list)
    top: float = 0.0
    times: int = 1

    @property
    def height(self) -> float:
        """Height on paper."""
        return 34 + (PILL + 5) * len(self.pills) + 15 * len(self.weights)

    @property
    def same(self) -> tuple[object, ...]:
        """Equal for cards that do the same to values of the same types."""
        ops = [(op_of(n).name, str(n.meta.get("type")), str(n.kwargs)) for n in self.nodes]
        return (*ops, tuple(w.split("  ")[0] for w in self.weights))


def cards(graph: Graph) -> list[Card]:
    """The cards of a graph: regions once it is FUSED, nodes before."""
    named: dict[torch.fx.Node, list[str]] = {}
    for name, node in graph.outputs.items():
        named.setdefault(node, []).append(name)
    if graph.level >= Level.FUSED:
        return [_card(graph, r, named) for r in regions_of(graph)]
    return [
        _card(graph, Region(i, (n,), None, n.args, (n,) if is_output(n) else ()), named)
        for i, n in enumerate(graph.computed())
    ]


def _card(graph: Graph, region: Region, named: dict[torch.fx.Node, list[str]]) -> Card:
    slots = [graph.slots[r.name] for r in region.reads if r.op == "placeholder"]
    weights = [f"{s.type}  {s.name}" for s in slots if s.role is Role.WEIGHT]
    outputs = [
        f"{name} {n.meta.get('type', '')}" for n in region.stores for name in named.get(n, ())
    ]
    moves = any(kind_of(n) is not Kind.VIEW for n in region.nodes)
    typed = graph.level >= Level.TYPED and moves
    card = Card(
        region.number, region.nodes, weights, outputs,
        region.bytes if typed else 0, region.flops if typed else 0,
    )  # fmt: skip
    x, row = 14.0, []
    for node in region.nodes:
        width = 16 + 6.7 * len(op_of(node).name)
        if x + width > CARD - 14 and row:
            card.pills.append(row)
            x, row = 14.0, []
        row.append((node, x, width))
        x += width + 7
    card.pills.append(row)
    return card


def folded(column: Sequence[Card]) -> tuple[list[Card], dict[int, int]]:
    """The cards with the longest repetition drawn once, and the card that stands for each number.

    The first card of the block that is kept says how often it runs.
    """
    same = [c.same for c in column]
    best = (0, 0, 0, 1)  # cards saved, start, period, times
    for period in range(1, len(same) // 3 + 1):
        run = 0
        for i in range(len(same) - period, -1, -1):
            run = run + 1 if i + period < len(same) and same[i] == same[i + period] else 0
            times = run // period + 1
            if times >= 3 and (times - 1) * period > best[0]:
                best = ((times - 1) * period, i, period, times)
    saved, start, period, times = best
    stands = {c.number: c.number for c in column}
    if not saved:
        return list(column), stands
    for i in range(start, start + period * times):
        stands[column[i].number] = column[start + (i - start) % period].number
    kept = [*column[: start + period], *column[start + period * times :]]
    for card in column[start : start + period]:
        card.times = times
    for card in column[start + period : start + period * times]:
        column[start + (card.number - start) % period].outputs += card.outputs
    return kept, stands


@dataclass(frozen=True)
class Flow:
    """A value that goes from one card to another; `cache` marks the handle of a state."""

    start: int
    end: int
    label: str
    cache: bool


def flows(graph: Graph, stands: dict[int, int]) -> list[Flow]:
    """The values between cards that are drawn, each once."""
    home = {n: c for c, nodes in _homes(graph).items() for n in nodes}
    found: dict[tuple[int, int, bool], dict[str, None]] = {}
    for node in graph.computed():
        for argument in node.args:
            a, b = home.get(argument), home[node]
            if a is not None and a != b and stands[a] != stands[b]:
                cache = kind_of(argument) is Kind.STATE
                label = "cache" if cache else str(argument.meta.get("type", argument.name))
                found.setdefault((stands[a], stands[b], cache), {})[label] = None
    return [Flow(a, b, ", ".join(labels), cache) for (a, b, cache), labels in found.items()]


def _homes(graph: Graph) -> dict[int, list[torch.fx.Node]]:
    if graph.level >= Level.FUSED:
        return graph.regions()
    return {i: [n] for i, n in enumerate(graph.computed())}


def svg(*graphs: Graph, titles: Sequence[str] = ()) -> str:
    """The graphs side by side as one stand-alone SVG, each under its title (default: its key)."""
    names = titles or [str(g.key) for g in graphs]
    drawings, x = [drawing(g, name) for g, name in zip(graphs, names)], 0.0
    parts = []
    for width, _, body in drawings:
        parts.append(f"<g transform='translate({x:.0f} 0)'>{body}</g>")
        x += width
    height = max((h for _, h, _ in drawings), default=0.0)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {x:.0f} {height:.0f}' "
        f"width='{x:.0f}' {FONT}><rect width='100%' height='100%' fill='{PAPER}'/>"
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        "markerHeight='7' orient='auto'><path d='M0 0L8 4L0 8z' fill='context-stroke'/></marker>"
        f"</defs>{''.join(parts)}</svg>\n"
    )


def drawing(graph: Graph, name: str) -> tuple[float, float, str]:
    """Width, height and SVG elements of one graph."""
    column, stands = folded(cards(graph))
    place = {c.number: i for i, c in enumerate(column)}
    y = 118.0
    for card in column:
        card.top = y
        y += card.height + GAP
    ahead = [f for f in flows(graph, stands) if place[f.end] > place[f.start]]
    lanes = _lanes([f for f in ahead if place[f.end] > place[f.start] + 1], place)
    parts = [_header(graph, name, column)]
    parts += [_straight(column, place, f) for f in ahead if f not in lanes]
    parts += [_arc(column, place, f, lane) for f, lane in lanes.items()]
    most = max((c.bytes for c in column), default=0) or 1
    parts += [_drawn(c, most) for c in column]
    parts.append(_bracket(column))
    return LEFT + CARD + 130.0 + LANE * (1 + max(lanes.values(), default=0)), y + 10, "".join(parts)


def _lanes(around: list[Flow], place: dict[int, int]) -> dict[Flow, int]:
    """A lane for each flow, so that two in one lane never overlap: short ones stay inside."""
    clash = nx.Graph()
    clash.add_nodes_from(around)
    for i, a in enumerate(around):
        for b in around[:i]:
            if place[a.start] < place[b.end] and place[b.start] < place[a.end]:
                clash.add_edge(a, b)
    order = sorted(around, key=lambda f: (place[f.end] - place[f.start], place[f.start]))
    return nx.greedy_color(clash, strategy=lambda *_: order) if around else {}


def _label(
    x: float, y: float, words: str, size: float = 11, colour: str = FAINT, more: str = ""
) -> str:
    start = f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{colour}' {more}>"
    return f"{start}{escape(words)}</text>"


def _header(graph: Graph, name: str, column: list[Card]) -> str:
    fused = graph.level >= Level.FUSED
    count = sum(c.times for c in column)
    moved, work = (sum(c.times * getattr(c, n) for c in column) for n in ("bytes", "flops"))
    title = f"{name} · {graph.level.name.lower()}"
    facts = f"{count} {'launches' if fused else 'nodes'} · after {graph.history[-1]}"
    if fused:
        facts += f" · moves {amount(moved)}B · computes {amount(work)}flop"
    inputs = "  ".join(f"{s.name} {s.type}" for s in graph.slots.values() if s.role is Role.INPUT)
    parts = [
        _label(24, 36, title, 20, INK, "font-weight='600'"), _label(24, 58, facts, 12),
        _label(24, 78, f"inputs  {inputs}", 11),
    ]  # fmt: skip
    x = 24.0
    for kind, (fill, _) in FILL.items():
        parts.append(
            f"<rect x='{x}' y='88' width='12' height='12' rx='3' fill='{fill}' stroke='{LINE}'/>"
        )
        parts.append(_label(x + 17, 98, SAID[kind]))
        x += 32 + 5.6 * len(SAID[kind])
    return "".join(parts)


def _drawn(card: Card, most: int) -> str:
    """One card: what it moves on the left, its ops as pills, the weights that it reads."""
    top, h = card.top, card.height
    parts = [
        f"<rect x='{LEFT}' y='{top:.1f}' width='{CARD}' height='{h:.1f}' rx='9' fill='#fbfcfd' "
        f"stroke='{LINE}'/>",
        _label(LEFT + 14, top + 20, str(card.number), 12, FAINT),
    ]
    if card.bytes:
        length = max(2.0, (LEFT - 60) * card.bytes / most)
        parts.append(
            f"<rect x='{LEFT - 12 - length:.1f}' y='{top + 8:.1f}' width='{length:.1f}' height='9' "
            f"rx='2' fill='{BAR}'/>"
        )
        told = f"{amount(card.bytes)}B" + (f" · {amount(card.flops)}flop" if card.flops else "")
        parts.append(_label(LEFT - 12, top + 30, told, 10.5, FAINT, "text-anchor='end'"))
    for line, row in enumerate(card.pills):
        y = top + 26 + line * (PILL + 5)
        for node, x, width in row:
            fill, ink = FILL[kind_of(node)]
            parts.append(
                f"<g><title>{escape(_told(node))}</title><rect x='{LEFT + x:.1f}' y='{y:.1f}' "
                f"width='{width:.1f}' height='{PILL}' rx='11' fill='{fill}' stroke='{LINE}'/>"
                + _label(LEFT + x + 8, y + 15, op_of(node).name, 11.5, ink)
                + "</g>"
            )
    y = top + 26 + (PILL + 5) * len(card.pills) + 8
    for number, weight in enumerate(card.weights):
        parts.append(_label(LEFT + 14, y + 15 * number, weight, 10.5))
    for number, output in enumerate(card.outputs):
        parts.append(
            _label(LEFT + CARD - 14, top + 18 + 14 * number, f"→ {output}", 11.5, FLOW,
                   "text-anchor='end' font-weight='600'")
        )  # fmt: skip
    return "".join(parts)


def _told(node: torch.fx.Node) -> str:
    """What a reader sees who rests on a pill."""
    numerics = node.meta.get("numerics")
    notes = [str(node.meta.get("type", "")), numerics.value if numerics else ""]
    return f"{node.name}  {'  '.join(n for n in notes if n)}  {node.meta.get('origin', '')}"


def _straight(column: list[Card], place: dict[int, int], flow: Flow) -> str:
    a, b = column[place[flow.start]], column[place[flow.end]]
    x, colour = LEFT + CARD / 2 - (60 if flow.cache else 0), CACHE if flow.cache else FLOW
    path = (
        f"<path d='M{x} {a.top + a.height:.1f}V{b.top - 1:.1f}' stroke='{colour}' "
        "stroke-width='1.6' fill='none' marker-end='url(#tip)'/>"
    )
    return path + _label(x + 7, b.top - 7, flow.label, 10, colour)


def _arc(column: list[Card], place: dict[int, int], flow: Flow, lane: int) -> str:
    a, b = column[place[flow.start]], column[place[flow.end]]
    x, right = LEFT + CARD, LEFT + CARD + 70 + LANE * lane
    y0, y1 = a.top + a.height - 9, b.top + 11
    colour = CACHE if flow.cache else FLOW
    path = (
        f"<path d='M{x} {y0:.1f}H{right - 9}q9 0 9 9V{y1 - 9:.1f}q0 9 -9 9H{x + 1}' fill='none' "
        f"stroke='{colour}' stroke-width='1.6' stroke-opacity='.75' marker-end='url(#tip)'/>"
    )
    return path + _label(x + 5, y1 - 4, flow.label, 10, colour)


def _bracket(column: list[Card]) -> str:
    """The mark beside cards that stand for several runs of the same."""
    block = [c for c in column if c.times > 1]
    if not block:
        return ""
    top, bottom = block[0].top, block[-1].top + block[-1].height
    return (
        f"<path d='M18 {top:.1f}h-8V{bottom:.1f}h8' fill='none' stroke='{FAINT}' stroke-width='2'/>"
        + _label(
            34, (top + bottom) / 2, f"× {block[0].times}", 17, INK,
            f"font-weight='600' transform='rotate(-90 34 {(top + bottom) / 2:.1f})'",
        )
    )  # fmt: skip
