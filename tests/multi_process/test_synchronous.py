"""Several processes train the same bits as one process with as many replicas."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from multi_process import training
from multi_process.calls import Fault
from multi_process.jobs import Failure, Job
from multi_process.training import Case

import tpu_embedding as te
from tpu_embedding.checkpoint.statistics import table_reports
from tpu_embedding.commands.files import TextProgress
from tpu_embedding.vocabulary import PARTS_OF_CANDIDATES

# One forgets, one has a static table beside it, one admits.
GROWING = (
    te.GrowingVocabulary(
        25, eviction="lru", unknown="shared_row", when_full="shared_row"
    ),
    None,
    te.GrowingVocabulary(9, min_count=2, max_candidates=3, unknown="initializer"),
)
# Never full; of three tables two are divided by their ids.
DIVIDED = (
    te.GrowingVocabulary(500, eviction="lru", min_rows=9),
    None,
    te.GrowingVocabulary(90, min_count=2, unknown="initializer"),
)
WIDE = (16, 37, 20)  # The dims of tables of int8.
CASES = {
    "sgd": Case("sgd", placement="rows"),
    "adagrad": Case("adagrad", weights=True, graph=True, placement="rows"),
    "default start": Case(
        placement="rows", rows=(400_001, 37, 2), default_start=True, steps=1
    ),
    "default start, whole": Case(placement="whole", default_start=True, steps=1),
    "adagrad whole": Case("adagrad", weights=True, placement="whole"),
    "rowwise": Case("rowwise", empty=True, steps=5, placement="rows"),
    "ftrl": Case("ftrl", pipelined=True, evaluate=True, steps=5),
    "bfloat16": Case("sgd", dtype="bfloat16", pipelined=True, placement="rows"),
    "bfloat16 whole": Case("adagrad", dtype="bfloat16", placement="whole"),
    "int8": Case("adagrad", dtype="int8", dims=WIDE, pipelined=True, placement="rows"),
    "int8 whole": Case(
        "rowwise", dtype="int8", dims=WIDE, weights=True, placement="whole"
    ),
    "int8, version 2": Case(
        "ftrl", dtype="int8", dims=WIDE, version=2, empty=True, placement="rows"
    ),
    "drop": Case("adagrad", invalid_ids="drop", weights=True),
    "mod": Case("adagrad", invalid_ids="mod"),
    "adam": Case("adam_all_rows"),
    "adam bfloat16": Case(
        "adam_all_rows", dtype="bfloat16", evaluate=True, placement="rows"
    ),
    "momentum": Case("momentum", empty=True),
    "clipped": Case("clipped"),
    "scheduled": Case("scheduled", evaluate=True),
    "version 2": Case("adagrad", version=2, weights=True),
    "version 2 pipelined": Case("ftrl", version=2, pipelined=True, graph=True),
    "growing": Case(weights=True, graph=True, steps=6, growing=GROWING),
    "growing pipelined": Case(
        "ftrl", pipelined=True, evaluate=True, steps=6, growing=GROWING
    ),
    "growing bfloat16": Case(
        "adam_all_rows", dtype="bfloat16", empty=True, growing=GROWING
    ),
    "growing, divided": Case(
        weights=True, graph=True, steps=4, growing=DIVIDED, placement="rows"
    ),
    "growing, divided, version 2": Case(
        "adam_all_rows",
        version=2,
        dtype="bfloat16",
        steps=4,
        growing=DIVIDED,
        placement="rows",
    ),
    "growing, divided, pipelined": Case(
        "ftrl",
        dtype="int8",
        dims=WIDE,
        pipelined=True,
        evaluate=True,
        empty=True,
        steps=5,
        growing=DIVIDED,
        placement="rows",
    ),
    "growing layer": Case(version=3, graph=True, steps=6, growing=GROWING),
    "growing version 2": Case(
        version=2, dtype="int8", dims=WIDE, graph=True, steps=6, growing=GROWING
    ),
    "growing version 2 pipelined": Case(
        "adam",
        version=2,
        pipelined=True,
        weights=True,
        steps=6,
        growing=(GROWING[0], None, GROWING[0]),
    ),
}


# What each part of a growing table numbers for itself.
OF_PARTS = ("rows", "state", *PARTS_OF_CANDIDATES)


def compare(job: Job, case: Case) -> None:
    number = len(job.processes)
    expected, tables = training.train_replicas(case, number)
    found = job.run("train", case)
    for process, (activations, own_tables) in enumerate(found):
        for step, (one, other) in enumerate(zip(activations, expected, strict=True)):
            for name, values in one.items():
                same(values[0], other[name][process], (case, process, step, name))
        for name, values in own_tables.items():
            if case.growing is DIVIDED and name.rpartition("/")[2] in OF_PARTS:
                continue
            same(values, tables[name], (case, process, name))


def same(found: np.ndarray, expected: np.ndarray, what: Any) -> None:
    """Bit by bit."""
    np.testing.assert_array_equal(
        found.view(np.uint8), expected.view(np.uint8), err_msg=str(what)
    )


def refuse(job: Job, case: Case, bad: str, kind: str, text: str) -> None:
    """All processes raise the error of the last one, and nothing has changed."""
    _, tables = training.train_replicas(case, len(job.processes))
    last = len(job.processes) - 1
    for process, (raised, own_tables) in enumerate(
        job.run("refuse_batches", case, bad)
    ):
        assert len(raised) == case.steps
        for found_kind, found_text in raised:
            if process == last and kind != "InvalidArgumentError":
                assert found_kind == kind, (found_kind, found_text)
            else:
                assert found_kind == "InvalidArgumentError", (found_kind, found_text)
                assert f"Process {last}: " in found_text
            assert text in found_text
        for name, values in own_tables.items():
            same(values, tables[name], (bad, process, name))


def test_two_processes_train_the_bits_of_one(two: Job) -> None:
    for case in CASES.values():
        compare(two, case)


@pytest.mark.second_tier
def test_three_processes_train_the_bits_of_one(three: Job) -> None:
    for name in (
        "adagrad",
        "adagrad whole",
        "default start",
        "rowwise",
        "ftrl",
        "version 2",
        "growing",
        "growing pipelined",
        "growing version 2",
        "growing, divided",
    ):
        compare(three, CASES[name])


@pytest.mark.second_tier
def test_a_full_table_of_one_process_refuses_in_all(two: Job) -> None:
    for arguments in ((1, False), (1, True), (2, False)):
        for raised, rows, ids, counts in two.run("fill_a_table", *arguments):
            assert raised[0] == "InvalidArgumentError"
            assert "Table films is full: 4 of max_rows=5" in raised[1]
            assert rows == [[0.5, 0.5]] * 4
            assert ids == [0, 1, 10, 11]
            assert counts == (4, 4, 0, 0)


@pytest.mark.second_tier
def test_rows_of_a_lookup_stay_while_its_preserved_outputs_exist(two: Job) -> None:
    """The process that has the table has no id of the batch."""
    assert two.run("keep_rows", True) == [[1, 3, 4]] * 2
    assert two.run("keep_rows", False) == [[2, 3, 4]] * 2
    assert two.run("keep_rows", False, True) == [[2, 3, 4]] * 2


@pytest.mark.second_tier
def test_growing_tables_restore_in_any_number_of_processes(
    two: Job, three: Job, tmp_path: pathlib.Path
) -> None:
    case = Case("scheduled_adagrad", pipelined=True, steps=6, growing=GROWING)
    path = str(tmp_path / "two")
    expected = two.run("save", case, path)[0]
    one = training.create(tf.distribute.get_strategy(), case)
    one.build()
    tf.train.Checkpoint(embedding=one).read(f"{path}-0").assert_consumed()
    equal_tables(training.tables_of(one), expected)
    for job in (two, three):
        for name, tracked in ((f"{path}-1", True), (path, False)):
            for tables, updates in job.run("restore", case, name, tracked):
                equal_tables(tables, expected)
                assert updates == case.steps


@pytest.mark.second_tier
def test_a_job_saves_and_exports_its_only_table(
    two: Job, tmp_path: pathlib.Path
) -> None:
    for ids, rows in two.run("save_a_growing_table", str(tmp_path)):
        assert ids == [0, 1, 7]
        assert sorted(rows) == [[0, 0], [0.5, 0.5], [0.5, 0.5]]
    model: Any = tf.saved_model.load(str(tmp_path / "model"))
    served = model.signatures["dense"](film=tf.constant([7, 1, 5], tf.int64))["film"]
    assert served.numpy()[:, 0].tolist() == [0, 0.5, 0]


@pytest.mark.second_tier
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_telemetry_counts_the_rows_of_each_process(two: Job, dtype: str) -> None:
    case = Case("adagrad", placement="rows", dtype=dtype, dims=WIDE, rows=(101, 37, 20))
    whole = training.count_replicas(case, 2)
    parts = two.run("telemetry", case)
    for table in ("table0", "table1", "table2"):
        expected, found = whole[table], [part[table] for part in parts]
        for figure in ("ids", "distinct_ids", "rows_touched"):
            assert sum(f[figure].value for f in found) == expected[figure].value
            assert all(f[figure].exact for f in found)
        hottest = [pair for f in found for pair in f["hottest_rows"].value]
        assert sorted(hottest) == sorted(expected["hottest_rows"].value)
        for figure in ("gradient_norm", "update_norm"):
            total = sum(f[figure].value ** 2 for f in found) ** 0.5
            assert total == pytest.approx(expected[figure].value, rel=1e-5)
        assert "samples" not in found[0]  # In several processes.
    for part in parts:
        assert part["*"]["steps"].value == case.steps
        assert part["*"]["bytes_sent/update"].value > 0


@pytest.mark.second_tier
def test_a_bad_batch_in_one_process_is_refused_in_all(two: Job) -> None:
    case = Case("adagrad", pipelined=True, steps=2)
    refuse(two, case, "id", "InvalidArgumentError", "dense")
    refuse(two, Case("sgd", version=2, steps=2), "id", "InvalidArgumentError", "dense")
    refuse(two, case, "structure", "ValueError", "more")
    refuse(two, case, "type", "TypeError", "dense")
    coded = Case("sgd", dtype="int8", dims=WIDE, placement="rows")
    refuse(two, coded, "gradient", "InvalidArgumentError", "dense")


@pytest.mark.second_tier
def test_processes_that_differ_find_out_at_construction(two: Job) -> None:
    for found in two.run("differ"):
        for name, (kind, text) in found.items():
            assert kind == "ValueError", (name, text)
            assert {"placement": "owner"}.get(name, name) in text, name
        text = "dim of table 'films' is 2 in process 0, but 4 in process 1"
        assert text in found["dim"][1]
    compare(two, CASES["sgd"])  # The job goes on.


@pytest.mark.second_tier
def test_what_several_processes_cannot_have_names_itself(two: Job) -> None:
    for raised in two.run("unsupported"):
        for (kind, text), name in zip(
            raised,
            ("CustomOptimizer", "CustomCombiner", "slot_variable_creation_fn"),
            strict=True,
        ):
            assert kind == "NotImplementedError", text
            assert name in text


@pytest.mark.second_tier
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_checkpoints_restore_in_any_number_of_processes(
    two: Job, three: Job, tmp_path: pathlib.Path, dtype: str
) -> None:
    case = Case("scheduled", pipelined=True, dtype=dtype, dims=WIDE, placement="rows")
    other = dataclasses.replace(case, placement="whole")
    path = str(tmp_path / "two")
    expected = two.run("save", case, path)[0]
    one = training.create(tf.distribute.get_strategy(), case)
    te.checkpoint.restore(one, path)
    equal_tables(training.tables_of(one), expected)
    assert int(one.core.checkpoint_updates()) == case.steps
    te.checkpoint.save(one, str(tmp_path / "one"))
    found, wanted = (
        table_reports(te.checkpoint.read(str(tmp_path / name)), TextProgress())
        for name in ("two", "one")
    )
    assert found == wanted  # What `python -m tpu_embedding report` shows.
    for job, own, name, tracked in (
        (three, other, "two", False),
        (three, case, "two-1", True),
        (two, other, "one", False),
        (two, case, "one", True),
    ):
        for tables, updates in job.run("restore", own, str(tmp_path / name), tracked):
            equal_tables(tables, expected)
            assert updates == case.steps
    for name in {"float32", "bfloat16", "int8"} - {dtype}:  # By value.
        by_value = dataclasses.replace(case, dtype=name)
        plain = training.create(tf.distribute.get_strategy(), by_value)
        te.checkpoint.restore(plain, path)
        for tables, _ in three.run("restore", by_value, path, False):
            equal_tables(tables, training.tables_of(plain))
    for kind, text in three.run("fail_to_restore", case, path):
        assert kind in ("AbortedError", "NotFoundError")
        assert "missing" in text


def equal_tables(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in found.items():
        same(values, expected[name], name)


@pytest.mark.second_tier
def test_bytes_follow_the_formula(two: Job) -> None:
    """At most 1.05 times, for small and for large vocabularies."""
    for arguments in (
        (10_000, (512, 10, 64)),
        (10_000, (512, 10, 8), "float32", "mean"),
        (1_000_000, (2048, 1, 32)),
    ):
        for found in two.run("statistics", *arguments):
            for phase, (sent, expected) in found.items():
                assert expected <= sent <= 1.05 * expected, (arguments, phase)


@pytest.mark.second_tier
def test_bfloat16_on_the_wire_halves_the_bytes_and_rounds_once(two: Job) -> None:
    """The activations of a table whose rows, or whose activations, travel.

    Rounding to nearest changes a value by at most 2^-9 of it. A sample of at most four
    ids adds up to 4 rows, so 4 * 2^-9 of the largest number bounds it, and float32's
    own roundings are far below.
    """
    for placement in ("rows", "whole"):
        case = Case("sgd", steps=1, placement=placement, wire="bfloat16")
        expected, _ = training.train_replicas(case, 2)
        tables = [
            training.initializer(table)((rows, dim))
            for table, (rows, dim) in enumerate(zip(case.rows, (8, 5, 16), strict=True))
        ]
        bound = 4 * 2.0**-9 * max(float(np.abs(table).max()) for table in tables)
        largest = 0.0
        for process, (activations, _) in enumerate(two.run("train", case)):
            for name, values in activations[0].items():
                difference = np.abs(values[0] - expected[0][name][process])
                largest = max(largest, float(difference.max(initial=0.0)))
        assert 0 < largest <= bound, (placement, largest, bound)
    for found in two.run("statistics", 10_000, (512, 10, 64), "bfloat16"):
        for phase, (sent, formula) in found.items():
            assert formula <= sent <= 1.05 * formula, phase


@pytest.mark.second_tier
def test_a_killed_process_fails_the_others_in_seconds() -> None:
    with Job(2) as job:
        fault = Fault(1, "kill", "update")
        found = job.attempt("train_with_fault", Case("adagrad"), fault)
    assert isinstance(found[1], Failure)
    kind, text, _ = found[0]
    assert kind == "UnavailableError"
    assert "Process 1" in text


@pytest.mark.second_tier
@pytest.mark.parametrize(("version", "placement"), [(1, "rows"), (2, "whole")])
def test_hashed_tables_have_the_bits_of_static_ones(
    two: Job, version: int, placement: str, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "saved")
    for tables, refused in two.run("hashed.train", version, placement, path):
        assert {table.tobytes() for table in tables} == {tables[0].tobytes()}
        assert refused[0] == "ValueError"
        assert "salt=6" in refused[1]
        assert "salt=5" in refused[1]
