"""The benchmark of preprocessing compares like with like."""

from __future__ import annotations

import importlib
import os
import pathlib

import numpy as np
import pytest

from tpu_embedding.testing import library as software_tpu

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on the path with `benchmarks`, but not the checkout's package."""
    (tmp_path / "benchmarks").symlink_to(CHECKOUT / "benchmarks")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # a peer adds to it


def test_the_stock_ops_get_the_same_batch_and_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_table(tmp_path: pathlib.Path) -> None:
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
