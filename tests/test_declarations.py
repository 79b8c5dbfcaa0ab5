"""An op is declared once, and what is derived from its declaration is true of its body."""

import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ir import ops
from ir.errors import BadOpCall, DimMismatch, RankMismatch
from ir.op import REGISTRY, Kind, Op
from ir.tensor import Format, TensorType

ROOT = Path(__file__).parent.parent
NAMES = sorted(REGISTRY)
OWNERS = [n for n in NAMES if REGISTRY[n].kind in (Kind.ANCHOR, Kind.STATE)]
INTEGERS = {
    "ids", "index", "indices", "positions", "row_sequence", "slots", "tables", "bitmask",
    "candidates", "parents", "ranks", "above",
}  # fmt: skip
SETTINGS = {  # attributes that need dimensions to fit
    "split_heads": {"heads": 2}, "lane": {"index": 1, "of": 2, "width": 2}, "advance": {"by": 3},
    "columns": {"start": 1, "stop": 3}, "column": {"index": 0}, "finish_ranks": {"width": 2},
    "tile_argmax": {"width": 2}, "norm_scale": {"offset": 1.0},
}  # fmt: skip


def shapes_of(op: Op, draw: torch.Generator) -> list[tuple[int, ...]]:
    """Shapes that the op's signature admits, with odd sizes."""
    sizes: dict[str, int] = {}

    def size(dim: str) -> int:
        if dim.isdigit():
            return int(dim)
        return sizes.setdefault(dim, int(torch.randint(1, 6, (), generator=draw)))

    if op.name in ("split_heads", "lane"):
        sizes["n"] = 4 * int(torch.randint(1, 4, (), generator=draw))
    if op.name == "columns":
        sizes["n"] = int(torch.randint(3, 9, (), generator=draw))
    if op.name in ("attention", "tree_attention"):
        sizes["g"] = int(torch.randint(1, 4, (), generator=draw))
        sizes["h"] = sizes["g"] * int(torch.randint(1, 4, (), generator=draw))
    if op.name == "rope":
        sizes["r"] = int(torch.randint(1, 4, (), generator=draw))
        sizes["d"] = 2 * sizes["r"] + int(torch.randint(0, 3, (), generator=draw))
    lead = tuple(torch.randint(1, 4, (2,), generator=draw).tolist())
    return [
        (lead if dims[:1] == ("...",) else ()) + tuple(size(d) for d in dims if d != "...")
        for _, dims in op.signature.arguments
    ]


def values_of(op: Op, shapes: list[tuple[int, ...]], draw: torch.Generator) -> list[torch.Tensor]:
    """Tensors of the shapes: indices within all tables, floats drawn from the normal law."""
    integers = INTEGERS | ({"table"} if op.name == "take" else set())
    return [
        torch.zeros(shape, dtype=torch.int32)
        if name in integers
        else torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in zip(op.signature.names, shapes)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_names_the_arguments_of_the_body(name):
    op = REGISTRY[name]
    parameters = inspect.signature(op.body).parameters.values()
    tensors = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert tuple(tensors) == op.signature.names
    keywords = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert all(p.default is not inspect.Parameter.empty for p in keywords)
    assert len(tensors) + len(keywords) == len(parameters)


@pytest.mark.parametrize("name", NAMES)
def test_every_op_says_what_it_returns(name):
    op = REGISTRY[name]
    first = (op.__doc__ or "").strip().split("\n\n")[0]
    assert (first.endswith(".") and op.__doc__[0].isupper()) or op.__doc__.startswith("`")
    assert getattr(ops, name) is op, "an op is offered by ir.ops"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_the_body_gives_the_shape_and_format_that_are_inferred(name, seed):
    op, draw = REGISTRY[name], torch.Generator().manual_seed(seed)
    shapes, attributes = shapes_of(op, draw), SETTINGS.get(name, {})
    values = [v.float() if v.is_floating_point() else v for v in values_of(op, shapes, draw)]
    got = op(*values, **attributes)
    assert op.infer([TensorType.of(v) for v in values], attributes) == TensorType.of(got)
    assert op.count_flops([TensorType.of(v) for v in values]) >= (1 if op.facets.flops else 0)


def shares_a_dimension(name: str) -> bool:
    """True if two arguments of the op have a named dimension in common."""
    dims = [set(d) - {"..."} for _, d in REGISTRY[name].signature.arguments]
    return any(a & b for i, a in enumerate(dims) for b in dims[i + 1 :])


@pytest.mark.parametrize("name", list(filter(shares_a_dimension, NAMES)))
@settings(max_examples=10)
@given(st.integers(0, 10_000))
def test_a_dimension_that_disagrees_is_named(name, seed):
    op, draw = REGISTRY[name], torch.Generator().manual_seed(seed)
    shapes = shapes_of(op, draw)
    known: dict[str, int] = {}
    for position, (argument, dims) in enumerate(op.signature.arguments):
        tail = [d for d in dims if d != "..."]
        for offset, dim in enumerate(reversed(tail)):
            if dim in known:
                wrong = list(shapes[position])
                wrong[-1 - offset] += 1
                changed = [*shapes[:position], tuple(wrong), *shapes[position + 1 :]]
                with pytest.raises(DimMismatch) as caught:
                    op.signature.bind(name, changed)
                facts = caught.value.facts
                assert facts["dim"] == dim and facts["argument"] == argument
                assert f"dimension {dim} is {wrong[-1 - offset]}" in caught.value.sentence
                assert op.signature.text in caught.value.advice
                return
        known |= dict.fromkeys(tail, position)
    raise AssertionError("no dimension is shared")


def test_wrong_calls_are_refused_in_words():
    x = torch.zeros(2, 3)
    with pytest.raises(BadOpCall, match="1 tensors given, 2 expected"):
        ops.add(x)
    with pytest.raises(BadOpCall, match="unknown attribute"):
        ops.add(x, x, scale=2)
    with pytest.raises(RankMismatch, match=r"`weight` has shape \(3,\)"):
        ops.linear(x, torch.zeros(3))


def influence(op: Op, values: list[torch.Tensor], argument: int, attributes: dict) -> torch.Tensor:
    """Bool [result elements, argument elements]: which element of
    the argument moves which result.
    """
    base = op(*values, **attributes)
    moved = []
    for i in range(values[argument].numel()):
        changed = [v.clone() for v in values]
        changed[argument].view(-1)[i] += 0.5 if changed[argument].is_floating_point() else 1
        moved.append((op(*changed, **attributes) != base).flatten())
    return torch.stack(moved, 1)


ELEMENTWISE = [
    (n, i)
    for n in NAMES
    for i in range(len(REGISTRY[n].signature.arguments))
    if REGISTRY[n].elementwise(i)
]


@pytest.mark.parametrize(("name", "argument"), ELEMENTWISE)
def test_an_elementwise_argument_is_read_at_the_result_index_only(name, argument):
    op, draw = REGISTRY[name], torch.Generator().manual_seed(3)
    shapes = shapes_of(op, draw)
    values = values_of(op, shapes, draw)
    assert op(*values).shape == values[argument].shape
    moved = influence(op, values, argument, {})
    assert not (moved & ~torch.eye(len(moved), dtype=torch.bool)).any()


def test_rope_is_declared_to_gather_and_does():
    draw = torch.Generator().manual_seed(3)
    values = values_of(ops.rope, [(1, 2, 6), (1,), (4, 2), (4, 2)], draw)
    assert not ops.rope.elementwise(0)
    assert (influence(ops.rope, values, 0, {}) & ~torch.eye(12, dtype=torch.bool)).any()


@pytest.mark.parametrize("name", [n for n in NAMES if REGISTRY[n].stacked is not None])
def test_stacking_rows_of_a_weight_stacks_columns_of_the_result(name):
    op, draw = REGISTRY[name], torch.Generator().manual_seed(1)
    values = values_of(op, shapes_of(op, draw), draw)
    other = list(values)
    other[op.stacked] = torch.randn(values[op.stacked].shape, generator=draw, dtype=torch.float64)
    both = list(values)
    both[op.stacked] = torch.cat([values[op.stacked], other[op.stacked]])
    assert torch.allclose(op(*both), torch.cat([op(*values), op(*other)], dim=-1), rtol=1e-12)


@pytest.mark.parametrize("name", [n for n in NAMES if REGISTRY[n].facets.identity])
def test_a_declared_identity_returns_its_argument(name):
    op = REGISTRY[name]
    x = torch.tensor([-1, 0, 5], dtype=torch.int32)
    attributes = dict.fromkeys(op.defaults, 0)
    assert op.is_identity(attributes) and torch.equal(op(x, **attributes), x)
    assert not op.is_identity(dict.fromkeys(op.defaults, 1))


@pytest.mark.parametrize("name", [n for n in NAMES if REGISTRY[n].facets.split])
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 9))
def test_a_split_op_is_its_two_halves(name, seed, columns, width):
    op, draw = REGISTRY[name], torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (4, columns), generator=draw).float()  # many ties
    x[1] = -torch.inf
    x[2, -1] = torch.nan
    x[3, 0] = torch.inf
    pair, others = op.facets.split, []
    if op is ops.next_rank:
        others = [ops.stood_up(ops.argmax(x))]
        for _ in range(min(2, columns - 1)):
            others = [ops.next_rank(x, *others)]
    partial = pair.partial(x, **{pair.partial.facets.tile: width})
    width = {"width": width} if "width" in pair.finish.defaults else {}
    found, wanted = pair.finish(x, partial, *others, **width), op(x, *others)
    if pair.exact:
        assert torch.equal(found, wanted)
    else:
        assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_ranks_are_a_stable_sort(seed, columns):
    x = torch.randint(-3, 4, (2, columns), generator=torch.Generator().manual_seed(seed)).float()
    x[0, columns // 2] = -torch.inf
    ranks = ops.stood_up(ops.argmax(x))
    for _ in range(4):
        ranks = ops.next_rank(x, ranks)
    known = (-x).argsort(dim=-1, stable=True)[:, :5]
    wanted = torch.nn.functional.pad(known, (0, 5 - known.shape[1]), value=columns)
    assert ranks.tolist() == wanted.tolist()
    shares = ops.log_share(x, ranks, ops.log_mass(x))
    known = x.log_softmax(-1).gather(1, known)
    if columns > 1:  # a row of nothing but -inf has no chances
        assert torch.allclose(shares[:, : known.shape[1]], known, atol=1e-6)
    assert (shares[:, columns:] == -torch.inf).all()


BACKENDS = sorted(p.name for p in ROOT.glob("codegen/templates/*") if p.is_dir())


def missing_templates(backends: list[str], owners: list[str]) -> list[str]:
    """Paths of the templates that (anchor or state write, backend) pairs lack."""
    paths = [
        ROOT / "codegen" / "templates" / backend / f"{op}.j2"
        for backend in backends
        for op in owners
    ]
    return [str(p.relative_to(ROOT)) for p in paths if not p.exists()]


def test_every_owner_of_a_region_has_a_template_in_every_backend():
    assert {"cpp", "triton"} <= set(BACKENDS)
    assert missing_templates(BACKENDS, OWNERS) == []


def test_a_missing_template_is_named_by_its_path():
    assert missing_templates(["cpp"], ["no_such_op"]) == ["codegen/templates/cpp/no_such_op.j2"]


def test_a_name_is_declared_once():
    with pytest.raises(AssertionError, match="declared twice"):
        Op(ops.add.body, Kind.POINTWISE, "a[n] b[n] -> [n]", ops.add.facets)
    assert Format.of(torch.float32) is Format.F32
