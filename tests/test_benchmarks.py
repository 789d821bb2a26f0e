"""The benchmark runs, on a scenario that is too small to say anything."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import tpu_embedding

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder on the path with `benchmarks`, but not the checkout's package."""
    (tmp_path / "benchmarks").symlink_to(CHECKOUT / "benchmarks")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_scenarios() -> None:
    scenarios = importlib.import_module("benchmarks.scenarios").SCENARIOS
    assert scenarios["dlrm"].ids_per_step == 438_272
    for batch in scenarios["tiny"].batches(2):
        for ids, rows in zip(batch, scenarios["tiny"].rows, strict=True):
            assert ids.dtype == np.int32
            assert 0 <= ids.min() <= ids.max() < rows
    with pytest.raises(NotImplementedError, match="not given weights"):
        scenarios["weights"].batches(1)


def test_the_plain_gather_sums_rows() -> None:
    peer = importlib.import_module("benchmarks.peers.machine_limits")
    rng = np.random.default_rng(0)
    table = rng.random([50, 16], np.float32)
    ids = rng.integers(0, 50, [9, 4], np.int32)
    sums = np.empty([9, 16], np.float32)
    peer.gather(table, ids, sums)
    np.testing.assert_allclose(sums, table[ids].sum(axis=1), rtol=1e-6)


def test_bags_of_several_sizes() -> None:
    scenarios = importlib.import_module("benchmarks.scenarios")
    (batch,) = scenarios.SCENARIOS["bags"].batches(1)
    ids, offsets = scenarios.jagged(batch)
    sizes = np.diff(offsets)
    assert (sizes.min(), sizes.max()) == (0, 100)
    # Four standard errors of the mean of 53,248 sizes, whose deviation is 10.5.
    assert np.mean(sizes) == pytest.approx(10, abs=0.18)
    first = batch[0][1]
    np.testing.assert_array_equal(ids[offsets[1] : offsets[2]], first[first >= 0])


@pytest.mark.second_tier
def test_run_writes_its_three_files(root: pathlib.Path) -> None:
    out = root / "out"
    command = [sys.executable, "-m", "benchmarks.run", "--scenario", "tiny"]
    options = ["--rounds", "2", "--out", str(out), "--peers"]
    options += ["tensorflow_nn", "fbgemm"]
    package = pathlib.Path(tpu_embedding.__file__).parents[1]
    path = os.pathsep.join([str(root), str(package)])
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    # Not in the checkout, whose build/peers may have it.
    subprocess.run([*command, *options], env=environment, cwd=root, check=True)
    written = json.loads((out / "tiny-adagrad.json").read_text())
    results = written["peers"]
    report = importlib.import_module("benchmarks.report")
    for side in ("milliseconds", "ours"):
        assert set(results["tensorflow_nn"][side]) == set(report.FUNCTIONS)
    assert results["fbgemm"]["missing"].startswith("not installed: No module")
    table = (out / "tiny-adagrad.md").read_text()
    assert table == report.markdown(report.Run(**written))
    assert "| fbgemm | not measured: not installed: No module named" in table
    assert (out / "tiny-adagrad.png").stat().st_size > 0


def test_a_run_that_is_broken_off_keeps_what_it_has(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = importlib.import_module("benchmarks.run")
    worker = {"rule": "", "missing": "why", "milliseconds": {}, "ours": {}}
    results = iter([worker])
    monkeypatch.setattr(run, "beside", lambda *_: next(results))
    options = ["--scenario", "tiny", "--out", str(tmp_path), "--peers"]
    options += ["fbgemm", "tfrs"]
    with pytest.raises(StopIteration):
        run.main(options)
    written = json.loads((tmp_path / "tiny-adagrad.json").read_text())
    assert written["peers"] == {"fbgemm": worker}


_KILLED = "import os; input(); os.kill(os.getpid(), 9)"
_OUT_OF_MEMORY = 'input(); print(\'{"missing": "MemoryError: no room"}\')'
_ENDED = "import sys; sys.exit(3)"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (_KILLED, "its process was killed by SIGKILL (out of memory?)"),
        (_OUT_OF_MEMORY, "MemoryError: no room"),
        (_ENDED, "its process ended early, with code 3"),
    ],
    ids=["killed", "answers", "ended"],
)
def test_a_peer_that_fails_in_the_middle_is_missing(script: str, why: str) -> None:
    run = importlib.import_module("benchmarks.run")

    def worker(script: str) -> Any:
        command = [sys.executable, "-c", script]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, **pipes)
        return run.Worker("peer", process, seconds={"step": [], "lookup": [0.5]})

    turn = '{"cold": 0.7, "seconds": [0.5]}'
    fine = f"\nwhile True: input(); print('{turn}', flush=True)"
    ours, theirs = worker(fine), worker(script)
    run.take_turns(ours, theirs, rounds=3)
    assert theirs.missing == why
    assert run.summary(theirs) == {}
    assert ours.missing is None
    assert run.summary(ours)["step"]["median"] == 500
    assert run.summary(ours)["step, cold"]["median"] == 700
    for side in (ours, theirs):
        side.stop()


def test_why_a_peer_is_missing() -> None:
    why = importlib.import_module("benchmarks.worker").why
    missing = ModuleNotFoundError("No module named 'torch'")
    expected = "not installed: No module named 'torch' (make bench-peers)"
    assert why(missing) == expected
    assert why(NotImplementedError("Refused.")) == "Refused."
    assert why(RuntimeError("[a | b]\nbelow")) == "RuntimeError: [a / b]"
    assert why(MemoryError()) == "MemoryError: "


def test_options_are_tried_before_anything_runs(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    run = importlib.import_module("benchmarks.run")
    (tmp_path / "file").write_text("")
    for options, why in (
        (["--out", str(tmp_path / "file" / "out")], "--out: cannot write into"),
        (["--out", str(tmp_path / "file")], "--out: cannot write into"),
        (["--rounds", "0"], "--rounds: '0' is no whole number of at least 1"),
        (["--rounds", "x"], "--rounds: 'x' is no whole number"),
        (["--peers", "no"], "--peers: invalid choice: 'no' (choose from"),
        (["--peers"], "--peers: expected at least one argument"),
    ):
        with pytest.raises(SystemExit):
            run.main(["--scenario", "tiny", *options])
        assert why in capsys.readouterr().err
    vocabulary = importlib.import_module("benchmarks.vocabulary")
    with pytest.raises(SystemExit):
        vocabulary.main(["--most-rows", "9999"])
    assert "9999 is less than the smallest, 10000" in capsys.readouterr().err


@pytest.mark.second_tier
def test_two_runs_do_not_disturb_each_other(tmp_path: pathlib.Path) -> None:
    options = importlib.import_module("benchmarks.options")
    script = "import pathlib, sys\nfrom benchmarks import options\n"
    script += "with options.alone(pathlib.Path(sys.argv[1])): pass"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with options.alone(tmp_path), options.alone(tmp_path):  # A part of a whole.
        options_of_run = {"cwd": tmp_path, "capture_output": True, "text": True}
        ran = subprocess.run(command, check=False, **options_of_run)
    assert ran.returncode == 1, ran.stderr
    assert f"Another benchmark runs and writes into {tmp_path}" in ran.stderr
    subprocess.run(command, cwd=tmp_path, check=True)


def test_everything_goes_on_after_a_part_that_failed(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    everything = importlib.import_module("benchmarks.everything")
    done = []

    def fail(options: list[str]) -> None:
        raise OSError(options[0])

    mains = dict.fromkeys(everything.MAINS, done.append) | {"vocabulary": fail}
    monkeypatch.setattr(everything, "MAINS", mains)
    with pytest.raises(SystemExit, match=r"above:\nbenchmarks\.vocabulary --rounds"):
        everything.main(["--quick", "--out", str(tmp_path)])
    assert len(done) == len(everything.commands(quick=True)) - 1
    assert "[1/" in capsys.readouterr().out

    def stop(options: list[str]) -> None:
        raise KeyboardInterrupt(options[0])

    monkeypatch.setattr(everything, "MAINS", mains | {"run": stop})
    (tmp_path / "done.md").write_text("done\n")
    with pytest.raises(KeyboardInterrupt):
        everything.main(["--quick", "--out", str(tmp_path)])
    first, *joined = (tmp_path / "everything.md").read_text().splitlines()
    assert re.search(
        r"\d cores, L3 \w+, a copy moves [\d.]+ GB/s, \d{4}-\d\d-\d\d, ", first
    )
    assert joined == ["", "done"]


@pytest.mark.second_tier
def test_jobs_of_several_processes_are_measured(
    root: pathlib.Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = importlib.import_module("benchmarks.distributed")
    package = str(pathlib.Path(tpu_embedding.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), package]))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # Not the package of the checkout.
    monkeypatch.setattr(distributed.run, "python_of", lambda peer: sys.executable)
    small = ["--tables", "2", "--rows", "99", "--batch", "8", "--steps", "2"]
    small += ["--systems", "ours:sgd", "torchrec:sgd", "--rounds", "1"]
    small += ["--out", str(root / "out")]
    distributed.main(small)
    printed = capsys.readouterr().out
    assert "| ours:sgd | " in printed
    assert "torchrec:sgd: not measured, ImportError: TorchRec cannot be" in printed
    assert "Run `make bench-peers`" in printed


def test_a_larger_table_has_ids_in_as_many_rows_of_each_process() -> None:
    jobs = importlib.import_module("benchmarks.peers.job")
    scenarios = importlib.import_module("benchmarks.scenarios")
    scenario = scenarios.Scenario("small", 64, 8, (100,), (10,))
    options = ("ours", "sgd", "float32", "auto", scenario)
    small, large = (jobs.Job(*options, spread, [], 1) for spread in (1, 1000))
    for (ids,), (others,) in zip(small.batches(), large.batches(), strict=True):
        assert (others // 1000 == ids).all()
        assert others.max() < large.rows[0]
        assert (others % 2 == ids % 2).all()


def test_the_cost_of_a_vocabulary_is_a_ratio_of_the_same_round() -> None:
    distributed = importlib.import_module("benchmarks.distributed")
    rounds = {"10 rows": (1.0, 3.0, 2.0), "99 rows": (1.2, 3.3, 4.0)}
    found = {n: [distributed.Figures(c, 1, 1) for c in r] for n, r in rounds.items()}
    assert "| 99 rows | 1.20 (1.10 to 2.00) | 1.3 |\n" in distributed.ratios(found)


def test_what_comes_right_after_another_process_does_not_count() -> None:
    burst = importlib.import_module("benchmarks.timing").burst
    seconds = iter([0.9, 0.8, 0.1, 0.2, 0.3, 0.4, 5.0])
    assert burst(lambda: next(seconds))[1] == [0.1, 0.2, 0.3, 0.4]
    assert burst(lambda: next(seconds)) == (5.0, [5.0])


def test_ratio_is_theirs_over_ours() -> None:
    report = importlib.import_module("benchmarks.report")
    times = {"median": 6.0, "min": 5.0, "max": 9.0}
    ours = {"median": 2.0, "min": 1.0, "max": 3.0}
    peer = {"milliseconds": {"step": times}, "ours": {"step": ours, "lookup": ours}}
    peers = {"peer": {**peer, "rule": "r", "missing": None}}
    run = report.Run("tiny", "sgd", 10, 4.0, peers)
    assert run.ratio("peer", "step") == 3.0
    assert run.ratio("peer", "lookup") is None
    assert "| peer | r | - | 2.00 (1.00-3.00) | - | 6.00 (5.00-9.00) |" in (
        report.markdown(run)
    )


def test_a_missed_aim_is_marked() -> None:
    report = importlib.import_module("benchmarks.report")
    peers = {}
    for name, ours in (("fbgemm", 2.5), ("tfrs", 0.5)):
        sides = [{"step": {"median": t, "min": t, "max": t}} for t in (10.0, ours)]
        peers[name] = {"rule": "r", "missing": None}
        peers[name] |= dict(zip(("milliseconds", "ours"), sides, strict=True))
    run = report.Run("dlrm", "adagrad", 10, 5e4, peers)
    assert run.missed("fbgemm", "step") == 5.0
    assert run.missed("tfrs", "step") is None
    table = report.markdown(run)
    assert "4.00 x (aim 5, **missed**) |" in table
    assert "| 20.00 x |" in table
    assert "50.0 ns a distinct row" in table


def test_a_step_s_bandwidth_stands_beside_a_copy_s() -> None:
    report = importlib.import_module("benchmarks.report")
    scenario = importlib.import_module("benchmarks.scenarios").SCENARIOS["tiny"]
    copy = importlib.import_module("benchmarks.peers.machine_limits")
    functions = copy.prepare(scenario, "none")
    assert functions["copy"]() > 0
    times = dict.fromkeys(("median", "min", "max"), 10.0)
    peer = {"rule": "r", "missing": None, "ours": {"step": times}}
    peers = {
        "machine_limits": {**peer, "milliseconds": dict.fromkeys(functions, times)}
    }
    table = report.markdown(report.Run("dlrm", "adagrad", copy.BYTES // 2, 5e4, peers))
    assert "at 26.8 GB/s, 50% of a copy's 53.7 GB/s (aim 60%, **missed**)." in table
    table = report.markdown(report.Run("dlrm", "adagrad", copy.BYTES, 5e4, peers))
    assert "100% of a copy's 53.7 GB/s." in table


def test_bytes_of_a_step() -> None:
    scenarios = importlib.import_module("benchmarks.scenarios")
    scenario = scenarios.Scenario("one", 4, 8, (1,), (3,))
    # 12 ids, 4 samples and one distinct row, which has a slot.
    assert scenario.bytes_per_step(1) == 4 * 8 * (2 * 12 + 4 + 2 * 2 * 1)


@pytest.mark.parametrize("peer", ["keras_fit", "layer_fit"])
def test_both_sides_of_fit(peer: str) -> None:
    scenario = importlib.import_module("benchmarks.scenarios").SCENARIOS["tiny"]
    prepare = importlib.import_module(f"benchmarks.peers.{peer}").prepare
    assert prepare(scenario, "adagrad")["step"]() > 0
    with pytest.raises(NotImplementedError, match="Keras has no rowwise_adagrad"):
        prepare(scenario, "rowwise_adagrad")


@pytest.mark.parametrize("name", ["tiny", "model_two_tower", "model_sequence"])
def test_a_whole_model_has_the_losses_of_variables(name: str) -> None:
    tf = importlib.import_module("tensorflow")
    ours = importlib.import_module("benchmarks.peers.model_tpu_embedding")
    models = importlib.import_module("benchmarks.models")
    scenario = importlib.import_module("benchmarks.scenarios").SCENARIOS[name]
    size = min(scenario.batch_size, 2 * models.POSITIONS)
    rows = tuple(min(rows, 1000) for rows in scenario.rows)
    scenario = dataclasses.replace(scenario, batch_size=size, rows=rows)
    loss = ours.prepare(scenario, "sgd")["loss"]()
    tables = [tf.Variable(models.first_rows(n, scenario.dim)) for n in rows]
    batches = iter(scenario.batches(4) * 2)
    features: list[Any] = []

    def look_up() -> list[Any]:
        features[:] = next(batches)
        found = zip(tables, features, strict=True)
        return [tf.reduce_sum(tf.gather(table, ids), 1) for table, ids in found]

    def update(gradients: Any) -> None:
        for table, ids, gradient in zip(tables, features, gradients, strict=True):
            each = tf.repeat(gradient, ids.shape[1], 0)
            table.scatter_sub(tf.IndexedSlices(0.01 * each, ids.reshape(-1)))

    tf.config.run_functions_eagerly(True)
    try:
        step = ours.step_of(scenario, look_up, update)
        losses = [float(step()) for _ in range(models.STEPS)]
    finally:
        tf.config.run_functions_eagerly(False)
    assert losses[0] != losses[-1]
    np.testing.assert_allclose(loss, losses[-1], rtol=1e-6)


def test_a_model_with_another_loss_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = importlib.import_module("benchmarks.run")

    class Trained(run.Worker):
        @classmethod
        def start(cls, peer: str, scenario: str, optimizer: str) -> Any:
            process = subprocess.Popen(["true"], stdin=-1, stdout=-1, text=True)
            return cls(peer, process, loss=0.7 if peer == "model_fbgemm" else 0.6)

    monkeypatch.setattr(run, "Worker", Trained)
    result = run.beside("model_fbgemm", "tiny", "sgd", 1)
    assert result["missing"] == "loss 0.700000, ours 0.600000"


@pytest.mark.second_tier
def test_everything_is_known(tmp_path: pathlib.Path) -> None:
    everything = importlib.import_module("benchmarks.everything")
    scenarios = importlib.import_module("benchmarks.scenarios").SCENARIOS
    slots = importlib.import_module("benchmarks.run").SLOTS
    for scenario, optimizer, peers in everything.RUNS:
        assert scenario in scenarios
        assert optimizer in slots
        for peer in peers:
            assert (CHECKOUT / "benchmarks" / "peers" / f"{peer}.py").exists()
    for quick in (False, True):
        modules = {module for module, _ in everything.commands(quick=quick)}
        assert modules == set(everything.MAINS)
    (tmp_path / "a.md").write_text("fine\n")
    (tmp_path / "b.md").write_text("**missed**\n")
    assert everything.join(tmp_path).endswith(".\n\n**missed**\n\nfine\n")


def test_one_table_of_all_peers(tmp_path: pathlib.Path) -> None:
    overview = importlib.import_module("benchmarks.overview")
    report = importlib.import_module("benchmarks.report")

    def result(theirs: float | None, ours: float) -> dict[str, Any]:
        sides = [
            {f: dict.fromkeys(("median", "min", "max"), t) for f in report.FUNCTIONS}
            for t in (theirs, ours)
        ]
        milliseconds = sides[0] if theirs else {}
        times = {"milliseconds": milliseconds, "ours": sides[1]}
        return {"rule": "r", "missing": None, **times}

    peers = {"machine_limits": result(None, 2.5), "fbgemm": result(8.0, 2.0)}
    none = {"missing": "not installed", "milliseconds": {}, "ours": {}}
    peers["keras_rs"] = result(None, 2.5) | none
    for optimizer, of in (("sgd", {"tfrs": result(9.0, 3.0)}), ("adagrad", peers)):
        one = report.Run("dlrm", optimizer, 10, 5e4, of)
        (tmp_path / f"{one.title}.json").write_text(json.dumps(dataclasses.asdict(one)))
    table = overview.write(tmp_path, "dlrm")
    assert table == (tmp_path / "overview.md").read_text()
    assert "| milliseconds (times faster) | lookup | sgd step | adagrad step |" in table
    cells = "| fbgemm | 8.00 (4.00 x) | - | 8.00 (4.00 x, aim 5 **missed**) |"
    assert cells in table
    missed = "9.00 (3.00 x, aim 6 **missed**)"
    assert f"| tfrs | {missed} | 9.00 (3.00 x) | - |" in table
    assert "| **ours** | 2.00 to 3.00 | 3.00 to 3.00 | 2.00 to 2.50 |" in table
    assert "machine_limits" not in table
    assert table.endswith("\nNot measured with adagrad: keras_rs, not installed\n")
    assert overview.write(tmp_path, "one_hot") == ""
    everything = importlib.import_module("benchmarks.everything")
    _, _, tables = everything.join(tmp_path).partition("\n\n")
    assert tables.startswith(table)


def test_the_planted_clicks_are_learned() -> None:
    """The standard error of an AUC of 1/2 would be 0.02."""
    quality = importlib.import_module("benchmarks.quality")
    task = quality.planted(count=3000, tables=4, largest=50)
    assert all(size > 0 for size in task.vocabulary_sizes.values())
    auc, norm = quality.train(task, "int8", 1, 2)
    assert 0.6 < auc < 0.95
    assert norm > 0.05 * 64**0.5  # That of the first rows.


def test_kinds_of_tables_are_compared_in_pairs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    quality = importlib.import_module("benchmarks.quality")
    runs = {"float32": {1: 0.5, 2: 0.7}, "int8": {1: 0.4, 2: 0.8}}

    def train(task: Any, kind: str, seed: int, epochs: int) -> tuple[float, float]:
        assert epochs == 2
        return runs[kind][seed], seed

    monkeypatch.setattr(quality, "train", train)
    monkeypatch.setitem(quality.TASKS, "planted", lambda: quality.planted(9, 2, 5))
    options = ["--task", "planted", "--seeds", "2", "--kinds", *runs]
    quality.main(options)
    printed = capsys.readouterr().out.splitlines()
    assert printed[3] == "int8, seed 2: AUC 0.80000, norm 2.00000, 0 s"
    assert printed[-2:] == [
        "int8                 AUC 0.60000, +0.00000 +- 0.10000 of float32",
        "                     norm 1.50000, +0.00000 +- 0.00000",
    ]


def test_a_machine_adds_biases_and_a_product(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    quality = importlib.import_module("benchmarks.quality")
    films, user = ("item", "genres"), ("user", "age", "occupation", "zip_code")
    biases = ("user_bias", "item_bias")
    sizes = dict.fromkeys((*films, *user, *biases, "recent"), 3)
    task = dataclasses.replace(quality.planted(9, 2, 5), vocabulary_sizes=sizes)
    monkeypatch.setattr(quality, "demo", lambda: task)
    machine = quality.machine()
    features = quality.model.make_feature_config(machine.vocabulary_sizes)
    dense = machine.make_dense_part(features, 3.5)
    inputs = {
        name: rng.normal(size=(2, feature.table.dim)).astype(np.float32)
        for name, feature in features.items()
    }
    found = dense({**inputs, "numbers": np.zeros([2, 3], np.float32)})
    film, person, bias = (
        np.sum([inputs[name] for name in names], axis=0)
        for names in (films, user, biases)
    )
    expected = 3.5 + (film * person).sum(axis=1) + bias[:, 0]
    # Products of 64 sums, each below 4^2 * 8, rounded to 2^-24 of them.
    np.testing.assert_allclose(found, expected, atol=64 * 128 * 2**-24)
