"""Attention over the paged cache, and the writes to it."""

from __future__ import annotations

from codegen.cpp_dialect import TYPES
from codegen.cpp_loops import Scope, last_address
from codegen.cpp_source import RegionSource, row
from codegen.expr import iadd, imul
from codegen.kernel import Kernel


def attention_kernel(region: RegionSource) -> Kernel:
    """The kernel of a region around attention: of rows in order, or of the paths of a tree."""
    low = region.lowered
    m, h, g, d, t = (region.dims[x] for x in "mhgdt")
    scope = Scope(region.places)
    head = iadd(imul(row(g, "g"), h // g), row(h // g, "j"))
    index = (row(m), head)
    query = [
        *scope.stats(low.stats, index),
        *scope.fill(
            region.argument("q"), index, lambda i, x: f"head.q[{last_address(scope, i)}] = {x};"
        ),
    ]
    result = Scope(region.places, lambda i: f"head.acc[{i[-1]}]")
    epilogue = scope.stats_read(low.stats, [s.value for s in low.stores], index)
    for store in low.stores:
        shape = tuple(store.value.shape)
        assert len(shape) == 3, f"attention stores heads, not {shape}"
        epilogue += result.fill(
            store.value, index,
            lambda i, x, o=store.operand, s=shape: f"{o.name}[{result.address(i, s)}] = {x};",
        )  # fmt: skip
    return region.kernel(
        low.anchor.target.name, cache=low.direct["cache"], tables=low.direct["tables"], query=query,
        epilogue=epilogue, m=m, heads=h // g, g=g, d=d, t=t,
        cached=TYPES[low.direct["cache"].type.format],
        scale=repr(float(low.attributes["scale"])) + "f",
        seen=scope.scalar("int32_t", "seen", region.argument("indices").at(row(m))),
        sequence=scope.scalar("int32_t", "sequence", region.argument("row_sequence").at(row(m))),
        parent=scope.scalar("int32_t", "parent", region.argument("parents").at(row(m)))
        if "parents" in low.arguments else None,
        tile_rows=min(region.schedule.rows, m),
    )  # fmt: skip


def kv_write_kernel(region: RegionSource) -> Kernel:
    """The kernel of a region around a write to the cache."""
    low = region.lowered
    m, g, d = (region.dims[x] for x in "mgd")
    scope = Scope(region.places)
    index = (row(m), row(g, "g"))
    lines = {
        name: scope.fill(
            region.argument(name),
            index,
            lambda i, x, to=to: f"keep({to} + {last_address(scope, i)}, {x});",
        )
        for name, to in (("k", "key"), ("v", "v"))
    }
    return region.kernel(
        "kv_write", cache=low.direct["cache"], m=m, g=g, d=d,
        cached=TYPES[low.direct["cache"].type.format],
        slot=scope.scalar("int32_t", "slot", region.argument("slots").at(row(m))),
        stats=scope.stats(low.stats, index), keys=lines["k"], values=lines["v"],
    )  # fmt: skip
