"""`te.keras.Embedding` and the Keras layer of hashed tables."""

from __future__ import annotations

import itertools
import pathlib
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from reference import hashing as oracle

import tpu_embedding as te

IDS = np.array([[5, -7, 0], [2**40, 5, 12]])
LAYERS = [("concat", None), ("sum", None), ("concat", "mean"), ("sum", "sqrtn")]


def expected(layer: Any, table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The values of ids, by the rows of the oracle."""
    own = layer.hashing
    parts = [
        table[[oracle.row(int(i), own.num_rows, own.salt, k) for i in ids.ravel()]]
        for k in range(own.hashes)
    ]
    values = np.concatenate(parts, -1)
    if own.combine == "sum":
        values = parts[0]
        for part in parts[1:]:
            values = values + part
    return values.reshape((*ids.shape, -1))


def layer_of(combine: str = "concat", combiner: Any = None, **options: Any) -> Any:
    own = te.Hashing(60, hashes=2, combine=combine, salt=9)
    return te.keras.Embedding(own, 8, combiner=combiner, **options)


@pytest.mark.parametrize(("combine", "combiner"), LAYERS)
def test_values_are_those_of_the_rows(combine: str, combiner: Any):
    layer = layer_of(combine, combiner)
    found = layer(tf.constant(IDS)).numpy()
    (table,) = layer.get_weights()
    assert table.shape == (60, 4 if combine == "concat" else 8)
    values = expected(layer, table, IDS)
    if combiner is None:
        assert found.tobytes() == values.tobytes()
    else:
        divisor = 3 if combiner == "mean" else 3**0.5
        np.testing.assert_allclose(found, values.sum(1) / divisor, rtol=0, atol=1e-6)
    assert layer.compute_output_shape((None, 3)) == (
        (None, 3, 8) if combiner is None else (None, 8)
    )
    ragged = layer(tf.RaggedTensor.from_tensor(IDS))
    dense = ragged.to_tensor() if combiner is None else ragged
    assert dense.numpy().tobytes() == found.tobytes()
    again = type(layer).from_config(layer.get_config())
    again.build((None, 3))
    again.set_weights([table])
    assert again.hashing == layer.hashing
    assert again(tf.constant(IDS)).numpy().tobytes() == found.tobytes()


def test_first_values_have_the_deviation_of_the_value_of_an_id():
    for combine, deviation in (("concat", 8**-0.5), ("sum", 16**-0.5)):
        layer = te.keras.Embedding(te.Hashing(20_000, 2, combine), 8)
        layer.build(None)
        (table,) = layer.get_weights()
        assert abs(table.std() / deviation / 0.8796 - 1) < 0.02  # It is truncated.


def model_of(lazy: bool | None = None, layer: Any = None) -> Any:
    inputs = keras.Input([3], dtype="int64")
    hidden = keras.layers.Flatten()((layer or layer_of())(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    if lazy is not None:
        optimizer: Any = keras.optimizers.Adagrad(0.1)
        model.compile(te.keras.RowSparseOptimizer(optimizer, lazy), "mse")
    return model


@pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning")
@pytest.mark.parametrize("lazy", [False, True])
def test_training_changes_the_rows_of_a_batch(lazy: bool, tmp_path: pathlib.Path):
    model = model_of(lazy)
    layer = model.layers[1]
    (before,) = layer.get_weights()
    model.fit(IDS, np.ones([2, 1]), epochs=2, verbose=0)
    (after,) = layer.get_weights()
    changed = np.flatnonzero((before != after).any(-1))
    rows = {oracle.row(int(i), 60, 9, k) for i in np.unique(IDS) for k in range(2)}
    assert set(changed.tolist()) == rows
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded: Any = keras.models.load_model(path)
    assert loaded.layers[1].hashing == te.Hashing(60, hashes=2, salt=9)
    assert (loaded.predict(IDS, verbose=0) == model.predict(IDS, verbose=0)).all()
    tf.saved_model.save(model, str(tmp_path / "saved"))
    saved: Any = tf.saved_model.load(str(tmp_path / "saved"))
    served = saved.signatures["serving_default"](tf.constant(IDS))
    expected = model.predict(IDS, verbose=0)
    np.testing.assert_allclose(next(iter(served.values())), expected, atol=1e-6)
    weights = str(tmp_path / "model.weights.h5")
    model.save_weights(weights)
    model_of().load_weights(weights)
    other = te.keras.Embedding(te.Hashing(60, hashes=2, salt=8), 8)
    with pytest.raises(ValueError, match=r"salt=8\), but in the file it has .*salt=9"):
        model_of(None, other).load_weights(weights)
    with pytest.raises(ValueError, match="is not hashed, but in the file it has"):
        model_of(None, te.keras.Embedding(60, 4)).load_weights(weights)


def test_checkpoints_of_other_rows_are_refused(tmp_path: pathlib.Path):
    rows = [
        60,
        te.Hashing(60, hashes=2, salt=9),
        te.Hashing(60, hashes=2, salt=8),
        te.Hashing(60, hashes=1, salt=9),
        te.Hashing(60, hashes=2, combine="sum", salt=9),
    ]

    def embedding(kind: Any) -> Any:
        concat = getattr(kind, "combine", "") == "concat"
        layer = te.keras.Embedding(kind, 4 * kind.hashes if concat else 4)
        layer.build(None)
        return layer

    def described(kind: Any) -> str:
        return "is not hashed" if kind == 60 else f"has {kind}"

    for saved, live in itertools.product(rows, rows):
        layer = embedding(saved)
        path = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "layer"))
        restored = embedding(live)
        (before,) = restored.get_weights()
        if saved == live:
            tf.train.Checkpoint(layer=restored).read(path).assert_consumed()
            assert (restored.get_weights()[0] == layer.get_weights()[0]).all()
            continue
        text = f"{described(live)}, but in {path} it {described(saved)}, so its"
        with pytest.raises(ValueError, match=re.escape(text)):
            tf.train.Checkpoint(layer=restored).read(path)
        assert (restored.get_weights()[0] == before).all()
    # Keras's own layer cannot know; `assert_consumed` does.
    plain = keras.layers.Embedding(60, 4)
    plain.build(None)
    with pytest.raises(AssertionError, match="hashing_record"):
        tf.train.Checkpoint(layer=plain).read(path).assert_consumed()


def test_mask_zero_masks_the_id_before_it_is_hashed():
    mask = layer_of(mask_zero=True).compute_mask(tf.constant(IDS))
    assert (np.array(mask) == (IDS != 0)).all()


def test_ids_that_are_no_integers_are_refused():
    layer = layer_of()
    whole = layer(tf.constant([1.0, 2.0**24])).numpy()
    assert whole.tobytes() == layer(tf.constant([1, 2**24])).numpy().tobytes()
    for bad in (2.5, 2.0**24 + 2, float("nan")):
        with pytest.raises(tf.errors.InvalidArgumentError, match="whole number of at"):
            layer(tf.constant([bad]))
    with pytest.raises(TypeError, match="string"):
        layer(tf.constant(["film"]))
    with pytest.raises(ValueError, match="dim 9 is not a multiple of 2, the num"):
        te.keras.Embedding(te.Hashing(60, 2), 9)
    with pytest.raises(ValueError, match="combine bags or hash ids"):
        te.keras.unconvert(model_of())


def test_the_layer_of_tables_keeps_masks_config_and_bits(tmp_path: pathlib.Path):
    table = te.TableConfig(
        te.Hashing(60, hashes=2, salt=9), 8, name="films", string_ids=True
    )
    config = {
        "film": te.FeatureConfig(table),
        "seen": te.FeatureConfig(table, max_sequence_length=3),
    }
    layer = te.keras.TPUEmbedding(config, te.Adagrad(0.1))
    inputs = {
        "film": keras.Input((), dtype="string", name="film"),
        "seen": keras.Input((3,), dtype="int64", name="seen"),
    }
    outputs = layer(inputs)
    assert outputs["film"].shape == (None, 8)
    assert outputs["seen"].shape == (None, 3, 8)
    pooled = keras.layers.GlobalAveragePooling1D()(outputs["seen"])
    both = keras.layers.Concatenate()([outputs["film"], pooled])
    model: Any = keras.Model(inputs, keras.layers.Dense(1)(both))
    model.compile("sgd", "mse")
    batch = {"film": tf.constant(["a", "b"]), "seen": tf.constant(IDS)}
    data = tf.data.Dataset.from_tensors((batch, tf.ones([2, 1])))
    model.fit(data, shuffle=False, verbose=0)
    mask = layer(batch)["seen"]._keras_mask
    assert mask.shape == (2, 3)
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded: Any = keras.models.load_model(path)
    assert (loaded(batch).numpy() == model(batch).numpy()).all()
    weights = str(tmp_path / "model.weights.h5")
    model.save_weights(weights)
    found = te.checkpoint.read(weights)["films"].hashing
    assert found == te.Hashing(60, hashes=2, salt=9)
