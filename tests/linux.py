"""What Linux says of a process, and a limit that it sets to one."""

from __future__ import annotations

import contextlib
import pathlib
import re
import resource
from collections.abc import Iterator


def status(field: str, pid: int | str = "self") -> int:
    """Returns a number of /proc/PID/status, such as VmRSS or VmHWM; sizes in bytes."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{field}:\s*(\d+)( kB)?$", text, re.MULTILINE)
    assert found is not None, field
    return int(found[1]) * (1024 if found[2] else 1)


@contextlib.contextmanager
def small_files(size: int = 4096, pid: int = 0) -> Iterator[None]:
    """Limits the files that a process (0 is this one) writes, as a full disk does."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
