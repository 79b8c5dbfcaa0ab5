"""`circuit bench`: one table of an artifact and its peers, measured side by side in one run."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from circuit import options
from circuit.bench.bandwidth import Reader
from circuit.bench.circuit_peer import CIRCUIT, circuit_contenders
from circuit.bench.peers import PEERS, peer_contenders
from circuit.bench.rounds import Timing, timed
from circuit.feed import in_order, parse_keys
from circuit.loaded import Loaded
from circuit.options import BadOption
from circuit.report import Record, Screen, table
from codegen.device import processor_name
from ir.key import GraphKey
from proposers.rules.tree_growth import parse_tree

TREES = ("auto:4",)


@dataclass(frozen=True)
class BenchRequest:
    """One benchmark as it was asked for; with `text`, a list of
    prompts, whole texts are timed instead.
    """

    folder: Path
    peers: tuple[str, ...]
    keys: frozenset[GraphKey] | None
    runs: int
    text: Path | None
    prompts: int | None
    max_tokens: int
    threads: int
    trees: tuple[str, ...] = ()

    @staticmethod
    def read(
        *, peers: str, keys: str | None, threads: int | None, text: Path | None = None,
        prompts: int | None = None, trees: tuple[str, ...] = (), **given: object,
    ) -> BenchRequest:  # fmt: skip
        """The request that the options stand for; BadOption if one cannot be read."""
        for name, value in (("--prompts", prompts), ("--tree", ", ".join(trees) or None)):
            if text is None and value is not None:
                raise BadOption(
                    name=name, given=value, problem="it says which texts are timed, and none are",
                    advice="Give prompts with --text, or leave it out.",
                )  # fmt: skip
        for tree in trees:
            parse_tree(tree)
        words = tuple(filter(None, (w.strip() for w in peers.split(","))))
        unknown = [w for w in words if w not in PEERS]
        if unknown:
            raise BadOption(
                name="--peers", given=peers, problem=f"there is no peer {unknown[0]}",
                advice=f"Peers are {', '.join(PEERS)}.",
            )  # fmt: skip
        return BenchRequest(
            peers=words, keys=parse_keys(keys), threads=options.threads(threads), text=text,
            prompts=prompts, trees=trees or TREES, **given,
        )  # fmt: skip


def bench_artifact(request: BenchRequest, screen: Screen) -> Record:
    """Times the artifact and its peers; the record holds a row per peer, weights and program."""
    loaded = Loaded.read(request.folder)
    if request.text is not None:
        from circuit.bench.text import bench_texts

        return bench_texts(loaded, request, screen) | {"machine": machine(request.threads)}
    runners, free_shared = loaded.runners(request.threads, sequences=2)
    notes: list[str] = []
    closers = [*(runner.close for runner in runners.values()), free_shared]
    rates: list[float] = []
    try:
        with screen.progress("bench") as report:
            contenders = circuit_contenders(loaded, runners, request.keys)
            for name in request.peers:
                found = peer_contenders(name, loaded, runners, request, report)
                contenders += found.contenders
                notes += found.notes
                closers.insert(0, found.close)
            reader = Reader(request.threads)
            timings = timed(
                contenders, request.runs, report,
                lambda: rates.append(reader.gigabytes_per_second(passes=1)),
            )  # fmt: skip
    finally:
        for close in closers:
            close()
    record = {
        "rows": [asdict(t) for t in timings],
        "read_bandwidth_gbs": round(median(rates), 2),
        "machine": machine(request.threads),
        "notes": notes,
        "digest": loaded.digest,
        "step_bytes": step_bytes(loaded),
    }
    tell(timings, record, screen)
    return record


def machine(threads: int) -> dict[str, object]:
    """What the run was made on."""
    return {
        "processor": processor_name(),
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
    }


def step_bytes(loaded: Loaded) -> dict[str, dict[str, int]]:
    """Bytes that each program of each part moves at least: weights,
    states and values, each once.
    """
    return {
        name: {str(k): sum(n.bytes for n in part.plan(k).launches) for k in in_order(part.keys)}
        for name, part in loaded.parts.items()
    }


def tell(timings: Sequence[Timing], record: Record, screen: Screen) -> None:
    """Prints the table: a line per program, a column per peer, and
    how many times as fast circuit is.
    """
    peers = list(dict.fromkeys(f"{t.peer} {t.weights}" for t in timings))
    own = next(p for p in peers if p.startswith(f"{CIRCUIT} "))
    programs = list(dict.fromkeys((t.key, t.rows) for t in timings))
    found = {(f"{t.peer} {t.weights}", t.key, t.rows): t.ms_median for t in timings}
    rows = []
    for key, count in programs:
        mine, cells = found.get((own, key, count)), []
        for peer in peers:
            ms = found.get((peer, key, count))
            ratio = f" ({ms / mine:.2f}x)" if ms and mine and peer != own else ""
            cells.append(f"{ms:.2f}{ratio}" if ms else "")
        rows.append([key, str(count), *cells])
    screen.say(table(["program", "rows", *(f"{p}, ms" for p in peers)], rows))
    screen.say(
        f"reading memory: {record['read_bandwidth_gbs']} GB/s with "
        f"{record['machine']['threads']} threads"
    )
    for note in record["notes"]:
        screen.say(f"note: {note}")
