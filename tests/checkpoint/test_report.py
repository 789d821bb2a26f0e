"""`python -m tpu_embedding report`: its facts beside NumPy, and the page."""

from __future__ import annotations

import pathlib
import re
import xml.etree.ElementTree
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from steps import train_on

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.__main__ import main
from tpu_embedding.checkpoint import statistics
from tpu_embedding.commands.files import TextProgress
from tpu_embedding.tables import rows as table_rows
from tpu_embedding.testing import SoftwareTPUStrategy


def trained(optimizer: te.optimizers.Optimizer | Any) -> tuple[Any, set[int]]:
    """An embedding of one table, trained, and the rows that were touched."""
    table = te.TableConfig(300, 4, optimizer=optimizer, name="films & <more>")
    embedding = te.TPUEmbedding(te.FeatureConfig(table), None)
    random = np.random.default_rng(0)
    touched: set[int] = set()
    for _ in range(4):
        ids = random.integers(0, 150, 20)
        touched |= {int(i) for i in ids}
        embedding.enqueue(tf.constant(ids))
        shape = embedding.dequeue().shape
        embedding.apply_gradients(tf.constant(random.normal(size=shape), tf.float32))
    return embedding, touched


def reports(path: Any) -> list[statistics.StoredTableReport]:
    return statistics.table_reports(checkpoint.read(path), TextProgress())


def assign(embedding: Any, rows: dict[Any, Any]) -> np.ndarray:
    (table,) = embedding.embedding_tables.values()
    values = table.numpy()
    for row, value in rows.items():
        values[row] = value
    table.assign(values)
    return values


@pytest.fixture(params=[1 << 22, 100], ids=["whole", "slices"])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "SLICE_BYTES", request.param)


@pytest.mark.usefixtures("slices")
def test_facts(tmp_path: pathlib.Path):
    embedding, touched = trained(te.Adagrad(0.1))
    repeated = np.arange(4.0)
    values = assign(
        embedding, {3: 0, range(200, 205): repeated, 7: np.nan, 9: 1e20, 8: -50}
    )
    (report,) = reports(checkpoint.save(embedding, tmp_path / "saved"))
    assert (report.name, report.rows, report.dim) == ("films & <more>", 300, 4)
    assert report.bytes == {"parameters": 4800, "accumulators": 4800}
    assert report.optimizers == ["Adagrad", "ProximalAdagrad"]
    assert (report.zero_rows, report.not_finite_rows) == (1, 1)
    norms = np.linalg.norm(values.astype(np.float64), axis=1)
    finite = norms[np.isfinite(norms)]
    assert report.mean_norm == pytest.approx(finite.mean())
    order = np.argsort(-np.where(np.isfinite(norms), norms, -1), kind="stable")[:10]
    assert [row for row, _ in report.largest] == order.tolist()
    assert [norm for _, norm in report.largest] == pytest.approx(norms[order])
    assert sum(count for _, _, count in report.norms) == len(finite) - 1
    for low, high, count in report.norms:
        assert count == ((finite >= low) & (finite < high)).sum()
    assert report.equal == statistics.EqualRows(5, [(5, [200, 201, 202, 203, 204])], 1)
    assert report.dead.count == 300 - len(touched)
    assert "An estimate" in report.dead.reason


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (te.Adam(0.1), ["Adam"]),
        (te.FTRL(0.1), ["FTRL"]),
        (te.RowwiseAdagrad(0.1), ["RowwiseAdagrad"]),
        (te.AdagradMomentum(0.1, 0.5), ["AdagradMomentum"]),
        (
            te.Adagrad(0.1, initial_accumulator_value=3.0),
            ["Adagrad", "ProximalAdagrad"],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rows_that_were_never_updated(
    optimizer: Any, names: list[str], tmp_path: pathlib.Path
):
    embedding, touched = trained(optimizer)
    (report,) = reports(checkpoint.save(embedding, tmp_path / "saved"))
    assert report.optimizers == names
    assert report.dead.count == 300 - len(touched)


def test_a_table_of_which_every_row_was_updated(tmp_path: pathlib.Path):
    table = te.TableConfig(6, 2, optimizer=te.Adam(0.1), name="days")
    embedding = te.TPUEmbedding(te.FeatureConfig(table), None)
    train_on(embedding, tf.range(6))
    (report,) = reports(checkpoint.save(embedding, tmp_path / "saved"))
    assert report.dead == statistics.DeadRows(
        0,
        "Rows whose momenta are 0 and velocities are 0 have had no update. Exact, but "
        "rows whose gradients were always 0 count, too.",
    )


def test_without_slots_nothing_is_claimed(tmp_path: pathlib.Path):
    np.save(tmp_path / "films.npy", np.zeros([4, 2], np.float32))
    (report,) = reports(tmp_path / "films.npy")
    assert report.dead.count is None
    assert report.norms == []
    assert report.zero_rows == 4
    assert report.equal.count == 0


@pytest.mark.parametrize("generation", ["v2", "v4", "v5p", "v6e", "7x"])
def test_checkpoints_of_tpus_show_what_one_machine_shows(
    generation: str, tmp_path: pathlib.Path
):
    tables = [
        te.TableConfig(rows, dim, optimizer=optimizer, name=name)
        for name, rows, dim, optimizer in (
            ("films", 37, 4, te.Adagrad(0.1)),
            ("users", 21, 4, te.Adagrad(0.1)),
            ("towns", 10, 3, te.Adam(0.1)),
        )
    ]
    features = {t.name: te.FeatureConfig(t, output_shape=[4]) for t in tables}
    one = te.TPUEmbedding(features, None)
    for ids in ([1, 5, 5, 9], [2, 5, 0, 7]):
        train_on(one, {name: tf.constant(ids) for name in features})
    path = checkpoint.save(one, tmp_path / "one")
    with SoftwareTPUStrategy(generation, 2).scope():
        tpu = te.TPUEmbedding(features, None)
        tpu.build()
    checkpoint.restore(tpu, path)
    expected = reports(path)
    assert [table.dead.count for table in expected] == [31, 4, 15]
    assert reports(checkpoint.save(tpu, tmp_path / "ours")) == expected
    theirs = tf.train.Checkpoint(embedding=tpu).write(str(tmp_path / "theirs"))
    assert sorted(reports(theirs), key=lambda t: t.name) == sorted(
        expected, key=lambda t: t.name
    )


def test_equal_rows_of_a_large_table_are_estimated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(statistics, "_MAX_HASHES", 512)
    found = statistics._Equal(4096)
    random = np.random.default_rng(0)
    values = random.normal(size=[4096, 3]).astype(np.float32)
    values[1024:2048] = values[:1024]
    found.add(0, values[:3000])
    found.add(3000, values[3000:])
    result = found.result()
    assert result.sampled == 8
    assert result.count == pytest.approx(2048, rel=0.3)
    assert all(rows[1] == (rows[0] or 0) + 1024 for _, rows in result.groups)


def test_page(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    embedding, _ = trained(te.Adagrad(0.1))
    assign(embedding, {range(200, 205): 1.0})
    path = checkpoint.save(embedding, tmp_path / "saved")
    page = tmp_path / "page.html"
    assert main(["report", path, "--output", str(page)]) == 0
    assert capsys.readouterr().out == f"Wrote to {page}: films & <more>\n"
    text = page.read_text()
    assert "films &amp; &lt;more&gt;" in text
    assert "<more>" not in text
    assert "200, 201, 202, 203, 204" in text
    # Nothing is loaded from anywhere, and nothing runs.
    assert not re.search(r"https?:|<script|<link|<img|url\(|@import", text)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        xml.etree.ElementTree.fromstring(picture)


def test_a_page_of_a_folder_of_arrays_and_of_no_checkpoint(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    np.save(tmp_path / "films.npy", np.eye(3, dtype=np.float32))
    np.save(tmp_path / "users.npy", np.ones([1, 3], np.float32))
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--output", str(page)]) == 0
    assert "users" in page.read_text()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "none"), "--output", str(page)]) == 2
    assert "There is no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["none/page.html", "folder"])
def test_a_page_that_cannot_be_written_is_an_error_before_tables_are_read(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], name: str
):
    np.save(tmp_path / "films.npy", np.eye(3, dtype=np.float32))
    (tmp_path / "folder").mkdir()
    output = str(tmp_path / name)
    assert main(["report", str(tmp_path / "films.npy"), "--output", output]) == 2
    error = capsys.readouterr().err
    assert f"`--output {output}` cannot be written" in error
    assert "Reading" not in error


def test_a_damaged_checkpoint_leaves_pages_as_they_are(tmp_path: pathlib.Path):
    embedding, _ = trained(te.Adagrad(0.1))
    path = checkpoint.save(embedding, tmp_path / "saved")
    data = max(tmp_path.glob("saved.data-*"), key=lambda p: p.stat().st_size)
    data.write_bytes(data.read_bytes()[:-64])
    old, new = tmp_path / "old.html", tmp_path / "new.html"
    old.write_text("the last page")
    for page in (old, new):
        assert main(["report", path, "--output", str(page)]) == 2
    assert old.read_text() == "the last page"
    assert not new.exists()


def test_names_of_tables_do_not_change_the_page_around_them(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    path, page = tmp_path / "tables.npz", tmp_path / "page.html"
    names = ["\u05e1\u05e8\u05d8\u05d9\u05dd", "a\x1b[31m", "b\u202ec"]
    np.savez(path, **{name: np.ones([2, 2], np.float32) for name in names})
    for command in (
        ["report", str(path), "--output", str(page)],
        ["checkpoint", "inspect", str(path)],
    ):
        assert main(command) == 0
        printed = capsys.readouterr().out
        assert names[0] in printed
        assert not {"\x1b", "\u202e"} & set(printed)
    text = page.read_text()
    assert text.count(f"<bdi>{names[0]}</bdi>") == 2
    assert text.count(r"<bdi>a\x1b[31m</bdi>") == 2
    assert text.count(r"<bdi>b\u202ec</bdi>") == 2


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_tables_without_rows_and_slots_without_numbers(tmp_path: pathlib.Path):
    path = tmp_path / "tables.npz"
    values = np.ones([3, 2], np.float32)
    arrays = {"empty": values[:0], "broken": values, "nan": values[:2] * np.nan}
    np.savez(path, **arrays, **{"broken/accumulators": values * np.nan})
    empty, nan, broken = sorted(reports(path), key=lambda table: table.rows)
    assert (empty.mean_norm, nan.mean_norm) == (None, None)
    assert (empty.rows, empty.norms, empty.equal.count) == (0, [], 0)
    assert broken.dead.count is None
    assert "slot accumulators has no finite value" in broken.dead.reason
    page = tmp_path / "page.html"
    assert main(["report", str(path), "--output", str(page)]) == 0
    assert page.read_text().count("<dd>no finite row</dd>") == 2
