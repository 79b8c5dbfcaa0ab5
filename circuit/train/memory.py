"""Memory of large tensors, kept by the process when they are freed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Parameters of mallopt(3), glibc, with what it begins with and with what keeps memory. Small blocks
# go back to their neighbours at once (FAST_MOST 0): the remainders of aligned blocks would keep
# freed ones apart.
FAST_MOST, TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = 1, -1, -2, -4
USUAL = {FAST_MOST: 128, TRIM_THRESHOLD: 128 << 10, TOP_PAD: 128 << 10, MMAP_MAX: 65536}
KEEPING = {FAST_MOST: 0, TRIM_THRESHOLD: -1, TOP_PAD: 256 << 20, MMAP_MAX: 0}


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Lets freed blocks of any size be used again without the system in between, in the block that
    follows; gives False where the C library offers no such choice.

    By default every large block is mapped anew and its pages are faulted in one by one, which costs
    an update of a head up to a third of its time.
    """
    choose = _chooser()
    taken = [choose(*choice) for choice in KEEPING.items()] if choose else [0]
    try:
        yield all(taken)
    finally:
        if choose:
            for choice in USUAL.items():
                choose(*choice)


def _chooser() -> Callable[[int, int], int] | None:
    """The C library's `mallopt`, if it has one."""
    try:
        return ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return None
