"""Runs the examples as a user does, for two epochs only, and tests their parts.

The examples get MovieLens-100K by themselves, through pip, into build/data.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence

import forked
import numpy as np
import pytest
from movielens import data, metrics, source, training

import tpu_embedding

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
RANKING = ROOT / "examples" / "01_movielens_ranking.py"
SPARSE_CORE = ROOT / "examples" / "03_sparsecore_on_your_laptop.py"
SERVE = ROOT / "examples" / "04_serve.py"
MANY_MACHINES = ROOT / "examples" / "06_many_machines.py"
STRINGS = ROOT / "examples" / "07_strings_to_serving.py"
GROWING = ROOT / "examples" / "09_growing.py"
ONLINE = ROOT / "examples" / "10_online.py"
EVERYWHERE = ROOT / "examples" / "08_everywhere.py"
RUN_BELOW = (
    *(SPARSE_CORE, SERVE, MANY_MACHINES, STRINGS, EVERYWHERE, GROWING, ONLINE),
)
TIMEOUT = 300.0  # Seconds; many times what a run takes.


def run(example: pathlib.Path, *more: str | pathlib.Path, **variables: str) -> str:
    """Runs an example in quick mode, with warnings as errors; what it printed."""
    options = ["-W", "error", example, "--quick", *more]
    done = forked.run(options, env=variables, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kill_after_checkpoint(number: int, out: pathlib.Path) -> None:
    """Starts the ranking example; kills it once it has saved that checkpoint."""
    saved = out / "checkpoints" / "latest" / f"ckpt-{number}.index"
    deadline = time.monotonic() + TIMEOUT
    # The example is to import the very package that is under test here.
    package = pathlib.Path(tpu_embedding.__file__).resolve().parents[1]
    with subprocess.Popen(
        [sys.executable, "-W", "error", RANKING, "--quick", "--out", out],
        env={**os.environ, "PYTHONPATH": str(package)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while not saved.exists():
            assert process.poll() is None, "ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    assert not (out / "metrics.json").exists()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """What a ranking run from start to end wrote and printed."""
    out = tmp_path_factory.mktemp("unbroken")
    return out, run(RANKING, "--out", out)


def found_metrics(out: pathlib.Path) -> dict[str, float]:
    """The metrics that do not depend on the clock."""
    found = json.loads((out / "metrics.json").read_text())
    return {k: v for k, v in found.items() if k not in ("seconds", "ids_per_second")}


@pytest.mark.second_tier
def test_ranking_writes_what_it_promises(unbroken: tuple[pathlib.Path, str]):
    out, printed = unbroken
    found = json.loads((out / "metrics.json").read_text())
    assert 0.9 < found["test_rmse"] < 1.0
    assert 0.7 < found["test_auc"] < 0.9
    assert found["baseline_rmse"] == pytest.approx(0.943, abs=0.01)
    assert found["ids_per_second"] > 0
    assert found["seconds"] > 0
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "saved_model" / "saved_model.pb").is_file()
    table = printed[printed.index("Ten films") :].splitlines()
    assert [line.split()[0] for line in table[2:12]] == [str(n) for n in range(1, 11)]


@pytest.mark.third_tier
def test_a_killed_run_resumes_to_the_same_metrics(
    unbroken: tuple[pathlib.Path, str], tmp_path: pathlib.Path
):
    # There are three checkpoints an epoch: in the middle of the second one.
    kill_after_checkpoint(4, tmp_path)
    printed = run(RANKING, "--out", tmp_path, "--resume")
    out, expected = unbroken
    assert found_metrics(tmp_path) == found_metrics(out)
    assert (
        printed[printed.index("Ten films") :] == expected[expected.index("Ten films") :]
    )


@pytest.mark.second_tier
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(
    example: pathlib.Path, tmp_path: pathlib.Path, request: pytest.FixtureRequest
):
    if example == RANKING:
        request.getfixturevalue("unbroken")  # It ran already.
    elif example not in RUN_BELOW:
        run(example, "--out", tmp_path)


@pytest.mark.third_tier
def test_a_job_that_lost_a_process_resumes_to_the_same_tables(tmp_path: pathlib.Path):
    lines = run(MANY_MACHINES, "--kill", "--out", tmp_path).splitlines()
    assert "[worker 0] All start again from step 10." in lines
    assert lines[-1] == "2 processes and one process have the same tables."


@pytest.mark.third_tier
def test_a_worker_is_killed_and_the_servers_train_on(tmp_path: pathlib.Path):
    printed = run(MANY_MACHINES, "--parameter-servers", "--kill", "--out", tmp_path)
    assert "A worker was killed and started again." in printed
    of_servers, of_one = (
        float(line.split()[-1]) for line in printed.splitlines() if "RMSE" in line
    )
    assert abs(of_servers - of_one) < 0.02


def test_strings_are_learned_and_served(tmp_path: pathlib.Path):
    # Before them Keras 3.16 shows how far layers have adapted.
    lines = run(STRINGS, "--out", tmp_path).splitlines()[-3:]
    rmse, of_mean = (float(number) for number in re.findall(r"\d\.\d+", lines[0]))
    assert 0.3 < rmse < 0.6 < 0.8 < of_mean  # The noise of a rating is 0.3.
    rows = (tmp_path / "ratings.csv").read_text().splitlines()[1:]
    genres = {row.split(",")[1]: row.split(",")[2].split() for row in rows}
    assert genres["film 0"] == ["action"]
    alike = lines[1].partition(": ")[2].split(", ")
    assert [film for film in alike if "action" not in genres[film]] == []
    served = [float(number) for number in re.findall(r"\d\.\d+", lines[2])]
    assert len(served) == 3


@pytest.mark.third_tier
def test_tables_grow_and_forget(tmp_path: pathlib.Path):
    run(GROWING, "--users", "150", "--out", tmp_path)
    found = json.loads((tmp_path / "growing.json").read_text())
    for rows, admitted, evicted in zip(
        found["rows"], found["admitted"], found["evicted"], strict=True
    ):
        assert rows == admitted - evicted <= 150 + 1000
    assert found["evicted"][-1] > 0
    growing, hashed = (np.mean(found["auc"][m]) for m in ("growing", "hashed"))
    assert growing > hashed
    assert (tmp_path / "growing.png").stat().st_size > 0


@pytest.mark.third_tier
def test_a_served_model_follows_its_trainer(tmp_path: pathlib.Path):
    lines = run(ONLINE, "--out", tmp_path).splitlines()
    assert re.match(r"100 deltas, \d+ kB each on average", lines[-1])
    found = json.loads((tmp_path / "online.json").read_text())["auc"]
    live, deltas, frozen = (np.mean(found[m]) for m in ("live", "deltas", "frozen"))
    assert frozen < deltas < live
    assert (tmp_path / "online.png").stat().st_size > 0


@pytest.mark.third_tier
def test_one_training_function_trains_everywhere():
    lines = run(EVERYWHERE).splitlines()
    assert len(lines) == 8 + 1
    first = np.array(lines[0].split()[1:], float)
    for line in lines[:-1]:
        np.testing.assert_allclose(np.array(line.split()[1:], float), first, atol=1e-5)
    assert float(lines[-1].split()[-1].rstrip(".")) < 1e-6


@pytest.mark.third_tier
def test_sparse_cores_in_software_train_as_the_host_does(tmp_path: pathlib.Path):
    printed = run(SPARSE_CORE, "--out", tmp_path)
    found = json.loads((tmp_path / "sparse_core.json").read_text())
    assert found["sparse_core"] == pytest.approx(found["host"], abs=1e-5)
    assert 0.95 < found["host"]["rmse"] < 1.05
    assert 0.7 < found["host"]["auc"] < 0.8
    stack = "age_genres_item_occupation_recent_user_zip_code"
    assert f"Table {stack}: a SparseCore asks SparseCore" in printed
    assert "but the limit is 256 (max_ids_per_table). Raise the limit" in printed
    # 16 places for each sample have room for all but the films seen before, up to 30.
    dropped = found["dropped_ids"]
    assert dropped.pop("recent") > 0
    assert set(dropped.values()) == {0}
    assert len(dropped) == 8


@pytest.mark.second_tier
def test_serving_in_fewer_bits_keeps_the_quality(
    unbroken: tuple[pathlib.Path, str], tmp_path: pathlib.Path
):
    printed = run(SERVE, "--out", tmp_path, "--demo", unbroken[0])
    found = json.loads((tmp_path / "serving.json").read_text())
    expected = found_metrics(unbroken[0])
    quality = {storage: result["quality"] for storage, result in found.items()}
    assert quality["float32"]["auc"] == pytest.approx(expected["test_auc"], abs=1e-6)
    assert quality["float32"]["rmse"] == pytest.approx(expected["test_rmse"], abs=1e-6)
    assert quality["int8"]["auc"] >= quality["float32"]["auc"] - 0.002
    assert quality["int4"]["auc"] >= quality["float32"]["auc"] - 0.01
    sizes = {storage: result["table_bytes"] for storage, result in found.items()}
    assert sizes["int4"] < 0.15 * sizes["float32"]
    # A byte for each value and four for each row: a quarter and 1/64 at 64 columns,
    # and the biases stay as they are.
    assert sizes["int8"] < 0.28 * sizes["float32"]
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")
    assert f"{sizes['int8']:,}" in printed


def test_data_folder_without_data_is_refused(tmp_path: pathlib.Path):
    with pytest.raises(SystemExit, match=r"ml-100k\.inter is missing; the folder must"):
        source.read_folder(tmp_path, "inter")


def test_without_pip_or_network_the_way_out_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit, match=r"(?s)could not download recbole.*--data DIR"):
        source.download(tmp_path)
    assert not list(tmp_path.iterdir())


def test_resuming_another_plan_is_refused(tmp_path: pathlib.Path):
    training.prepare(training.Schedule(24, 1, tmp_path / "c"), resume=False)
    training.prepare(training.Schedule(24, 1, tmp_path / "c"), resume=True)
    with pytest.raises(SystemExit, match=r"'epochs': 24.*'epochs': 2.*give the same"):
        training.prepare(training.Schedule(2, 1, tmp_path / "c"), resume=True)


def made_up_tables(rng: np.random.Generator) -> dict[str, source.Table]:
    """The three files in small: 7 users, 9 films, 60 ratings."""

    def words(low: int, high: int) -> list[str]:
        return [str(n) for n in rng.integers(low, high, 60)]

    users, films = [str(n) for n in range(1, 8)], [str(n) for n in range(1, 10)]
    return {
        "inter": {
            "user_id": words(1, 8),
            "item_id": words(1, 10),
            "rating": words(1, 6),
            "timestamp": words(0, 20),  # Some alike.
        },
        "item": {
            "item_id": films,
            "movie_title": ["Piano, The", *(f"Film {film}" for film in films[1:])],
            "release_year": ["1993", "V", *(["1995"] * 7)],
            "class": ["Drama Romance", "", *(["Comedy"] * 7)],
        },
        "user": {
            "user_id": users,
            "age": [str(n) for n in rng.integers(20, 30, 7)],
            "gender": ["F", "M", *("M" * 5)],
            "occupation": ["writer", *(["other"] * 6)],
            "zip_code": ["85711", "85799", *(["T8H1N"] * 5)],
        },
    }


def seen_before(ratings: data.Ratings, when: np.ndarray, row: int) -> Sequence[int]:
    """The films of `recent`, by the definition and slowly."""
    rows = [
        (when[other], other)
        for other in ratings.split.train
        if ratings.user[other] == ratings.user[row]
        and (when[other], other) < (when[row], row)
    ]
    return [int(ratings.item[other]) for _, other in sorted(rows)][-data.MAX_RECENT :]


def test_the_parts_are_disjoint_and_complete(rng: np.random.Generator):
    ratings, _ = data.load(made_up_tables(rng).__getitem__)
    split = ratings.split
    assert (len(split.test), len(split.validation), len(split.train)) == (12, 2, 46)
    parts = np.concatenate([split.test, split.validation, split.train])
    assert sorted(parts.tolist()) == list(range(60))


def test_recent_films_come_from_earlier_training_ratings(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(data, "MAX_RECENT", 4)
    tables = made_up_tables(rng)
    ratings, catalogue = data.load(tables.__getitem__)
    when = np.array(tables["inter"]["timestamp"], int)
    expected = [seen_before(ratings, when, row) for row in range(60)]
    assert ratings.recent.to_list() == expected
    assert max(len(films) for films in expected) == 4
    assert catalogue.latest.shape[0] == 7


def test_inputs_of_the_model(rng: np.random.Generator):
    ratings, catalogue = data.load(made_up_tables(rng).__getitem__)
    rows = ratings.split.train
    (batch,) = ratings.batches(rows, 60)
    ids, numbers = catalogue.inputs(batch)
    assert set(ids) == set(catalogue.vocabulary_sizes)
    assert numbers.shape == (len(rows), 3)
    assert np.isfinite(numbers).all()
    for name, feature in ids.items():
        flat = feature if name not in ("genres", "recent") else feature.flat_values
        assert 0 <= min(flat) <= max(flat) < catalogue.vocabulary_sizes[name]
    count = sum(int(np.size(getattr(x, "flat_values", x))) for x in ids.values())
    assert catalogue.ids_per_rating(ratings)[rows].sum() == count
    assert catalogue.titles[:2] == ["The Piano (1993)", "Film 2 (V)"]


def test_auc_counts_pairs(rng: np.random.Generator):
    predicted = rng.integers(0, 8, 50) / 4
    rating = rng.integers(1, 6, 50)
    liked, others = predicted[rating >= 4], predicted[rating < 4]
    pairs = np.sign(liked[:, None] - others) / 2 + 0.5
    assert metrics.auc(predicted, rating) == pytest.approx(pairs.mean())


def test_the_baseline_knows_only_what_it_is_given(rng: np.random.Generator):
    tables = made_up_tables(rng)
    ratings, _ = data.load(tables.__getitem__)
    split = ratings.split
    before = metrics.biases_alone(ratings, split.rest, split.test)
    ratings.rating[split.test] = 1
    after = metrics.biases_alone(ratings, split.rest, split.test)
    np.testing.assert_array_equal(before, after)
