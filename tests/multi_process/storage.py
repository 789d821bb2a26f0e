"""Storage that fails while the processes of a job save and restore."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from linux import small_files
from multi_process import calls, training
from multi_process.training import Case

import tpu_embedding as te

# Both tables have rows in each process; a part of a checkpoint is more than 4 KiB.
CASE = Case(placement="rows", rows=(997, 500, 7), timeout_seconds=60)


class At:
    """A progress that acts once, when a task begins or has advanced.

    Attributes:
      moment: "Writing", "Checking" or "Restoring"; with " on" after its first part.
    """

    def __init__(self, moment: str, act: Callable[[], None]) -> None:
        self.moment, self._act = moment, act
        self._task = ""

    def start(self, task: str, total: int) -> None:
        self._task = task
        self._reach(task)

    def advance(self, count: int) -> None:
        self._reach(f"{self._task} on")

    def _reach(self, moment: str) -> None:
        if moment == self.moment:
            self.moment = ""
            self._act()


def saved_first(strategy: Any, folder: str) -> tuple[Any, dict[str, np.ndarray]]:
    embedding = training.create(strategy, CASE)
    embedding.build()
    before = training.tables_of(embedding)
    te.checkpoint.save(embedding, f"{folder}/first")
    return embedding, before


def is_same(embedding: Any, before: dict[str, np.ndarray]) -> bool:
    after = training.tables_of(embedding)
    return all(np.array_equal(after[name], before[name]) for name in before)


def fail_to_save(
    strategy: Any, folder: str, kind: str, culprit: int
) -> tuple[str, str, float]:
    """Saves, and once more where the storage fails; then checks that all goes on.

    The kind is "full", "a file", or a moment of `At` at which the folder vanishes.
    Returns the error of the second save, and its seconds.
    """
    is_culprit = calls.rank(strategy) == culprit
    is_full = is_culprit and kind == "full"
    place = pathlib.Path(folder, "place")
    embedding, before = saved_first(strategy, folder)
    if kind == "a file":
        place.touch()
    else:
        place.mkdir(exist_ok=True)

    def act() -> None:
        if is_culprit:
            place.rename(f"{folder}/elsewhere")

    begin = time.monotonic()
    with small_files() if is_full else contextlib.nullcontext():
        found = calls.failure(
            lambda: te.checkpoint.save(
                embedding, f"{place}/second", progress=At(kind, act)
            )
        )
    seconds = time.monotonic() - begin
    assert not pathlib.Path(f"{place}/second.index").exists()
    for path in ("first", "third"):
        if path == "third":
            te.checkpoint.save(embedding, f"{folder}/third")
        te.checkpoint.restore(embedding, f"{folder}/{path}")
        assert is_same(embedding, before)
    return *found, seconds


def fail_to_restore(
    strategy: Any, folder: str, moment: str, culprit: int
) -> tuple[str, str, float]:
    """As `fail_to_save`, for a checkpoint that vanishes while it is restored.

    At "Restoring on" it does not vanish: the culprit fails to read it.
    """
    place = pathlib.Path(folder, "place")
    embedding, before = saved_first(strategy, folder)
    te.checkpoint.save(embedding, f"{place}/second")

    def act() -> None:
        if calls.rank(strategy) != culprit:
            return
        if moment == "Restoring on":
            raise OSError("cannot be read")
        place.rename(f"{folder}/elsewhere")

    begin = time.monotonic()
    found = calls.failure(
        lambda: te.checkpoint.restore(
            embedding, f"{place}/second", progress=At(moment, act)
        )
    )
    seconds = time.monotonic() - begin
    te.checkpoint.restore(embedding, f"{folder}/first")
    assert is_same(embedding, before)
    return *found, seconds


def restore_damaged(
    strategy: Any, case: Case, path: str, tracked: bool
) -> tuple[str, str, bool]:
    """What a restore raises, and whether tables and slots are as they were."""
    embedding = training.create(strategy, case)
    embedding.build()
    before = training.tables_of(embedding)

    def restore() -> None:
        if tracked:
            tf.train.Checkpoint(embedding=embedding).read(path)
        else:
            te.checkpoint.restore(embedding, path)

    return *calls.failure(restore), is_same(embedding, before)
