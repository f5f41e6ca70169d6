"""Imported last by each process that tests fork others from: what it holds by then is left to all of them.

A fork copies what maps the memory, and what either side then writes to. So the garbage collector no longer looks at
these objects, which writes to them, and huge pages map them where there are any.
"""

import ctypes
import gc
from pathlib import Path

HUGE = 1 << 21  # bytes of a huge page
MADV_COLLAPSE = 25  # of Linux since 6.1; older ones refuse it, and all stays as it is
MAPS = Path("/proc/self/maps")


def collapse() -> None:
    """Let a huge page map what many pages do now."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in MAPS.read_text().splitlines():
        addresses, access, _, _, _, *file = line.split(maxsplit=5)
        if access == "rw-p" and file in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for huge in range(-(-begin // HUGE) * HUGE, end - HUGE + 1, HUGE):
                madvise(huge, HUGE, MADV_COLLAPSE)


gc.collect()
gc.freeze()
if MAPS.exists():
    collapse()
