"""`run --keras` and `try`: unchanged scripts for Keras train by rows."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import new_process
import pytest

from tpu_embedding.__main__ import main
from tpu_embedding.commands import programs

SCRIPT = """
import sys

import keras
import numpy as np

class Mine(keras.layers.Embedding):
    pass

class Calls(Mine):
    def call(self, inputs):
        return super().call(inputs)

ids = np.random.default_rng(0).integers(0, 50, (64, 2))
inputs = keras.Input([2], dtype="int64")
none = keras.regularizers.L2(0.0)
tables = [keras.layers.Embedding(50, 4, embeddings_regularizer=none)]
some = keras.regularizers.L2(0.1)
tables += [Mine(50, 4), Calls(50, 4)]
tables += [keras.layers.Embedding(60, 4, embeddings_regularizer=some)]
rows = keras.layers.Concatenate()([table(inputs) for table in tables])
model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
model.compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse")
model.fit(ids, ids[:, :1] / 50, 8, 1, 0)
ways = getattr(model.optimizer, "updates_rows_by", {}).get("embedding/embeddings:0")
names = type(tables[0]).__module__, type(model.optimizer).__name__
print(*names, len(model.losses), ways, *sys.argv[1:])
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trial") / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return new_process.run("-m", "tpu_embedding", *arguments)


def test_run_keras_replaces_both(script: str):
    done = command("run", "--keras", script, "argument")
    assert done.returncode == 0, done.stderr[-3000:]
    # Without the regularizer of strength 0, whose gradient is dense.
    expected = "tpu_embedding.keras.rows.embedding RowSparseSGD 1 rows argument"
    assert done.stdout.splitlines()[-1] == expected
    assert done.stderr.count("keras.layers.Embedding is te.keras.Embedding") == 1


def test_try_compares(script: str):
    done = command("try", "--steps", "5", script)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = {line[:28].strip(): line for line in done.stdout.splitlines()}
    assert {"step, wall", "step, CPU", "peak memory", "loss, step 5"} <= set(lines)
    *_, plain, rows = lines["loss, step 5"].split()
    assert plain == rows
    assert "by rows: layer embedding (50 x 4): about " in done.stdout
    assert "(60 x 4), but the gradient of its regularizer is dense" in done.stdout
    assert "by rows: optimizer SGD" in done.stdout
    assert "(50 x 4): Mine is a subclass: derive it from te.keras" in done.stdout
    assert "(50 x 4): Calls is a subclass with a call of its own" in done.stdout
    assert "step 5 of 5" not in done.stderr  # It is no terminal.
    assert "The last loss is" not in done.stdout
    assert "The first run wrote" not in done.stdout


def test_the_table_says_what_was_found():
    plain = programs.Run([0.2, 0.4, 0.2], [0.3] * 3, [1.0, 2.0, 3.0, 4.0], 9, 2**21)
    rows = programs.Run([0.1] * 3, [0.1] * 3, [1.0, 2.0, 3.5, 4.0], 8, 2**20)
    rows.notes = [("optimizer adam", ""), ("layer x", "why")]
    text = programs.compare(plain, rows)
    assert "200.0 ms      100.0 ms    50.0%" in text
    assert "9.0 s         8.0 s" in text
    assert "2 MiB         1 MiB" in text
    assert "largest difference of losses in 4 steps: 0.5\nThe last loss is " in text
    assert "The last loss is lower by rows.\nWhere ids repeat in a batch" in text
    assert text.endswith("by rows: optimizer adam\nleft as it is: layer x: why")
    rows.notes = [("layer x (30 x 4)", ""), ("layer y (10 x 4)", "")]
    text = programs.compare(plain, rows)
    assert "(30 x 4): about 150.0 ms of CPU saved in a step\n" in text
    assert text.endswith("(10 x 4): about 50.0 ms of CPU saved in a step")
    rows.cpu, rows.notes = [0.4] * 3, [*rows.notes[:1], ("layer z (9 x 9)", "why")]
    text = programs.compare(plain, rows)
    assert "(30 x 4): about 100.0 ms of CPU lost, so it does not pay in a step" in text
    assert "does not call `fit`" in programs.compare(programs.Run(), rows)
    assert "Nothing was replaced" in programs.compare(plain, programs.Run())


def test_a_terminal_shows_the_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    programs._draw("rows", 5, 5)
    bar = "by rows   [##############################] step 5 of 5"
    assert bar in capsys.readouterr().err


def test_losses_are_compared_in_their_direction():
    plain, rows = (programs.Run([0.1], [0.1], [1.0, last]) for last in (2.0, 2.1))
    text = programs.compare(plain, rows)
    assert "The last loss is higher by rows." in text
    assert "Where ids repeat" not in text  # Nothing was replaced.
    rows.losses[1] = 2.00001
    assert "The last loss" not in programs.compare(plain, rows)


@pytest.mark.third_tier
@pytest.mark.parametrize(
    "optimizer",
    ["keras.optimizers.Adagrad(0.1)", "keras.optimizers.SGD(0.5, global_clipnorm=0.1)"],
)
def test_a_script_whose_ids_repeat_and_that_writes_files(
    optimizer: str, tmp_path: pathlib.Path
):
    path = tmp_path / "nightly.py"
    path.write_text(
        f"""
import keras
import numpy as np
random = np.random.default_rng(0)
layers = [keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input([3], dtype="int32"), *layers])
model.compile({optimizer}, "mse")
ids = random.integers(0, 20, [320, 3])
model.fit(ids, random.random(320), batch_size=64, verbose=0, shuffle=False)
model.save_weights({str(tmp_path / "kept.weights.h5")!r})
"""
    )
    done = command("try", "--steps", "0", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "by rows.\nWhere ids repeat in a batch" in done.stdout
    assert "The first run wrote" in done.stdout
    assert "kept.weights.h5. If the script reads" in done.stdout


def test_what_is_refused(
    script: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["try", str(tmp_path / "none.py")]) == 2
    assert main(["try", "--steps", "-1", script]) == 2
    assert main(["run", "--keras", "--on", "v4:2", script]) == 2
    printed = capsys.readouterr().err
    assert "There is no script" in printed
    assert "--steps must not be negative. Received: -1." in printed
    assert "`--on` has no effect with `--keras`" in printed


def test_a_script_that_fails_shows_its_error(tmp_path: pathlib.Path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("raise ValueError('of the script')")
    done = command("try", str(wrong))
    assert done.returncode == 1
    assert "wrong.py failed as it is:" in done.stderr
    assert "ValueError: of the script" in done.stderr
