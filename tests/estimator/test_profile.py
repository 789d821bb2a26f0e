"""Profiles: what is sampled, merged and read back."""

from __future__ import annotations

import json
import pathlib
import re
import time
from typing import Any

import numpy as np
import pytest
from estimator.estimator_models import (
    batches,
    linear_model,
    make_estimator,
    sparse,
    variables,
)
from interop.spec_cases import SGD, dict_spec, embedding, shared, spec
from threads import run_in_threads

import tpu_embedding as te
from tpu_embedding import estimator, interop
from tpu_embedding.compat.estimator import profile
from tpu_embedding.layout.plan import make_plan
from tpu_embedding.layout.stacking import StackingOptions, make_layout

ALL = estimator.ProfileOptions(sample_fraction=1.0, min_samples=1, num_shards=2)
Options = estimator.ProfileOptions


def profiler(folder: pathlib.Path, options: Any = ALL, **more: Any) -> Any:
    made = dict_spec(profile_data_directory=str(folder), **more)
    return estimator.EmbeddingProfiler(made, options)


def observe(run: Any) -> None:
    """One example, and writes it."""
    run.observe("f", [1], [0], 1)
    run.flush()


def test_statistics_of_one_batch(tmp_path: pathlib.Path):
    found = profiler(tmp_path / "new")
    found.observe("f", [1, 2, 7, 3], [0, 0, 0, 2], 3)
    found.flush()
    (table,) = profiler(tmp_path / "new").load().values()
    assert table == estimator.TableStatistics(3, 4, 3, (3, 1))  # Rows 0 to 3, 4 to 7.
    assert (table.mean_ids, table.imbalance) == (4 / 3, 1.5)
    mod = profiler(tmp_path, partition_strategy="mod")
    mod.observe("f", [1, 2, 7, 3], [0, 0, 0, 2], 3)
    mod.flush()
    assert mod.load()["t"].shard_ids == (1, 3)


def test_positions_of_a_sequence_are_no_examples(tmp_path: pathlib.Path):
    found = profiler(tmp_path)
    # Two examples of three positions: ids 1, 2 and 3 in one, 7 in the other.
    rows = sparse([[1], [2], [3], [], [7], []])
    profile.observe_batch(found, {"f": rows._replace(dense_shape=[6, 1])}, {"f": 3})
    profile.observe_batch(found, {"f": np.array([4])}, {"f": 0})
    found.flush()
    assert found.load()["t"] == estimator.TableStatistics(3, 5, 3, (3, 2))


def test_the_planner_takes_a_profile(tmp_path: pathlib.Path):
    """From ids seen to a stack in which two tables do not press on one SparseCore."""
    tables = {name: interop.TableConfig(8, 2) for name in "tu"}
    features = {"f": interop.FeatureConfig("t"), "g": interop.FeatureConfig("u")}
    run = profiler(tmp_path, partition_strategy="mod", features=features, tables=tables)
    run.observe("f", [1, 3, 5, 2], [0, 0, 1, 1], 2)  # Odd: shard 1.
    run.observe("g", [2, 4, 6, 1], [0, 0, 0, 0], 1)  # Even, so that TensorFlow's turn
    run.flush()  # by one would put both on shard 1.
    loads = run.shard_loads()
    assert loads == {"t": (0.5, 1.5), "u": (3.0, 1.0)}
    config = te.SparseCoreEmbeddingConfig(shard_loads=loads)
    made = [te.TableConfig(8, 2, name=name) for name in "tu"]
    plan = make_plan(
        ["f", "g"], [te.FeatureConfig(t) for t in made], {t: t for t in made}, te.SGD()
    )
    for given, turns in (({}, [0, 1]), (config.shard_loads or {}, [1, 1])):
        options = StackingOptions(2, 1, shard_loads=given)
        layout = make_layout(plan, [(4,), (4,)], options)
        assert [t.sparse_core_shard_rotation for t in layout.tables] == turns
    for shards, wrong, text in (
        (3, loads, "Table 't': `shard_loads` has 2 numbers, but there are 3"),
        (
            2,
            {"v": (1, 1)},
            "`shard_loads` names the table 'v', but the tables are t, u",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            make_layout(
                plan, [(4,), (4,)], StackingOptions(shards, 1, shard_loads=wrong)
            )
    with pytest.raises(ValueError, match="taken with partition_strategy='div'"):
        profiler(tmp_path).shard_loads()


def test_runs_are_merged(tmp_path: pathlib.Path):
    for ids in ([1, 2], [5]):
        run = profiler(tmp_path)
        run.observe("f", ids, [0] * len(ids), 1)
        run.flush()
        run.flush()  # Nothing new.
    assert run.load()["t"] == estimator.TableStatistics(2, 3, 2, (2, 1))
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"[0-9a-f]{32}\.json", file.name)
    assert json.loads(file.read_text())["vocabulary_size"] == 8


def test_three_percent_by_a_hash(tmp_path: pathlib.Path):
    count = 100_000

    def sampled(options: Any) -> np.ndarray:
        made = profiler(tmp_path, options)
        return made._chosen("f", np.arange(count))

    first = sampled(Options())
    # Binomial: 3,000 with a standard deviation of 54; five of them.
    assert abs(first.sum() - 0.03 * count) < 270
    np.testing.assert_array_equal(first, sampled(Options()))
    assert (first != sampled(Options(seed=1))).any()
    # Halves are as full: no example's number decides.
    assert abs(first[: count // 2].sum() - first[count // 2 :].sum()) < 270
    run = profiler(tmp_path, Options(min_samples=1))
    for start in range(0, 1000, 100):  # In batches as in one.
        run.observe("f", np.zeros(100, int), np.arange(100), 100)
        assert run._seen["f"] == start + 100
    run.flush()
    assert run.load()["t"].examples == first[:1000].sum()


def test_few_samples_leave_the_file(tmp_path: pathlib.Path):
    run = profiler(tmp_path, Options(sample_fraction=1.0, min_samples=2))
    observe(run)
    assert run.load() == {}
    observe(run)
    assert run.load()["t"].examples == 2


@pytest.mark.parametrize("change", ["table", "run", "strategy"])
def test_other_parameters_have_other_files(tmp_path: pathlib.Path, change: str):
    options = Options(sample_fraction=1.0, min_samples=1, num_shards=2, task_count=3)
    other = {
        "table": lambda: profiler(tmp_path, tables={"t": interop.TableConfig(9, 2)}),
        "run": lambda: profiler(tmp_path, options),
        "strategy": lambda: profiler(tmp_path, partition_strategy="mod"),
    }[change]()
    for run in (profiler(tmp_path), other):
        observe(run)
        assert run.load()["t"].examples == 1


@pytest.mark.parametrize("content", ["{", "{}", '{"version": 0}'])
def test_other_files_are_begun_anew(
    tmp_path: pathlib.Path, content: str, said: list[str]
):
    run = profiler(tmp_path)
    pathlib.Path(run._paths["t"]).write_text(content)
    observe(run)
    assert run.load()["t"].examples == 1
    assert "is not a valid profile, so a new one is started" in said[0]


@pytest.mark.parametrize(
    "change",
    [
        None,
        {"examples": "1"},
        {"examples": -1},
        {"ids": float("nan")},
        {"max_ids": None},
        {"shard_ids": [1]},
        {"shard_ids": 1},
        {"shard_ids": [1, 1]},
    ],
    ids=repr,
)
def test_damaged_statistics_are_begun_anew(
    tmp_path: pathlib.Path, change: Any, said: list[str]
):
    """Training that lasted for hours must not end in an error over its profile."""
    run = profiler(tmp_path)
    file = pathlib.Path(run._paths["t"])
    for _ in range(2):
        observe(run)
        assert run.load()["t"] == estimator.TableStatistics(1, 1, 1, (1, 0))
        content = json.loads(file.read_text())
        content["statistics"] = change and {**content["statistics"], **change}
        file.write_text(json.dumps(content))
    assert "is not a valid profile, so a new one is started" in said[0]


@pytest.mark.parametrize("key", ["version", "vocabulary_size"])
def test_statistics_of_another_version_or_table_are_not_merged(
    tmp_path: pathlib.Path, key: str
):
    run = profiler(tmp_path)
    file = pathlib.Path(run._paths["t"])
    for _ in range(2):
        observe(run)
        assert run.load()["t"].examples == 1
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, key: 0}))


def test_runs_that_write_at_once_lose_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """What one reads and the other writes has a lock around it."""
    inner = profile.replace_file

    def slow(*arguments: Any) -> None:
        time.sleep(0.02)  # The others have read by now, if nothing holds them back.
        inner(*arguments)

    monkeypatch.setattr(profile, "replace_file", slow)

    run_in_threads(lambda _: observe(profiler(tmp_path)), 4)
    assert profiler(tmp_path).load()["t"].examples == 4


def test_a_folder_that_fails_is_a_warning(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
):

    def full(*_: Any) -> None:
        raise OSError("no space left")

    run = profiler(tmp_path)
    run.observe("f", [1], [0], 1)
    with monkeypatch.context() as patch:
        patch.setattr(profile.os, "replace", full)
        run.flush()
    assert said == ["The profile of table 't' was not written: no space left"]
    assert not list(tmp_path.iterdir())
    run.flush()  # Nothing was lost.
    assert run.load()["t"].examples == 1


def test_bad_arguments(tmp_path: pathlib.Path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is a file, not a folder"):
        profiler(file)
    with pytest.raises(ValueError, match="needs a spec with `profile_data_directory`"):
        estimator.EmbeddingProfiler(dict_spec())
    with pytest.raises(TypeError, match="`spec` must be an EmbeddingConfigSpec"):
        estimator.EmbeddingProfiler(3)
    with pytest.raises(ValueError, match="`num_shards` must be an int >= 1"):
        Options(num_shards=0)
    for share in (1.5, 0, float("nan"), "x", None):
        with pytest.raises(ValueError, match="`sample_fraction` must be a number abov"):
            Options(sample_fraction=share)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_bad_batches_change_nothing(tmp_path: pathlib.Path, strategy: str):
    run = profiler(tmp_path, partition_strategy=strategy)
    for arguments, words in {
        ("nobody", (1,), (0,), 1): "has no feature 'nobody'. It has f",
        ("f", (1, 2), (0,), 1): r"one shape \[n\]. Received: \(2,\) and \(1,\)",
        ("f", (1, 8), (0, 0), 1): "`ids` must be >= 0 and < 8. Received: 8",
        ("f", (-1,), (0,), 1): "`ids` must be >= 0 and < 8. Received: -1",
        ("f", (1,), (1,), 1): "`examples` must be >= 0 and < 1. Received: 1",
        ("f", (1,), (-1,), 1): "`examples` must be >= 0 and < 1. Received: -1",
    }.items():
        with pytest.raises(ValueError, match=words):
            run.observe(*arguments)
    with pytest.raises(TypeError, match=r"'f': `ids` and .* integers.* dtype float64"):
        run.observe("f", [1.5], [0], 1)
    assert run._seen == {"f": 0}
    run.flush()
    assert run.load() == {}
    run.observe("f", [], [], 1)
    run.flush()
    assert run.load()["t"].examples == 1


def test_the_trainer_writes_and_computes_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        profile.ProfileOptions.__init__, "__defaults__", (1, 1, 1.0, 1, 0)
    )
    columns = [embedding("a", 1), *shared("b", "c", dimension=1)]
    features = {key: sparse([[1, 2], [3], []]) for key in "abc"}
    found = {}
    for folder in (None, str(tmp_path / "profile")):
        made = spec(*columns, parameters=SGD, profile_data_directory=folder)
        trained = make_estimator(
            linear_model(columns),
            tmp_path / str(folder is None),
            made,
            config={"tf_random_seed": 1},
        )
        found[folder] = variables(trained.train(batches(features), steps=2))
    off, on = found.values()
    for name, value in off.items():
        np.testing.assert_array_equal(on[name], value)
    loaded = estimator.EmbeddingProfiler(made).load()
    assert loaded == {
        "tbl_a": estimator.TableStatistics(6, 6, 2, (6,)),
        "tbl_b_c_shared_embedding": estimator.TableStatistics(12, 12, 2, (12,)),
    }
