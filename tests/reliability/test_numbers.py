"""Numbers at the edges: not finite, subnormal, zero, huge, and one row many times."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import optimizer_cases
import pytest
import tensorflow as tf
from cpu_engines import EACH_ENGINE
from reference import optimizers as reference
from reference.embedding import Feature, ReferenceEmbedding, Table
from steps import train_on

import tpu_embedding as te

ROWS, DIM = 4, 2
IDS = np.array([0, 2, 2])
EPSILON = 2.0**-24
LEAST_NORMAL = 2.0**-126  # Below it TensorFlow's threads have zeros.

OPTIMIZERS = [
    *(case.cls(0.1) for case in optimizer_cases.OPTIMIZERS),
    te.Adagrad(0.1, initial_accumulator_value=1e-30),
    te.Adam(0.1, sum_inside_sqrt=False),
    te.FTRL(0.1, initial_accumulator_value=0.0, allow_zero_accumulator=True),
    te.FTRL(0.1, multiply_linear_by_learning_rate=True),
    te.AdagradMomentum(0.1, 0.9, use_nesterov=True, beta2=0.5),
]
each_engine = pytest.mark.parametrize("engine", EACH_ENGINE)


def each(optimizers: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "optimizer", optimizers, ids=lambda optimizer: type(optimizer).__name__
    )


each_optimizer = each(OPTIMIZERS)


class Both:
    """The package and the reference over one table, step by step."""

    def __init__(self, optimizer: Any, *, rate: float = 0.1, **options: Any) -> None:
        self.optimizer = dataclasses.replace(optimizer, learning_rate=rate)
        start = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM) / 8
        self.config = te.TableConfig(
            ROWS, DIM, lambda shape, dtype: start, combiner="sum", name="films"
        )
        self.embedding = te.TPUEmbedding(
            {"film": te.FeatureConfig(self.config)}, self.optimizer, **options
        )
        hyper = {
            field.name: getattr(self.optimizer, field.name)
            for field in dataclasses.fields(self.optimizer)
        }
        table = Table(
            values=start,
            optimizer=type(optimizer).__name__,
            hyper=hyper,
            combiner="sum",
        )
        self.reference = ReferenceEmbedding({"films": table}, [Feature("films")])

    def step(self, gradient: np.ndarray, ids: np.ndarray = IDS) -> None:
        gradient = np.asarray(gradient, np.float32)
        train_on(
            self.embedding, {"film": tf.constant(ids)}, {"film": tf.constant(gradient)}
        )
        self.reference.forward([[tf.constant(ids)]], [[None]])
        with np.errstate(all="ignore"):
            self.reference.backward([[gradient]])

    def values(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        (own,) = self.embedding.variables.values()
        expected = {
            "parameters": self.reference.tables["films"],
            **self.reference.slots.get("films", {}),
        }
        return {name: v.numpy() for name, v in own.items()}, expected

    def check(self, rtol: float, atol: float = 0.0) -> None:
        own, expected = self.values()
        for name, values in own.items():
            # NaN and infinity where the formula has them in float32.
            with np.errstate(over="ignore"):
                wanted = expected[name].astype(np.float32)
            np.testing.assert_allclose(values, wanted, rtol, atol, err_msg=name)


# Roundings of two updates: 16 each, a sum of two terms, the slot's own.
TWO_UPDATES = 2 * (16 + 2 + 2) * EPSILON * 8


@pytest.fixture(autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", request.getfixturevalue("engine"))


@each_engine
@pytest.mark.parametrize(
    "optimizer",
    [*OPTIMIZERS, te.FrequencyEstimator(lambda: 0.1)],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_special_gradients(optimizer: Any, engine: str) -> None:
    """NaN, infinities, huge and tiny numbers: the slots and rows of the reference.

    The reference computes in float32 here, so that squares overflow and underflow as on
    the engines. The second column has an ordinary gradient.
    """
    special = [np.nan, np.inf, -np.inf, 1e30, -1e30, 3e38, -3e38, 1e-30, 0.0, -0.0, 1.0]
    rows, dim = len(special), optimizer.table_dim or 2
    gradients = np.ones([rows, dim], np.float32)
    gradients[:, 0] = special
    start = np.linspace(-1, 1, rows * dim, dtype=np.float32).reshape(rows, dim)
    config = te.TableConfig(rows, dim, lambda shape, dtype: start, optimizer)
    embedding = te.TPUEmbedding(te.FeatureConfig(config), None)
    name = type(optimizer).__name__
    hyper = {f.name: getattr(optimizer, f.name) for f in dataclasses.fields(optimizer)}
    table, slots = start, reference.initial_slots(name, hyper, start.shape)
    for step in range(3):
        given = gradients if step < 2 else np.zeros_like(gradients)
        train_on(embedding, tf.range(rows), tf.constant(given))
        with np.errstate(all="ignore"):
            table, slots = reference.apply(
                name, hyper, table, slots, dict(enumerate(given)), 0.1, np.float32
            )
        for array, wanted in {"parameters": table, **slots}.items():
            np.testing.assert_allclose(
                embedding.variables[config][array].numpy(),
                wanted,
                (step + 1) * TWO_UPDATES,
                LEAST_NORMAL,
                err_msg=f"{array} after step {step}",
            )


@each_engine
@each_optimizer
def test_gradients_of_zero_and_accumulators_at_zero(
    optimizer: Any, engine: str
) -> None:
    both = Both(optimizer)
    for _ in range(2):
        both.step(np.zeros([3, DIM]))
    both.check(TWO_UPDATES, TWO_UPDATES)
    own, _ = both.values()
    assert all(np.isfinite(values).all() for values in own.values())


def divides_by_the_rate(optimizer: Any) -> bool:
    is_ftrl = isinstance(optimizer, te.FTRL)
    return is_ftrl and not optimizer.multiply_linear_by_learning_rate


@each_engine
@each([optimizer for optimizer in OPTIMIZERS if not divides_by_the_rate(optimizer)])
def test_a_rate_of_zero(optimizer: Any, engine: str) -> None:
    both = Both(optimizer, rate=0.0)
    before = both.values()[0]["parameters"]
    both.step(np.ones([3, DIM]))
    after = both.values()[0]["parameters"]
    if not isinstance(optimizer, te.FTRL):  # It sets rows to what linears say.
        np.testing.assert_array_equal(after, before)
    assert np.isfinite(after).all()


@each_engine
def test_a_huge_rate_and_huge_gradients(engine: str) -> None:
    for optimizer in (te.SGD(1.0), te.Adagrad(1.0), te.RowwiseAdagrad(1.0)):
        both = Both(optimizer, rate=1e30)
        both.step(np.ones([3, DIM]))
        both.check(TWO_UPDATES)
        both = Both(optimizer)
        both.step(np.full([3, DIM], 1e30))
        own, _ = both.values()
        # Squares overflow to infinity, by which a step is 0; a sum does not.
        assert not np.isnan(own["parameters"]).any()
        others = [1, 3]
        start = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM) / 8
        np.testing.assert_array_equal(own["parameters"][others], start[others])


@each_engine
def test_subnormal_gradients(engine: str) -> None:
    least = np.float32(2.0**-149)
    both = Both(te.SGD(1.0), rate=1.0)
    zero = {"film": tf.constant([0])}
    (table,) = both.embedding.embedding_tables.values()
    table.assign(tf.zeros([ROWS, DIM]))
    train_on(both.embedding, zero, {"film": tf.constant([[least, -2 * least]])})
    row = table.numpy()[0]
    # Kept, or taken for 0 where TensorFlow's threads flush them: never more.
    assert row.tolist() in ([-least, 2 * least], [0.0, 0.0])
    both = Both(te.Adagrad(0.1))
    both.step(np.full([3, DIM], 1e-40))
    both.check(TWO_UPDATES, LEAST_NORMAL)


@each_engine
def test_one_row_a_million_times(engine: str) -> None:
    number = 1_000_000
    both = Both(te.SGD(1.0), rate=1.0)
    ids = tf.zeros([number], tf.int64)
    train_on(both.embedding, {"film": ids}, {"film": tf.fill([number, DIM], 2.0**-10)})
    (table,) = both.embedding.embedding_tables.values()
    expected = np.arange(ROWS * DIM, dtype=np.float64).reshape(ROWS, DIM) / 8
    expected[0] -= number * 2.0**-10
    np.testing.assert_array_equal(table.numpy(), expected)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
@each_engine
def test_long_sums(engine: str, combiner: str, quantized: bool) -> None:
    """Added in sequence, the values are 0.9 % off."""
    number, value = 1_000_000, np.float32(0.1)
    table = te.TableConfig(
        2,
        DIM,
        tf.keras.initializers.Constant(value),
        combiner=combiner,
        quantization_config=te.QuantizationConfig(11, 0.0, 1.0) if quantized else None,
        name="films",
    )
    features = {"film": te.FeatureConfig(table)}
    ids = {"film": tf.RaggedTensor.from_row_lengths([0] * number + [1], [number, 1])}
    embedding = te.TPUEmbedding(features, te.SGD(1.0))
    found = train_on(embedding, ids, {"film": tf.fill([2, DIM], 1 / number)})["film"]
    # Each block of 4,096 values in sequence, then 8 sums of pairs and the gain.
    bound = (4096 + 8 + 3) * EPSILON
    expected = np.repeat([number if combiner == "sum" else 1, 1], DIM).reshape(2, DIM)
    np.testing.assert_allclose(found, expected * np.float64(value), rtol=bound)
    (trained,) = embedding.embedding_tables.values()
    np.testing.assert_allclose(
        trained[0], value - (1 if combiner == "sum" else 1 / number), rtol=bound
    )


@each_engine
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(value: float, engine: str) -> None:
    """Refused where it is asked for; else only the rows that are named have it."""
    both = Both(te.Adagrad(0.1), check_numerics=True)
    gradient = np.zeros([3, DIM], np.float32)
    gradient[1, 1] = value
    both.embedding.enqueue({"film": tf.constant(IDS)})
    both.embedding.dequeue()
    before = both.values()[0]
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        both.embedding.apply_gradients({"film": tf.constant(gradient)})
    assert "Feature film: the gradient of sample 1 is not finite" in str(raised.value)
    for name, values in both.values()[0].items():
        np.testing.assert_array_equal(values, before[name])
    free = Both(te.Adagrad(0.1))
    train_on(
        free.embedding, {"film": tf.constant(IDS)}, {"film": tf.constant(gradient)}
    )
    others = free.values()[0]["parameters"][[0, 1, 3]]
    assert np.isfinite(others).all()
