"""The command line: what it prints, writes and answers."""

from __future__ import annotations

import importlib
import io
import json
import os
import pathlib
import runpy
import sys

import new_process
import numpy as np
import pytest
import tensorflow as tf
from checkpoint import models, stock_stacks

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.__main__ import main
from tpu_embedding.checkpoint import numpy_format
from tpu_embedding.commands.files import TextProgress


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> str:
    """Tables of ones with accumulators of 0.1, and a count of updates."""
    schedule = tf.keras.optimizers.schedules.PolynomialDecay(0.5, 4)
    embedding = models.make(te.Adagrad(schedule))
    for table in embedding.embedding_tables.values():
        table.assign(tf.ones_like(table))
    return checkpoint.save(embedding, tmp_path / "saved")


def contents(path: str) -> models.Values:
    return {
        name: {array: rows.numpy() for array, rows in table.arrays.items()}
        for name, table in checkpoint.read(path).items()
    }


def test_inspect(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", saved]) == 0
    assert capsys.readouterr().out == (
        f"{saved} (TensorFlow, 0 updates)\n"
        "table  array         shape   dtype    bytes      norm\n"
        "films  parameters    11 x 3  float32    132   5.74456\n"
        "films  accumulators  11 x 3  float32    132  0.574456\n"
        "users  parameters    6 x 2   float32     48    3.4641\n"
        "users  accumulators  6 x 2   float32     48   0.34641\n"
    )


def test_inspect_as_json(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", "--json", "--root", "embedding", saved]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["path"], facts["format"], facts["updates"]) == (
        saved,
        "TensorFlow",
        0,
    )
    first = facts["arrays"][0]
    assert (first["table"], first["array"]) == ("films", "parameters")
    assert (first["shape"], first["dtype"]) == ([11, 3], "float32")
    assert first["norm"] == pytest.approx(33**0.5, rel=1e-12)


def test_convert_there_and_back(saved: str, tmp_path: pathlib.Path) -> None:
    arrays, plain = str(tmp_path / "arrays"), str(tmp_path / "plain")
    assert main(["checkpoint", "convert", saved, arrays, "--to", "numpy"]) == 0
    names = ["films", "films/accumulators", "users", "users/accumulators"]
    for name in names:
        assert (pathlib.Path(arrays) / f"{name}.npy").exists()
    rename = ["--rename", "films=movies", "--new-root", "model/tables"]
    assert main(["checkpoint", "convert", arrays, plain, *rename]) == 0
    assert checkpoint.read(plain, root="model/tables").keys() == {"movies", "users"}
    alone = str(tmp_path / "alone")
    assert main(["checkpoint", "convert", saved, alone, "--no-slots"]) == 0
    assert [bool(table.slots) for table in checkpoint.read(alone).values()] == [
        False
    ] * 2


def test_convert_to_sparse_core(
    saved: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedding = models.make(te.Adagrad(0.1), stock_stacks.SIZES)
    plain = checkpoint.save(embedding, tmp_path / "plain")
    layouts = [stock_stacks.layout_of(p) for p in stock_stacks.stock_layouts(2, 4)]
    like = checkpoint.save(embedding, tmp_path / "like", layouts=layouts)
    sharded, back = str(tmp_path / "sharded"), str(tmp_path / "back")
    to = ["--to", "sparse-core", "--like", like]
    assert main(["checkpoint", "convert", plain, sharded, *to]) == 0
    assert checkpoint.read_layouts(sharded) == layouts
    assert main(["checkpoint", "convert", sharded, back, "--json"]) == 0
    models.assert_same(contents(back), contents(plain))
    capsys.readouterr()
    other = str(tmp_path / "other")
    assert main(["checkpoint", "convert", plain, other, "--to", "sparse-core"]) == 2
    assert "needs `--like CHECKPOINT`" in capsys.readouterr().err
    assert main(["checkpoint", "convert", plain, other, "--like", like]) == 2
    words = "`--like` needs `--to sparse-core`. Received: `--to tensorflow`. Add"
    assert words in capsys.readouterr().err
    # A folder means its latest checkpoint; a folder of arrays has no record.
    tf.compat.v1.train.update_checkpoint_state(str(tmp_path), like)
    assert checkpoint.read_layouts(tmp_path) == layouts
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    np.save(arrays / "films.npy", np.zeros((3, 2), np.float32))
    to = ["--to", "sparse-core", "--like", str(arrays)]
    assert main(["checkpoint", "convert", plain, other, *to]) == 2
    assert f"{arrays} has no SparseCore layout record" in capsys.readouterr().err
    assert not list(tmp_path.glob("other*"))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (
            np.zeros((0, 3), np.float32),
            "films has shape [0, 3]. A table needs at least",
        ),
        (
            np.zeros((3, 0), np.float32),
            "films has shape [3, 0]. A table needs at least",
        ),
        (
            np.zeros((3, 2), np.longdouble),
            "films.npy has dtype float128. Tables and sl",
        ),
    ],
    ids=["no_rows", "no_columns", "longdouble"],
)
def test_arrays_that_no_embedding_has(
    array: np.ndarray,
    words: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.save(tmp_path / "films.npy", array)
    path = str(tmp_path / "films.npy")
    assert main(["checkpoint", "convert", path, str(tmp_path / "new")]) == 2
    assert words in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["films.npy"]


def test_refuses_to_search_a_folder_of_everything(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np.save(tmp_path / "films.npy", np.ones([3, 2], np.float32))
    (tmp_path / "notes").touch()
    for most, code in ((3, 0), (2, 2)):  # The folder and its two files.
        monkeypatch.setattr(numpy_format, "_MAX_FILES", most)
        assert main(["checkpoint", "inspect", str(tmp_path)]) == code
    assert f"{tmp_path} has more than 2 files and folders" in capsys.readouterr().err


def test_values_that_are_not_numbers(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.npy"
    np.save(file, np.array([[np.nan, 1.0], [np.inf, 2.0]]))
    assert main(["checkpoint", "inspect", str(file), "--json"]) == 0
    # JSON has no NaN and no infinity: other readers refuse them.
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "nowhere"], "There is no checkpoint at nowhere"),
        (["convert", "{saved}", "{saved}"], "Save to another path"),
        (["convert", "{saved}", "x", "--rename", "films"], "must be OLD=NEW"),
        (
            ["convert", "{saved}", "x", "--rename", "films=a", "--rename", "films=b"],
            "`--rename` gives table films two names, a and b.",
        ),
        (["convert", "{saved}", "x", "--rename", "films=users"], "no other table has"),
        (["convert", "{saved}", "x", "--to=numpy", "--new-root=y"], "no effect with"),
        (["inspect", "{saved}", "--root", "x"], "holds no tables"),
        (
            ["convert", "{saved}", "{saved}.index/x", "--to=numpy", "--no-slots"],
            "Not a d",
        ),
    ],
)
def test_errors(
    arguments: list[str], words: str, saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [argument.format(saved=saved) for argument in arguments]
    assert main(["checkpoint", *filled]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert words in output.err
    assert not output.out


def test_the_module_runs(
    saved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python -m tpu_embedding` does it."""
    monkeypatch.setattr(sys, "argv", ["", "checkpoint", "inspect", saved])
    monkeypatch.delitem(sys.modules, "tpu_embedding.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tpu_embedding", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"{saved} (TensorFlow")


@pytest.mark.parametrize("command", [[], ["plan"], ["checkpoint", "inspect"]])
def test_help_needs_no_tensorflow(command: list[str]) -> None:
    program = (
        "import sys\n"
        "from tpu_embedding.__main__ import main\n"
        "try:\n"
        f"    main({[*command, '--help']})\n"
        "finally:\n"
        "    assert 'tensorflow' not in sys.modules\n"
    )
    ran = new_process.run("-c", program)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("usage: ")


@pytest.mark.second_tier
def test_a_command_prints_its_own_output_only(
    saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    ran = new_process.run("-m", "tpu_embedding", "checkpoint", "inspect", saved)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"{saved} (TensorFlow")


def test_what_loading_wrote_is_shown_where_it_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load(_: str) -> None:
        os.write(2, b"no library\n")
        raise ImportError

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(ImportError):
        main(["checkpoint", "inspect", "model"])
    assert capfd.readouterr().err == "no library\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress() -> None:
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        progress = TextProgress(stream)
        progress.start("Reading", 4 << 20)
        progress.advance(1 << 20)
        progress.advance(3 << 20)
        assert (
            "Reading [" + "#" * 30 + "] 100% 4/4 MiB\n" in stream.getvalue()
        ) == shown
        assert bool(stream.getvalue()) == shown
