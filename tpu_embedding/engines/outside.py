"""How variables of all replicas are made from within one, or from a tf.function."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def outside_of_replicas(function: Callable[[], Result]) -> Result:
    """Calls `function` eagerly and in cross-replica context, wherever the caller is.

    In another thread: tf.init_scope leaves the graph that is being traced, but neither
    the replica that it is traced for, which cannot make variables of all, nor the
    tf.function, which wants none after its first trace.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function).result()
