"""The demo: fetch, compile, generate with and without drafts, and a table of
speeds, by the commands themselves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

STEPS = "DECODE,VERIFY_2,VERIFY_3,VERIFY_4,PREFILL_256,CHAIN_3"


def command(*words: str, capture: bool = False) -> str:
    """Runs `circuit` with `words`, shown as a person types it; its stdout if `capture`."""
    print(
        f"\n$ circuit {' '.join(w if w and ' ' not in w else repr(w) for w in words)}", flush=True
    )
    call = [str(Path(sys.executable).parent / "circuit"), *words]
    done = subprocess.run(call, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout if capture else ""


def main() -> None:
    """Runs the demo; the artifact stays in `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="build/demo")
    parser.add_argument("--prompt", required=True)
    given = parser.parse_args()
    began = time.monotonic()
    command("fetch", "demo")
    command("compile", "demo", "--draft", "demo", "-o", given.out)
    ask = ("--chat", "--prompt", given.prompt, "--max-tokens", "120")
    command("generate", given.out, *ask, "--no-draft")
    command("generate", given.out, *ask)
    texts = [
        json.loads(command("generate", given.out, *ask, *extra, "--json", capture=True))["text"]
        for extra in (("--no-draft",), ())
    ]
    print("\nthe two texts are", "equal, token for token" if len(set(texts)) == 1 else "NOT equal")
    command("bench", given.out, "--peers", "eager,llama.cpp", "--keys", STEPS, "--runs", "9")
    command("bench", given.out, "--peers", "", "--text", "bench/prompts.json", "--prompts", "8")
    command("show", given.out, "--format", "html", "-o", f"{given.out}.html")
    print(
        f"\n{time.monotonic() - began:.0f} s; the artifact is in {given.out}, a page in "
        f"{given.out}.html"
    )
    raise SystemExit(0 if len(set(texts)) == 1 else 1)


if __name__ == "__main__":
    main()
