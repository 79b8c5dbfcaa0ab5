"""Every kernel of programs of real sizes compiles for three architectures
without a device, and none spills.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_shapes import ARCHS, KEYS

HERE = Path(__file__).parent
SHARED_LIMIT = 160 * 1024  # bytes a block may ask for on the smallest of the three


def start(model: str) -> subprocess.Popen[str]:
    """A process that compiles the kernels of `model`."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE)])
    return subprocess.Popen(
        [sys.executable, str(HERE / "triton_shapes.py"), model],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict]]:
    """What each kernel of each model uses; the models are compiled side by side."""
    started = {model: start(model) for model in KEYS}
    found = {}
    for model, process in started.items():
        out, problems = process.communicate()
        assert process.returncode == 0, problems
        found[model] = json.loads(out)
    return found


@pytest.mark.parametrize("model", KEYS)
def test_no_kernel_spills(compiled: dict[str, list[dict]], model: str) -> None:
    found = compiled[model]
    assert {row["arch"] for row in found} == set(ARCHS)
    for row in found:
        assert row["stack"] == 0 and row["local"] == 0, row
        assert 0 < row["registers"] <= 255 and row["shared"] + row["asked"] <= SHARED_LIMIT, row


def test_a_draft_step_is_nine_launches(compiled: dict[str, list[dict]]) -> None:
    rows = [r for r in compiled["head"] if r["label"].startswith("DECODE ") and r["arch"] == 90]
    assert len(rows) == 9


@pytest.mark.parametrize("model", ["target", "attended"])
def test_many_rows_of_one_sequence_attend_in_tiles(compiled: dict, model: str) -> None:
    """With room for two programs on a processor: 65536 registers, 160 KiB of shared memory."""
    found = [r for r in compiled[model] if r["label"].startswith("PREFILL")]
    rows = [r for r in found if "attention" in r["label"]]
    assert {r["arch"] for r in rows} == set(ARCHS) and len(rows) == len(ARCHS)
    for row in rows:
        assert row["shared"] + row["asked"] <= SHARED_LIMIT // 2 and row["registers"] <= 255, row
        assert row["shared"] + row["asked"] > 16 * 1024, row  # a tile of keys and one of values


@pytest.mark.parametrize("model", ["head", "target"])
def test_a_row_is_added_up_in_one_order_whatever_the_row_count(compiled: dict, model: str) -> None:
    """On each architecture, what DECODE and VERIFY_4 reduce along a
    row is spread over lanes alike.
    """
    orders: dict[tuple[str, int], dict[str, list[str]]] = {}
    for row in compiled[model]:
        key, _, label = row["label"].partition(" ")
        if key in ("DECODE", "VERIFY_4") and "linear" in label:
            orders.setdefault((label, row["arch"]), {}).setdefault(key, []).append(row["sums"])
    both = {at: found for at, found in orders.items() if len(found) == 2}
    assert len(both) >= 4 * len(ARCHS)
    for at, found in both.items():
        decode, verify = (sorted(found[k]) for k in ("DECODE", "VERIFY_4"))
        assert decode == verify and all(decode), at
