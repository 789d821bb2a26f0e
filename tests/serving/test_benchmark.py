"""The benchmark of serving runs, on tables that are too small to say anything."""

from __future__ import annotations

import importlib
import json
import pathlib
from typing import Any

import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def serving(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # A folder on the path with `benchmarks`, but not the checkout's package.
    (tmp_path / "benchmarks").symlink_to(CHECKOUT / "benchmarks")
    monkeypatch.syspath_prepend(tmp_path)
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
