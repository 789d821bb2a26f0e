"""How tables are kept: error bounds, sizes, the report."""

from __future__ import annotations

import pathlib
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from serving.exported import ragged

import tpu_embedding as te
from tpu_embedding.serving import conversion, quantization
from tpu_embedding.serving.conversion import Conversion, GatheredRows, Source
from tpu_embedding.serving.quantization import STORAGES, WholeTable, stored_form

EPSILON = 2.0**-24
# The unit roundoff of each 16-bit type, and the half of its smallest step.
HALVES = {"bfloat16": (2.0**-8, 2.0**-134), "float16": (2.0**-11, 2.0**-25)}


def table_of(rng: np.random.Generator, rows: int, dim: int) -> np.ndarray:
    """Rows of all scales; the first is 0, the second constant, the third far off 0."""
    values = rng.standard_normal((rows, dim)) * 10.0 ** rng.uniform(-6, 3, (rows, 1))
    values[:3] = [[0.0] * dim, [0.1] * dim, 100 + rng.uniform(size=dim)]
    return values.astype(np.float32)


def read(values: np.ndarray, storage: str) -> tuple[np.ndarray, te.serving.TableReport]:
    """What the stock ops read of a table that was stored."""
    table, report = store(values, storage)
    return table.read(tf.range(len(values), dtype=tf.int64)).numpy(), report


def store(
    values: np.ndarray, storage: str, size: int = 1 << 20, name: str = "films"
) -> tuple[Any, te.serving.TableReport]:
    """A table whose parts are here assigned, which an export writes to files."""
    source = Source(name, GatheredRows(tf.constant(values)))
    table: Any = stored_form(source, storage)
    conversion = Conversion(source, table)
    written: dict[str, list[np.ndarray]] = {part: [] for part in table.parts}
    for piece in conversion.pieces({part: part for part in table.parts}, size):
        start, count = sum(map(len, written[piece.key])), len(piece.values)
        if count < len(values):
            assert f" {start},{count}:0," in piece.spec
        written[piece.key].append(piece.values)
    for part, pieces in written.items():
        table.parts[part].assign(np.concatenate(pieces))
    return table, conversion.report()


@pytest.mark.parametrize("dim", [2, 5, 16])
@pytest.mark.parametrize(("storage", "levels"), [("int8", 256), ("int4", 16)])
def test_a_row_is_at_most_half_a_step_off(
    storage: str, levels: int, dim: int, rng: np.random.Generator
) -> None:
    values = table_of(rng, 200, dim)
    found, report = read(values, storage)
    _, scale, offset = quantization.encode(values, levels)
    step = scale.astype(np.float64)
    # Three roundings of what is read: the product, the sum, and it as a float32.
    rounding = 3 * EPSILON * (levels / 2 * step + np.abs(offset.astype(np.float64)))
    difference = np.abs(found.astype(np.float64) - values)
    assert (difference <= step / 2 + rounding).all()
    # A step is hardly longer than it must be: bfloat16, of unit roundoff 1/256, takes
    # the scale up twice that far at most, and moves the middle by as much of itself.
    low = values.min(axis=1, keepdims=True).astype(np.float64)
    high = values.max(axis=1, keepdims=True).astype(np.float64)
    needed = (high - low + np.abs(low + high) / 256) / (levels - 1)
    assert (step <= needed * (1 + 1 / 256) ** 2 + 1e-38).all()
    np.testing.assert_array_equal(found[0], 0)
    assert report.max_error <= report.bound
    assert report.max_error == pytest.approx(difference.max(), rel=1e-3)


@pytest.mark.parametrize("storage", HALVES)
def test_16_bits(storage: str, rng: np.random.Generator) -> None:
    values = table_of(rng, 50, 6)
    found, report = read(values, storage)
    unit, smallest = HALVES[storage]
    assert (np.abs(found - values) <= np.abs(values) * unit + smallest).all()
    assert report.max_error <= report.bound
    assert report.bytes_after * 2 == report.bytes_before


def test_float32_is_the_variable_itself(rng: np.random.Generator) -> None:
    variable = tf.Variable(table_of(rng, 9, 3))
    table = stored_form(Source("films", GatheredRows(variable)), "float32")
    assert isinstance(table, WholeTable)
    assert table.table is variable


@hypothesis.given(
    values=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 9)),
        elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    ),
    storage=st.sampled_from(["int8", "int4"]),
)
def test_any_values_stay_within_the_bound(values: np.ndarray, storage: str) -> None:
    levels = {"int8": 256, "int4": 16}[storage]
    codes, scale, offset = quantization.encode(values, levels)
    decoded, bounds = quantization.decode(codes, scale, offset, levels)
    difference = np.abs(decoded - values.astype(np.float64))
    assert (difference <= bounds * (1 + 1e-9) + 1e-36).all()


def test_slices_fit_together(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = table_of(rng, 23, 5)
    for storage in STORAGES:
        whole = read(values, storage)
        with monkeypatch.context() as patch:
            patch.setattr(conversion, "CONVERTED_BYTES", 4 * 5 * 4)
            table, report = store(values, storage, size=200)
        sliced = table.read(tf.range(23, dtype=tf.int64))
        np.testing.assert_array_equal(whole[0], sliced)
        assert whole[1].rms_error == pytest.approx(report.rms_error)


def test_rows_too_short_to_gain_stay_float32() -> None:
    for dim, storage in ((1, "float32"), (2, "int8")):
        _, report = store(np.ones([6, dim], np.float32), "int8")
        assert report.storage == storage
        assert report.bytes_after <= report.bytes_before


@pytest.mark.parametrize(
    ("storage", "value"),
    [("int8", np.nan), ("int4", np.inf), ("float16", 7e4), ("bfloat16", -np.inf)],
)
def test_what_cannot_be_stored_is_named(storage: str, value: float) -> None:
    values = np.ones([4, 6], np.float32)
    values[2, 5] = value
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        store(values, storage)
    assert f"Table films: row 2 holds {value}, which {storage} cannot store" in (
        raised.value.message
    )


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("storage", STORAGES)
def test_exported_tables_are_dequantised_and_combined(
    storage: str, weighted: bool, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    films = te.TableConfig(30, 6, combiner="mean", name="films")
    values = rng.uniform(-1, 1, (30, 6)).astype(np.float32)
    report = te.serving.export(
        {films: tf.constant(values)},
        tmp_path,
        feature_config={"film": te.FeatureConfig(films)},
        signatures=["ragged"],
        weighted=["film"] if weighted else [],
        storage={films: storage},
    )
    served: Any = tf.saved_model.load(str(tmp_path)).signatures["ragged"]
    ids = ragged([[3, 29, 3], [], [7]])
    inputs = {"film_values": ids.values, "film_row_splits": ids.row_splits}
    weights = [[0.5, 2.0, 1.0], [], [4.0]] if weighted else [[1.0] * 3, [], [1.0]]
    if weighted:
        inputs["film_weights"] = ragged(weights, tf.float32).values
    gains = np.array(weights[0]) / sum(weights[0])
    expected = [gains @ values[[3, 29, 3]], np.zeros(6), values[7]]
    # A mean is as far off as a value at most, and 3 terms are summed.
    bound = report.tables[0].bound + 8 * EPSILON
    np.testing.assert_allclose(served(**inputs)["film"], expected, rtol=0, atol=bound)


def test_the_report_is_a_table(rng: np.random.Generator) -> None:
    reports = [
        store(table_of(rng, rows, 16), storage, name=name)[1]
        for name, rows, storage in (("films", 1000, "int8"), ("users", 30, "int4"))
    ]
    report = te.serving.Report(tuple(reports))
    assert report.bytes_before == 1030 * 64
    assert report.bytes_after == 1000 * (16 + 4) + 30 * (8 + 4)
    lines = str(report).splitlines()
    assert lines[0].split() == [
        *("table", "shape", "storage", "bytes", "size", "max", "error", "rms", "error")
    ]
    assert lines[1].split()[:6] == ["films", "1000", "x", "16", "int8", "20,000"]
    assert lines[3].split()[:3] == ["all", "20,360", "30.9%"]
    assert f"{reports[0].rms_error:.2e}" in lines[1]
    assert len({line.index("  ") for line in lines[1:3]}) == 1
