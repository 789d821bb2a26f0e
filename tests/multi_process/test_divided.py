"""Growing tables that are divided over processes: each part for itself."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
from typing import Any

import pytest
import tensorflow as tf
from multi_process import divided
from multi_process.jobs import PACKAGE, TESTS, Failure, Job, Process

import tpu_embedding as te
from tpu_embedding.layout.balancing import place_on_servers, place_tables
from tpu_embedding.layout.placement import BY_ID


@pytest.mark.second_tier
def test_parts_admit_and_evict_as_in_the_reference(
    two: Job, three: Job, tmp_path: pathlib.Path
) -> None:
    full = 0
    for job in (two, three):
        for seed in (2, 5, 6):  # By age and full; by hits; by use, with admission.
            full += job.run("divided.fuzz", seed, 30, str(tmp_path))[0]
    assert full > 0


@pytest.mark.third_tier
def test_parts_admit_and_evict_as_in_the_reference_for_long(
    two: Job, three: Job, tmp_path: pathlib.Path
) -> None:
    for job in (two, three):
        for seed in range(100, 130):
            job.run("divided.fuzz", seed, 50, str(tmp_path))


@pytest.mark.third_tier
def test_kills_resume_with_another_number_of_processes(tmp_path: pathlib.Path) -> None:
    """Ten in a step, in a save and in a restore each."""
    expected, sizes = divided.trajectory(60), itertools.cycle((2, 3, 1, 4))
    for seed, kind in enumerate([*divided.KILLED_IN * 10, ""]):
        with Job(next(sizes)) as job:
            arguments = (str(tmp_path), expected, kind, seed)
            results = job.attempt("divided.train_until_killed", *arguments)
        found = {getattr(result, "kind", "trained") for result in results}
        assert found <= ({"Ended", "UnavailableError"} if kind else {"trained"})


@pytest.mark.third_tier
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_servers_admit_and_evict_as_in_the_reference(
    servers: int, tmp_path: pathlib.Path
) -> None:
    arguments = {"seeds": [*range(6)], "steps": 30, "folder": str(tmp_path)}
    on_servers("fuzz_divided", servers, servers=servers, **arguments)


def on_servers(function: str, number: int, **arguments: Any) -> Any:
    """Calls a function of parameter_servers.cluster, of so many servers."""
    variables = {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(PACKAGE)]),
        "TEST_SERVERS": str(number),
    }
    process = Process(variables, "parameter_servers.process")
    with contextlib.closing(process):
        process.send(f"cluster.{function}", (arguments,))
        result = process.receive(500.0)
        assert not isinstance(result, Failure), f"{result}\n{process.printed()}"
        print(process.printed())
        return result


@pytest.mark.third_tier
def test_restores_onto_processes_and_servers(
    two: Job, three: Job, tmp_path: pathlib.Path
) -> None:
    """1 -> 3 -> 2 -> servers -> 1."""
    one = tf.distribute.get_strategy()
    paths = [str(tmp_path / str(k)) for k in range(5)]
    results = [divided.move(one, "", paths[0])]
    results.append(three.run("divided.move", *paths[:2])[0])
    results.append(two.run("divided.move", *paths[1:3])[0])
    results.append(on_servers("move_divided", 2, source=paths[2], target=paths[3]))
    results.append(divided.move(one, *paths[3:]))
    for (_, last), (before, _) in itertools.pairwise(results):
        assert before == last
    assert set(results[-1][1][0]) == {3, 5, -9, 7, -(2**63)}


def test_a_table_is_saved_by_blocks(two: Job, tmp_path: pathlib.Path) -> None:
    """No process reads more at once, of its own rows or of others."""
    for most in two.run("divided.save_in_blocks", str(tmp_path / "saved")):
        assert divided.BLOCK_BYTES / 4 < most <= divided.BLOCK_BYTES


def test_a_table_is_exported_by_blocks(two: Job, tmp_path: pathlib.Path) -> None:
    """The first process also holds the ids, and what it writes into a file."""
    for share in two.run("divided.export_by_blocks", str(tmp_path / "model")):
        assert share < 0.75  # Without blocks it is above 2.


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [(40, 0.0), pytest.param(2000, 1.0, marks=pytest.mark.third_tier)],
)
def test_a_status_that_is_written_changes_no_bit(
    two: Job, steps: int, seconds: float, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "status")
    for said, (expected, found) in two.run(
        "divided.write_statuses", path, steps, seconds, timeout=900
    ):
        assert 0 < said <= steps
        assert found == expected


@pytest.mark.second_tier
def test_restores_into_any_number_of_processes(
    two: Job, three: Job, tmp_path: pathlib.Path
) -> None:
    one = tf.distribute.get_strategy()
    jobs = [two, None, three, two, None]
    paths = ["", *(str(tmp_path / str(k)) for k in range(len(jobs)))]
    last = ({}, (0, 0, 0, 0))
    for job, source, target in zip(jobs, paths[:-1], paths[1:], strict=True):
        if job is None:
            results = [divided.move(one, source, target)]
        else:
            results = job.run("divided.move", source, target)
        for before, after in results:
            assert before == last
            assert after == results[0][1]
        last = results[0][1]
    assert set(last[0]) == {3, 5, -9, 7, -(2**63)}
    assert last[0][3] == (1.0 - 0.5 * 6, 6, 4)
    for raised, shared in two.run("divided.refuse", paths[-1]):
        assert raised[0] == "ValueError"
        assert "Table 'films (part " in raised[1]
        assert "has max_rows=2, but the table that was saved has 4 ids" in raised[1]
        assert shared[0] == "NotImplementedError"
        assert 'films\' grows and has a shared row, so placement="rows"' in shared[1]


@pytest.mark.second_tier
@pytest.mark.parametrize("placement", ["rows", "whole"])
def test_a_plan_is_what_growing_tables_take(two: Job, placement: str) -> None:
    results = two.run("divided.fill", 80_000, placement)
    for process, (grown, tables, needed) in enumerate(results):
        assert 0.9 * tables[process] < grown < needed[process], results


@pytest.mark.second_tier
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize(
    ("placement", "dim", "ids", "busy"), [("rows", 64, 10, 2), ("whole", 8, 40, 1)]
)
def test_a_plan_is_what_large_steps_take(
    placement: str, dim: int, ids: int, busy: int, grows: bool
) -> None:
    """One job of three: what malloc keeps beside the buffers differs between jobs.

    The plan is that of the busiest process; a whole table is in the first one.
    """
    for _ in range(3):
        with Job(2) as job:  # Whose memory no test before has used.
            found = job.run("divided.large_steps", grows, placement, dim, ids)
        if all(grown < planned for grown, planned in found):
            break
    assert all(grown < planned for grown, planned in found), found
    assert all(0.5 * planned < grown for grown, planned in found[:busy]), found


def test_the_largest_clock_of_all_processes_counts(two: Job) -> None:
    for ids, times, raised in two.run("divided.pass_clocks"):
        assert (ids, times) == ([2, 3], [13, 16])
        assert raised[0] == "InvalidArgumentError"
        assert "the clock goes back from 16 to 15" in raised[1]


def test_a_job_publishes_a_divided_table(two: Job, tmp_path: pathlib.Path) -> None:
    results = two.run("divided.publish", str(tmp_path))
    for served, ids, _ in results:
        assert served == [0.0, 0.5, 0.0]
        assert ids == [-9, 3, 5, 7]
    assert sum(admitted for _, _, admitted in results) == 4


def test_large_growing_tables_are_divided() -> None:
    def owners(rows: int, **options: Any) -> tuple[int, ...]:
        vocabulary = te.GrowingVocabulary(rows, **options)
        table = te.TableConfig(vocabulary, 64, name="films")
        plan = te.TPUEmbedding(te.FeatureConfig(table), te.SGD(0.5)).core.plan
        return place_tables(plan, 0, 2).owners + place_on_servers(plan, 2).owners

    assert owners(1000) == (0, 0)
    assert owners(1 << 20) == (BY_ID, BY_ID)
    assert owners(1 << 20, unknown="shared_row") == (0, 0)


def test_a_shared_row_is_not_divided() -> None:
    shared = te.GrowingVocabulary(9, unknown="shared_row")
    with pytest.raises(ValueError, match='`placement` must be None or "whole"'):
        te.TableConfig(shared, 2, placement="rows")
