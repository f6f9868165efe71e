"""The most host memory that a process held so far.

In: this process. Out: bytes of resident memory, libraries and files it mapped included.
"""

import resource
import sys
from pathlib import Path


def peak_host_bytes() -> int:
    """Peak resident set of this process since it started its program.

    Linux's own ``ru_maxrss`` is not used where there is a better one: it begins with what the
    launching process held.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
