"""A plan as a picture: what each launch moves, and what lives in the arena while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from codegen.plan import Launch, Plan, Space

WIDTH, MARGIN = 1180, 28
COLOURS = (
    "#3b6fb6", "#e08a2e", "#4fa05a", "#b5527a", "#7a67b8", "#c9b23c", "#3aa6a6", "#8c6a4f",
    "#6b7f91", "#d46a5a",
)  # fmt: skip
INK, FAINT, PAPER, PANEL = "#1f2933", "#7b8794", "#ffffff", "#f4f6f8"
STRIP, ROW, ARENA, MOST_STEPS = 46, 21, 170, 42
FONT = "font-family='Inter,Helvetica,Arial,sans-serif'"


@dataclass(frozen=True)
class Group:
    """Launches of one kernel: how many there are, their largest weight,
    what they move and compute together.
    """

    label: str
    weight: str
    colour: str
    launches: int
    bytes: int
    flops: int


@dataclass(frozen=True)
class Life:
    """A value in the arena: its place, its bytes, the launches from its first use to its last."""

    name: str
    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class PlanView:
    """A plan as it is drawn: its kernels as groups, the largest
    first, and the lives of arena values.
    """

    title: str
    plan: Plan
    groups: dict[str, Group]
    lives: tuple[Life, ...]

    @staticmethod
    def of(part: str, plan: Plan) -> PlanView:
        """The view of the program `plan` of `part`."""
        sums: dict[str, list[int]] = {}
        labels: dict[str, tuple[str, str]] = {}
        for n in plan.launches:
            entry = sums.setdefault(n.kernel, [0, 0, 0])
            entry[0], entry[1], entry[2] = entry[0] + 1, entry[1] + n.bytes, entry[2] + n.flops
            labels.setdefault(n.kernel, (n.label, largest_weight(plan, n)))
        ranked = sorted(sums, key=lambda kernel: (-sums[kernel][1], kernel))
        groups = {
            kernel: Group(*labels[kernel], COLOURS[i % len(COLOURS)], *sums[kernel])
            for i, kernel in enumerate(ranked)
        }
        return PlanView(f"{part} {plan.key}", plan, groups, lives_of(plan))


def largest_weight(plan: Plan, launch: Launch) -> str:
    """Type of the largest weight that the launch reads; empty if it reads none."""
    weights = [plan.buffers[n] for n in launch.arguments if plan.buffers[n].space is Space.WEIGHT]
    return str(max(weights, key=lambda b: b.type.nbytes).type) if weights else ""


def lives_of(plan: Plan) -> tuple[Life, ...]:
    """The arena's values in the order of their offsets."""
    spans: dict[int, list[int]] = {}
    for at, launch in enumerate(plan.launches):
        for number in launch.arguments:
            if plan.buffers[number].space is Space.ARENA:
                spans.setdefault(number, [at, at])[1] = at
    found = [
        Life(b.name, b.offset, b.type.nbytes, *spans[n])
        for n, b in enumerate(plan.buffers)
        if n in spans
    ]
    return tuple(sorted(found, key=lambda life: (life.offset, life.first)))


def amount(number: float, unit: str) -> str:
    """`number` with a prefix: `1.2 kB`, `34 MB`."""
    for prefix in ("", "k", "M"):
        if abs(number) < 1000:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:.3g} G{unit}"


def picture(views: Sequence[PlanView]) -> str:
    """The SVG of several plans, one below the other."""
    top, parts = MARGIN, []
    for view in views:
        body, height = _drawn(view, top)
        parts.append(body)
        top += height + MARGIN
    total = WIDTH + 2 * MARGIN
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{total}' height='{top}' "
        f"viewBox='0 0 {total} {top}' {FONT} font-size='13' fill='{INK}'>"
        f"<rect width='100%' height='100%' fill='{PAPER}'/>{''.join(parts)}</svg>\n"
    )


def _drawn(view: PlanView, top: int) -> tuple[str, int]:
    """One plan from `top` down, and its height."""
    plan = view.plan
    moved, flops = (sum(getattr(n, f) for n in plan.launches) for f in ("bytes", "flops"))
    facts = (
        f"{len(plan.launches)} launches · moves {amount(moved, 'B')} · {amount(flops, 'flop')} · "
        f"arena {amount(plan.arena_bytes, 'B')}"
    )
    parts = [
        _text(MARGIN, top + 18, view.title, size=20, weight=600),
        _text(MARGIN + WIDTH, top + 18, facts, anchor="end", fill=FAINT),
        _text(MARGIN, top + 44, "What a step moves, launch by launch (width: bytes)", fill=FAINT),
    ]
    y = top + 54
    parts.append(_strip(view, y, moved))
    y += STRIP + 16
    legend, height = _legend(view, y, moved)
    parts.append(legend)
    y += height + 18
    arena, height = _arena(view, y)
    return "".join([*parts, arena]), y + height - top


def _strip(view: PlanView, y: int, moved: int) -> str:
    """The launches side by side, each as wide as the bytes that it moves."""
    x, parts = float(MARGIN), []
    for number, n in enumerate(view.plan.launches):
        width = WIDTH * n.bytes / max(1, moved)
        tip = f"{number}: {n.label}, {amount(n.bytes, 'B')}, {amount(n.flops, 'flop')}"
        parts.append(_rect(x, y, width, STRIP, view.groups[n.kernel].colour, tip, stroke=width > 3))
        x += width
    return "".join(parts)


def _legend(view: PlanView, y: int, moved: int) -> tuple[str, int]:
    """A line per kernel: colour, count, what it computes, its share
    of the bytes; and the height.
    """
    parts = []
    for row, group in enumerate(view.groups.values()):
        line = y + ROW * row
        share = group.bytes / max(1, moved)
        parts += [
            _rect(MARGIN, line, 13, 13, group.colour, ""),
            _text(MARGIN + 54, line + 11, f"{group.launches} ×", anchor="end", fill=FAINT),
            _text(MARGIN + 62, line + 11, group.label),
            _text(MARGIN + WIDTH - 390, line + 11, group.weight, anchor="end", fill=FAINT, size=12),
            _text(MARGIN + WIDTH - 300, line + 11, amount(group.bytes, "B"), anchor="end"),
            _text(MARGIN + WIDTH - 190, line + 11, amount(group.flops, "flop"), anchor="end"),
            _rect(MARGIN + WIDTH - 170, line + 2, 110 * share, 9, group.colour, ""),
            _text(MARGIN + WIDTH, line + 11, f"{share:.1%}", anchor="end", fill=FAINT),
        ]
    return "".join(parts), ROW * len(view.groups)


def _arena(view: PlanView, y: int) -> tuple[str, int]:
    """Values of the arena over the first launches: across time, down their addresses."""
    plan = view.plan
    steps = min(len(plan.launches), MOST_STEPS)
    shown = [life for life in view.lives if life.first < steps]
    size = max((life.offset + life.nbytes for life in shown), default=0)
    note = (
        f", launches 0 to {steps - 1} of {len(plan.launches)}" if steps < len(plan.launches) else ""
    )
    parts = [
        _text(
            MARGIN,
            y + 12,
            f"What lives in the arena (across: launches{note}; down: addresses)",
            fill=FAINT,
        ),
        _rect(MARGIN, y + 22, WIDTH, ARENA, PANEL, ""),
    ]
    if not size:
        return "".join(parts), ARENA + 40
    column = WIDTH / steps
    for life in shown:
        colour = view.groups[plan.launches[life.first].kernel].colour
        width = (min(life.last, steps - 1) - life.first + 1) * column
        x, top = MARGIN + life.first * column, y + 22 + ARENA * life.offset / size
        height = max(ARENA * life.nbytes / size, 2)
        tip = (
            f"{life.name}: {amount(life.nbytes, 'B')} at {life.offset}, launches {life.first} to "
            f"{life.last}"
        )
        parts.append(_rect(x + 1, top + 0.5, width - 2, height - 1, colour, tip, round_=2))
        if width > 60 and height > 13:
            parts.append(
                _text(
                    x + 7,
                    top + min(height / 2 + 4, 14),
                    _short(life.name, width),
                    fill="#fff",
                    size=11,
                )
            )
    for step in range(0, steps, 5 if steps > 20 else 1):
        parts.append(
            _text(
                MARGIN + (step + 0.5) * column,
                y + ARENA + 36,
                str(step),
                anchor="middle",
                fill=FAINT,
                size=11,
            )
        )
    return "".join(parts), ARENA + 44


def _short(name: str, width: float) -> str:
    fits = int(width / 6.4)
    return name if len(name) <= fits else name[: max(1, fits - 1)] + "…"


def _rect(
    x: float, y: float, width: float, height: float, fill: str, tip: str, *,
    stroke: bool = False, round_: int = 0,
) -> str:  # fmt: skip
    edge = f" stroke='{PAPER}' stroke-width='0.7'" if stroke else ""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f"<rect x='{x:.2f}' y='{y:.2f}' width='{max(width, 0):.2f}' height='{max(height, 0):.2f}' "
        f"rx='{round_}' fill='{fill}'{edge}>{title}</rect>"
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", fill: str = INK, size: int = 13,
    weight: int = 400,
) -> str:  # fmt: skip
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{fill}' font-size='{size}' "
        f"font-weight='{weight}'>{escape(text)}</text>"
    )
