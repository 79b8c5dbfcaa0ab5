"""Kernels in C++: each anchor's template filled with the region's prologue and epilogue."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.cpp_attention import attention_kernel, kv_write_kernel
from codegen.cpp_linear import linear_kernel
from codegen.cpp_loops import Scope, indented
from codegen.cpp_source import CppSchedule, RegionSource, row
from codegen.expr import Expr
from codegen.kernel import Kernel
from codegen.lower import Lowered, Operand, Store
from ir.format import Format


def emit_kernel(lowered: Lowered, schedule: CppSchedule, layouts: Mapping[str, str]) -> Kernel:
    """The kernel of a region: the template of its anchor, or the
    one of regions without an anchor.
    """
    name = lowered.anchor.target.name if lowered.anchor is not None else "region"
    return _EMITTERS[name](RegionSource(lowered, schedule, layouts))


def _plain(region: RegionSource) -> Kernel:
    low = region.lowered
    scope = Scope(region.places)
    rows = max((s.value.shape[0] for s in low.stores if s.value.shape), default=1)
    flat = [s for s in low.stores if len(s.value.shape) == 2]
    together = [s for s in flat if low.stats and len(flat) > 1]
    loops = [_elements(scope, low, s) for s in low.stores if s not in together]
    loops += _row_by_row(scope, low, together)
    return region.kernel("region", stores=loops, rows=rows)


def _row_by_row(scope: Scope, low: Lowered, stores: list[Store]) -> list[dict[str, object]]:
    """One loop over the rows for stores of as many, so that statistics are computed once."""
    loops = []
    for count in dict.fromkeys(s.value.shape[0] for s in stores):
        alike, lead = [s for s in stores if s.value.shape[0] == count], (row(count),)
        lines = scope.stats_read(low.stats, [s.value for s in alike], lead)
        for store in alike:
            lines += scope.fill(
                store.value, lead,
                lambda i, x, s=store: _assigned(
                    s.operand, f"{s.operand.name}[{scope.address(i, tuple(s.value.shape))}]", x
                ),
            )  # fmt: skip
        loops.append({"rows": count, "lines": lines})
    return loops


def _elements(scope: Scope, low: Lowered, store: Store) -> dict[str, object]:
    """Rows of a store, and the statements that compute one row `i`."""
    shape, name = tuple(store.value.shape), store.operand.name
    lead: list[Expr] = [row(shape[0])]
    if len(shape) == 1:
        statements, text = scope.text(store.value.at(*lead))
        lines = [*scope.stats(low.stats, tuple(lead)), *statements]
        return {"rows": shape[0], "lines": [*lines, _assigned(store.operand, f"{name}[i]", text)]}
    opening, closing = [], 0
    for depth, extent in enumerate(shape[1:-1]):
        lead.append(row(extent, f"j{depth}"))
        opening.append(f"for (int j{depth} = 0; j{depth} < {extent}; j{depth}++) {{")
        closing += 1
    stats = [s for s in low.stats if len(s.value.shape) <= len(lead)]
    body = [
        *scope.stats(stats, tuple(lead)),
        *scope.fill(
            store.value, tuple(lead),
            lambda i, x: _assigned(store.operand, f"{name}[{scope.address(i, shape)}]", x),
        ),
    ]  # fmt: skip
    lines = [*opening, *indented(body), *(["}"] * closing)]
    return {"rows": shape[0], "lines": lines}


def _assigned(operand: Operand, target: str, text: str) -> str:
    narrow = operand.type.format in (Format.F16, Format.BF16)
    return f"keep(&{target}, {text});" if narrow else f"{target} = {text};"


_EMITTERS = {
    "linear": linear_kernel, "attention": attention_kernel, "tree_attention": attention_kernel,
    "kv_write": kv_write_kernel, "region": _plain,
}  # fmt: skip
