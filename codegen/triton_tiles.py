"""Attention of many rows of one sequence in Triton: tiles of rows and heads on the matrix units."""

from __future__ import annotations

import math
from collections.abc import Iterator

from codegen.expr import Expr, iadd, var
from codegen.lower import Lowered
from codegen.tiles import TYPES, Axis, power
from codegen.triton_cache import result_stores
from codegen.triton_holes import Draft, Holes, result_format, widened
from codegen.triton_schedule import FEW_ROWS, PROCESSORS, TritonSchedule
from ir.format import Format

_WIDEST = 128  # columns of a head whose sums stay in the registers of a program's warps
_LOG2_E = math.log2(math.e)
_SCALED = (Format.BF16, Format.F16)
_MEET = ((Format.BF16, Format.BF16), (Format.F16, Format.F16), _SCALED)
"""Formats of a query and a cache that the matrix units multiply with no digit lost, in the cache's
format; f32 is not among them.
"""


def in_tiles(lowered: Lowered) -> bool:
    """True for a region whose attention is computed in tiles: many rows, all of one sequence."""
    if lowered.anchor is None or lowered.anchor.target.name != "attention":
        return False
    d, formats = lowered.dims, (lowered.arguments["q"].format, cache_format(lowered))
    return d["s"] == 1 and d["m"] > FEW_ROWS and d["d"] <= _WIDEST and formats in _MEET


def cache_format(lowered: Lowered) -> Format:
    """The format of the cache that a region attends to."""
    return lowered.direct["cache"].type.format


def tile_space(lowered: Lowered) -> Iterator[TritonSchedule]:
    """Schedules of attention in tiles: `rows` pairs of a row and a head, read in `stages` stages.

    Each warp holds 16 whole lines of every tile whatever the choice, so that the order in which a
    line is added up is not among the choices.
    """
    for rows, warps in ((64, 4), (128, 8)):
        for stages in (2, 3, 4):
            yield TritonSchedule(rows=rows, block_k=step_of(lowered), warps=warps, stages=stages)


def step_of(lowered: Lowered) -> int:
    """Rows of context read at a time: part of the order of sums, so by the width of a head alone.

    Wider heads leave a program registers for half as many scores.
    """
    return 64 if lowered.dims["d"] <= 64 else 32


def tile_cost(lowered: Lowered, schedule: TritonSchedule) -> float:
    """Seconds of attention in tiles over a full context: the time of one program and the waves of
    programs.
    """
    d = lowered.dims
    programs = -(-d["m"] * d["h"] // d["g"] // schedule.rows) * d["g"]
    waves, context = -(-programs // PROCESSORS), 16 * d["t"]
    columns = sum(width for _, width in parts_of(d["d"]))
    work = 4 * schedule.rows * context * columns / 3.0e12  # of one processor
    read = cache_format(lowered).nbytes((2, context, d["d"])) / 4.0e10
    return waves * max(work, read) * (1 + abs(schedule.stages - 3) / 20)


def parts_of(width: int) -> list[tuple[int, int]]:
    """(first column, columns) of the parts that the columns of a head are taken in: powers of two
    from 16 to 64, the last of which may reach past the end.
    """
    found, first = [], 0
    while first < width:
        left = width - first
        size = min(64, power(left) if power(left) - left < 16 else power(left) // 2)
        found.append((first, max(16, size)))
        first += max(16, size)
    return found


def attention_tiles(lowered: Lowered, schedule: TritonSchedule) -> Draft:
    """The kernel of a region around attention of many rows of one sequence."""
    d, size = lowered.dims, schedule.rows
    per = d["h"] // d["g"]
    pairs = d["m"] * per
    w = Holes(lowered, size * 128)
    pair_cut = f"pair < {pairs}" if pairs % size else ""
    w.axes |= {"row": Axis("row", 0, size, pair_cut), "head": Axis("head", 0, size, pair_cut)}
    parts = []
    for first, width in parts_of(d["d"]):
        name, cut = f"dim{first}", f"dim{first} < {d['d']}" if first + width > d["d"] else ""
        w.axes[f"part{first}"] = Axis(f"({name} - {first})" if first else name, 1, width, cut)
        parts.append({
            "name": name, "first": first, "width": width, "cut": cut, "sums": f"sums{first}",
            "result": f"result{first}",
        })  # fmt: skip
    row, head = var("row", d["m"]), var("head", d["h"])
    dims = [
        iadd(var(f"part{p['first']}", min(p["width"], d["d"] - p["first"])), p["first"])
        for p in parts
    ]
    args, cache = lowered.arguments, lowered.direct["cache"]
    with w.hole() as place:
        last = w.bound(args["indices"].at(row))
    scaled = args["q"].format is not cache.type.format
    with w.hole() as queries:
        _queries(w, [args["q"].at(row, head, dim) for dim in dims], scaled, parts, size)
    stores = result_stores(
        w, lowered, [(row, head, dim) for dim in dims], [p["result"] for p in parts]
    )
    holes = {
        "rows": d["m"], "pairs": size, "pair_cut": pair_cut, "group": per, "groups": d["g"],
        "dims": d["d"], "parts": parts, "step": step_of(lowered), "context": 16 * d["t"],
        "blocks": d["b"], "place": place, "last": last, "queries": queries, "scaled": scaled,
        "operand": TYPES[cache.type.format], "cache": cache.name, "stores": stores,
        "tables": lowered.direct["tables"].name,
        "factor": repr(float(lowered.attributes["scale"]) * _LOG2_E),
        "format": TYPES[result_format(lowered)],
    }  # fmt: skip
    grid = (-(-pairs // size), d["g"])
    return Draft("attention_tiles", holes, grid, schedule.warps, schedule.stages)


def _queries(
    w: Holes, values: list[Expr], scaled: bool, parts: list[dict], size: int
) -> None:  # fmt: skip
    """Writes the tiles of the query, in f32 where it is yet to be scaled."""
    wanted = w.expect(widened(q) if scaled else q for q in values)
    for value, part in zip(wanted, parts, strict=True):
        text = w.value(value)
        masks = [f"({cut})" for cut in (w.axes["row"].mask, part["cut"]) if cut]
        if masks:  # lanes past the end add nothing, whatever the prologue makes of zeros
            text = f"tl.where({' & '.join(masks)}, {text}, 0.0).to({TYPES[value.format]})"
        w.line(f"query_{part['name']} = tl.broadcast_to({text}, ({size}, {part['width']}))")
