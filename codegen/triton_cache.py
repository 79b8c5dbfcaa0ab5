"""The kernels of the paged cache: attention over it, and writes to it."""

from __future__ import annotations

from codegen.expr import Expr, const, iadd, imul, make, var
from codegen.lower import Lowered
from codegen.tiles import TYPES, Axis, power
from codegen.triton_holes import Draft, Holes, element, result_format, widened
from codegen.triton_schedule import TritonSchedule

SPAN = 128
"""Rows of context that one program of `attention` covers; spans start at multiples of it."""
CHUNK = 16
"""Rows of context that one program of `attention` reads at a time. Part of the order of sums."""


def _group_axes(w: Holes, lowered: Lowered) -> tuple[Expr, Expr, Expr, str]:
    dims = lowered.dims
    cut = f"dim < {dims['d']}" if power(dims["d"]) != dims["d"] else ""
    w.axes |= {
        "row": Axis("row"), "group": Axis("group"), "dim": Axis("dim", 1, power(dims["d"]), cut),
    }  # fmt: skip
    return var("row", dims["m"]), var("group", dims["g"]), var("dim", dims["d"]), cut


def attention(lowered: Lowered, schedule: TritonSchedule) -> Draft:
    """The kernel of a region around attention: of rows in order, or of the paths of a tree."""
    d = lowered.dims
    w = Holes(lowered, 1024)
    row, group, dim, cut = _group_axes(w, lowered)
    per = d["h"] // d["g"]
    heads = [iadd(imul(group, per), h) for h in range(per)]
    args = lowered.arguments
    with w.hole() as place:
        last, sequence = (w.bound(args[a].at(row)) for a in ("indices", "row_sequence"))
        ancestors = _ancestors(w, lowered, last) if "parents" in args else []
    with w.hole() as queries:
        wanted = w.expect(widened(args["q"].at(row, h, dim)) for h in heads)
        query = []
        for e in wanted:
            text = w.value(e)
            query.append(w.fresh("q"))
            w.line(f"{query[-1]} = " + (f"tl.where({cut}, {text}, 0.0)" if cut else text))
    result = [f"result{h}" for h in range(per)]
    stores = result_stores(w, lowered, [(row, h, dim) for h in heads], result)
    context = d["t"] * 16
    spans = -(-context // SPAN)
    part = per * (power(d["d"]) + 8)
    holes = {
        "rows": d["m"], "group": per, "groups": d["g"], "heads": d["h"], "dims": d["d"],
        "dim_block": power(d["d"]), "dim_mask": f" & ({cut})" if cut else "", "chunk": CHUNK,
        "span": SPAN, "spans": spans, "context": context, "place": place,
        "last": "tip" if ancestors else last,
        "sequence": sequence,
        "sequences": d["s"], "width": d["t"], "blocks": d["b"], "queries": queries, "query": query,
        "joint": min(16, power(spans)), "cache": lowered.direct["cache"].name,
        "tables": lowered.direct["tables"].name,
        "scale": repr(float(lowered.attributes["scale"])), "format": TYPES[result_format(lowered)],
        "result": result, "stores": stores, "ancestors": ancestors, "part": part,
        "scratch": "scratch", "counters": "counters",
    }  # fmt: skip
    split = spans > 1
    return Draft(
        lowered.anchor.target.name, holes, (d["m"] * d["g"], spans), schedule.warps,
        scratch_bytes=4 * d["m"] * d["g"] * spans * part if split else 0,
        counters=d["m"] * d["g"] if split else 0,
    )  # fmt: skip


def _ancestors(w: Holes, lowered: Lowered, last: str) -> list[tuple[str, str]]:
    """(place in the row's path, row of the cache) of the row and of each ancestor it may have.

    Written as a walk up the parents that stays at the root; `tip` becomes the row's own place.
    """
    m, args = lowered.dims["m"], lowered.arguments
    places, inner = [], []
    w.line("up0 = row")
    for s in range(m):
        w.axes[f"up{s}"] = Axis(f"up{s}")
        up = var(f"up{s}", m)
        index = last if s == 0 else w.bound(args["indices"].at(up))
        w.line(f"row{s} = tl.minimum(tl.maximum({index}, 0), {16 * lowered.dims['t'] - 1})")
        places.append((f"place{s}", f"row{s}"))
        if s + 1 < m:
            parent = w.bound(args["parents"].at(up))
            w.line(f"inner{s} = ({parent} >= 0) & ({parent} < up{s})")
            w.line(f"up{s + 1} = tl.where(inner{s}, {parent}, up{s})")
            inner.append(f"inner{s}.to(tl.int32)")
    w.line(f"depth = {' + '.join(inner) or '0'}")
    w.line(f"tip = tl.where({last} >= 0, row{m - 1} + depth, -1)")
    for s in range(m):
        w.line(f"place{s} = tl.where(depth >= {s}, tip - {s}, -1)")
    return places


def result_stores(
    w: Holes, lowered: Lowered, places: list[tuple[Expr, Expr, Expr]], result: list[str]
) -> list[str]:
    """The stores of a program whose results at `places` (row, head, dim) are named `result`."""
    d = lowered.dims
    with w.hole() as stores, w.scope():
        for place, name in zip(places, result):
            at = [const(0) if d[n] == 1 else e for e, n in zip(place, "mhd")]
            w.names[make("acc", *at, format=result_format(lowered))] = name
        flat = [(row, iadd(imul(head, d["d"]), dim)) for row, head, dim in places]
        items = [(s, *element(s, *at)) for at in flat for s in lowered.stores]
        w.expect(v for *_, v in items)
        for store, index, value in items:
            w.store(store, index, w.value(value))
    return stores


def kv_write(lowered: Lowered, schedule: TritonSchedule) -> Draft:
    """The kernel of a region around a write to the paged cache."""
    d = lowered.dims
    w = Holes(lowered, 1024)
    row, group, dim, cut = _group_axes(w, lowered)
    args = lowered.arguments
    with w.hole() as loads:
        k, v = w.expect([args["k"].at(row, group, dim), args["v"].at(row, group, dim)])
        slot = w.bound(args["slots"].at(row))
        texts = [w.value(k), w.value(v)]
    with w.hole() as stores:
        flat = iadd(imul(group, d["d"]), dim)
        for s in lowered.stores:
            index, value = element(s, row, flat)
            w.store(s, index, w.value(value))
    cache = lowered.direct["cache"]
    holes = {
        "rows": d["m"], "groups": d["g"], "dims": d["d"], "dim_block": power(d["d"]),
        "loads": loads,
        "slot": slot, "slots": d["b"] * 16, "cache": cache.name, "k": texts[0], "v": texts[1],
        "mask": f", mask={cut}" if cut else "", "stores": stores,
        "format": TYPES[cache.type.format],
    }  # fmt: skip
    return Draft("kv_write", holes, (d["m"], d["g"]), 1)
