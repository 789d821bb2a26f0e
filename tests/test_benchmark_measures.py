"""The benchmarks that measure other things than steps, with tiny tables."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from tpu_embedding.testing import library as software_tpu

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on the path with `benchmarks`, but not the checkout's package."""
    (tmp_path / "benchmarks").symlink_to(CHECKOUT / "benchmarks")
    monkeypatch.syspath_prepend(tmp_path)


def test_tables_of_bfloat16_are_measured_beside_ours() -> None:
    measures = importlib.import_module("benchmarks.measures")
    assert measures.child_width("tiny", "3", "bfloat16")["seconds"] > 0
    for form in measures.FORMS:
        assert measures.child_form("tiny", form)["seconds"] > 0
    scenario = importlib.import_module("benchmarks.scenarios").SCENARIOS["tiny"]
    beside = importlib.import_module("benchmarks.peers.tpu_embedding_bfloat16")
    assert beside.prepare(scenario, "adagrad")["lookup"]() > 0


@pytest.mark.parametrize("form", ["ragged", "packed", "growing"])
def test_other_forms_are_measured_beside_ours(form: str) -> None:
    scenario = importlib.import_module("benchmarks.scenarios").SCENARIOS["tiny"]
    beside = importlib.import_module(f"benchmarks.peers.tpu_embedding_{form}")
    for function in beside.prepare(scenario, "adagrad").values():
        assert function() > 0


def test_a_growing_table_is_measured() -> None:
    measures = importlib.import_module("benchmarks.measures")
    found = measures.child_growing("30000")
    assert set(found) == {"growing", "static", "longest", "memory"}
    assert min(found.values()) > 0


def test_measures_mark_what_they_miss() -> None:
    measures = importlib.import_module("benchmarks.measures")
    rows = [
        measures.Measure("faster", 1.5, 1.7, at_least=True),
        measures.Measure("larger", 1.05, 1.1, at_least=False),
    ]
    table = measures.markdown(rows)
    assert "| faster | 1.5 | at least 1.7, **missed** |" in table
    assert "| larger | 1.05 | at most 1.1 |" in table


def test_all_measures_are_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures = importlib.import_module("benchmarks.measures")
    found = {
        "memory": {"tensorflow": 0.0, "early": 1e9, "late": 1e9},
        "growing": {"growing": 30.0, "static": 9.0, "longest": 1.5, "memory": 1.0},
    }
    asked = []

    def in_process(function: str, *arguments: object, python: str = "") -> dict:
        asked.append((function, *arguments))
        return found.get(function, {"seconds": 1.0})

    monkeypatch.setattr(measures, "_in_process", in_process)
    monkeypatch.setattr(measures.picture, "bars", lambda *_: None)  # Drawn below.
    measures.main(["--out", str(tmp_path)])
    written = json.loads((tmp_path / "measures-dlrm.json").read_text())
    names = {row["name"] for row in written}
    assert "step with int64 ids over that with int32" in names
    for dtype in ("float32", "bfloat16"):
        for pair in ((3, 4), (7, 8), (10, 8), (100, 96), (1024, 256)):
            name = f"{dtype} step per byte at dim {pair[0]} over that at dim {pair[1]}"
            assert name in names
    assert ("width", "wide", 1024, "float32") in asked
    assert ("memory", "dlrm", 10_000) in asked
    assert {row["aim"] for row in written} == {1.0, 1.01, 1.1, 1.3, 1.7, 2.0, 20.0}


def test_measures_that_were_not_taken() -> None:
    measures = importlib.import_module("benchmarks.measures")
    row = measures.Measure("tracing", None, 1.0, missing="not installed")
    assert "| tracing | not measured: not installed |" in measures.markdown([row])
    with pytest.raises(measures.ChildError, match=r"form ended with code 1: KeyError"):
        measures._in_process("form", "no", "int64")


def test_one_measure_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures = importlib.import_module("benchmarks.measures")

    def in_process(function: str, *_: object) -> dict:
        if function == "form":
            raise measures.ChildError("form ended with code 1: MemoryError")
        return {"tensorflow": 0.0, "early": 1e9, "late": 2e9}

    monkeypatch.setattr(measures, "_in_process", in_process)
    measures.main(["--only", "forms", "memory", "--out", str(tmp_path)])
    table = (tmp_path / "measures-dlrm-forms-memory.md").read_text()
    assert "| forms | not measured: form ended with code 1: MemoryError |" in table
    assert "after a tenth | 2 | at most 1.01, **missed** |" in table
    assert (tmp_path / "measures-dlrm-forms-memory.png").stat().st_size > 0


def test_vocabulary_marks_its_aim() -> None:
    vocabulary = importlib.import_module("benchmarks.vocabulary")
    times = [{"median": t, "min": t, "max": t} for t in (8.0, 2.0, 30.0)]
    peers = {
        "fast": {"missing": None, "milliseconds": {"step": times[2]}},
        "large": {"missing": "needs 33 GB, 20 GB are free"},
    }
    peers["fast"]["ours"] = {"step": times[0]}
    ours, base = times[:2]
    slow = vocabulary.Size(200_000, 4e4, None, ours, base, 4e4, peers)
    assert (slow.row_nanoseconds, slow.growth, slow.slower) == (200.0, 4.0, 4.0)
    more_rows = vocabulary.Size(200_000, 8e4, None, ours, base, 4e4)
    assert more_rows.growth == 2.0
    assert vocabulary.missed(slow)
    assert not vocabulary.missed(dataclasses.replace(slow, rows=10_000))
    assert not vocabulary.missed(more_rows)
    missing = vocabulary.Size(5000, 1.0, "needs 17 GB, 9 GB are free")
    table = vocabulary.markdown([slow, more_rows, missing])
    assert "| 200 | 4.00 x, **missed** | 4.00 x |" in table
    assert "| 100 | 2.00 x | 4.00 x |" in table
    assert "not measured: needs 17 GB, 9 GB are free |" in table
    assert "| 200,000 | fast | 30.00 | 8.00 | 3.75 x |" in table
    assert "| 200,000 | large | not measured: needs 33 GB" in table


def test_what_fits_into_memory() -> None:
    vocabulary = importlib.import_module("benchmarks.vocabulary")
    largest = vocabulary.SCENARIOS["vocabulary_25000000"]
    assert vocabulary.needed(largest) > 12.8e9
    assert vocabulary.does_not_fit([largest], int(24e9)) is None
    refused = vocabulary.does_not_fit([largest, largest], int(24e9))
    assert refused == "needs 33 GB, 24 GB are free"
    assert vocabulary.available_bytes() > 0


FIXED, PER_ID, PER_BYTE = 5e-4, 2e-8, 1e-10


def _work(name: str, ids: int, moved: int, threads: int) -> Any:
    scaling = importlib.import_module("benchmarks.scaling")
    seconds = FIXED + (PER_ID * ids + PER_BYTE * moved) / threads
    return scaling.Work(name, ids, moved, threads, seconds)


def _works() -> list[Any]:
    sizes = ((800, 700), (50_000, 1500), (400_000, 900))
    return [
        _work(f"case {ids}", ids, ids * bytes_of_id, threads)
        for ids, bytes_of_id in sizes
        for threads in (1, 2)
    ]


def test_a_model_of_a_step_is_fitted() -> None:
    scaling = importlib.import_module("benchmarks.scaling")
    coefficients = scaling.fit(_works())
    np.testing.assert_allclose(coefficients, [FIXED, PER_ID, PER_BYTE], 1e-6)
    assert max(scaling.left_out(_works()).values()) < 1e-6
    many = _work("", 400_000, 360_000_000, 64)
    assert scaling.predict(coefficients, many) == pytest.approx(many.seconds)
    # Memory of 100 GB/s is slower.
    assert scaling.predict(coefficients, many, 1e11) == pytest.approx(3.6e-3)


def test_a_fitted_model_says_how_it_errs() -> None:
    scaling = importlib.import_module("benchmarks.scaling")
    odd = [
        dataclasses.replace(work, seconds=2 * work.seconds) if work.ids == 800 else work
        for work in _works()
    ]
    # By a fit without the case itself.
    assert scaling.left_out(odd)["case 800"] == pytest.approx(0.5, abs=1e-6)
    # Slower on two threads than on one: no share of a thread explains that.
    slower = [
        dataclasses.replace(work, seconds=work.seconds * work.threads**2)
        for work in _works()
    ]
    assert scaling.fit(slower).min() >= 0


def test_the_model_of_a_step_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = importlib.import_module("benchmarks.scaling")
    cases = [("tiny", "adagrad", 1), ("small_tables", "sgd", 0)]
    monkeypatch.setattr(scaling, "CASES", cases)
    monkeypatch.setattr(scaling, "_timed", lambda *case: 1e-3 / case[-1])
    scaling.main(["--rounds", "1", "--cores", "8", "--out", str(tmp_path)])
    assert len(json.loads((tmp_path / "scaling.json").read_text())) == 4
    assert "| tiny, adagrad | 1.00, 0.50 |" in (tmp_path / "scaling.md").read_text()


def test_the_cost_of_tracking_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    deltas = importlib.import_module("benchmarks.deltas")
    deltas.main(["--only", "tracking", "--scenarios", "tiny", "--rounds", "1"])
    assert "ms for a step; one consumer" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        deltas.main(["--only", "publishing"])


def test_the_stock_ops_get_the_same_batch_and_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # The peer adds to it.
    software_tpu.load()
    scenario = importlib.import_module("benchmarks.scenarios").SCENARIOS["tiny"]
    one_stack = importlib.import_module("benchmarks.one_stack")
    # As many devices as the tests have.
    monkeypatch.setattr(one_stack, "DEVICES", {"one_device": 1, "more_devices": 4})
    feed = importlib.import_module("benchmarks.feed")
    ours, stock = (
        importlib.import_module(f"benchmarks.peers.{name}")
        for name in ("tpu_embedding_v2", "tensorflow_tpu_host_ops")
    )
    for devices in one_stack.DEVICES.values():
        stack = one_stack.Stack.of(scenario, devices)
        batches = scenario.batches(1)
        embedding = ours.embedding(scenario, devices)
        own = ours.step(embedding, feed.dense(batches))()
        other = stock.step(scenario, stack, batches)()
        ((name, table),) = own.tables.items()
        size = int(own.sizes[name].ids)
        assert size == other.ids_unpadded_size > 0
        for key in ("sorted_sample_ids", "sorted_token_ids", "sorted_gains"):
            found = getattr(table, key)[:size]
            np.testing.assert_array_equal(found, getattr(other, key)[:size])
    functions = ours.prepare(scenario, "none")
    expected = [f"{name}{end}" for name in one_stack.DEVICES for end in ("", "_cpu")]
    assert list(functions) == expected
    assert all(function() > 0 for function in functions.values())


def test_the_table_of_preprocessing(tmp_path: pathlib.Path) -> None:
    benchmark = importlib.import_module("benchmarks.preprocessing")
    names = ["one_device", "eight_devices"]
    names += [f"{name}_cpu" for name in names]
    results = {"other": {"missing": "No module named 'other'"}}
    results["peer"] = {
        "missing": None,
        "rule": "r",
        "milliseconds": {n: {"median": 6.0, "min": 5.0, "max": 9.0} for n in names},
        "ours": {n: {"median": 2.0, "min": 1.0, "max": 3.0} for n in names},
    }
    table = benchmark.markdown("dlrm", results)
    assert "| other | not measured: No module named 'other' |" in table
    row = "| peer | r | 8 | 6.00 (5.00-9.00) | 2.00 (1.00-3.00) | 3.00 x | 3.00 x | "
    assert f"{row}219.1 M |" in table
    slow = {n: {"median": 3.9, "min": 3.0, "max": 4.0} for n in names}
    results["peer"] |= {"milliseconds": slow}
    assert "| 1.95 x, **missed** | 1.95 x |" in benchmark.markdown("dlrm", results)
    assert "**missed**" not in benchmark.markdown("tiny", results)
    benchmark._write(tmp_path, "dlrm", results)
    assert (tmp_path / "dlrm-preprocessing.png").stat().st_size > 0


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module("benchmarks.serving")
    monkeypatch.setattr(module, "ROWS", 50)
    return module


@pytest.mark.parametrize("features", [1, 4])
def test_runs_no_more_ops_than_the_peer(
    features: int, serving: Any, tmp_path: pathlib.Path
) -> None:
    scenario = serving.Scenario("few", features=features, ids=2, other="ragged")
    sessions = serving.export(scenario, tmp_path)
    inputs = serving.make_inputs(scenario, 3)["sparse"]
    ours, most = (sessions[side].num_ops("sparse", inputs) for side in ("ours", "peer"))
    assert 0 < ours <= most


def test_times_ours_and_the_peer_in_turn(
    serving: Any,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serving, "BATCHES", (1, 4))
    serving.main(
        ["--scenarios", "one_feature", "--rounds", "2", "--out", str(tmp_path)]
    )
    found = json.loads((tmp_path / "serving.json").read_text())["one_feature"]
    names = ["tf.nn.safe_embedding_lookup_sparse", "ours, sparse", "ours, dense"]
    assert {size: list(times) for size, times in found.items()} == {
        "1": names,
        "4": names,
    }
    table = (tmp_path / "serving.md").read_text()
    assert capsys.readouterr().out.endswith(f"{table}\n")
    assert "| one_feature, 1 x 1 ids, microseconds | batch 1 | batch 4 |" in table
    assert (tmp_path / "serving.png").stat().st_size > 0
    times = {serving.PEER: 100.0, "ours, sparse": 101.0, "ours, dense": 99.0}
    assert serving._cell("ours, sparse", times) == "101 (1.010, aim 1 **missed**)"
    assert serving._cell("ours, dense", times) == "99 (0.990)"
