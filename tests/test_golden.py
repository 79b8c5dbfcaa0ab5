"""The printed programs of a tiny target and a tiny head are the ones kept in `golden/`.

`python tests/test_golden.py` writes them anew: read the difference before it is committed.
"""

from pathlib import Path

import pytest

from ir.graph import DECODE, Graph, GraphKey
from ir.passes.manager import run_pipeline
from ir.show import text
from ir.tensor import Format
from tests.programs import CPU, QWEN35, head_graph, target_graph

GOLDEN = Path(__file__).parent / "golden"
PROGRAMS = {
    "target_decode": lambda: target_graph(DECODE, Format.Q4_1, num_hidden_layers=1),
    "target_verify_3_f32": lambda: target_graph(GraphKey.parse("VERIFY_3"), num_hidden_layers=1),
    "head_decode": lambda: head_graph(DECODE, Format.Q8_0),
    "head_qwen35_decode": lambda: head_graph(DECODE, Format.BF16, QWEN35),
    "head_chain_2": lambda: head_graph(GraphKey.parse("CHAIN_2"), Format.Q8_0),
}


def printed(graph: Graph) -> str:
    """The graph as it is traced, and as it is launched."""
    return text(graph, origins=False) + "\n\n" + text(run_pipeline(graph, CPU), origins=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_printed_program_is_the_golden_one(name):
    assert printed(PROGRAMS[name]()) == (GOLDEN / f"{name}.ir.txt").read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_printed_program_parses_as_python(name):
    compile(printed(PROGRAMS[name]()), name, "exec")


if __name__ == "__main__":
    for name, make in PROGRAMS.items():
        (GOLDEN / f"{name}.ir.txt").write_text(printed(make()))
