"""Imports point left only: ir <- codegen <- runners <- proposers <- circuit."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ["ir", "codegen", "runners", "proposers", "circuit"]


def imported_layers(source: str) -> set[str]:
    """Top-level package names that a module's source imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add((node.module or "").split(".")[0])
    return found & set(LAYERS)


def arrows_to_the_right(layer: str, source: str) -> list[str]:
    """Layers that `source`, a module of `layer`, may not import but does."""
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    return sorted(imported_layers(source) - set(allowed))


def test_no_import_points_right():
    wrong = {
        str(path.relative_to(ROOT)): arrows
        for layer in LAYERS
        for path in sorted((ROOT / layer).rglob("*.py"))
        if (arrows := arrows_to_the_right(layer, path.read_text()))
    }
    assert wrong == {}


def test_an_arrow_to_the_right_is_seen():
    assert arrows_to_the_right("ir", "def f():\n    from runners.kv import Lease") == ["runners"]
    assert arrows_to_the_right("runners", "import ir.op, codegen.plan") == []


def test_environment_is_read_in_options_only():
    readers = [
        str(path.relative_to(ROOT))
        for layer in LAYERS
        for path in sorted((ROOT / layer).rglob("*.py"))
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    ]
    assert set(readers) <= {"circuit/options.py"}


def test_compiled_programs_are_served_without_torch():
    """Importing torch would cost more than loading an artifact and writing its first token."""
    code = (
        "import sys, circuit.loaded, circuit.engine.batch, proposers.multi_module\n"
        "print(sorted({'torch', 'networkx', 'jinja2', 'triton'} & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (out.stdout, out.stderr) == ("[]\n", "")
