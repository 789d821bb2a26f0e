"""Deltas of a job equal those of one process, byte by byte."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from multi_process.deltas import STORAGES, write_in_replicas
from multi_process.jobs import Job
from multi_process.test_synchronous import DIVIDED, GROWING, WIDE
from multi_process.training import FEATURES, Case
from reference import int8_rows

import tpu_embedding as te
from tpu_embedding.tables.rows import SCALE_OFFSET

pytestmark = pytest.mark.third_tier

CASES = {
    "divided": Case(placement="rows"),
    "mixed": Case("ftrl", choices=("rows", "whole", "whole"), pipelined=True),
    "V2": Case(version=2, dtype="bfloat16", choices=("rows", "whole", "rows")),
    "int8": Case("rowwise", dtype="int8", dims=WIDE, placement="rows", pipelined=True),
    "layer": Case(version=3, placement="rows"),
    "all rows": Case("adam_all_rows", placement="rows"),
    "growing": Case("ftrl", pipelined=True, growing=GROWING),
    "growing, divided": Case(
        "ftrl", dtype="int8", dims=WIDE, growing=DIVIDED, placement="rows"
    ),
}


def follow(folder: pathlib.Path, form: str, tables: dict[str, np.ndarray]) -> None:
    """The model has the bits of the tables; quantized, the error of the export."""
    model: Any = tf.saved_model.load(str(folder / form))
    for number in (1, 2, 3):
        path = folder / f"{form}.{number}"
        assert te.serving.apply_delta(model, path) == number
    ids = tf.zeros([1], tf.int64)
    features = {name: ids[:, None] if name == "sequence" else ids for name in FEATURES}
    for table, feature in (("table0", "ragged"), ("table1", "dense")):
        if f"{table}/ids" in tables:
            continue  # The number of a row is no id.
        rows = tables[f"{table}/parameters"]
        grids = tables.get(f"{table}/{SCALE_OFFSET}")
        if grids is not None:
            rows = int8_rows.values_of(rows, grids)
        every = tf.range(len(rows), dtype=tf.int64)
        found = model.signatures["dense"](**features | {feature: every})[feature]
        if form == "float32" or grids is not None:
            np.testing.assert_array_equal(found, rows.astype(np.float32))
        else:
            step = (rows.max(axis=1) - rows.min(axis=1)) / 254
            assert (np.abs(found - rows).max(axis=1) <= step).all()


@pytest.mark.parametrize("name", CASES)
def test_a_job_writes_the_delta_of_one_process(
    name: str, two: Job, tmp_path: pathlib.Path
) -> None:
    one, job = tmp_path / "one", tmp_path / "job"
    one.mkdir()
    job.mkdir()
    tables = write_in_replicas(CASES[name], 2, str(one))
    for own in two.run("deltas.write_in_job", CASES[name], str(job)):
        for table, rows in tables.items():
            np.testing.assert_array_equal(own[table], rows)
    for form in STORAGES:
        for number in (1, 2, 3):
            path = f"{form}.{number}"
            assert (job / path).read_bytes() == (one / path).read_bytes(), path
        follow(job, form, tables)


def test_three_processes_write_the_delta_of_one(
    three: Job, tmp_path: pathlib.Path
) -> None:
    """The third table has two rows."""
    case = Case(choices=("rows", "whole", "rows"))
    (tmp_path / "one").mkdir()
    write_in_replicas(case, 3, str(tmp_path / "one"))
    three.run("deltas.write_in_job", case, str(tmp_path))
    for form in STORAGES:
        for number in (1, 2, 3):
            path = f"{form}.{number}"
            expected = (tmp_path / "one" / path).read_bytes()
            assert (tmp_path / path).read_bytes() == expected


def test_what_one_process_refuses_fails_in_all(
    two: Job, tmp_path: pathlib.Path
) -> None:
    (raised, counts), (own_raised, own_counts) = two.run("deltas.refuse", str(tmp_path))
    for number, name in enumerate(("consumer", "deltas", "path")):
        assert raised[number] == own_raised[number]
        kind, text = raised[number]
        assert kind == "ValueError"
        assert f"`{name}` is " in text
    (kind, text), (own_kind, own_text) = raised[3], own_raised[3]
    assert (kind, own_kind) == ("ValueError", "AbortedError")
    assert "exists. Give each delta its own path" in text
    assert f"Process 0: ValueError: {text}" in own_text
    assert counts == own_counts
    assert counts["table1"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "base", "taken"]
