"""The expressions that kernels are printed from give what the bodies
give on tensors, element by element.
"""

import math
import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.expr import Expr, bounds, const, iadd, idiv, imod, imul, make, var
from codegen.lazy import Lazy, Unprintable
from ir import ops
from ir.op import Kind, Op
from ir.tensor import Format

_CALLS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "shr": operator.rshift,
    "and": operator.and_,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq,
    "max": max, "min": min, "neg": operator.neg, "rsqrt": lambda x: 1 / math.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)), "exp": math.exp, "log": math.log,
    "tanh": math.tanh,
}  # fmt: skip
_REDUCTIONS = {"sum": sum, "max": max, "min": min}


def evaluate(e: Expr, variables: dict[str, int], buffers: dict[str, torch.Tensor]):
    """The value of an expression, by the plain meaning of each node."""
    if e.op == "const":
        return e.payload
    if e.op == "var":
        return variables[e.payload[0]]
    if e.op == "reduce":
        kind, name, extent = e.payload
        return _REDUCTIONS[kind](
            evaluate(e.args[0], {**variables, name: i}, buffers) for i in range(extent)
        )
    if e.op == "where":
        test, yes, no = e.args
        return evaluate(yes if evaluate(test, variables, buffers) else no, variables, buffers)
    args = [evaluate(a, variables, buffers) for a in e.args]
    if e.op == "load":
        assert all(0 <= a < n for a, n in zip(args, buffers[e.payload].shape)), "a load is outside"
        return buffers[e.payload][tuple(int(a) for a in args)].item()
    if e.op == "cast":
        return torch.tensor(args[0]).to(e.format.dtype).item()
    return _CALLS[e.op](*args)


def loaded(name: str, tensor: torch.Tensor) -> Lazy:
    """The Lazy that reads buffer `name`."""
    format = Format.of(tensor.dtype)
    return Lazy(
        tuple(tensor.shape), format, lambda i: make("load", *i, format=format, payload=name)
    )


def assert_printed_equals_body(op: Op, *tensors: torch.Tensor, **attributes) -> None:
    """Every element of the lazy body equals the body on tensors."""
    want = op(*tensors, **attributes)
    buffers = {f"p{i}": t for i, t in enumerate(tensors)}
    value = op.body(*(loaded(n, t) for n, t in buffers.items()), **attributes)
    assert tuple(value.shape) == tuple(want.shape)
    assert value.format is Format.of(want.dtype)
    names = ["ijkl"[d] for d in range(want.dim())]
    element = value.at(*(var(n, size) for n, size in zip(names, want.shape)))
    for index in np.ndindex(*want.shape):
        got = evaluate(element, dict(zip(names, index)), buffers)
        assert torch.allclose(
            torch.tensor(float(got)), want[index].double().float(),
            rtol=1e-2 if want.dtype.itemsize == 2
            else 1e-5, atol=1e-6, equal_nan=True,
        ), (op, index, got, want[index])  # fmt: skip


def randn(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CASES = {
    "add": lambda t: (randn(3, 5, dtype=t), randn(3, 5, dtype=t)),
    "add_bias": lambda t: (randn(3, 5, dtype=t), randn(5, dtype=t)),
    "silu_mul": lambda t: (randn(3, 5, dtype=t), randn(3, 5, dtype=t)),
    "sigmoid_gate": lambda t: (randn(3, 5, dtype=t), randn(3, 5, dtype=t)),
    "inverse_rms": lambda t: (randn(3, 2, 9, dtype=t),),
    "norm_scale": lambda t: (randn(3, 9, dtype=t), randn(3).abs(), randn(9)),
    "rope": lambda t: (randn(3, 2, 10, dtype=t), index(0, 4, 2), randn(6, 4), randn(6, 4)),
    "embed": lambda t: (index(0, 96, 200), randn(97, 5, dtype=t)),
    "select_rows": lambda t: (randn(4, 5, dtype=t), index(3, 1)),
    "argmax": lambda t: (torch.tensor([[1.0, 3, 3, 2], [-1, -2, -1, -9]], dtype=t),),
    "tile_mass": lambda t: (randn(2, 33, dtype=t),),
    "tile_argmax": lambda t: (torch.tensor([[1.0, 3, 3, 2, 9], [-1, -2, -1, -9, -7]], dtype=t),),
    "finish_argmax": lambda t: (
        torch.tensor([[1.0, 3, 3, 2], [-1, -2, -1, -9]], dtype=t),
        index(1, 2, 4, 2).reshape(2, 2),
    ),
    "next_rank": lambda t: (
        torch.tensor([[1.0, 3, 3, 2], [-1, -2, -1, -9]], dtype=t),
        index(1, 0).reshape(2, 1),
    ),
    "stood_up": lambda t: (index(-1, 0, 7),),
    "finish_ranks": lambda t: (
        torch.tensor([[1.0, 3, 3, 2, 9], [-1, -2, -1, -9, -9]], dtype=t),
        index(1, 2, 4, 0, 2, 4).reshape(2, 3),
        index(4, 1, 0, 2).reshape(2, 2),
    ),
    "finish_mass": lambda t: (randn(2, 9, dtype=t), randn(2, 5)),
    "log_chance": lambda t: (randn(2, 9, dtype=t), index(8, 9), randn(2)),
    "log_mass": lambda t: (randn(3, 9, dtype=t),),
    "log_share": lambda t: (randn(2, 9, dtype=t), index(0, 8, 9, 3).reshape(2, 2), randn(2)),
    "column": lambda t: (randn(3, 12, dtype=t),),
    "mask_ids": lambda t: (
        randn(2, 4, dtype=t),
        index(5, -(2**31), 9, -1).reshape(2, 2),
        index(0, 31, 33, 99),
    ),
    "mask_logits": lambda t: (randn(2, 70, dtype=t), index(5, -(2**31), 9, -1).reshape(2, 2)),
    "take": lambda t: (index(0, 3, 1), index(10, 20, 30, 40)),
    "concat": lambda t: (randn(3, 4, dtype=t), randn(3, 3, dtype=t)),
    "advance": lambda t: (index(-1, 0, 7),),
    "zero_at": lambda t: (randn(3, 5, dtype=t), index(0, 4, -1)),
    "split_heads": lambda t: (randn(3, 12, dtype=t),),
    "merge_heads": lambda t: (randn(3, 4, 5, dtype=t),),
    "columns": lambda t: (randn(3, 12, dtype=t),),
    "lane": lambda t: (randn(3, 64, dtype=t),),
    "slot_at": lambda t: (index(*range(8)).reshape(2, 4), index(0, 1, 1), index(17, 63, -1)),
}
ATTRIBUTES = {
    "split_heads": {"heads": 3}, "columns": {"start": 3, "stop": 9}, "lane": {"index": 1},
    "advance": {"by": 2}, "norm_scale": {"offset": 1.0}, "tile_argmax": {"width": 2},
    "tile_mass": {"width": 8},
    "finish_ranks": {"width": 2}, "column": {"index": 3},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(CASES))
def test_printed_body_is_the_body(name, dtype):
    op = getattr(ops, name)
    assert_printed_equals_body(op, *CASES[name](dtype), **ATTRIBUTES.get(name, {}))


def test_every_printable_op_has_a_case():
    printable = {
        n for n in ops.__all__
        if isinstance(getattr(ops, n), Op)
        and getattr(ops, n).kind in (Kind.POINTWISE, Kind.ROW, Kind.VIEW)
    }  # fmt: skip
    assert printable <= CASES.keys()


def test_views_of_views_print_as_the_plain_address():
    i, j = var("i"), var("j", 32)
    flat = Lazy((3, 32), Format.F32, lambda at: make("load", *at, format=Format.F32, payload="x"))
    there_and_back = flat.reshape(3, 4, 8).flatten(-2)
    assert there_and_back.at(i, j) is flat.at(i, j)
    heads = Lazy(
        (3, 4, 8), Format.F32, lambda at: make("load", *at, format=Format.F32, payload="h")
    )
    row, head, column = heads.flatten(-2).at(i, j).args
    assert iadd(iadd(imul(row, 32), imul(head, 8)), column) is iadd(imul(i, 32), j)


@given(
    st.integers(0, 9), st.integers(0, 9), st.integers(1, 64), st.integers(1, 64), st.integers(0, 70)
)
def test_index_arithmetic_is_exact(i, j, a, n, c):
    x, y = var("x", 10), var("y", 10)
    e = iadd(iadd(imul(x, a), y), c)
    for made, want in ((idiv(e, n), (i * a + j + c) // n), (imod(e, n), (i * a + j + c) % n)):
        assert evaluate(made, {"x": i, "y": j}, {}) == want
        limits = bounds(made)
        assert limits is None or limits[0] <= want <= limits[1]
    nested = imod(idiv(e, n), 7)
    assert evaluate(nested, {"x": i, "y": j}, {}) == (i * a + j + c) // n % 7


def test_a_function_without_a_printed_form_is_named():
    x = loaded("x", randn(2, 2))
    with pytest.raises(Unprintable, match="erf"):
        torch.erf(x)
    assert const(3) is const(3) and const(3) is not const(3.0, Format.F32)


settings.register_profile("ordinary", deadline=None)
settings.load_profile("ordinary")
