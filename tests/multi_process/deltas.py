"""A trainer that writes deltas, run by a job or by replicas of one process."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from multi_process import training
from multi_process.calls import failure, own_batches, rank
from multi_process.training import Case
from replica_values import mirrored

import tpu_embedding as te

STORAGES = ("float32", "int8")


def write(
    strategy: Any, case: Case, value: Callable[[int], Any], folder: str, own: str
) -> dict[str, np.ndarray]:
    """Exports, and writes three deltas of each form; the tables in the end.

    Between the second and the third one the trainer goes back to a checkpoint that has
    the marks. Numbers of exports and runs are 1, 2, ...
    """
    embedding = training.create(strategy, case)
    number = itertools.count()

    def train() -> None:
        first = case.steps * next(number)
        training.train(strategy, case, embedding, first, value)

    with mock.patch("secrets.randbelow", side_effect=itertools.count()):
        for form in STORAGES:
            te.serving.export(
                embedding,
                f"{folder}/{form}",
                storage=form,
                signatures=("dense",),
                deltas=1.0,
            )
        train()  # The first delta has what was trained since the export.
        writers = {
            form: te.serving.DeltaWriter(embedding, f"{folder}/{form}", form)
            for form in STORAGES
        }

        def export(delta: int) -> None:
            for form, writer in writers.items():
                writer.export_delta(f"{folder}/{form}.{delta}")

        export(1)
        train()
        export(2)
        train()
        checkpoint = tf.train.Checkpoint(embedding=embedding, **writers)
        path = checkpoint.write(own)
        train()
        checkpoint.read(path).assert_consumed()
        export(3)
    return {
        name: rows
        for name, rows in training.tables_of(embedding).items()
        if name.endswith(("/parameters", "/scale_offset", "/ids"))
    }


def write_in_job(strategy: Any, case: Case, folder: str) -> dict[str, np.ndarray]:
    """`write` in a process of a job."""
    own = f"{folder}/checkpoint{rank(strategy)}"
    return write(strategy, case, own_batches(strategy, case), folder, own)


def write_in_replicas(case: Case, number: int, folder: str) -> dict[str, np.ndarray]:
    """`write` in one process with as many replicas."""
    strategy = mirrored(number)
    value = training.of_replicas(strategy, case, number)
    return write(strategy, case, value, folder, f"{folder}/checkpoint")


def refuse(strategy: Any, folder: str) -> Any:
    """Errors of calls that fail in one process, or differ; then the rows of a delta."""
    case = Case(placement="rows", features=("dense",))
    embedding = training.create(strategy, case)
    te.serving.export(embedding, f"{folder}/base", signatures=("dense",), deltas=1.0)
    own = str(rank(strategy))

    def make(consumer: str) -> Any:
        return te.serving.DeltaWriter(embedding, f"{folder}/base", consumer)

    unlike = {"signatures": ("dense",), "deltas": 0.5 if own == "0" else True}
    raised = [
        failure(lambda: make(f"consumer{own}")),
        failure(lambda: te.serving.export(embedding, f"{folder}/unlike", **unlike)),
    ]
    writer = make("replicas")
    training.train(strategy, case, embedding, 0, own_batches(strategy, case))
    raised.append(failure(lambda: writer.export_delta(f"{folder}/{own}")))
    if own == "0":
        pathlib.Path(f"{folder}/taken").touch()
    raised.append(failure(lambda: writer.export_delta(f"{folder}/taken")))
    return raised, writer.export_delta(f"{folder}/1")
