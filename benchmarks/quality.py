"""AUC by kind of table on three tasks, over several seeds.

    python -m benchmarks.quality --task machine --seeds 10 --kinds float32 int8

- demo: the model of examples/01_movielens_ranking.py.
- machine: a factorization machine on the same ratings.
- planted: the demo's model on 26 tables and clicks that depend on pairs of ids.

The AUC on the test part is that of the epoch with the smallest error on the validation
part; the norm is the mean norm of a row after the last epoch. A share such as 1/10 is
a share of the bytes that the rows of all tables with 100 ids or more take.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tpu_embedding as te

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from movielens import data, metrics, model  # noqa: E402

BATCH = 512
LOSS_SCALE = 16.0  # Tables learn faster; accumulators of Adagrad start at 0.1.
LARGE = 100  # Tables with fewer ids are neither hashed nor growing.
MakeTable = Callable[[te.TableConfig], te.TableConfig]


def of_dtype(dtype: str, optimizer: Any = None) -> MakeTable:
    """Returns a function that stores the rows of a table as a dtype."""
    return lambda table: dataclasses.replace(table, dtype=dtype, optimizer=optimizer)


def hashed(hashes: int, combine: str, share: Fraction) -> MakeTable:
    """Returns a function that hashes a table's ids into a share of its bytes."""

    def make(table: te.TableConfig) -> te.TableConfig:
        if table.vocabulary_size < LARGE:
            return table
        rows = math.ceil(table.vocabulary_size * share)
        rows *= hashes if combine == "concat" else 1
        own = te.Hashing(rows, hashes, combine)
        return dataclasses.replace(table, vocabulary_size=own, initializer=None)

    return make


def growing(share: Fraction) -> MakeTable:
    """Gives the most frequent ids a share of the rows; the others share one row."""

    def make(table: te.TableConfig) -> te.TableConfig:
        if table.vocabulary_size < LARGE:
            return table
        rows = math.ceil(table.vocabulary_size * share)
        ids = te.GrowingVocabulary(
            rows, unknown="shared_row", when_full="shared_row", eviction="lfu"
        )
        return dataclasses.replace(table, vocabulary_size=ids)

    return make


KINDS: dict[str, MakeTable] = {
    "float32": of_dtype("float32"),
    "bfloat16": of_dtype("bfloat16"),
    "int8": of_dtype("int8"),
    "float32, row-wise": of_dtype("float32", te.RowwiseAdagrad(0.05)),
    "bfloat16, row-wise": of_dtype("bfloat16", te.RowwiseAdagrad(0.05)),
    "int8, row-wise": of_dtype("int8", te.RowwiseAdagrad(0.05)),
    **{
        f"{combine} {hashes}, {share}": hashed(hashes, combine, share)
        for share in (Fraction(1, 4), Fraction(1, 10))
        for hashes, combine in (
            *((1, "concat"), (2, "concat"), (4, "concat"), (8, "concat")),
            (2, "sum"),
        )
    },
    "growing, 1/4": growing(Fraction(1, 4)),
    "growing, 1/10": growing(Fraction(1, 10)),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """N samples, and the model that predicts their ratings."""

    batches: Callable[[np.ndarray, int], tf.data.Dataset]  # (ids, numbers, rating)
    rating: np.ndarray  # float32 [N]; AUC counts metrics.LIKED and above as positive
    split: data.Split
    vocabulary_sizes: Mapping[str, int]
    make_dense_part: Callable[[model.FeatureConfigs, float], keras.Model]
    epochs: int
    loss_scale: float = 1.0


def demo() -> Task:
    """Makes the task of the demo."""
    ratings, films = data.find(None, ROOT / "build" / "data")

    def batches(rows: np.ndarray, size: int) -> tf.data.Dataset:
        return ratings.batches(rows, size).map(
            lambda batch: (*films.inputs(batch), batch["rating"])
        )

    sizes = films.vocabulary_sizes
    dense = model.make_dense_part
    return Task(batches, ratings.rating, ratings.split, sizes, dense, epochs=8)


def machine() -> Task:
    """Makes a factorization machine: biases, and the product of a user and a film."""

    def make_dense_part(features: model.FeatureConfigs, mean: float) -> keras.Model:
        inputs = {
            name: keras.Input([feature.table.dim], name=name)
            for name, feature in features.items()
        }
        numbers = keras.Input([model.NUM_DENSE], name="numbers")
        film = keras.layers.Add()([inputs["item"], inputs["genres"]])
        names = ("user", "age", "occupation", "zip_code")
        user = keras.layers.Add()([inputs[name] for name in names])
        start: Any = keras.initializers.Constant(mean)
        first = keras.layers.Dense(
            1, kernel_initializer="zeros", bias_initializer=start
        )
        parts = [inputs["user_bias"], inputs["item_bias"], first(numbers)]
        parts.append(keras.layers.Dot(axes=1)([user, film]))
        rating = keras.ops.squeeze(keras.layers.Add()(parts), axis=1)
        return keras.Model({**inputs, "numbers": numbers}, rating)

    task = demo()
    sizes = {name: n for name, n in task.vocabulary_sizes.items() if name != "recent"}
    return dataclasses.replace(
        task,
        vocabulary_sizes=sizes,
        make_dense_part=make_dense_part,
        loss_scale=LOSS_SCALE,
    )


def planted(count: int = 300_000, tables: int = 26, largest: int = 5000) -> Task:
    """Makes clicks, as ratings of 1 and 5, of samples with one id in each table."""
    rng = np.random.default_rng(0)
    sizes = {
        f"ids{number:02}": int(size)
        for number, size in enumerate(np.geomspace(10, largest, tables))
    }
    numbers = rng.normal(size=(count, model.NUM_DENSE)).astype(np.float32)
    ids, alone = {}, numbers.sum(axis=1)
    total, own = np.zeros([count, 4]), np.zeros(count)
    for name, size in sizes.items():
        ids[name] = (rng.random(count) ** 3 * size).astype(np.int64)  # 0 is frequent.
        alone += rng.normal(size=size)[ids[name]]
        vectors = rng.normal(size=(size, 4))[ids[name]]
        total += vectors
        own += np.square(vectors).sum(axis=1)
    pairs = np.square(total).sum(axis=1) - own  # Products of different tables.
    logits = sum((part - part.mean()) / part.std() for part in (alone, pairs))
    clicked = rng.random(count) < 1 / (1 + np.exp(-2 * logits))
    rating = np.where(clicked, 5, 1).astype(np.float32)
    columns = tf.nest.map_structure(tf.constant, (ids, numbers, rating))

    def batches(rows: np.ndarray, size: int) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(rows).batch(size)
        return dataset.map(
            lambda batch: tf.nest.map_structure(lambda x: tf.gather(x, batch), columns)
        )

    parts = np.split(np.arange(count), [count * 6 // 10, count * 7 // 10])
    dense = model.make_dense_part
    return Task(batches, rating, data.Split(*parts), sizes, dense, 2, LOSS_SCALE)


TASKS = {"demo": demo, "machine": machine, "planted": planted}


def train(task: Task, kind: str, seed: int, epochs: int) -> tuple[float, float]:
    """Trains once; returns the AUC and the mean norm of a row."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    features = {
        name: dataclasses.replace(feature, table=KINDS[kind](feature.table))
        if feature.table.dim > 1
        else feature
        for name, feature in model.make_feature_config(task.vocabulary_sizes).items()
    }
    embedding = te.TPUEmbedding(features, te.Adagrad(0.05))
    dense = task.make_dense_part(features, float(task.rating[task.split.train].mean()))
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(dense.trainable_variables)

    def look_up(
        ids: Any, numbers: tf.Tensor, *, training: bool
    ) -> dict[str, tf.Tensor]:
        embedding.enqueue({name: ids[name] for name in features}, training=training)
        return {**embedding.dequeue(), "numbers": numbers}

    @tf.function(reduce_retracing=True)
    def step(ids: Any, numbers: tf.Tensor, rating: tf.Tensor) -> None:
        inputs = look_up(ids, numbers, training=True)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            error = dense(inputs, training=True) - rating
            loss = task.loss_scale * tf.reduce_mean(tf.square(error))
        weights = dense.trainable_variables
        gradients: Any = tape.gradient(loss, (inputs, weights))
        of_inputs, of_weights = gradients
        embedding.apply_gradients({name: of_inputs[name] for name in features})
        optimizer.apply_gradients(zip(of_weights, weights, strict=True))

    @tf.function(reduce_retracing=True)
    def predict(ids: Any, numbers: tf.Tensor) -> tf.Tensor:
        return dense(look_up(ids, numbers, training=False), training=False)

    def evaluate(rows: np.ndarray) -> metrics.Evaluation:
        found = [predict(*inputs).numpy() for *inputs, _ in task.batches(rows, 4096)]
        return metrics.evaluate(np.concatenate(found), task.rating[rows])

    order, best = np.random.default_rng(seed), (math.inf, 0.0)
    for _ in range(epochs):
        for batch in task.batches(order.permutation(task.split.train), BATCH):
            step(*batch)
        error = evaluate(task.split.validation).rmse
        if error < best[0]:
            best = error, evaluate(task.split.test).auc
    tables = embedding.embedding_tables.items()
    norms = [np.linalg.norm(rows, axis=1) for table, rows in tables if table.dim > 1]
    return best[1], float(np.concatenate(norms).mean())


def differences(found: np.ndarray, first: np.ndarray) -> str:
    """Returns the mean, and the mean difference of pairs with its standard error."""
    pairs = found - first
    error = pairs.std(ddof=1) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
    return f"{found.mean():.5f}, {pairs.mean():+.5f} +- {error:.5f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each run, then one for each kind."""
    parser = argparse.ArgumentParser(description="Compares kinds of tables.")
    parser.add_argument("--task", choices=TASKS, default="demo")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="default: 8, of planted 2")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args(argv)
    task = TASKS[options.task]()
    runs: dict[str, np.ndarray] = {}
    for kind in options.kinds:
        found = []
        for seed in range(1, options.seeds + 1):
            start = time.monotonic()
            found.append(train(task, kind, seed, options.epochs or task.epochs))
            auc, norm = found[-1]
            seconds = time.monotonic() - start
            line = f"{kind}, seed {seed}: AUC {auc:.5f}, norm {norm:.5f}"
            print(f"{line}, {seconds:.0f} s", flush=True)
        runs[kind] = np.array(found).T
    first = runs[options.kinds[0]]
    for kind, (aucs, norms) in runs.items():
        print(f"{kind:20} AUC {differences(aucs, first[0])} of {options.kinds[0]}")
        print(f"{'':20} norm {differences(norms, first[1])}")


if __name__ == "__main__":
    main()
