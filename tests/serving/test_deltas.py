"""Models that follow their trainer: what deltas change, what is refused."""

from __future__ import annotations

import os
import pathlib
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from serving.deltas import (
    KILLED_AT,
    NOTHING,
    Trainer,
    blocks_of,
    kill_apply,
    resealed,
    send,
    with_field,
)
from serving.exported import graph_of, ops_of
from threads import repeated

import tpu_embedding as te
from tpu_embedding.__main__ import main
from tpu_embedding.serving import delta_files, following, following_tables
from tpu_embedding.serving.delta_files import Base, BaseTable, DeltaRows, Header
from tpu_embedding.serving.quantization import STORAGES, converter

Blocks = list[bytes]


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values)


def test_serves_the_bits_of_the_trainer_after_each_delta(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    """Of a table in each form, with an even and an odd number of columns."""
    shapes = {f"{form}/{dim}": (30, dim) for form in STORAGES for dim in (4, 5)}
    storage = {name: name.partition("/")[0] for name in shapes}
    trainer = Trainer(tmp_path / "base", rng, storage, shapes, deltas=1.0)
    model = trainer.model
    for number in range(1, 8):
        path = tmp_path / f"{number}.delta"
        changed = trainer.write(path)
        assert te.serving.apply_delta(model, path) == number
        assert_equal(trainer.served(model), trainer.expected())
        header = delta_files.read_header(path)
        assert header.sequence == number
        names = [table.name for table in trainer.base.tables]
        assert header.counts == tuple((len(changed[name]), 0) for name in names)
    trainer.export(tmp_path / "after")
    exported = tf.saved_model.load(str(tmp_path / "after"))
    assert_equal(trainer.served(model), trainer.served(exported))
    state = model.signatures["delta_state"]()
    assert (int(state["sequence"]), int(state["run"])) == (7, trainer.run)
    assert int(state["base"]) == trainer.base.id


@pytest.fixture(scope="module", name="exported")
def trainer_of_all_forms(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder and its trainer, which nothing changes."""
    folder = tmp_path_factory.mktemp("exported") / "base"
    shapes = dict.fromkeys(STORAGES, (9, 6))
    storage = {form: form for form in STORAGES}
    return folder, Trainer(folder, np.random.default_rng(2), storage, shapes)


def test_an_export_with_deltas_answers_as_one_without(exported: Any) -> None:
    _, trainer = exported
    assert_equal(trainer.served(trainer.model), trainer.expected())
    ids = {form: tf.constant([1], tf.int64) for form in STORAGES}
    with pytest.raises(tf.errors.InvalidArgumentError, match="float16"):
        trainer.model.signatures["dense"](
            **{**ids, "float16": tf.constant([9], tf.int64)}
        )


def test_all_ops_are_stock(exported: Any) -> None:
    assert {"MutexLock", "ResourceScatterUpdate"} < ops_of(exported[0])


def test_a_lookup_copies_no_table(exported: Any) -> None:
    graph = graph_of(exported[0]).graph_def
    functions = [f for f in graph.library.function if "save" not in f.signature.name]
    nodes = [n for f in functions for n in f.node_def]
    read = [node.attr["dtype"].type for node in nodes if node.op == "ReadVariableOp"]
    assert read
    kept = (tf.float32, tf.bfloat16, tf.int16, tf.uint8)
    assert not {dtype.as_datatype_enum for dtype in kept}.intersection(read)


def swap(blocks: Blocks) -> Blocks:
    return [blocks[0], blocks[2], blocks[1], *blocks[3:]]


def flipped(block: bytes, bit: int) -> bytes:
    changed = bytearray(block)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


BAD: dict[str, tuple[Callable[[Blocks], Blocks], str]] = {
    "repeated": (
        lambda b: [with_field(b[0], 3, 2)],
        "Delta 2 is repeated: delta 2 was",
    ),
    "missing": (
        lambda b: [with_field(b[0], 3, 5)],
        "Delta 3 is missing: delta 5 was sent after delta 2",
    ),
    "base": (lambda b: [with_field(b[0], 0, 9)], "Delta 3 belongs to another export"),
    "run": (lambda b: [with_field(b[0], 2, 9)], "it follows a delta of run 9, but the"),
    "tables": (lambda b: [with_field(b[0], 4, 1)], "belongs to another export"),
    "too many": (
        lambda b: [with_field(b[0], 5, 41)],
        "changes 41 rows of table a/b.c, but this export takes at most 40",
    ),
    "negative": (lambda b: [with_field(b[0], 5, -1)], "changes -1 rows of table a/b.c"),
    "deletes": (
        lambda b: [with_field(b[0], 8, 1)],
        "deletes rows of table users, whose ids are fixed",
    ),
    "reordered": (swap, "Block 2 of delta 3 was sent, but block 1 is next"),
    "without a block": (lambda b: b[:2] + b[3:], "was sent, but block 2 is"),
    "twice a block": (lambda b: b[:2] + b[1:], "delta 3 was sent, but block 2"),
    "empty": (lambda b: [b""], "has only 0 bytes: it is truncated"),
    "cut": (lambda b: [b[0][:-1]], "Block 0 of a delta is damaged"),
    "flipped": (
        lambda b: [*b[:2], flipped(b[2], 555)],
        "Block 2 of a delta is damaged",
    ),
    "kind": (
        lambda b: [resealed(b[0][:8] + struct.pack("<q", 7) + b[0][16:])],
        "unknown kind 7",
    ),
    "no table": (lambda b: [b[0], with_field(b[1], 0, 2)], "Block 1 of a delta has an"),
    "minus rows": (lambda b: [b[0], with_field(b[1], 1, -2)], "invalid table index or"),
    "fewer rows": (lambda b: [b[0], with_field(b[1], 1, 1)], "do not fit its 1 rows"),
    "huge": (
        lambda b: [b[0], with_field(b[1], 1, 2**62)],
        "do not fit its 4611686018427387",
    ),
    "descending": (lambda b: [b[0], with_field(b[1], 3, 39)], "must ascend"),
    "below 0": (lambda b: [b[0], with_field(b[1], 3, -1)], "must ascend and be from 0"),
    "out of range": (lambda b: [b[0], with_field(b[1], 4, 40)], "from 0 to 39"),
    "total": (
        lambda b: [*b[:-1], with_field(b[-1], 0, 1)],
        "is truncated, or blocks of",
    ),
    "more than said": (
        lambda b: [with_field(b[0], 5, 1), *b[1:]],
        "more rows of table a/b.c than its header announces",
    ),
}


class Written(NamedTuple):
    """A trainer, two deltas, and a third one, `path`, of several blocks.

    `before` and `after` are what is served before and after the third.
    """

    folder: pathlib.Path
    trainer: Trainer
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    path: pathlib.Path


@pytest.fixture(scope="module", name="written")
def trainer_and_deltas(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("follower")
    trainer = Trainer(folder / "base", np.random.default_rng(3), "int8", deltas=1.0)
    for number in range(2):
        trainer.write(folder / f"{number}")
    before = trainer.expected()
    changed = {"a/b.c": np.arange(3, 9), "users": np.arange(1, 5)}
    for name, ids in changed.items():
        trainer.values[name][ids] += 1
    path = folder / "3"
    delta_files.write_delta(path, trainer.header(changed), trainer.rows(changed))
    return Written(folder, trainer, before, trainer.expected(), path)


def after_two(written: Written) -> Any:
    model = tf.saved_model.load(str(written.folder / "base"))
    for number in range(2):
        te.serving.apply_delta(model, written.folder / f"{number}")
    return model


@pytest.fixture(scope="module", name="follower")
def model_after_two(written: Written) -> Any:
    """For what is refused, which changes nothing."""
    return after_two(written)


@pytest.mark.parametrize("case", BAD)
def test_refuses_a_bad_delta_by_name_with_nothing_changed(
    case: str, written: Written, follower: Any
) -> None:
    change, message = BAD[case]
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        send(follower, change(blocks_of(written.path)))
    assert message in raised.value.message
    assert int(follower.signatures["delta_state"]()["sequence"]) == 2
    assert_equal(written.trainer.served(follower), written.before)


def test_refuses_a_table_that_announces_more_than_comes(
    written: Written, follower: Any
) -> None:
    blocks = blocks_of(written.path)
    blocks[0] = with_field(blocks[0], 5, 7)
    total = 0
    for block in blocks[:-1]:
        total = delta_files.chained(total, struct.unpack_from("<q", block)[0])
    blocks[-1] = with_field(blocks[-1], 0, total)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Delta 3 is truncated"):
        send(follower, blocks)
    assert_equal(written.trainer.served(follower), written.before)


def test_goes_on_with_the_right_block_after_a_damaged_one(written: Written) -> None:
    model, path = after_two(written), written.path
    with pytest.raises(tf.errors.InvalidArgumentError, match="no delta has begun"):
        send(model, blocks_of(path)[1:])
    for case in ("repeated", "descending", "total"):
        with pytest.raises(tf.errors.InvalidArgumentError):
            send(model, BAD[case][0](blocks_of(path)))
    for block in blocks_of(path):
        with pytest.raises(tf.errors.InvalidArgumentError, match="is damaged"):
            send(model, [flipped(block, 200)])
        send(model, [block])
    assert_equal(written.trainer.served(model), written.after)


@pytest.mark.parametrize("read", [delta_files.read_header, blocks_of])
def test_truncated_files_are_named(
    read: Callable[[pathlib.Path], Any], written: Written, tmp_path: pathlib.Path
) -> None:
    content = written.path.read_bytes()
    path = tmp_path / "cut"
    for size in (*range(60), len(content) - 1):
        path.write_bytes(content[:size])
        starts = size >= 8
        if read is blocks_of and size == 8:
            continue  # A file without blocks: its reader gives none.
        with pytest.raises(tf.errors.DataLossError) as raised:
            read(path)
        assert ("is truncated" if starts else "is not a delta") in raised.value.message


def test_a_damaged_file_is_named(written: Written, tmp_path: pathlib.Path) -> None:
    content = bytearray(written.path.read_bytes())
    rng = np.random.default_rng(4)
    path = tmp_path / "damaged"
    for position in rng.integers(8, len(content), 60):
        content[position] ^= 64
        path.write_bytes(content)
        with pytest.raises(tf.errors.DataLossError, match=r"damaged|truncated"):
            delta_files.read_header(path)
        content[position] ^= 64


def test_a_model_that_takes_no_deltas(written: Written, tmp_path: pathlib.Path) -> None:
    written.trainer.export(tmp_path / "plain")
    model = tf.saved_model.load(str(tmp_path / "plain"))
    with pytest.raises(ValueError, match="The model does not take deltas"):
        te.serving.apply_delta(model, written.path)


@pytest.mark.parametrize("deltas", [0, -1, 1.5, "yes", None])
def test_refuses_other_values(deltas: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        ValueError, match="`deltas` must be True, False, or the largest"
    ):
        Trainer(tmp_path / "base", np.random.default_rng(0), deltas=deltas)
    assert not (tmp_path / "base").exists()


def test_a_signature_cannot_have_the_name(tmp_path: pathlib.Path) -> None:
    films = te.TableConfig(8, 2, name="films")
    with pytest.raises(ValueError, match="`signatures` has 'apply_delta', a name that"):
        te.serving.export(
            {films: tf.zeros([8, 2])},
            tmp_path / "base",
            feature_config={"film": te.FeatureConfig(films)},
            signatures={
                "apply_delta": te.serving.Signature(
                    {"x": tf.TensorSpec([None], tf.int64)},
                    lambda inputs: te.serving.Request({"film": inputs["x"]}),
                )
            },
            deltas=True,
        )


def test_too_many_rows_for_an_index(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following_tables, "SMALL_TABLE", 8)
    monkeypatch.setattr(following, "_MOST_ROWS", 55)
    with pytest.raises(ValueError, match=r"Table a/b.c has 40 rows and needs 16 spare"):
        Trainer(tmp_path / "base", np.random.default_rng(0))


@pytest.mark.parametrize(
    ("storage", "width"), [("float32", 256), ("int8", 68), ("int4", 36)]
)
def test_the_size_of_a_delta(
    storage: str, width: int, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    table = BaseTable("films", 5000, 64, storage, 5000)
    ids = np.arange(0, 5000, 2)
    header = Header(Base(1, (table,)), 2, 1, 1, ((len(ids), 0),))
    values = rng.normal(size=[len(ids), 64]).astype(np.float32)
    parts = converter(storage, 64).convert(values).parts
    path = tmp_path / "delta"
    size = delta_files.write_delta(path, header, [DeltaRows(0, ids, NOTHING, parts)])
    assert size == path.stat().st_size
    assert size <= 1.05 * len(ids) * (8 + width)
    assert delta_files.read_header(path) == header


def test_inspects_and_applies_on_the_command_line(
    written: Written, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, trainer = written.folder, written.trainer
    assert main(["delta", "inspect", str(written.path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"delta 3 of export {trainer.base.id}"
    assert told[3].split() == ["a/b.c", "8", "int8", "6", "0"]
    base, new = str(folder / "base"), str(tmp_path / "new")
    two = [str(folder / "0"), str(folder / "1")]
    assert main(["delta", "apply", base, *two, "--to", new]) == 0
    assert f"Wrote to {new}: the export after delta 2" in capsys.readouterr().out
    model: Any = tf.saved_model.load(new)
    assert te.serving.apply_delta(model, written.path) == 3
    assert_equal(trainer.served(model), written.after)
    assert main(["delta", "apply", base, two[0], "--to", new]) == 2
    assert f"{new} already exists" in capsys.readouterr().err
    assert main(["delta", "apply", base, two[1], "--to", new + "er"]) == 2
    assert "Delta 1 is missing" in capsys.readouterr().err
    assert not pathlib.Path(new + "er").exists()


def test_an_existing_delta_is_kept(written: Written, tmp_path: pathlib.Path) -> None:
    (tmp_path / "delta").write_bytes(b"kept")
    header = delta_files.read_header(written.path)
    with pytest.raises(ValueError, match=r"exists\. Give each delta its own path"):
        delta_files.write_delta(tmp_path / "delta", header, [])
    assert (tmp_path / "delta").read_bytes() == b"kept"
    with pytest.raises(ValueError, match="`path` must name the file of the delta"):
        delta_files.write_delta("", header, [])


def test_rows_that_cannot_be_read_leave_no_file(
    written: Written, tmp_path: pathlib.Path
) -> None:
    changed = {"a/b.c": np.arange(4), "users": NOTHING}

    def rows() -> Any:
        yield from written.trainer.rows(changed)
        raise RuntimeError("the table is gone")

    header = written.trainer.header(changed)
    with pytest.raises(RuntimeError, match="the table is gone"):
        delta_files.write_delta(tmp_path / "delta", header, rows())
    assert list(tmp_path.iterdir()) == []


def read_while_applying(
    folder: pathlib.Path, storage: str, dim: int, deltas: int
) -> tuple[int, int, int]:
    """Rows read by 8 threads, those that were torn, and those that went back.

    Each delta fills the hot rows with its number, so a whole row has equal values.
    """
    hot = 64
    rng = np.random.default_rng(0)
    trainer = Trainer(folder / "base", rng, storage, {"films": (hot, dim)}, 1.0)
    model = trainer.model
    ids = tf.range(hot, dtype=tf.int64)
    counts, last = np.zeros([8, 3], np.int64), [0.0] * 8

    def read(thread: int) -> None:
        rows = model.signatures["dense"](films=ids)["films"].numpy()
        torn, back = rows.min(axis=1) != rows.max(axis=1), rows[:, 0] < last[thread]
        counts[thread] += [hot, int(torn.sum()), int(back.sum())]
        last[thread] = float(rows[:, 0].min())
        time.sleep(0.01)  # Or the readers leave the writer no time.

    changed = {"films": np.arange(hot)}
    path = folder / "delta"

    def follow(number: int) -> None:
        trainer.values["films"][:] = number
        delta_files.write_delta(path, trainer.header(changed), trainer.rows(changed))
        trainer.sequence, trainer.follows = number, trainer.run
        te.serving.apply_delta(model, path)
        path.unlink()

    follow(1)
    with repeated(read, 8):
        for number in range(2, deltas + 1):
            follow(number)
    total, torn, back = counts.sum(axis=0)
    return int(total), int(torn), int(back)


@pytest.mark.parametrize(("storage", "dim"), [("float32", 512), ("int8", 64)])
def test_no_row_is_torn_while_deltas_are_applied(
    storage: str, dim: int, tmp_path: pathlib.Path
) -> None:
    total, torn, back = read_while_applying(tmp_path, storage, dim, deltas=12)
    assert total > 0
    assert (torn, back) == (0, 0)


@pytest.mark.second_tier
@pytest.mark.parametrize(("storage", "dim"), [("float32", 512), ("int8", 64)])
def test_no_row_is_torn_in_many_deltas(
    storage: str, dim: int, tmp_path: pathlib.Path
) -> None:
    deltas = int(os.environ.get("TPU_EMBEDDING_TEST_DELTAS", "40"))
    total, torn, back = read_while_applying(tmp_path, storage, dim, deltas)
    assert total > deltas
    assert (torn, back) == (0, 0)


def test_a_session_applies_deltas_as_servers_and_c_do(written: Written) -> None:
    folder, _, before, after, path = written
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(folder / "base"))

        def call(name: str, **inputs: Any) -> dict[str, np.ndarray]:
            signature = loaded.signature_def[name]
            outputs = {key: info.name for key, info in signature.outputs.items()}
            feeds = {signature.inputs[key].name: v for key, v in inputs.items()}
            return session.run(outputs, feeds)

        def rows() -> dict[str, np.ndarray]:
            ids = {"a_b_c": np.arange(40), "users": np.arange(7)}
            return call("dense", **ids)

        for number in range(2):
            for block in blocks_of(folder / f"{number}"):
                call("apply_delta", block=block)
        assert_equal(rows(), before)
        with pytest.raises(tf.errors.InvalidArgumentError, match="Delta 2 is repeated"):
            call("apply_delta", block=blocks_of(folder / "1")[0])
        for block in blocks_of(path):
            assert call("delta_state")["sequence"] == 2
            call("apply_delta", block=block)
        assert call("delta_state")["sequence"] == 3
        assert_equal(rows(), after)


@pytest.mark.second_tier
@pytest.mark.parametrize("point", KILLED_AT)
def test_a_killed_apply_leaves_no_export(
    point: str, written: Written, tmp_path: pathlib.Path
) -> None:
    places = [str(written.folder / "base"), str(written.folder / "0")]
    new = str(tmp_path / "new")
    kill_apply(point, places[0], places[1], new)
    assert not (tmp_path / "new").exists()
    assert main(["delta", "apply", *places, "--to", new]) == 0
    model: Any = tf.saved_model.load(new)
    for path in (written.folder / "1", written.path):
        te.serving.apply_delta(model, path)
    assert_equal(written.trainer.served(model), written.after)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
