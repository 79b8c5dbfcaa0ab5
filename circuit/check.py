"""The parity tool: every compiled program against the eager one, under the float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from circuit import options
from circuit.feed import parse_keys
from circuit.loaded import Loaded
from circuit.part_check import PartCheck, check_part
from circuit.recipe import TARGET
from circuit.report import FAILURE, OK, Record, Screen, table
from circuit.scenario import AHEAD, PREFIX, Script, one_by_one

if TYPE_CHECKING:
    from runners.base import Runner

TEXT = (
    "The river had carried stones down from the hills for so long that nobody in the valley knew "
    "what the bank had looked like before. In spring the water was brown and loud; in autumn one "
    "could cross it on foot, 12 steps from side to side, and count the fish that waited there."
)


def check_artifact(
    folder: Path, screen: Screen, *, keys: str | None = None, bisect: bool = False,
    threads: int | None = None,
) -> Record:  # fmt: skip
    """Checks every program of an artifact; the record says what was
    compared, and why it does not pass.
    """
    import torch

    from circuit.bindings import rebind

    torch.set_num_threads(options.threads(threads))
    wanted = parse_keys(keys)
    loaded = Loaded.read(folder, verify=True)
    bound = rebind(loaded.artifact)
    runners, free_shared = loaded.runners(threads, sequences=2)
    checks: dict[str, PartCheck] = {}
    try:
        with screen.progress("check") as report:
            scripts = scripts_of(loaded, runners)
            for name, runner in runners.items():
                chosen = runner.keys if wanted is None else runner.keys & wanted
                checks[name] = check_part(name, bound, runner, scripts[name], chosen, report)
    finally:
        for runner in runners.values():
            runner.close()
        free_shared()
    complete = {n: wanted is None or runners[n].keys <= wanted for n in checks}
    problems = [p for name, check in checks.items() for p in check.problems(complete[name])]
    record = _record(checks, problems)
    if bisect and problems:
        from circuit.bisect import first_bad_rewrites

        record["bisect"] = first_bad_rewrites(bound, scripts, screen, threads)
    _tell(checks, problems, screen)
    return record


def scripts_of(loaded: Loaded, runners: Mapping[str, Runner]) -> dict[str, Script]:
    """The text of the walk of each part; heads are fed the compiled target's own hiddens."""
    ids = np.array(loaded.tokenizer.encode(TEXT), np.int64)
    need = PREFIX + AHEAD + 1
    ids = np.resize(ids, need) if len(ids) < need else ids[:need]
    scripts = {TARGET: Script(ids)}
    if loaded.draft_parts:
        rows = one_by_one(runners[TARGET], scripts[TARGET], 0, need - 1)
        for name, head in zip(loaded.draft_parts, loaded.recipe.heads):
            hiddens = np.concatenate(
                [row.outputs[head.contract.target_hidden.output] for row in rows]
            )
            scripts[name] = Script(ids[1:], hiddens, head.contract.rope_offset)
    return scripts


def _record(checks: Mapping[str, PartCheck], problems: list[str]) -> dict[str, object]:
    programs = [c for check in checks.values() for c in check.programs]
    return {
        "passed": not problems,
        "problems": problems,
        "compared": {
            "programs": len(programs),
            "rows": sum(c.rows for c in programs),
            "numbers": sum(c.numbers for c in programs),
            "tokens": sum(c.tokens for c in programs),
            "near_ties": sum(c.near_ties for c in programs),
            "equal_rows": sum(check.equal_rows for check in checks.values()),
        },
        "faults": {name: check.faults for name, check in checks.items()},
        "programs": [c.plain() for c in programs],
        "exit_code": FAILURE if problems else OK,
    }


def _tell(checks: Mapping[str, PartCheck], problems: list[str], screen: Screen) -> None:
    rows = [
        [c.part, str(c.key), str(c.rows), f"{c.numbers:,}", str(c.tokens), str(c.near_ties),
         f"{c.worst:.2f}",
         "ok" if not c.problems else "WRONG"]
        for check in checks.values() for c in check.programs
    ]  # fmt: skip
    headings = ["part", "program", "rows", "numbers", "tokens", "near ties", "of allowance", ""]
    screen.say(table(headings, rows))
    equal = sum(check.equal_rows for check in checks.values())
    seen = sum(ok for check in checks.values() for ok in check.faults.values())
    planted_count = sum(len(check.faults) for check in checks.values())
    screen.say(f"{equal} rows of wider programs are equal to DECODE's, byte for byte")
    screen.say(f"{seen} of {planted_count} planted faults were seen")
    for problem in problems[:20]:
        screen.say(f"  - {problem}")
    screen.say("passed" if not problems else f"NOT passed: {len(problems)} problem(s)")
