"""Promises of jobs in combination: refused steps, pipelining, checkpoints."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from keras_layer.models import mirrored
from multi_process import training
from multi_process.crossings import REFUSED, keras_loop
from multi_process.jobs import Job
from multi_process.test_synchronous import compare, same
from multi_process.training import Case

pytestmark = pytest.mark.third_tier


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("graph", [False, True])
def test_refused_steps_and_a_restart_change_no_bit(
    two: Job, version: int, graph: bool, tmp_path: pathlib.Path
) -> None:
    case = Case(
        "scheduled_adagrad",
        version=version,
        steps=6,
        pipelined=version < 3,
        graph=graph,
        weights=True,
        check_numerics=True,
        placement="rows",
    )
    expected, tables = training.train_replicas(case, 2, parts=2)
    found = two.run("crossings.train_around_refusals", case, str(tmp_path / "half"))
    words = {"id": "dense", "weight": "many", "gradient": "finite"}
    for process, (raised, activations, own_tables) in enumerate(found):
        for number, (kind, text) in enumerate(raised):
            assert kind == "InvalidArgumentError", text
            assert "Process 1: " in text
            assert words[REFUSED[number % 3]] in text
        for step, (one, other) in enumerate(zip(activations, expected, strict=True)):
            for name, values in one.items():
                same(values[0], other[name][process], (process, step, name))
        for name, values in own_tables.items():
            same(values, tables[name], (process, name))


def test_a_bad_input_of_any_kind_is_refused_in_all_processes(two: Job) -> None:
    good, bad = two.run("crossings.refuse_inputs")
    assert len(good) > 100
    for (kind, text, seconds), (own_kind, own_text, _) in zip(good, bad, strict=True):
        assert own_kind in ("InvalidArgumentError", "TypeError", "ValueError")
        assert kind == "InvalidArgumentError", (text, own_text)
        assert "Process 1: " in text
        assert seconds < 2


def test_a_call_that_differs_is_refused_in_all_processes(
    two: Job, tmp_path: pathlib.Path
) -> None:
    """Also while it is traced; the next step of each process trains."""
    good, bad = two.run("crossings.refuse_calls", str(tmp_path))
    assert not any(tmp_path.iterdir())
    for number, (name, ((kind, text), tables)) in enumerate(good.items()):
        (own_kind, own_text), own_tables = bad[name]
        arguments = {"save": "path", "restore": "path", "export": "storage"}
        argument = arguments.get(name, name)
        if argument in ("path", "slots", "storage"):
            assert kind == own_kind == "ValueError", (name, text, own_text)
            assert f"`{argument}` is " in text
            assert text == own_text
        elif own_kind == "ValueError":
            assert kind == "InvalidArgumentError", (name, text)
            assert "Process 1: ValueError: The " in text
        else:
            assert kind == own_kind == "FailedPreconditionError", (name, text)
            assert "process 0 called " in text
            assert "but process 1 called " in text
            assert text.partition("The ")[2] == own_text.partition("The ")[2]
        # Each step has two processes, with a gradient of 1 and a rate of 0.5.
        expected = [0.0, -float(number), 1.0 - number, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert tables == own_tables == [expected] * 2, name


def test_a_call_that_one_process_makes_alone_is_refused_in_all(two: Job) -> None:
    """Nothing changes: the pending update is applied once, in both."""
    good, bad = two.run("crossings.call_alone")
    for name, ((kind, text), table) in good.items():
        assert kind == "FailedPreconditionError", (name, text)
        assert "process 0 called embedding_lookup(training=False), " in text
        assert f"but process 1 called {name}. Nothing has changed." in text
        (own_kind, own_text), own_table = bad[name]
        assert (own_kind, own_table) == (kind, table)
        assert own_text.partition("The ")[2] == text.partition("The ")[2]
        assert table[:4] == [0.0, -1.0, 0.0, 3.0], name


def test_a_step_that_one_process_has_left_is_refused_at_once(two: Job) -> None:
    one, other = two.run("crossings.forget_a_gradient")
    for number, found in enumerate(zip(one, other, strict=True)):
        replicated, turn = divmod(number, 2)
        (left_kind, left_text), table = found[turn]
        (kind, text), others_table = found[1 - turn]
        assert kind == "FailedPreconditionError", text
        assert f"process {turn} called enqueue(training=True)" in text
        assert f"process {1 - turn} called apply_gradients" in text
        if replicated:  # The process that has begun another step goes on.
            assert (left_kind, left_text) == ("", "")
            assert "This step is discarded in all processes" in text
        else:
            assert left_text.partition("The ")[2] == text.partition("The ")[2]
        assert table == others_table
        assert table[:4] == [0.0, 0.0, 1.0, 3.0]


def test_after_a_refused_lookup_the_next_step_trains_its_own_batch(two: Job) -> None:
    for found in two.run("crossings.leave_refused_lookups"):
        for (kind, text), (first, second, third) in found:
            assert kind == "InvalidArgumentError", text
            assert "films" in text
            assert first == third != second


def test_after_a_rate_that_raises_the_next_step_trains_its_own_batch(two: Job) -> None:
    one, other = two.run("crossings.leave_refused_rates")
    for number, found in enumerate(zip(one, other, strict=True)):
        place, culprits = divmod(number, 3)
        for process, ((kind, text), rows) in enumerate(found):
            assert rows == [30.0 + process]
            is_culprit = culprits in (process, 2)
            if is_culprit or place < 2:
                assert "no rate" in text, (number, process)
            if place < 2 and not is_culprit:
                assert kind == "InvalidArgumentError", text
            if place == 2 and not is_culprit:
                assert kind == "FailedPreconditionError", text
                assert "This step is discarded in all processes" in text


def test_a_call_alone_is_refused_where_the_others_run_a_function(two: Job) -> None:
    good, bad = two.run("crossings.call_alone_in_a_function")
    for one, other in zip(good, bad, strict=True):
        name, (kind, text), table = one
        assert kind == "FailedPreconditionError", text
        assert "process 0 called enqueue(training=True), " in text
        assert f"but process 1 called {name}. Nothing has changed." in text
        assert (
            other[1][1].partition("The ")[2].startswith(text.partition("The ")[2][:99])
        )
        _, (own_kind, own_text), own_table = other
        assert own_kind == kind
        assert f"but process 1 called {name}. Nothing has changed." in own_text
        assert own_table == table == [0.0, 0.0, 1.0, 3.0]


def test_a_structure_that_a_keras_layer_refuses_is_refused_in_all(two: Job) -> None:
    good, bad = two.run("crossings.refuse_a_structure")
    assert bad[0][0] == "ValueError"
    assert good[0][0] == "InvalidArgumentError"
    assert "Process 1: ValueError: " in good[0][1]
    assert good[1] == bad[1] == [1.0, 2.0]


def test_calls_meet_in_a_process_without_tables(
    two: Job, tmp_path: pathlib.Path
) -> None:
    """And a restore has a name; `reset` is repeated as docs/distributed.md says."""
    for refused, (kind, text), table in two.run(
        "crossings.meet_unbuilt", str(tmp_path)
    ):
        assert refused
        assert kind == "FailedPreconditionError"
        assert "process 0 called flush, but process 1 called restore." in text
        assert table[:4] == [0.0, 0.0, 1.0, 3.0]


def test_an_eviction_in_one_process_alone_evicts_nothing(two: Job) -> None:
    for found in two.run("crossings.evict_alone"):
        for turn, (kind, text), ids in found:
            assert kind == "FailedPreconditionError", text
            assert f"process {turn} called evict" in text
            assert ids == [1, 2]


def test_a_batch_that_was_prepared_first_is_refused_in_all_processes(two: Job) -> None:
    for found in two.run("crossings.refuse_prepared"):
        assert len(found) == 4
        for number, ((kind, text), table) in enumerate(found):
            assert kind == "InvalidArgumentError", text
            assert "Process 1: " in text
            assert "film" in text
            # Good steps alone count: two processes, a gradient of 1, a rate of 0.5.
            assert table[:3] == [0.0, -float(number), 1.0 - number]


def test_fuzzed_refusals_change_no_bit(two: Job, seed: int) -> None:
    """A few of the steps of `make test-distributed DISTRIBUTED=refusals`."""
    assert two.run("refusals.run", 150, seed) == [150, 150]


def test_a_line_says_which_process_is_waited_for() -> None:
    with Job(2, {"TF_CPP_MIN_LOG_LEVEL": "1"}) as job:
        found = job.run("crossings.step_late", 3.5)
        printed = [process.printed() for process in job.processes]
    assert found == [[0, 0, 1, 3, 4, 5, 6, 7]] * 2
    line = "tpu_embedding: process 0 waits in enqueue(training=True) "
    assert f"{line}for process 1, at most 5 s." in printed[0], printed[0]
    assert "tpu_embedding: process" not in printed[1]


@pytest.mark.parametrize("call", ["step_in_another_order", "wait_elsewhere"])
def test_the_end_of_a_wait_names_both_calls(call: str) -> None:
    """Where calls are not compared: of two embeddings, and of an enqueue ahead."""
    with Job(2) as job:
        found = job.run(f"crossings.{call}")
    enqueue, reset = "enqueue(training=True)", "reset"
    waits = [(enqueue, reset), (reset, enqueue)]
    if call == "step_in_another_order":
        waits = [(enqueue, f"{enqueue} of embedding ")]
    for _, text in found:
        assert any(
            f"waited 5 s in {one} " in text and f" waits in {other}" in text
            for one, other in waits
        ), found


def test_a_line_says_that_a_constructor_waits() -> None:
    with Job(2, {"TF_CPP_MIN_LOG_LEVEL": "1"}) as job:
        job.run("crossings.construct_late", 12.0)
        printed = [process.printed() for process in job.processes]
    line = "process 0 waits in the constructor of an embedding or layer for one of the "
    assert f"{line}processes 1. " in printed[0]
    assert "waits in the constructor" not in printed[1]


def test_a_preempted_job_goes_on_with_another_number_of_processes(
    tmp_path: pathlib.Path,
) -> None:
    """The process that gets SIGTERM and the other one save the same step, and end."""
    # TensorFlow's handler asks for Google's metadata server; nothing answers there.
    no_server = {"GCE_METADATA_IP": "127.0.0.1:9"}
    path = str(tmp_path)
    with Job(2, no_server) as job:
        for found in job.attempt("crossings.train_until_preempted", path, 9999, 3):
            assert (found.kind, found.text) == ("Ended", "exit code 42")
    with Job(3, no_server) as job:
        results = job.run("crossings.train_until_preempted", path, 2, -1)
    begun, _ = results[0]
    assert 3 <= begun < 9999
    moved = float(begun + 2 * 1.5)  # A step of a process moves a row by 0.5.
    table = [0.0, 1 - moved, 2 - moved, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert results == [(begun, table)] * 3


def test_an_op_that_fails_beside_an_exchange_is_named() -> None:
    with Job(2) as job:
        (kind, text), (own_kind, own_text) = job.run("crossings.fail_in_a_function")
    assert own_kind == "InvalidArgumentError"
    assert "is not in [0, 2)" in own_text
    assert kind == "InternalError", text  # So TensorFlow calls it in functions.
    assert "Process 1 gave up enqueue: another op of its function failed" in text


EXTREMES = {
    "nothing beside much": Case(sizes=(0, 80, 3), weights=True, placement="rows"),
    "nothing anywhere": Case(sizes=(0, 0, 0)),
    "fewer rows than processes": Case("ftrl", rows=(1, 1, 2), placement="rows"),
    "one column": Case("rowwise", dims=(1, 1, 1), graph=True, placement="rows"),
    "no ids anywhere": Case(
        ids_in=(9,), features=("ragged", "sparse", "sequence"), tables=(0, 1, 0, 2, 1)
    ),
    "ids in one process": Case(
        ids_in=(1,), features=("ragged", "sparse", "sequence"), pipelined=True
    ),
}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_unusual_batches_and_tables(two: Job, three: Job, version: int) -> None:
    for extreme in EXTREMES.values():
        pipelined = extreme.pipelined and version < 3
        case = dataclasses.replace(extreme, version=version, pipelined=pipelined)
        compare(two, case)
        if version == 1:
            compare(three, case)


def test_the_keras_layer_in_a_loop_of_ones_own(two: Job) -> None:
    """Dense gradients of two processes are summed in any order: 1e-6."""
    case = Case(version=3, steps=4, placement="rows")
    # Collectives that a test before left unfinished would end those of this process.
    strategy = mirrored(2)
    value = training.of_replicas(strategy, case, 2)
    evaluated, weights, tables = keras_loop(strategy, case, value)
    for process, found in enumerate(two.run("crossings.train_keras", case)):
        np.testing.assert_allclose(found[0][0], evaluated[process], rtol=1e-5)
        for own, expected in zip(found[1], weights, strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-6)
        for name, own in found[2].items():
            np.testing.assert_allclose(own, tables[name], rtol=1e-6, atol=1e-6)


def test_fit_of_keras_3_fails_before_it_calls_a_layer(two: Job) -> None:
    """docs/distributed.md says so: if this passes, Keras has mended it."""
    for kind, text in two.run("crossings.fit"):
        assert kind == "ValueError"
        assert "PerReplica" in text


def test_all_processes_export_one_model(two: Job, tmp_path: pathlib.Path) -> None:
    case = Case("adagrad", placement="rows", pipelined=True, features=("dense",))
    found = two.run("crossings.export", case, str(tmp_path))
    (reports, (kind, text), tables), (own_reports, (own_kind, own_text), _) = found
    assert [str(report) for report in reports] == [str(r) for r in own_reports]
    assert (kind, own_kind) == ("ValueError", "AbortedError")
    assert "is not an empty folder" in text
    assert f"Process 0: ValueError: {text}" in own_text
    ids = tf.range(case.rows[1], dtype=tf.int64)
    served = tf.saved_model.load(tmp_path / "float32").signatures["dense"]
    rows = 2 * tables["table1/parameters"]
    np.testing.assert_array_equal(served(dense=ids)["dense"], rows)
    served = tf.saved_model.load(tmp_path / "int8").signatures["dense"]
    error = np.abs(served(dense=ids)["dense"] - rows).max()
    assert 0 < error <= 2 * reports[1].tables[0].max_error * 1.001


def test_the_device_of_a_process_names_its_replica(two: Job) -> None:
    assert two.run("crossings.enqueue_on_own_device") == [[0, -1, -1, 0]] * 2
