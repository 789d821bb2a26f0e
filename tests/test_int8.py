"""Tables of int8 through everything that holds, saves, serves or refuses tables."""

from __future__ import annotations

import base64
import io
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from reference import int8_rows, rounding
from replica_values import mirrored, of_replicas
from rounded_tables import (
    IDS,
    initial,
    refusals,
    save_numpy,
    save_ours,
    save_tensorflow,
    table_of,
    train,
)
from steps import evaluate_on, train_on

import tpu_embedding as te
from tpu_embedding import checkpoint, serving
from tpu_embedding.keras import TPUEmbedding

ROWS, DIM = 12, 20
BFLOAT16: Any = tf.bfloat16.as_numpy_dtype
GOLDEN = pathlib.Path(__file__).parent / "golden/exports/int8_d6493b1.zip.base64"


def feature(
    dtype: Any = "int8", rows: Any = ROWS, dim: int = DIM, **options: Any
) -> dict[str, te.FeatureConfig]:
    options = {"combiner": "sum", "initializer": initial, "name": "films", **options}
    table = te.TableConfig(rows, dim, dtype=dtype, **options)
    return {"seen": te.FeatureConfig(table, name="seen")}


def make(dtype: Any = "int8", optimizer: Any = None, **options: Any) -> Any:
    return te.TPUEmbedding(feature(dtype, **options), optimizer or te.Adagrad(0.1))


def stored(embedding: Any) -> tuple[np.ndarray, np.ndarray]:
    """The codes, and the scales and offsets."""
    embedding.core.flush()
    coded = embedding.core.tables()["films"].rows["parameters"].coded
    codes, grids = (rows.numpy() for rows in coded.values())
    return codes, grids


def assert_same_bits(embedding: Any, other: Any) -> None:
    for own, expected in zip(stored(embedding), stored(other), strict=True):
        np.testing.assert_array_equal(own.view(np.uint8), expected.view(np.uint8))


def fuzzed_rows(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Rows of any size, constant, zero, far from 0, tiny, and with a NaN."""
    x = rng.normal(size=(count, dim)) * 10.0 ** rng.integers(-6, 3, (count, 1))
    kind = rng.integers(0, 12, count)
    x[kind == 0] = 0
    x[kind == 1] = x[kind == 1][:, :1]
    x[kind == 2] += 1000 * rng.normal(size=(np.sum(kind == 2), 1))
    x[kind == 3] *= 1e-36
    x[kind == 4] *= 1e-42
    x[kind == 5] *= 1e36
    x[kind == 6, rng.integers(0, dim)] = np.nan
    x[kind == 7, rng.integers(0, dim)] = np.inf
    x[kind == 8] = np.float32(BFLOAT16(x[kind == 8][:, :1]))
    x[kind == 9] = np.where(rng.random((np.sum(kind == 9), dim)) < 0.5, -0.0, 0.0)
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


@pytest.mark.parametrize("dim", [16, 20, 64, 97])
def test_updates_have_the_bits_of_the_reference(dim: int) -> None:
    """First values, then updates that change each row a little or altogether."""
    count, seed, rng = 1250, 2**40 + 7, np.random.default_rng(dim)
    first = fuzzed_rows(rng, count, dim)
    embedding = make(
        optimizer=te.SGD(1.0),
        rows=count,
        dim=dim,
        initializer=lambda shape, dtype: tf.constant(first, dtype),
        rounding_seed=seed,
    )
    rows = np.arange(count)
    grids = np.zeros([count, 2], BFLOAT16)
    codes, grids = int8_rows.store(first, grids, rows, seed, 0)
    for step in range(4):
        for own, expected in zip(stored(embedding), (codes, grids), strict=True):
            np.testing.assert_array_equal(own.view(np.uint8), expected.view(np.uint8))
        values = int8_rows.values_of(codes, grids)
        np.testing.assert_array_equal(table_of(embedding), values)
        with np.errstate(all="ignore"):
            target = fuzzed_rows(rng, count, dim)
            small = values + rng.normal(size=values.shape) * 0.01 * np.abs(values)
            target[::2] = small[::2]
            gradient = (values - target).astype(np.float32)
            gradient[::7] = 0
            # The arithmetic of TensorFlow's threads takes others for 0.
            gradient[np.abs(gradient) < np.finfo(np.float32).tiny] = 0
            x = values - gradient
        embedding.enqueue({"seen": tf.constant(rows[:, np.newaxis])})
        np.testing.assert_array_equal(embedding.dequeue()["seen"], values)
        embedding.apply_gradients({"seen": tf.constant(gradient)})
        codes, grids = int8_rows.store(x, grids, rows, seed, step)
    scales = grids[:, 0].astype(np.float32)
    assert (scales == 0).any()
    assert np.isnan(scales).any()
    assert (scales > 0).any()


def test_the_reference_has_the_random_bits_of_bfloat16() -> None:
    bits = int8_rows.random_bits(2**40 + 7, 3, np.array([5, 2**31]), 131)
    for row, number in enumerate((5, 2**31)):
        for column in (0, 1, 17, 63, 64, 130):
            expected = rounding.random_bits(2**40 + 7, 3, number, column)
            assert bits[row, column] == expected


def test_an_earlier_export_decodes_what_is_trained(tmp_path: pathlib.Path) -> None:
    """The file was written before tables of int8 were."""
    content = io.BytesIO(base64.b64decode(GOLDEN.read_bytes()))
    zipfile.ZipFile(content).extractall(tmp_path)
    exported: Any = tf.saved_model.load(str(tmp_path))
    function = exported.signatures["serving_default"]
    embedding = make()
    train(embedding)
    codes, grids = stored(embedding)
    handles = {v.dtype: v for v in function.variables}
    handles[tf.uint8].assign(codes)
    handles[tf.bfloat16].assign(grids)
    (served,) = function(seen=np.arange(ROWS)).values()
    np.testing.assert_array_equal(served, table_of(embedding))


OPTIMIZERS = {
    "SGD": te.SGD(0.1),
    "Adagrad": te.Adagrad(0.1),
    "RowwiseAdagrad": te.RowwiseAdagrad(0.1),
    "AdagradMomentum": te.AdagradMomentum(0.1),
    "FTRL": te.FTRL(0.1),
    "Adam": te.Adam(0.1),
    "all rows": te.Adam(0.1, lazy_adam=False),
    "decay": te.SGD(
        0.1, weight_decay_factor=0.01, clip_weight_min=-1.0, clip_weight_max=1.0
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_is_that_of_float32_before_it_is_rounded(name: str) -> None:
    """A step from the values of the table, which float32 takes, too."""
    coded = make(optimizer=OPTIMIZERS[name], rounding_seed=5)
    start = table_of(coded)
    grids = stored(coded)[1]
    plain = make(
        "float32", OPTIMIZERS[name], initializer=lambda shape, dtype: tf.constant(start)
    )
    train(coded, [0])
    train(plain, [0])
    touched = np.arange(ROWS) if name == "all rows" else np.unique(IDS)
    x = table_of(plain)[touched]
    codes, grids = int8_rows.store(x, grids[touched], touched, 5, 0)
    expected = start.copy()
    expected[touched] = int8_rows.values_of(codes, grids)
    np.testing.assert_array_equal(table_of(coded), expected)


@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
@pytest.mark.parametrize("quantizes", [False, True])
def test_lookups_are_those_of_the_values(combiner: str, quantizes: bool) -> None:
    options = {
        "combiner": combiner,
        "quantization_config": te.QuantizationConfig(16, -1.0, 1.0)
        if quantizes
        else None,
    }
    coded = make(**options)
    values = table_of(coded)
    plain = make("float32", **options | {"initializer": lambda s, dtype: values})
    ids = tf.ragged.constant([[1, 2, 2], [], [5], [11] * 9], dtype=tf.int64)
    weights = tf.ragged.constant([[1.0, -2.0, 0.5], [], [3.0], [0.25] * 9])
    for own_weights in (None, {"seen": weights}):
        found = [evaluate_on(e, {"seen": ids}, own_weights) for e in (coded, plain)]
        np.testing.assert_array_equal(*(each["seen"] for each in found))


def test_a_model_of_several_tables(tmp_path: pathlib.Path) -> None:
    """Tables of all storages side by side: the bits of each do not depend on others."""
    names = ("int8", "float32", "bfloat16")

    def make_all() -> Any:
        config = {
            name: te.FeatureConfig(
                te.TableConfig(ROWS, DIM, initial, name=name, dtype=name), name=name
            )
            for name in names
        }
        config["seen"] = feature()["seen"]
        return te.TPUEmbedding(config, te.Adagrad(0.1))

    def train_all(embedding: Any, steps: Sequence[int]) -> None:
        for step in steps:
            embedding.enqueue(dict.fromkeys((*names, "seen"), IDS))
            embedding.dequeue()
            gradient = tf.random.stateless_normal([2, DIM], seed=[step, 0])
            embedding.apply_gradients(dict.fromkeys((*names, "seen"), gradient))

    alone, unbroken, resumed = make(), make_all(), make_all()
    train(alone)
    train_all(unbroken, range(3))
    assert_same_bits(unbroken, alone)
    first = make_all()
    train_all(first, range(2))
    checkpoint.restore(resumed, checkpoint.save(first, tmp_path / "first"))
    train_all(resumed, [2])
    assert_same_bits(resumed, unbroken)
    tables = [e.embedding_tables.values() for e in (resumed, unbroken)]
    for own, values in zip(*tables, strict=True):
        np.testing.assert_array_equal(own.numpy(), values.numpy())


def test_pipelining_does_not_change_the_bits() -> None:
    plain = make()
    pipelined = te.TPUEmbedding(
        feature(), te.Adagrad(0.1), pipeline_execution_with_tensor_core=True
    )
    train(plain)
    train(pipelined)
    assert_same_bits(pipelined, plain)


@pytest.mark.parametrize("save", [save_ours, save_tensorflow])
@pytest.mark.parametrize("read", [save_ours, save_tensorflow])
def test_a_resumed_training_has_the_bits_of_an_unbroken_one(
    save: Any, read: Any, tmp_path: pathlib.Path
) -> None:
    unbroken, first, resumed = make(), make(), make()
    train(unbroken, range(4))
    train(first, range(2))
    path = save(first, tmp_path)
    if read is save_ours:
        checkpoint.restore(resumed, path)
    else:
        tf.train.Checkpoint(embedding=resumed).read(path).assert_consumed()
    assert_same_bits(resumed, first)
    train(resumed, range(2, 4))
    assert_same_bits(resumed, unbroken)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("save", [save_ours, save_tensorflow, save_numpy])
def test_checkpoints_go_from_one_dtype_to_the_other(
    save: Any, dtype: str, tmp_path: pathlib.Path
) -> None:
    for folder in ("coded", "plain"):
        (tmp_path / folder).mkdir()
    coded, plain = make(), make(dtype)
    train(coded)
    train(plain)
    widened, rounded = make(dtype), make()
    path = save(coded, tmp_path / "coded")
    stored = checkpoint.read(path)["films"].parameters.stored_dtype
    assert stored == ("float32" if save is save_numpy else "int8")
    checkpoint.restore(widened, path)
    expected = table_of(coded)
    if dtype == "bfloat16":
        expected = rounding.nearest(expected)
    np.testing.assert_array_equal(table_of(widened), expected)
    path = save(plain, tmp_path / "plain")
    checkpoint.restore(rounded, path)
    # The nearest, as the export of the plain table has them.
    exported = str(tmp_path / "exported")
    serving.export(plain, exported, storage="int8")
    served: Any = tf.saved_model.load(exported).signatures["serving_default"]
    (values,) = served(seen=np.arange(ROWS)).values()
    np.testing.assert_array_equal(table_of(rounded), values)
    # Rows that are left out keep their bits.
    some = make()
    before = table_of(some)
    checkpoint.restore(some, path, ids={"films": np.array([-1, 3, 0])})
    before[1:3] = table_of(rounded)[[3, 0]]
    np.testing.assert_array_equal(table_of(some), before)


@pytest.mark.parametrize("save", [save_ours, save_tensorflow])
def test_damaged_files_change_nothing(save: Any, tmp_path: pathlib.Path) -> None:
    """A bit of the codes, of the scales and offsets, and of the slot."""
    embedding = make()
    path = save(embedding, tmp_path)
    train(embedding)
    before = stored(embedding)
    (data,) = (file for file in tmp_path.glob("*.data-*") if file.stat().st_size > 999)
    content = data.read_bytes()
    places = [content.index(array.tobytes()) for array in stored(make())]
    places.append(content.index(np.full([ROWS, DIM], 0.1, np.float32).tobytes()))
    for place in places:
        damaged = bytearray(content)
        damaged[place + 7] ^= 4
        data.write_bytes(damaged)
        with pytest.raises(tf.errors.DataLossError):
            checkpoint.restore(embedding, path)
        for own, expected in zip(stored(embedding), before, strict=True):
            np.testing.assert_array_equal(own.view(np.uint8), expected.view(np.uint8))
    data.write_bytes(content)
    checkpoint.restore(embedding, path)
    assert_same_bits(embedding, make())


def test_tensorflow_refuses_to_restore_another_dtype(tmp_path: pathlib.Path) -> None:
    for own, other in (("int8", "float32"), ("bfloat16", "int8")):
        (tmp_path / own).mkdir()
        path = save_tensorflow(make(other), tmp_path / own)
        embedding = make(own)
        before = table_of(embedding)
        with pytest.raises(TypeError, match=rf"films is {own}, .* it is {other}, and"):
            tf.train.Checkpoint(embedding=embedding).read(path)
        np.testing.assert_array_equal(table_of(embedding), before)


def test_rows_of_other_numbers_and_fills(tmp_path: pathlib.Path) -> None:
    larger, smaller = make(), make(rows=5)
    train(larger)
    path = save_ours(larger, tmp_path)
    checkpoint.restore(smaller, path, resize=True)
    for own, expected in zip(stored(smaller), stored(larger), strict=True):
        np.testing.assert_array_equal(own.view(np.uint8), expected[:5].view(np.uint8))
    (tmp_path / "small").mkdir()
    filled = make()
    checkpoint.restore(filled, save_ours(smaller, tmp_path / "small"), resize="mean")
    for own, expected in zip(stored(filled), stored(smaller), strict=True):
        np.testing.assert_array_equal(own[:5], expected)
    mean = table_of(smaller).mean(axis=0)
    scale = np.float32(stored(filled)[1][5, 0])
    assert np.abs(table_of(filled)[5:] - mean).max() <= scale


@pytest.mark.parametrize("storage", ["int8", "float32", "bfloat16", "int4"])
def test_export(storage: str, tmp_path: pathlib.Path) -> None:
    embedding = make()
    train(embedding)
    path = str(tmp_path / "served")
    report = serving.export(embedding, path, storage=storage)
    served: Any = tf.saved_model.load(path).signatures["serving_default"]
    (values,) = served(seen=np.arange(ROWS)).values()
    if storage in ("int8", "float32"):
        np.testing.assert_array_equal(values, table_of(embedding))
        assert report.tables[0].max_error == 0
        assert report.tables[0].bound == 0
    else:
        limit = report.tables[0].bound
        assert np.abs(values - table_of(embedding)).max() <= limit * (1 + 1e-6)


def test_deltas_have_the_trained_codes(tmp_path: pathlib.Path) -> None:
    embedding, path = make(), str(tmp_path / "served")
    train(embedding, [0])
    serving.export(embedding, path, storage="int8", deltas=True)
    exported: Any = tf.saved_model.load(path)
    writer = serving.DeltaWriter(embedding, path, "first")
    train(embedding, [1, 2])
    rows = {"films": len(np.unique(IDS))}
    assert writer.export_delta(tmp_path / "delta") == rows
    serving.apply_delta(exported, str(tmp_path / "delta"))
    served = exported.signatures["serving_default"]
    (values,) = served(seen=np.arange(ROWS)).values()
    np.testing.assert_array_equal(values, table_of(embedding))
    late = serving.DeltaWriter(embedding, path, "late")  # Compares with the export.
    assert late.export_delta(tmp_path / "late") == rows


@pytest.mark.parametrize("checks", [False, True])
def test_a_gradient_that_is_no_number(checks: bool) -> None:
    embedding = te.TPUEmbedding(feature(), te.SGD(0.1), check_numerics=checks)
    before = table_of(embedding)
    gradient = np.zeros([2, DIM], np.float32)
    gradient[0, 3] = np.nan  # Of the rows 1 and 2.
    embedding.enqueue({"seen": IDS})
    embedding.dequeue()
    if checks:
        with pytest.raises(tf.errors.InvalidArgumentError, match="seen"):
            embedding.apply_gradients({"seen": tf.constant(gradient)})
        np.testing.assert_array_equal(table_of(embedding), before)
        return
    embedding.apply_gradients({"seen": tf.constant(gradient)})
    after = table_of(embedding)
    assert np.isnan(after[[1, 2]]).all()
    others = np.delete(np.arange(ROWS), [1, 2, 10])
    np.testing.assert_array_equal(after[others], before[others])
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 1 holds nan"):
        serving.export(embedding, "/nowhere", storage="int8")


def test_the_layer(tmp_path: pathlib.Path) -> None:
    embedding = make()
    train(embedding)
    layer = TPUEmbedding(feature(initializer=None), te.Adagrad(0.1))
    layer.update_embedding_table(
        next(iter(layer.embedding_tables)), initial([ROWS, DIM])
    )
    plain = make("float32")
    exported = checkpoint.save(plain, tmp_path / "plain")
    restored = make()
    checkpoint.restore(restored, exported)
    assert_same_bits(layer, restored)  # Both take the nearest values.
    inputs = {"seen": keras.Input([2], dtype="int64", name="seen")}
    model = keras.Model(inputs, layer(inputs)["seen"])
    for step in range(3):
        gradient = tf.random.stateless_normal([2, DIM], seed=[step, 0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model({"seen": IDS}) * gradient)
        tape.gradient(loss, model.trainable_variables)
    train(restored)
    assert_same_bits(layer, restored)
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded: Any = keras.models.load_model(path)
    (other,) = [part for part in loaded.layers if isinstance(part, type(layer))]
    assert_same_bits(other, layer)
    (table,) = other.embedding_tables
    assert table.dtype == "int8"
    of_file, by_value = make(), make("float32")
    checkpoint.restore(of_file, path)
    assert_same_bits(of_file, layer)
    checkpoint.restore(by_value, path)
    np.testing.assert_array_equal(table_of(by_value), table_of(layer))
    floats = TPUEmbedding(feature("float32"), te.Adagrad(0.1))
    weights = str(tmp_path / "model.weights.h5")
    model.save_weights(weights)
    checkpoint.restore(restored, weights)
    assert_same_bits(restored, layer)
    another = keras.Model(inputs, floats(inputs)["seen"])
    another.load_weights(weights)
    np.testing.assert_array_equal(table_of(floats), table_of(layer))
    another.save_weights(weights)
    model.load_weights(weights)
    error = np.abs(table_of(layer) - table_of(floats)).max()
    assert error <= np.float32(stored(layer)[1][:, 0]).max() / 2


def test_replicas_have_the_bits_of_one() -> None:
    """Two replicas, each with half of the batch; sums keep the order of replicas."""
    one = make()
    train(one)
    strategy = mirrored(2)
    with strategy.scope():
        two = make()

    def in_replica(ids: tf.Tensor, gradient: tf.Tensor) -> None:
        train_on(two, {"seen": ids}, {"seen": gradient})

    @tf.function
    def step(gradients: tf.Tensor) -> None:
        def halves(values: tf.Tensor) -> Any:
            return of_replicas(strategy, tf.split(values, 2))

        strategy.run(in_replica, (halves(IDS), halves(gradients)))

    for number in range(3):
        step(tf.random.stateless_normal([2, DIM], seed=[number, 0]))
    assert_same_bits(two, one)


def test_hashed_tables(tmp_path: pathlib.Path) -> None:
    hashing = te.Hashing(ROWS, hashes=2, combine="sum")
    embedding = make(rows=hashing)
    train_on(embedding, {"seen": IDS * 1000}, {"seen": tf.ones([2, DIM])})
    resumed = make(rows=hashing)
    checkpoint.restore(resumed, save_ours(embedding, tmp_path))
    np.testing.assert_array_equal(table_of(resumed), table_of(embedding))


def test_the_plan_counts_its_bytes() -> None:
    config = feature(rows=1000, dim=64)
    plan = te.plan(config, te.RowwiseAdagrad(0.1), batch_size=8)
    by_array = {array.array: array for array in plan.arrays}
    assert by_array["parameters"].bytes == 1000 * (64 + 4)
    assert by_array["parameters"].dtype == "int8"
    assert by_array["accumulators"].bytes == 1000 * 4


def custom(gradient: Any, table: Any, slots: Any, rate: Any, numbers: Any) -> Any:
    return table - rate * gradient


STORES = "stores tables as float32 or bfloat16, not as int8"
REFUSALS = {
    **refusals(feature),
    f"portable .* CustomOptimizer, {STORES}": lambda: te.TPUEmbeddingV2(
        feature(), te.CustomOptimizer(custom, 0.1)
    ),
    f"portable .* CustomCombiner, {STORES}": lambda: te.TPUEmbeddingV2(
        feature(combiner=te.CustomCombiner(lambda valency, vectors: vectors[0], 2)),
        te.Adagrad(0.1),
    ),
    f"TPUEmbeddingForServing {STORES}": lambda: te.TPUEmbeddingForServing(
        feature(), None
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refused_by_name(what: str) -> None:
    with pytest.raises(NotImplementedError, match=what) as raised:
        REFUSALS[what]()
    assert "films" in str(raised.value)
    assert "keras.TPUEmbedding has tables of int8." in str(raised.value)


def test_narrow_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`dim` .*16.* Received: 15|dim.*15"):
        te.TableConfig(10, 15, dtype="int8")
    te.TableConfig(10, 16, dtype=tf.int8)


def test_stacked_tables_have_no_variables_of_values() -> None:
    embedding = te.TPUEmbeddingV2(feature(), te.Adagrad(0.1))
    embedding.build()
    with pytest.raises(NotImplementedError, match="films is stored as int8"):
        _ = embedding.stacked_tables
    ((_, shard),) = next(iter(embedding.embedding_table_shards.values()))
    np.testing.assert_array_equal(shard, table_of(embedding))
