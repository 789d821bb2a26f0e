"""Processes that are killed, starved or in each other's way: see faults.py."""

from __future__ import annotations

import json
import signal

import new_process
import pytest
import tensorflow as tf
from cpu_engines import EACH_ENGINE
from reliability import faults

import tpu_embedding as te

KILLED = -signal.SIGKILL


@pytest.fixture(scope="module", params=EACH_ENGINE)
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    """By name of the scenario the exit code and what it answered, the last run's."""
    folder = tmp_path_factory.mktemp("faults")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    engine = {"TPU_EMBEDDING_ENGINE": request.param}
    ran = new_process.run(faults.__file__, folder, env=engine, timeout=600)
    assert ran.returncode == 0, ran.stderr
    print(ran.stderr)
    results = json.loads(ran.stdout.splitlines()[-1])
    assert len(results) == len(faults.SCENARIOS)
    named = {}
    for (place, _), (name, code, answer) in zip(faults.SCENARIOS, results, strict=True):
        named[f"{place}/{name}"] = (code, answer)
    return named


@pytest.mark.second_tier
@pytest.mark.parametrize("place", ["training", "save"])
def test_killed_and_resumed(place: str, outcomes: dict[str, tuple[int, str]]) -> None:
    """Same bits as a run that nothing broke."""
    assert outcomes[f"{place}/killed_in_{place}"] == (KILLED, "")
    code, digest = outcomes[f"{place}/unbroken"]
    assert code == 0
    assert digest == outcomes["unbroken/unbroken"][1]


@pytest.mark.second_tier
def test_killed_in_export(outcomes: dict[str, tuple[int, str]]) -> None:
    assert outcomes["export/killed_in_export"] == (KILLED, "")
    code, left = outcomes["export/export_again"]
    assert code == 0
    assert left in ("refused", "whole")


@pytest.mark.second_tier
@pytest.mark.parametrize("fault", ["full_disk", "below_a_file", "no_rights"])
def test_files_that_cannot_be_written(
    fault: str, outcomes: dict[str, tuple[int, str]]
) -> None:
    """An error, and the training goes on with the same bits."""
    assert outcomes[f"{fault}/{fault}"] == (0, outcomes["unbroken/unbroken"][1])


@pytest.mark.second_tier
def test_memory_that_runs_out(outcomes: dict[str, tuple[int, str]]) -> None:
    assert outcomes["no_memory/no_memory"] == (0, outcomes["unbroken/unbroken"][1])


@pytest.mark.second_tier
def test_two_writers_of_one_checkpoint(outcomes: dict[str, tuple[int, str]]) -> None:
    assert outcomes["two_writers/two_writers"] == (0, "whole")


@pytest.mark.second_tier
def test_two_exporters_to_one_folder(outcomes: dict[str, tuple[int, str]]) -> None:
    """One has written it; the other has the refusal of a folder that is not empty."""
    assert outcomes["two_exporters/two_exporters"] == (0, "[0, 3]")


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_a_worker_that_throws(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a thread that reads data comes out; the embedding is as it was."""
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", engine)
    films = te.TableConfig(8, 2, te.RowIdInitializer(), name="films")
    embedding = te.TPUEmbeddingV2({"film": te.FeatureConfig(films)}, te.SGD(0.5))

    def read(step: tf.Tensor) -> tf.Tensor:
        if step == 3:
            raise ArithmeticError("the disk is gone")
        return tf.range(4, dtype=tf.int64)

    def batch(step: tf.Tensor) -> object:
        ids = tf.ensure_shape(tf.py_function(read, [step], tf.int64), [4])
        return embedding.preprocess_features({"film": ids})

    data = tf.data.Dataset.range(6).map(batch, num_parallel_calls=4)
    steps = []

    def train() -> None:
        for features in data:
            activations, preserved = embedding(features)
            ones = {"film": tf.ones_like(activations["film"])}
            embedding.apply_gradients(ones, preserved)
            steps.append(ones)

    with pytest.raises(tf.errors.OpError, match="the disk is gone"):
        train()
    assert len(steps) == 3
    (table,) = embedding.embedding_tables.values()
    expected = [row - 0.5 * 3 if row < 4 else row for row in range(8)]
    assert table.numpy()[:, 0].tolist() == expected
