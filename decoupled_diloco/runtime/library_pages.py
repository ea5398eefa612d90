"""Lets go of the pages of a shared library that was needed once.

A compiler is a hundred megabytes of code, most of it touched while machine code is loaded and never again. The system
would take such pages back only when memory is short, and until then they count as the process's own.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Final

_MADV_DONTNEED: Final = 4  # from <sys/mman.h>, on Linux

_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ +(\S.*)\n((?:[A-Z]\w+: .*\n)+)")
"""Begin, end, rights and file of a mapping, and the lines with its sizes, in /proc/self/smaps."""


def let_go_of_library(name: str) -> int:
    """Takes a library's unchanged read-only pages out of this process; what is used again is read again from the file.

    Args:
        name: What the name of its file begins with, for example "libllvmlite".

    Returns:
        Bytes that were resident and are not any more; 0 where the system has no such means.
    """
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        mappings = Path("/proc/self/smaps").read_text()
    except (AttributeError, OSError, TypeError):
        return 0
    let_go = 0
    for begin, end, rights, path, sizes in _MAPPING.findall(mappings):
        # A page that was changed (by the linker, say) is anonymous, and would come back as it is in the file.
        is_unchanged = "w" not in rights and re.search(r"^Anonymous: +0 kB$", sizes, re.MULTILINE)
        if Path(path).name.startswith(name) and is_unchanged:
            at = int(begin, 16)
            if madvise(ctypes.c_void_p(at), ctypes.c_size_t(int(end, 16) - at), _MADV_DONTNEED) == 0:
                resident = re.search(r"^Rss: +(\d+) kB$", sizes, re.MULTILINE)
                let_go += 1024 * int(resident[1]) if resident else 0
    return let_go
