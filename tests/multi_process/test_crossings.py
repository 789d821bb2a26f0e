"""Promises of jobs that meet each other: refused steps, pipelining, checkpoints."""

from __future__ import annotations

import pathlib

import pytest
from multi_process import training
from multi_process.crossings import REFUSED
from multi_process.jobs import Job
from multi_process.test_synchronous import same
from multi_process.training import Case


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


def test_a_call_that_differs_is_refused_in_all_processes(two: Job) -> None:
    """Also while it is traced; the next step of each process trains."""
    good, bad = two.run("crossings.refuse_calls")
    for number, (name, ((kind, text), tables)) in enumerate(good.items()):
        (own_kind, own_text), own_tables = bad[name]
        if own_kind == "ValueError":
            assert kind == "InvalidArgumentError", (name, text)
            assert "Process 1: ValueError: The " in text
        else:
            assert kind == own_kind == "FailedPreconditionError", (name, text)
            assert "process 1 made another call" in text
            assert "process 0 made another call" in own_text
        # Each step has two processes, with a gradient of 1 and a rate of 0.5.
        expected = [0.0, -float(number), 1.0 - number, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert tables == own_tables == [expected] * 2, name


def test_an_op_that_fails_beside_an_exchange_is_named() -> None:
    with Job(2) as job:
        (kind, text), (own_kind, own_text) = job.run("crossings.fail_in_a_function")
    assert own_kind == "InvalidArgumentError"
    assert "is not in [0, 2)" in own_text
    assert kind == "InternalError", text  # So TensorFlow calls it in functions.
    assert "Process 1 gave up enqueue: another op of its function failed" in text
