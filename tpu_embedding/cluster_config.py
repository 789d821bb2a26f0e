"""Reads what the environment tells a process about its job.

TF_CONFIG is checked before TensorFlow connects. TensorFlow itself does not check it,
and all processes wait for minutes if one has a wrong TF_CONFIG. A strategy connects in
its constructor, so only the import of the library can check it earlier.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

# Names the file in which te.Telemetry tells the launcher how the training goes.
STATUS_VARIABLE = "TPU_EMBEDDING_STATUS"


def replace_file(path: str, text: str) -> None:
    """Writes text to a new file beside `path`, and then renames it to `path`."""
    beside = pathlib.Path(f"{path}.new")
    try:
        beside.write_text(f"{text}\n")
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def problem() -> str:
    """Returns what is wrong with TF_CONFIG whatever the strategy is, or ""."""
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return ""
    try:
        config = json.loads(text)
        cluster = {job: _addresses(of) for job, of in config.get("cluster", {}).items()}
        task = config.get("task", {})
        kind, index = task.get("type"), int(task.get("index") or 0)
    except (ValueError, TypeError, AttributeError) as error:
        return f"it cannot be read: {type(error).__name__}: {error}"
    if not cluster or kind in (None, "evaluator"):
        return ""  # One process, or one that is in no job.
    return _problem_of_addresses(cluster) or _problem_of_task(cluster, kind, index)


def warn() -> None:
    """Logs what is wrong with TF_CONFIG.

    It raises no error: a process that makes no strategy does not read TF_CONFIG.
    """
    found = problem()
    if found:
        from absl import logging

        logging.warning(
            "The environment variable TF_CONFIG of this process is wrong: %s. The "
            "constructor of a strategy would wait for processes that never start. Set "
            'it to {"cluster": {"worker": ["host:port", ...]}, "task": {"type": '
            '"worker", "index": 0}}, with the same "cluster" in all processes and a '
            "different index in each.",
            found,
        )


def _addresses(of: Any) -> dict[int, str]:
    """Returns the addresses of a job by index; TensorFlow takes a list or a dict."""
    pairs = of.items() if isinstance(of, dict) else enumerate(of)
    return {int(index): str(address) for index, address in pairs}


def _problem_of_addresses(cluster: dict[str, dict[int, str]]) -> str:
    tasks: dict[str, str] = {}
    for job, addresses in cluster.items():
        for index, address in addresses.items():
            port = address.rpartition(":")[2]
            # gRPC keeps the lowest 16 bits of a port above 65535.
            if not port.isdecimal() or not 0 < int(port) < 2**16:
                return (
                    f"it gives {job} {index} the address {address!r}, but an address "
                    "must end with a port from 1 to 65535, as in 'host:2222'"
                )
            if address in tasks:
                return (
                    f"it gives {tasks[address]} and {job} {index} the same address, "
                    f"{address!r}"
                )
            tasks[address] = f"{job} {index}"
    return ""


def _problem_of_task(cluster: dict[str, dict[int, str]], kind: str, index: int) -> str:
    if kind not in cluster:
        jobs = ", ".join(map(repr, cluster))
        return f'its "task" has type {kind!r}, but its "cluster" has {jobs}'
    if index not in cluster[kind]:
        return (
            f'its "task" has index {index}, but its "cluster" has {len(cluster[kind])} '
            f"of type {kind!r}: the index must be from 0 to {len(cluster[kind]) - 1}"
        )
    return ""
