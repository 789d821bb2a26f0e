"""One training program, run by a process of a job or by replicas of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optimizer_cases
import replica_values
import tensorflow as tf
from steps import look_up

import tpu_embedding as te
from tpu_embedding.tables.rows import stored_arrays

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: te.SGD(0.1),
    "adagrad": lambda: te.Adagrad(0.1),
    "rowwise": lambda: te.RowwiseAdagrad(0.1),
    "ftrl": lambda: te.FTRL(0.1, l1_regularization_strength=0.001),
    "adam": lambda: te.Adam(0.01),
    "adam_all_rows": lambda: te.Adam(0.01, lazy_adam=False),
    "momentum": lambda: te.AdagradMomentum(0.1, momentum=0.9),
    "clipped": lambda: te.Adagrad(0.1, **optimizer_cases.ALL_OPTIONS),
    "scheduled": lambda: te.SGD(lambda step: 0.1 / (1.0 + tf.cast(step, tf.float32))),
    "scheduled_adagrad": lambda: te.Adagrad(
        lambda step: 0.1 / (1.0 + tf.cast(step, tf.float32))
    ),
}

FEATURES = ("ragged", "dense", "many", "sparse", "sequence")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and how; most options are those of the constructors."""

    optimizer: str = "adagrad"  # A key of `OPTIMIZERS`.
    steps: int = 3
    version: int = 1  # 3: the Keras layer.
    pipelined: bool = False
    dtype: str = "float32"
    weights: bool = False
    graph: bool = False
    invalid_ids: str = "error"  # With others some IDs are out of range.
    evaluate: bool = False  # After each second step.
    empty: bool = False  # Some batches have no samples.
    placement: str = "auto"
    wire: str = "float32"
    rows: tuple[int, int, int] = (101, 37, 2)  # Also fewer than there are processes.
    dims: tuple[int, int, int] = (8, 5, 16)
    combiners: tuple[str, str, str] = ("mean", "sum", "sqrtn")
    choices: tuple[str | None, str | None, str | None] = (None, None, None)
    tables: tuple[int, int, int, int, int] = (0, 1, 0, 2, 1)  # Of each feature.
    features: tuple[str, ...] = FEATURES
    length: int = 3
    output_shape: Sequence[int] | None = None
    timeout_seconds: int = 60
    seed: int = 0
    check_numerics: bool = False
    sizes: tuple[int, ...] = ()  # Of batches of each process; (): 1 to 8 samples.
    ids_in: tuple[int, ...] = ()  # Processes whose samples have IDs; (): all.
    default_start: bool = False  # Rows are those of the default initializer.
    growing: tuple[te.GrowingVocabulary | None, ...] = (None, None, None)


def initializer(seed: int) -> Callable[..., tf.Tensor]:
    def make(shape: Any, dtype: Any = tf.float32) -> tf.Tensor:
        values = np.random.default_rng(seed).standard_normal(shape)
        return tf.cast(tf.constant(values, tf.float32), dtype)

    return make


def create(strategy: tf.distribute.Strategy, case: Case) -> Any:
    tf.random.set_seed(case.seed)
    tables = [
        te.TableConfig(
            vocabulary or rows,
            dim,
            None if case.default_start or vocabulary else initializer(index),
            combiner=combiner,
            name=f"table{index}",
            dtype=case.dtype,
            invalid_ids=case.invalid_ids,
            placement=choice,
        )
        for index, (rows, dim, combiner, choice, vocabulary) in enumerate(
            zip(
                case.rows,
                case.dims,
                case.combiners,
                case.choices,
                case.growing,
                strict=True,
            )
        )
    ]
    features = {
        name: te.FeatureConfig(
            tables[table],
            max_sequence_length=case.length if name == "sequence" else 0,
            output_shape=case.output_shape,
        )
        for name, table in zip(FEATURES, case.tables, strict=True)
        if name in case.features
    }
    arguments: dict[str, Any] = {
        "check_numerics": case.check_numerics,
        "distributed_options": te.DistributedOptions(
            case.placement, case.wire, case.timeout_seconds
        ),
    }
    if case.version == 3:
        from tpu_embedding.keras import TPUEmbedding as Layer

        kind: Any = Layer
    else:
        kind = te.TPUEmbedding if case.version == 1 else te.TPUEmbeddingV2
    with strategy.scope():
        return kind(features, OPTIMIZERS[case.optimizer](), case.pipelined, **arguments)


def batch(case: Case, step: int, process: int) -> tuple[Any, ...]:
    """Draws features and weights of one process, of a size of its own."""
    random = np.random.default_rng((case.seed, step, process))
    size = int(random.integers(0 if case.empty else 1, 9))
    size = case.sizes[process] if case.sizes else size
    longest = 5 if process in (case.ids_in or (process,)) else 1
    spread = 5 if case.invalid_ids != "error" else 0

    def ids(rows: int, shape: Any) -> Any:
        # Few distinct rows, so that processes share them.
        return random.zipf(1.3, shape) % (rows + spread) - spread // 2

    lengths = random.integers(0, longest, size)
    total = int(lengths.sum())
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    sparse = [
        (sample, column)
        for sample in range(size)
        for column in range(int(random.integers(0, min(longest, 3))))
    ]
    indices = np.array(sparse, np.int64).reshape(-1, 2)

    def ragged(values: Any) -> Any:
        return tf.RaggedTensor.from_row_splits(values, splits)

    def sparsely(values: Any) -> Any:
        return tf.SparseTensor(indices, values, [size, 3])

    of = dict(zip(FEATURES, (case.rows[t] for t in case.tables), strict=True))
    features = {
        "ragged": ragged(tf.constant(ids(of["ragged"], total), tf.int32)),
        "dense": tf.constant(ids(of["dense"], size), tf.int64),
        "many": tf.constant(ids(of["many"], (size, 3)), tf.int64),
        "sparse": sparsely(tf.constant(ids(of["sparse"], len(sparse)), tf.int64)),
        "sequence": ragged(tf.constant(ids(of["sequence"], total), tf.int64)),
    }
    weights = {
        "ragged": ragged(tf.constant(random.uniform(0.1, 2, total), tf.float32)),
        "dense": None,
        "many": tf.constant(random.uniform(0.1, 2, (size, 3)), tf.float32),
        "sparse": sparsely(tf.constant(random.uniform(1, 2, len(sparse)), tf.float32)),
        "sequence": None,
    }
    return tuple(
        {name: values[name] for name in case.features} for values in (features, weights)
    )


def gradients(activations: Any) -> Any:
    """Computes gradients from the activations; the feature "many" has none."""
    found = {name: tf.sin(3 * value) for name, value in activations.items()}
    return found | {name: None for name in ("many",) if name in found}


def step(case: Case, embedding: Any, features: Any, weights: Any) -> Any:
    given = weights if case.weights else None
    if case.version < 3:
        activations, preserved = look_up(embedding, features, given)
        embedding.apply_gradients(gradients(activations), *preserved)
    else:
        with tf.GradientTape() as tape:
            activations = embedding(features, given)
        backward(tape, embedding, activations, gradients(activations))
    return activations


def backward(tape: Any, layer: Any, activations: Any, gradients: Any) -> None:
    """Trains the tables of a Keras layer; None for activations that nothing uses."""
    used = [name for name in activations if gradients[name] is not None]
    tape.gradient(
        [activations[name] for name in used],
        layer.trainable_variables,
        [gradients[name] for name in used],
    )


def evaluate(case: Case, embedding: Any, features: Any, weights: Any) -> Any:
    embedding.enqueue(features, weights if case.weights else None, training=False)
    return embedding.dequeue()


def runner(strategy: tf.distribute.Strategy, case: Case, function: Any) -> Any:
    """Runs `function` of features and weights in the replicas of this process."""

    def run(features: Any, weights: Any) -> Any:
        return strategy.run(function, args=(features, weights))

    return tf.function(run, reduce_retracing=True) if case.graph else run


def train(
    strategy: tf.distribute.Strategy,
    case: Case,
    embedding: Any,
    first: int,
    value: Callable[[int], Any],
) -> list[Any]:
    """Trains; returns the activations of each step and replica of this process.

    `value(step)` returns features and weights, which may be distributed.
    """
    found = []
    one = runner(strategy, case, lambda f, w: step(case, embedding, f, w))
    look = runner(strategy, case, lambda f, w: evaluate(case, embedding, f, w))
    for number in range(first, first + case.steps):
        found.append(one(*value(number)))
        if case.evaluate and number % 2:
            found.append(look(*value(number + 1000)))
    embedding.core.flush()
    return [
        {
            name: [v.numpy() for v in strategy.experimental_local_results(values)]
            for name, values in activations.items()
        }
        for activations in found
    ]


def tables_of(embedding: Any) -> dict[str, np.ndarray]:
    """Reads tables and slots as stored, by "<table>/<array>"; all processes call it.

    For growing tables it also reads what their vocabularies hold.
    """
    return {
        f"{name}/{array}": rows.numpy()
        for name, table in embedding.core.tables().items()
        if table.rows
        for array, rows in stored_arrays(table.rows).items()
    } | {
        f"{name}/{part}": np.asarray(value)
        for name, state in embedding.core.growing().items()
        for part, value in state.read().items()
    }


def of_replicas(
    strategy: tf.distribute.Strategy, case: Case, number: int
) -> Callable[[int], Any]:
    """Returns a function from a step's number to the batches of all replicas."""

    def value(number_of_step: int) -> Any:
        parts = [batch(case, number_of_step, r) for r in range(number)]

        def distribute(index: int, name: str) -> Any:
            values = [part[index][name] for part in parts]
            if values[0] is None:
                return None
            return replica_values.of_replicas(strategy, values)

        return tuple(
            {name: distribute(index, name) for name in parts[0][index]}
            for index in range(2)
        )

    return value


def count_replicas(case: Case, number: int) -> dict[str, dict[str, te.Figure]]:
    """Returns what te.Telemetry counts in one process, with as many replicas."""
    strategy = replica_values.mirrored(number)
    embedding = create(strategy, case)
    telemetry = te.Telemetry(embedding, every=1, hottest=1000)
    train(strategy, case, embedding, 0, of_replicas(strategy, case, number))
    return telemetry.read()


def train_replicas(
    case: Case, number: int, parts: int = 1
) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Trains in one process; flushes after each of `parts` of the steps."""
    strategy = replica_values.mirrored(number)
    embedding = create(strategy, case)
    value = of_replicas(strategy, case, number)
    part = dataclasses.replace(case, steps=case.steps // parts)
    activations = []
    for first in range(0, case.steps, part.steps):
        activations += train(strategy, part, embedding, first, value)
    return activations, tables_of(embedding)
