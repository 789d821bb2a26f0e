"""The reference itself, against worked examples and TensorFlow."""

from __future__ import annotations

import ast
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reference import lookup, optimizers
from reference.embedding import Feature, ReferenceEmbedding, Table

TABLE = np.arange(12, dtype=np.float32).reshape(6, 2)  # row r is [2r, 2r + 1]


def test_the_reference_imports_nothing_of_the_package() -> None:
    for file in (pathlib.Path(__file__).parent / "reference").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])]
            assert not any(
                "tpu_embedding" in name or "tensorflow" in name
                for name in [*names, str(getattr(node, "module", ""))]
            )


@pytest.mark.parametrize(
    ("combiner", "weights", "gains"),
    [
        ("sum", [2.0, -1.0], [2.0, -1.0]),
        ("mean", [3.0, 1.0], [0.75, 0.25]),
        ("mean", [1.0, -1.0], [0.0, 0.0]),
        ("sqrtn", [3.0, -4.0], [0.6, -0.8]),
        ("sqrtn", [0.0, 0.0], [0.0, 0.0]),
        ("mean", [], []),
    ],
)
def test_gains(combiner: str, weights: list[float], gains: list[float]) -> None:
    assert lookup.gains(weights, combiner) == pytest.approx(gains)


def _ids(samples: lookup.Samples) -> list[list[int]]:
    return [[id_ for id_, _ in entries] for entries in samples.entries]


SPARSE = tf.SparseTensor([[0, 1], [0, 4], [2, 0]], [5, 3, 2], [3, 6])
RAGGED = tf.ragged.constant([[5, 3], [], [2], [1, 1, 1]])


@pytest.mark.parametrize(
    ("value", "options", "ids", "shape"),
    [
        (tf.constant([4, 2]), {}, [[4], [2]], (2,)),
        (tf.constant([[4, 2]]), {}, [[4, 2]], (1,)),
        (tf.constant([[[4], [2]]]), {}, [[4], [2]], (1, 2)),
        (tf.constant([[4, 2]]), {"max_sequence_length": 3}, [[4], [2], []], (1, 3)),
        (SPARSE, {}, [[5, 3], [], [2]], (3,)),
        (SPARSE, {"max_sequence_length": 2}, [[], [5], [], [], [2], []], (3, 2)),
        (
            tf.SparseTensor([[0, 1, 1], [1, 0, 0]], [5, 3], [2, 2, 2]),
            {},
            [[], [5], [3], []],
            (2, 2),
        ),
        (RAGGED, {}, [[5, 3], [], [2], [1, 1, 1]], (4,)),
        (RAGGED, {"output_shape": (2, 2)}, [[5, 3], [], [2], [1, 1, 1]], (2, 2)),
        (RAGGED, {"output_shape": (None, 2)}, [[5, 3], [], [2], [1, 1, 1]], (2, 2)),
        (
            RAGGED,
            {"output_shape": (4, 2)},
            [[5], [3], [], [], [2], [], [1], [1]],
            (4, 2),
        ),
        (RAGGED, {"max_sequence_length": 1}, [[5], [], [2], [1]], (4, 1)),
    ],
)
def test_samples(
    value: Any, options: dict[str, Any], ids: list[list[int]], shape: tuple[int, ...]
) -> None:
    samples = lookup.samples_of(value, **options)
    assert _ids(samples) == ids
    assert samples.shape == shape


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (tf.constant([1]), {"max_sequence_length": 2}),
        (tf.constant([[1]]), {"max_sequence_length": 2, "output_shape": (1, 2)}),
        (tf.constant([[1]]), {"output_shape": (2,)}),
        (tf.constant([[1]]), {"output_shape": (1, 1)}),
        (RAGGED, {"output_shape": (3,)}),
        (RAGGED, {"output_shape": (None, 3)}),
        (RAGGED, {"output_shape": (None, None)}),
        (RAGGED, {"weights": tf.ragged.constant([[1.0]])}),
    ],
)
def test_shapes_that_do_not_fit(value: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the reference has no texts.
        lookup.samples_of(value, **options)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookup_is_that_of_embedding_lookup_sparse(
    combiner: str, weighted: bool, rng: np.random.Generator
) -> None:
    # TensorFlow's function wants no empty sample at the end and positive weights.
    ids = tf.ragged.constant([[3, 1, 1], [], [0], [5, 2]]).to_sparse()
    weights = None
    if weighted:
        values = rng.uniform(0.5, 2.0, size=ids.values.shape).astype(np.float32)
        weights = ids.with_values(tf.constant(values))
    expected = tf.nn.embedding_lookup_sparse(
        tf.constant(TABLE), ids, weights, combiner=combiner
    )
    samples = lookup.samples_of(ids, weights)
    np.testing.assert_allclose(
        lookup.lookup(TABLE, samples, combiner), expected, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("invalid_ids", "expected"),
    [("drop", [[2.0, 3.0], [0.0, 0.0]]), ("mod", [[4.0, 5.0], [10.0, 11.0]])],
)
def test_invalid_ids(invalid_ids: str, expected: list[list[float]]) -> None:
    samples = lookup.samples_of(tf.ragged.constant([[1, 2**33 + 1], [-1]], tf.int64))
    assert (2**33 + 1) % 6 == 3
    found = lookup.lookup(TABLE, samples, "mean", invalid_ids=invalid_ids)
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(lookup.InvalidIdError):
        lookup.lookup(TABLE, samples, "mean")


def test_an_invalid_id_past_the_end_of_a_sequence_is_an_error() -> None:
    samples = lookup.samples_of(tf.constant([[1, 9]]), max_sequence_length=1)
    with pytest.raises(lookup.InvalidIdError):
        lookup.lookup(TABLE, samples, "sum")
    found = lookup.lookup(TABLE, samples, "sum", invalid_ids="mod")
    np.testing.assert_array_equal(found, TABLE[[1]])


def test_quantization() -> None:
    quantization = lookup.Quantization(num_buckets=3, lower=0.0, upper=4.0)
    x = np.array([-1.0, 0.9, 1.0, 2.9, 3.0, 9.0])
    np.testing.assert_array_equal(
        lookup.quantize(x, quantization), [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]
    )


def test_unknown_arguments_of_optimizers_are_refused() -> None:
    with pytest.raises(KeyError):
        optimizers.complete("SGD", {"momentum": 0.9})


def test_apply_leaves_its_arguments_alone() -> None:
    table, slots = np.ones((2, 2)), {"accumulators": np.ones((2, 2))}
    new, new_slots = optimizers.apply(
        "Adagrad", {}, table, slots, {0: np.ones(2)}, rate=0.5
    )
    np.testing.assert_array_equal(table, 1.0)
    np.testing.assert_array_equal(slots["accumulators"], 1.0)
    np.testing.assert_allclose(new[0], 1 - 0.5 / np.sqrt(2), rtol=1e-6)
    np.testing.assert_array_equal(new_slots["accumulators"], [[2, 2], [1, 1]])


def _embedding(hyper: dict[str, Any] | None = None, **options: Any) -> Any:
    table = Table(TABLE, "SGD", {"learning_rate": 0.5, **(hyper or {})}, "mean")
    return ReferenceEmbedding({"t": table}, [Feature("t"), Feature("t")], **options)


def test_a_step_follows_automatic_differentiation(rng: np.random.Generator) -> None:
    ids = [
        tf.ragged.constant([[3, 1, 1], [0]]),
        tf.ragged.constant([[], [1]], tf.int32),
    ]
    gradients = [rng.normal(size=(2, 2)).astype(np.float32) for _ in ids]
    embedding = _embedding()
    activations = embedding.step([ids], None, [gradients])[0]

    table = tf.Variable(tf.constant(TABLE))
    with tf.GradientTape() as tape:
        found = [
            tf.math.divide_no_nan(
                tf.reduce_sum(tf.gather(table, feature), axis=1),
                tf.cast(feature.row_lengths(), tf.float32)[:, tf.newaxis],
            )
            for feature in ids
        ]
        loss = tf.add_n(
            [tf.reduce_sum(a * g) for a, g in zip(found, gradients, strict=True)]
        )
    table.assign_sub(0.5 * tf.convert_to_tensor(tape.gradient(loss, table)))
    for actual, expected in zip(activations, found, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    np.testing.assert_allclose(embedding.tables["t"], table, rtol=1e-5)


def test_replicas_are_summed_into_one_update() -> None:
    one, two = tf.constant([1]), tf.constant([2])
    embedding = _embedding({"clipvalue": 1.5})
    gradient = np.ones((1, 2))
    embedding.step(
        [[one, two], [one, one]], None, [[gradient, gradient], [gradient, None]]
    )
    # Row 1: 1 + 1 + 0, clipped to 1.5 once; row 2: 1.
    expected = TABLE.copy()
    expected[1] -= 0.5 * 1.5
    expected[2] -= 0.5
    np.testing.assert_array_equal(embedding.tables["t"], expected)


def test_pipelined_lookups_are_one_step_old() -> None:
    ids = [tf.constant([1]), tf.constant([1])]
    gradients = [np.full((1, 2), 0.5)] * 2
    embedding = _embedding(pipelined=True)
    seen = [
        float(embedding.step([ids], None, [gradients])[0][0][0, 0]) for _ in range(4)
    ]
    assert seen == [2.0, 2.0, 1.5, 1.0]
    assert embedding.lookup([ids])[0][0][0, 0] == 0.0  # Nothing is pending now.


def test_rates_see_the_number_of_updates_and_are_called_once_per_step() -> None:
    steps = []

    def rate(step: int) -> float:
        steps.append(step)
        return 0.5

    tables = {name: Table(TABLE, "SGD", {"learning_rate": rate}) for name in "ab"}
    embedding = ReferenceEmbedding(tables, [Feature("a"), Feature("b")])
    ids = [tf.constant([1]), tf.constant([2])]
    for _ in range(3):
        embedding.step([ids], None, [[None, None]])
    assert steps == [0, 1, 2]


def test_a_step_that_fails_changes_nothing() -> None:
    embedding = _embedding()
    with pytest.raises(lookup.InvalidIdError):
        embedding.forward([[tf.constant([1]), tf.constant([6])]])
    np.testing.assert_array_equal(embedding.tables["t"], TABLE)
