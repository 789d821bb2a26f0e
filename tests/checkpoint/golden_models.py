"""Models whose files earlier commits wrote, and which must load for good.

Run as a script at that commit, `python -m checkpoint.golden_models FOLDER` writes one
file for each of `CASES`: a zip archive in base64 of what was saved, and of
`expected.json` with the values that were in memory. The tests make the same models,
with other initial values, and load those files.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import io
import json
import pathlib
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.__main__ import main
from tpu_embedding.keras import TPUEmbedding
from tpu_embedding.testing import SoftwareTPUStrategy

BATCH = 4
Features = collections.namedtuple("Features", ["film", "words"])


def initializer(seed: int) -> Callable[..., tf.Tensor]:
    """Random values that depend on nothing but the seed and the shape."""

    def fill(shape: Any, dtype: Any = tf.float32) -> tf.Tensor:
        return tf.cast(tf.random.stateless_normal(shape, [seed, 1]), dtype)

    return fill


def features(seed: int, dtype: str = "float32") -> Any:
    """A namedtuple: one table for two features, and one of another optimizer."""
    films = te.TableConfig(
        7, 3, initializer(seed), te.Adam(0.1), name="films", dtype=dtype
    )
    words = te.TableConfig(
        5, 2, initializer(seed + 9), name="words", combiner="sum", dtype=dtype
    )
    return Features(
        te.FeatureConfig(films, output_shape=[BATCH], name="film"),
        [
            te.FeatureConfig(words, output_shape=[BATCH], name="word"),
            te.FeatureConfig(films, output_shape=[BATCH], name="title"),
        ],
    )


def optimizer() -> Any:
    """A schedule, for which the number of updates is kept."""
    return te.FTRL(tf.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))


def ids() -> Any:
    return Features(tf.constant([1, 2, 2, 4]), [tf.constant([0, 3, 3, 1])] * 2)


def make(
    make_class: Any,
    seed: int,
    strategy: tf.distribute.Strategy | None = None,
    *,
    dtype: str = "float32",
    **options: Any,
) -> Any:
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    with scope:
        return make_class(features(seed, dtype), optimizer(), **options)


def train(embedding: Any, strategy: tf.distribute.Strategy | None = None) -> None:
    """Three updates."""
    by_queue = isinstance(embedding, te.TPUEmbedding)

    def step() -> None:
        if by_queue:
            embedding.apply_gradients(embedding.dequeue())
        else:
            activations, preserved = embedding(ids())
            embedding.apply_gradients(activations, preserved)

    if by_queue and strategy:
        embedding.build(BATCH)
    for _ in range(3):
        if by_queue:
            embedding.enqueue(ids())
        if strategy is None:
            step()
        else:
            strategy.run(step)


def values(embedding: Any) -> dict[str, Any]:
    """Every table, slot and counter, by name, as JSON has them."""
    with tempfile.TemporaryDirectory() as folder:
        found = checkpoint.read(checkpoint.save(embedding, f"{folder}/saved"))
        stored = {
            f"{table}/{name}": np.float32(rows.numpy()).tolist()
            for table, content in found.items()
            for name, rows in content.arrays.items()
        }
        return {**stored, "updates": found.updates}


def tracked(embedding: Any) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(embedding=embedding)


class Case(NamedTuple):
    """Trains and saves a model, loads it made anew; both give all values."""

    save: Callable[[str], Any]
    load: Callable[[str], Any]


def package(**options: Any) -> Case:
    """What te.checkpoint.save writes of a TPUEmbedding."""

    def save(folder: str) -> Any:
        embedding = make(te.TPUEmbedding, 0, **options)
        train(embedding)
        checkpoint.save(embedding, f"{folder}/saved")
        return values(embedding)

    def load(folder: str) -> Any:
        embedding = make(te.TPUEmbedding, 1, **options)
        checkpoint.restore(embedding, f"{folder}/saved")
        return values(embedding)

    return Case(save, load)


def tensorflow(make_class: Any, generation: str | None = None) -> Case:
    """What tf.train.Checkpoint writes of an embedding."""

    def strategy() -> Any:
        return SoftwareTPUStrategy(generation, 2) if generation else None

    def save(folder: str) -> Any:
        where = strategy()
        embedding = make(make_class, 0, where)
        train(embedding, where)
        tracked(embedding).write(f"{folder}/saved")
        return values(embedding)

    def load(folder: str) -> Any:
        embedding = make(make_class, 1, strategy())
        embedding.build(*([BATCH] if make_class is te.TPUEmbedding else []))
        tracked(embedding).read(f"{folder}/saved").assert_consumed()
        found = values(embedding)
        again = make(make_class, 2)  # On the host engine, as te.checkpoint reads it.
        checkpoint.restore(again, f"{folder}/saved")
        assert values(again) == found
        return found

    return Case(save, load)


def custom(seed: int, strategy: Any = None) -> Any:
    """An embedding whose CustomCombiner has weights."""
    combiner = te.CustomCombiner(
        lambda valency, vectors, weights: tf.linalg.matvec(
            vectors, weights, transpose_a=True
        ),
        max_valency=2,
        num_weights=2,
        initializer=initializer(seed),
        combiner_weights_learning_rate=0.1,
    )
    table = te.TableConfig(6, 3, initializer(seed), combiner=combiner, name="films")
    feature = te.FeatureConfig(table, output_shape=[BATCH], name="film")
    with strategy.scope() if strategy else contextlib.nullcontext():
        return te.TPUEmbeddingV2({"film": feature}, te.Adagrad(0.1))


def custom_values(embedding: Any) -> Any:
    return {
        name: np.asarray(value).tolist()
        for arrays in embedding.variables.values()
        for name, value in arrays.items()
    }


def custom_case(generation: str | None) -> Case:
    def strategy() -> Any:
        return SoftwareTPUStrategy(generation, 2) if generation else None

    def save(folder: str) -> Any:
        where = strategy()
        embedding = custom(0, where)
        embedding.build()

        def step() -> None:
            ids = tf.RaggedTensor.from_row_splits([1, 2, 2, 5, 4], [0, 2, 3, 5, 5])
            activations, preserved = embedding({"film": ids})
            embedding.apply_gradients(activations, preserved)

        where.run(step) if where else step()
        tracked(embedding).write(f"{folder}/saved")
        return custom_values(embedding)

    def load(folder: str) -> Any:
        embedding = custom(1, strategy())
        embedding.build()
        tracked(embedding).read(f"{folder}/saved").assert_consumed()
        return custom_values(embedding)

    return Case(save, load)


def layer_features() -> Any:
    """With many options, all of which a `.keras` file keeps."""
    films = te.TableConfig(
        7,
        3,
        te.RowIdInitializer(),
        te.Adam(0.1, use_gradient_accumulation=True, clip_weight_max=5.0),
        combiner="sqrtn",
        name="films",
        quantization_config=te.QuantizationConfig(16, -1.0, 8.0),
        invalid_ids="drop",
    )
    words = te.TableConfig(
        5, 2, keras.initializers.Constant(0.5), combiner="sum", name="words"
    )
    return {
        "film": te.FeatureConfig(films, name="film"),
        "more": [
            [te.FeatureConfig(words)],
            te.FeatureConfig(films, max_sequence_length=2, name="history"),
        ],
    }


LAYER_IDS = {
    "film": np.array([1, 2, 2, 4]),
    "more": [[np.array([[0, 3], [3, 1], [1, 1], [2, 4]])], np.array([[1, 2]] * BATCH)],
}


def layer_model() -> Any:
    def symbolic(name: str, *shape: int) -> Any:
        return keras.Input(shape, BATCH, "int64", name=name)

    inputs = {
        "film": symbolic("film"),
        "more": [[symbolic("word", 2)], symbolic("history", 2)],
    }
    rate = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    layer = TPUEmbedding(layer_features(), keras.optimizers.Ftrl(rate), name="tables")
    found = layer(inputs)
    flat = [found["film"], found["more"][0][0], found["more"][1]]
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(x) for x in flat])
    dense = keras.layers.Dense(1, kernel_initializer="ones", name="head")(joined)
    model = keras.Model(inputs, dense)
    model.compile("sgd", "mse")
    return model


def predicted(model: Any) -> Any:
    layer = model.get_layer("tables")
    state = {v.path: np.asarray(v).tolist() for v in layer.variables}
    outputs = model.predict(LAYER_IDS, BATCH, verbose=0).tolist()
    return {"outputs": outputs, "variables": list(state.values())}


def layer_case(file: str) -> Case:
    def save(folder: str) -> Any:
        model = layer_model()
        model.fit(LAYER_IDS, np.zeros((BATCH, 1)), BATCH, epochs=2, verbose=0)
        if file.endswith(".keras"):
            model.save(f"{folder}/{file}")
        else:
            model.save_weights(f"{folder}/{file}")
        return predicted(model)

    def load(folder: str) -> Any:
        if file.endswith(".keras"):
            return predicted(keras.models.load_model(f"{folder}/{file}"))
        model = layer_model()
        model.load_weights(f"{folder}/{file}")
        return predicted(model)

    return Case(save, load)


def served(folder: str) -> Any:
    answers = tf.saved_model.load(folder).signatures["ragged"](
        film_values=tf.constant([3, 5, 0], tf.int64),
        film_row_splits=tf.constant([0, 2, 2, 3], tf.int64),
    )
    return {name: answers[name].numpy().tolist() for name in sorted(answers)}


def export_case(storage: str) -> Case:
    def save(folder: str) -> Any:
        table = te.TableConfig(6, 4, initializer(0), name="films")
        embedding = te.TPUEmbedding({"film": te.FeatureConfig(table)}, te.SGD(0.1))
        te.serving.export(
            embedding, f"{folder}/model", signatures=["ragged"], storage=storage
        )
        return served(f"{folder}/model")

    return Case(save, lambda folder: served(f"{folder}/model"))


def numpy_case() -> Case:
    def save(folder: str) -> Any:
        embedding = make(te.TPUEmbedding, 0)
        train(embedding)
        with tempfile.TemporaryDirectory() as temporary:
            path = checkpoint.save(embedding, f"{temporary}/saved")
            arguments = [path, f"{folder}/arrays", "--to", "numpy"]
            assert main(["checkpoint", "convert", *arguments]) == 0
        return {**values(embedding), "updates": 0}

    def load(folder: str) -> Any:
        embedding = make(te.TPUEmbedding, 1)
        checkpoint.restore(embedding, f"{folder}/arrays")
        return values(embedding)

    return Case(save, load)


CASES: Mapping[str, Case] = {
    "package": package(),
    "package-bfloat16": package(dtype="bfloat16"),
    "package-pipelined": package(pipeline_execution_with_tensor_core=True),
    "tensorflow-v1": tensorflow(te.TPUEmbedding),
    "tensorflow-v2": tensorflow(te.TPUEmbeddingV2),
    "tensorflow-v6e": tensorflow(te.TPUEmbeddingV2, "v6e"),
    "tensorflow-v4": tensorflow(te.TPUEmbedding, "v4"),
    "combiner": custom_case(None),
    "combiner-v6e": custom_case("v6e"),
    "layer": layer_case("model.keras"),
    "weights": layer_case("model.weights.h5"),
    "export-float32": export_case("float32"),
    "export-int8": export_case("int8"),
    "numpy": numpy_case(),
}


def pack(case: Case) -> bytes:
    """What a case saves, and the values, as an archive in base64."""
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        expected = case.save(folder)
        root = pathlib.Path(folder)
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as archive:
            for file in sorted(root.rglob("*")):
                if file.is_file() and file.parent.name != "debug":
                    archive.write(file, file.relative_to(root))
            archive.writestr("expected.json", json.dumps(expected))
    return base64.encodebytes(packed.getvalue())


if __name__ == "__main__":
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [logical] * 2)
    target = pathlib.Path(sys.argv[1])
    for name, case in CASES.items():
        (target / f"{name}.zip.base64").write_bytes(pack(case))
