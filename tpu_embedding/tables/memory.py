"""Whether tables fit into the memory of this machine."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import tensorflow as tf

_GIB = 2.0**30
_ROOT = pathlib.Path("/")
_CGROUPS = (  # the limit, what is used of it: version 2, then 1
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def require_memory(sizes: Mapping[str, int], root: pathlib.Path = _ROOT) -> None:
    """Fails where variables of these bytes would not fit (`root`: the system's)."""
    available = available_bytes(root)
    if available is not None and sum(sizes.values()) > available:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:4]
        parts = ", ".join(f"{name} {sizes[name] / _GIB:.1f} GiB" for name in largest)
        more = f" and {len(sizes) - 4} more" if len(sizes) > 4 else ""
        raise tf.errors.ResourceExhaustedError(
            None,
            None,
            f"The tables and slots take {sum(sizes.values()) / _GIB:.1f} GiB ({parts}"
            f"{more}), but {available / _GIB:.1f} GiB of memory are free. Nothing was "
            "made. Use a smaller `vocabulary_size` or `dim`, an optimizer with fewer "
            "or smaller slots (SGD, RowwiseAdagrad), or a machine with more memory.",
        )


def available_bytes(root: pathlib.Path = _ROOT) -> int | None:
    """Memory and swap that is free, in bytes; None where the system does not say."""
    limits = [
        limit - used
        for limit, used in ((_number(root / p) for p in pair) for pair in _CGROUPS)
        if limit is not None and used is not None
    ]
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        lines = (line.split() for line in meminfo.read_text().splitlines())
        sizes = {words[0]: int(words[1]) for words in lines if len(words) > 1}
        if "MemAvailable:" in sizes:
            kib = sizes["MemAvailable:"] + sizes.get("SwapFree:", 0)
            limits.append(kib * 1024)
    return max(min(limits), 0) if limits else None


def _number(file: pathlib.Path) -> int | None:
    """What a file holds if it is a number; "max" stands for no limit."""
    if not file.is_file():
        return None
    text = file.read_text().strip()
    return int(text) if text.isdigit() else None
