"""The benchmark of serving runs, on tables that are too small to say anything."""

from __future__ import annotations

import importlib
import json
import pathlib

import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def test_times_ours_and_the_peer_in_turn(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A folder on the path with `benchmarks`, but not the checkout's package.
    (tmp_path / "benchmarks").symlink_to(CHECKOUT / "benchmarks")
    monkeypatch.syspath_prepend(tmp_path)
    serving = importlib.import_module("benchmarks.serving")
    monkeypatch.setattr(serving, "ROWS", 50)
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
    lines = capsys.readouterr().out.splitlines()
    assert "( 1.00)" in lines[1]
