"""Compares losses of five programs: Keras with dense gradients, te.keras by rows.

    python -m benchmarks.keras_programs --steps 300

Two towers with a history, several tasks with strings and callbacks, SASRec by sampled
logits, DLRM of 26 tables, and skip-gram, each with Adam and AdamW, from the same first
values. Prints the largest relative difference of a loss, and the last AUC or recall,
also with `lazy=True`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te

keras: Any = tf.keras
layers: Any = keras.layers
BATCH, DIM = 64, 8


class Dense(layers.Embedding):
    """A layer with a dense gradient, in which repeated ids are summed."""

    def call(self, inputs: Any) -> Any:
        return tf.gather(tf.convert_to_tensor(self.embeddings) * 1.0, inputs)


def ids(rng: np.random.Generator, rows: int, *shape: int) -> np.ndarray:
    """Draws Zipf-distributed ids, so that most rows wait for many steps."""
    return np.minimum(rng.zipf(1.2, shape), rows) - 1


def two_towers(new: Callable[..., Any], rng: Any, samples: int) -> tuple[Any, ...]:
    """Builds a query of a user and 10 items, scored against one more item."""
    users, items = 2000, 1000
    user = keras.Input((), dtype="int64")
    history, item = keras.Input([10], dtype="int64"), keras.Input((), dtype="int64")
    table = new(items, DIM)
    seen = layers.GlobalAveragePooling1D()(table(history))
    query = layers.Dense(DIM)(layers.Concatenate()([new(users, DIM)(user), seen]))
    scores = layers.Dot(1)([query, layers.Dense(DIM)(table(item))])
    x = [ids(rng, users, samples), ids(rng, items, samples, 10)]
    x.append((x[1][:, 0] + x[0]) % items)
    wrong = rng.random(samples) < 0.5
    x[2] = np.where(wrong, ids(rng, items, samples), x[2])
    return keras.Model([user, history, item], scores), x, 1.0 - wrong[:, None]


def several_tasks(new: Callable[..., Any], rng: Any, samples: int) -> tuple[Any, ...]:
    """Builds a model with two labels of a user and a shop, which is a string."""
    names = [f"shop {n}" for n in range(500)]
    shop, user = keras.Input((), dtype="string"), keras.Input((), dtype="int64")
    number = layers.StringLookup(vocabulary=names)(shop)
    both = layers.Concatenate()([new(501, DIM)(number), new(2000, DIM)(user)])
    hidden = layers.Dense(16, "relu")(both)
    out = layers.Concatenate()([layers.Dense(1)(hidden), layers.Dense(1)(both)])
    shops, x = ids(rng, 500, samples), ids(rng, 2000, samples)
    y = np.stack([(shops + x) % 3 == 0, shops % 2 == 0], 1)
    strings = tf.constant([names[n] for n in shops])
    return keras.Model([shop, user], out), [strings, x], y.astype("f")


def sasrec(new: Callable[..., Any], rng: Any, samples: int) -> tuple[Any, ...]:
    """Builds a model of the item after 12 others, scored beside four sampled ones."""
    items, length = 1000, 12
    table = new(items, DIM)
    past, asked = keras.Input([length], dtype="int64"), keras.Input([5], dtype="int64")
    x = table(past) + new(length, DIM)(tf.range(length))
    x = layers.LayerNormalization()(
        x + layers.MultiHeadAttention(1, DIM)(x, x, use_causal_mask=True)
    )
    last = layers.Dense(DIM)(x)[:, -1:]
    logits = layers.Flatten()(layers.Dot(2)([last, table(asked)]))
    inputs = [ids(rng, items, samples, length), ids(rng, items, samples, 5)]
    inputs[1][:, 0] = (inputs[0][:, -1] + 1) % items
    y = np.zeros([samples, 5], "f")
    y[:, 0] = 1.0
    return keras.Model([past, asked], logits), inputs, y


def dlrm(new: Callable[..., Any], rng: Any, samples: int) -> tuple[Any, ...]:
    """Builds a DLRM: 26 tables of 100 to 1,100 rows, and crossed features."""
    sizes = [100 + 40 * t for t in range(26)]
    sparse = [keras.Input((), dtype="int64") for _ in sizes]
    dense = keras.Input([13])
    rows = [new(n, DIM)(x) for n, x in zip(sizes, sparse, strict=True)]
    rows.append(layers.Dense(DIM, "relu")(dense))
    stacked = layers.Reshape([27, DIM])(layers.Concatenate()(rows))
    crossed = layers.Flatten()(layers.Dot(2)([stacked, stacked]))
    out = layers.Dense(1)(layers.Dense(32, "relu")(crossed))
    x = [ids(rng, n, samples) for n in sizes]
    y = (np.sum(x[:4], 0) % 3 == 0)[:, None].astype("f")
    features = rng.normal(size=(samples, 13)).astype("f")
    return keras.Model([*sparse, dense], out), [*x, features], y


def skip_gram(new: Callable[..., Any], rng: Any, samples: int) -> tuple[Any, ...]:
    """Builds a model of a word and its context, beside four sampled words."""
    words = 3000
    word, context = keras.Input((), dtype="int64"), keras.Input([5], dtype="int64")
    one = layers.Reshape([1, DIM])(new(words, DIM)(word))
    logits = layers.Flatten()(layers.Dot(2)([one, new(words, DIM)(context)]))
    x = [ids(rng, words, samples), ids(rng, words, samples, 5)]
    x[1][:, 0] = (x[0] * 7 + 1) % words
    y = np.zeros([samples, 5], "f")
    y[:, 0] = 1.0
    return keras.Model([word, context], logits), x, y


PROGRAMS = (two_towers, several_tasks, sasrec, dlrm, skip_gram)
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(3e-3),
    "AdamW": lambda: keras.optimizers.AdamW(3e-3, weight_decay=0.02),
}


class Losses(keras.callbacks.Callback):
    """Records the loss of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        for metric in self.model.metrics:
            if metric.name == "loss":
                metric.reset_state()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.values.append(float(logs["loss"]))


def train(
    program: Any, optimizer: Any, lazy: bool | None, steps: int, seed: int
) -> Any:
    """Returns the losses of all steps, and the AUC or the recall of other samples.

    `lazy` is the argument of te.keras; None trains with Keras instead.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    new = Dense if lazy is None else te.keras.Embedding
    model, x, y = program(new, rng, BATCH * (steps // 3 + 4))
    x = [tf.constant(each) for each in x]
    if lazy is not None:
        optimizer = te.keras.RowSparseOptimizer(optimizer, lazy=lazy)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    losses, held = Losses(), 4 * BATCH
    reduce = keras.callbacks.ReduceLROnPlateau("loss", 0.5, 1, min_delta=0.1)
    model.fit([each[held:] for each in x], y[held:], BATCH, 3, verbose=0, shuffle=False,
              callbacks=[losses, reduce])  # fmt: skip
    scores = model.predict([each[:held] for each in x], verbose=0)
    if y.shape[1] == 5:
        return losses.values, float(np.mean(scores.argmax(1) == 0))
    metric = keras.metrics.AUC()
    metric.update_state(y[:held], tf.sigmoid(scores))
    return losses.values, float(metric.result())


def main() -> None:
    """Prints a line for each program and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    print("program, optimizer, seed: largest difference of a loss, last AUC or recall")
    for program in PROGRAMS:
        for name, make in OPTIMIZERS.items():
            for seed in options.seeds:
                ways = [train(program, make(), lazy, options.steps, seed)
                        for lazy in (None, False, True)]  # fmt: skip
                (keras_losses, keras_score), (ours, score), (_, lazy_score) = ways
                difference = np.abs(np.divide(ours, keras_losses) - 1.0)
                print(
                    f"{program.__name__:13} {name:5} {seed}: {difference.max():.1e} in "
                    f"{len(ours)} steps; Keras {keras_score:.4f}, rows {score:.4f}, "
                    f"lazy {lazy_score:.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
