"""TPUEmbedding on the software TPU v2 to v4 against the NumPy reference.

The same twin and data as those of the host engine's suite, which holds that engine to
the same reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from conformance.twin import Feature, Table, Twin

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

RATE = 0.25
KINDS = ("dense3", "sparse2", "ragged", "ragged_positions", "sparse_sequence")
OPTIMIZERS = {
    "sgd": lambda rate: te.SGD(rate, clip_weight_min=-1.0, clip_weight_max=0.5),
    "adagrad": lambda rate: te.Adagrad(rate, clipvalue=(None, 0.5)),
    "adagrad_momentum": lambda rate: te.AdagradMomentum(
        rate, momentum=0.9, use_nesterov=True, epsilon=1e-3, weight_decay_factor=0.25
    ),
    "ftrl": lambda rate: te.FTRL(
        rate, l1_regularization_strength=0.2, multiply_linear_by_learning_rate=True
    ),
    "adam": lambda rate: te.Adam(
        rate,
        weight_decay_factor=0.5,
        multiply_weight_decay_factor_by_learning_rate=True,
        sum_inside_sqrt=False,
        lazy_adam=False,
    ),
}


class Readable(te.TPUEmbedding):
    """Its tables can be read, if by way of what a checkpoint would hold."""

    @property
    def variables(self) -> dict[Any, dict[str, Any]]:
        rows = self.checkpoint_rows()
        return {
            spec.key: {name: r.numpy() for name, r in rows[spec.name].items()}
            for spec in self._plan.tables
        }


def make_twin(
    kinds: Any, optimizer: Any, devices: int, combiner: str = "mean", **arguments: Any
) -> Twin:
    """Each kind twice, with weights and without; the first two share a table."""
    tables, features = {}, {}
    for number, kind in enumerate(kinds):
        table = kinds[0] if number == 1 else kind
        tables.setdefault(table, Table(dim=(4, 3, 8)[number % 3], combiner=combiner))
        features[kind] = Feature(table, cases.INPUT_BY_NAME[kind])
        features[f"{kind}_weighted"] = Feature(table, cases.INPUT_BY_NAME[kind], True)
    return Twin(
        tables,
        features,
        optimizer,
        strategy=SoftwareTPUStrategy("v4", devices, meeting_timeout=20),
        make=Readable,
        **arguments,
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_rule(name: str, rng: np.random.Generator) -> None:
    number = list(OPTIMIZERS).index(name)
    twin = make_twin(
        KINDS[number : number + 2] or KINDS[:2],
        OPTIMIZERS[name](RATE),
        devices=2,
        combiner=cases.COMBINERS[number % 3],
    )
    twin.run(rng, 2, without=[f for f in twin.features if "weighted" in f])


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_kind_of_input(devices: int, rng: np.random.Generator) -> None:
    combiner = cases.COMBINERS[devices % 3]
    kinds = KINDS if devices > 2 else list(cases.INPUT_BY_NAME)
    twin = make_twin(kinds, te.Adagrad(RATE), devices, combiner)
    twin.run(rng, 2)
    twin.evaluate(twin.draw(rng))


@pytest.mark.parametrize("devices", [1, 4])
def test_inside_of_programs(devices: int, rng: np.random.Generator) -> None:
    make_twin(KINDS[2:3], te.Adam(RATE), devices, inside=True).run(rng, 1)


def test_dynamic_rates(rng: np.random.Generator) -> None:
    """One that reads a variable; one of the number of updates, on another table."""
    strategy = SoftwareTPUStrategy("v4", 2, meeting_timeout=20)
    with strategy.scope():
        rate = tf.Variable(RATE)
    steps = tf.keras.optimizers.schedules.PiecewiseConstantDecay(
        [0, 1], [0.5, 1.0, 2.0]
    )
    twin = Twin(
        {
            "one": Table(optimizer=te.SGD(lambda: rate + 0.0)),
            "two": Table(optimizer=te.FTRL(steps)),
        },
        {
            "a": Feature("one", cases.INPUT_BY_NAME["dense1"]),
            "b": Feature("two", cases.INPUT_BY_NAME["dense2"]),
        },
        strategy=strategy,
        make=Readable,
        function=tf.function,
    )
    twin.step(rng, twin.draw(rng))
    rate.assign(0.5)
    twin.step(rng, twin.draw(rng))
    twin.check_variables()
    updates = twin.embedding.checkpoint_updates()
    assert updates is not None
    assert updates.numpy() == 2


@pytest.mark.parametrize("devices", [1, 2])
def test_pipelining(devices: int, rng: np.random.Generator) -> None:
    """Exactly one step old; evaluation and what is saved see every update."""
    twin = make_twin(
        KINDS[1:3], te.Adagrad(RATE), devices, pipeline_execution_with_tensor_core=True
    )
    for _ in range(3):
        twin.step(rng, twin.draw(rng))
    twin.evaluate(twin.draw(rng))
    twin.step(rng, twin.draw(rng), without=[KINDS[1]])
    twin.run(rng, 1)


@pytest.mark.parametrize("rule", ["drop", "mod"])
def test_invalid_ids(rule: str, rng: np.random.Generator) -> None:
    twin = Twin(
        {"table": Table(invalid_ids=rule, combiner="mean")},
        {"a": Feature("table", cases.INPUT_BY_NAME["ragged"], weighted=True)},
        te.Adagrad(RATE),
        strategy=SoftwareTPUStrategy("v4", 2, meeting_timeout=20),
        make=Readable,
    )
    batch = twin.draw(rng)
    for replica, bad in zip(batch.values, (-3, 2**40), strict=True):
        ids = cases.values_of(replica["a"]).astype(np.int64)
        ids[::3] = bad
        replica["a"] = cases.with_values(replica["a"], ids)
    twin.step(rng, batch)
    twin.check_variables()


def test_quantization(rng: np.random.Generator) -> None:
    twin = Twin(
        {"table": Table(quantization=te.QuantizationConfig(5, -1.0, 1.0))},
        {"a": Feature("table", cases.INPUT_BY_NAME["sparse2"], weighted=True)},
        te.SGD(RATE),
        strategy=SoftwareTPUStrategy("v4", 2, meeting_timeout=20),
        make=Readable,
    )
    twin.run(rng, 2)
