"""`circuit compile --backend triton` on a machine without a device: what
it writes, and what loading it says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_models import tiny_head, tiny_model

ROOT = Path(__file__).parent.parent
UNIT = '''"""One kernel."""

import triton
import triton.language as tl

KERNELS = {}


@triton.jit
def doubled(p0, o0):
    lane = tl.arange(0, 128)
    tl.store(o0 + lane, tl.load(p0 + lane) * 2.0)


KERNELS["doubled"] = (doubled, (1,), 1, 1, 0, ((0, 0, "fp32"), (1, 0, "fp32")))
'''
BUILD = """
import sys
from pathlib import Path
from codegen.aot import compile_units
from codegen.store import KernelStore
built = compile_units({"one.py": Path(sys.argv[1])}, (80, 90), KernelStore(Path(sys.argv[2])))
for name in sorted(built):
    print(name, built[name])
"""


def run(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """`circuit` with `words` (or a piece of code) where Triton compiles instead of interpreting."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    start = ["-c", code] if code else ["-m", "circuit.cli"]
    return subprocess.run(
        [sys.executable, *start, *words], env=environment, text=True, capture_output=True, cwd=ROOT
    )


def test_units_become_cubins_with_their_resource_usage(tmp_path: Path) -> None:
    unit = tmp_path / "one.py"
    unit.write_text(UNIT)
    done = run(str(unit), str(tmp_path / "store"), code=BUILD)
    assert done.returncode == 0, done.stderr
    built = dict(line.split() for line in done.stdout.splitlines())
    assert sorted(built) == ["doubled.sm_80.cubin", "doubled.sm_90.cubin", "usage.json"]
    assert Path(built["doubled.sm_90.cubin"]).read_bytes()[:4] == b"\x7fELF"
    used = json.loads(Path(built["usage.json"]).read_text())
    assert [(u["kernel"], u["arch"], u["stack"]) for u in used] == [
        ("doubled", 80, 0),
        ("doubled", 90, 0),
    ]
    assert all(0 < u["registers"] < 64 for u in used)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and head, compiled for CUDA devices without one."""
    folder = tmp_path_factory.mktemp("triton")
    model, head = tiny_model(folder / "model"), tiny_head(folder / "head.safetensors")
    done = run(
        "compile", str(model), "--draft", str(head), "-o", str(folder / "out"), "--backend",
        "triton",
        "--weights", "bf16", "--context", "64", "--batch", "2", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["parts"]["draft"]["launches"]["DECODE"] <= 9
    return folder / "out"


def test_an_artifact_holds_the_generated_modules(artifact: Path) -> None:
    kernels = artifact / "target" / "kernels"
    text = (kernels / "DECODE.py").read_text()
    assert "@triton.jit" in text and "def circuit_run_DECODE(launch):" in text
    plans = {p.stem for p in (artifact / "target" / "plans").iterdir()}
    assert plans == {p.stem for p in kernels.glob("*.py")} and "VERIFY_4" in plans
    for path in kernels.glob("*.py"):
        compile(path.read_text(), str(path), "exec")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_loading_it_without_a_device_is_one_error_with_a_hint(artifact: Path) -> None:
    done = run("generate", str(artifact), "--prompt", "a", "--max-tokens", "2")
    assert done.returncode == 1 and not done.stdout.strip()
    assert "CUDA device" in done.stderr and "--backend cpp" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_architecture_that_is_none_is_refused(tmp_path: Path) -> None:
    done = run("compile", "x", "-o", str(tmp_path / "o"), "--backend", "triton", "--archs", "70")
    assert done.returncode == 2 and "sm_80" in done.stderr
