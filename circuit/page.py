"""An artifact as a page that stands alone: totals, the picture of a
program, its launches, its graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from circuit.feed import in_order
from circuit.picture import PlanView, amount, picture

if TYPE_CHECKING:
    from circuit.loaded import Loaded
    from codegen.artifact import Part
    from codegen.plan import Plan
    from ir.key import GraphKey

STYLE = """
body { font: 15px/1.5 Inter, Helvetica, Arial, sans-serif; color: #1f2933; max-width: 1240px;
       margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.4rem; }
p.facts, td.faint { color: #7b8794; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: #7b8794; font-weight: 500; border-bottom: 2px solid #e4e7eb; }
td { border-bottom: 1px solid #e4e7eb; } td, th { padding: .3rem .7rem .3rem 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f4f6f8; padding: 1rem; overflow: auto; font-size: 12px; line-height: 1.45; }
summary { cursor: pointer; margin: 1rem 0; }
"""


def page(loaded: Loaded, parts: Sequence[Part], key: GraphKey) -> str:
    """The HTML of one program of each part, under what the artifact holds in all."""
    recipe = loaded.recipe
    name = recipe.origin.path.rsplit("/", 1)[-1]
    facts = (
        f"{name} · weights {recipe.choices.weights} · backend {recipe.choices.backend} · "
        f"context {recipe.choices.context} · {loaded.digest[:16]}"
    )
    body = [
        f"<h1>{escape(name)}</h1><p class='facts'>{escape(facts)}</p>",
        "<h2>Programs</h2>",
        _programs(loaded),
        f"<h2>{key}: what it moves, and what it keeps meanwhile</h2>",
        picture([PlanView.of(part.name, part.plan(key)) for part in parts]),
    ]
    for part in parts:
        body.append(f"<h2>{escape(part.name)} {key}: launches in order</h2>")
        body.append(_launches(part.plan(key)))
        body.append(
            f"<details><summary>The graph after the last pass</summary>"
            f"<pre>{escape(part.graph_text(key))}</pre></details>"
        )
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(name)}, {key}</title><style>{STYLE}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _programs(loaded: Loaded) -> str:
    rows = [
        (part.name, str(key), len(plan.launches), amount(sum(n.bytes for n in plan.launches), "B"),
         amount(sum(n.flops for n in plan.launches), "flop"), amount(plan.arena_bytes, "B"),
         plan.digest[:12])
        for part in loaded.parts.values()
        for key in in_order(part.keys)
        for plan in [part.plan(key)]
    ]  # fmt: skip
    return _table(("part", "program", "launches", "moves", "computes", "arena", "digest"), rows)


def _launches(plan: Plan) -> str:
    rows = [
        (number, n.label, n.kernel, amount(n.bytes, "B"), amount(n.flops, "flop"),
         " ".join(n.numerics))
        for number, n in enumerate(plan.launches)
    ]  # fmt: skip
    return _table(("", "computes", "kernel", "moves", "flops", "numerics"), rows)


def _table(headings: Iterable[str], rows: Iterable[Sequence[object]]) -> str:
    rows = [[str(cell) for cell in row] for row in rows]
    numeric = [all(row[i][:1].isdigit() for row in rows) for i in range(len(rows[0]))]
    classes = [" class='n'" if n else "" for n in numeric]
    head = "".join(f"<th{c}>{escape(h)}</th>" for c, h in zip(classes, headings))
    lines = (
        "<tr>" + "".join(f"<td{c}>{escape(x)}</td>" for c, x in zip(classes, row)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
