"""The rules beyond TensorFlow's five on the software engine of TPU v2 to v4.

Against the reference and the host engine; all in one embedding, a table for each
variant, so that tables are not mixed up either.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import optimizer_cases
import pytest
import tensorflow as tf
from conformance import cases
from conformance.twin import Feature, Table, Twin
from everywhere.twins import Queue
from tpu_v2_v4.test_checkpoints import assert_same_bits

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.testing import SoftwareTPUStrategy

RATE = 0.25
KINDS = ("dense2", "ragged", "sparse_sequence")
VARIANTS: list[Any] = [
    *(
        case.cls(learning_rate=RATE / (1 + number), **options)
        for case in optimizer_cases.OPTIMIZERS
        if case.cls.tpu and not case.stock
        for number, options in enumerate(case.options)
    ),
    te.FrequencyEstimator(tau=0.25, max_delta=8.0, outlier_threshold=2.0),
]


def make_twin(strategy: tf.distribute.Strategy, seed: int) -> tuple[Twin, Any]:
    """All variants, and what draws the same batches for equal seeds."""
    tables, features = {}, {}
    for number, optimizer in enumerate(VARIANTS):
        name = f"{type(optimizer).__name__}_{number}"
        dim = optimizer.table_dim or (4, 3, 8)[number % 3]
        combiner = cases.COMBINERS[number // 3 % 3]
        tables[name] = Table(dim=dim, combiner=combiner, optimizer=optimizer)
        kind = cases.INPUT_BY_NAME[KINDS[number % 3]]
        features[name] = Feature(name, kind, weighted=bool(number % 2))
    twin = Twin(tables, features, strategy=strategy, make=Queue)
    return twin, np.random.default_rng(seed)


def state(twin: Twin) -> dict[str, np.ndarray]:
    """All tables and slots."""
    rows = twin.embedding.core.checkpoint_rows()
    return {f"{t}/{a}": r.numpy() for t, rs in rows.items() for a, r in rs.items()}


def test_on_two_devices() -> None:
    strategy = SoftwareTPUStrategy("v4", 2, meeting_timeout=20)
    twin, rng = make_twin(strategy, 2)
    twin.run(rng, 2)


def test_checkpoints(tmp_path: pathlib.Path) -> None:
    """TPU and host with the same batches; then each goes on from the other's tables."""
    tpu, for_tpu = make_twin(SoftwareTPUStrategy("v4", 1, meeting_timeout=20), 1)
    host, for_host = make_twin(tf.distribute.OneDeviceStrategy("CPU:0"), 1)
    tpu.run(for_tpu, 2)
    host.run(for_host, 2)
    expected = state(tpu)
    slots = [slot for optimizer in VARIANTS for slot in optimizer.slots]
    assert len(expected) == len(VARIANTS) + len(slots)
    checkpoint.restore(
        host.embedding, checkpoint.save(tpu.embedding, str(tmp_path / "of_tpu"))
    )
    assert_same_bits(state(host), expected)
    host.run(for_host, 1)
    tpu.run(for_tpu, 1)
    expected = state(host)
    path = tf.train.Checkpoint(e=host.embedding).write(str(tmp_path / "of_host"))
    tf.train.Checkpoint(e=tpu.embedding).read(path).assert_consumed()
    assert_same_bits(state(tpu), expected)
    tpu.run(for_tpu, 1)


@pytest.mark.parametrize("multiply", [False, True])
def test_a_rate_of_zero_for_ftrl(multiply: bool) -> None:
    """Divided by, but for one form of the rule: NaN on each engine, or none."""
    states = []
    for strategy in (
        tf.distribute.OneDeviceStrategy("CPU:0"),
        SoftwareTPUStrategy("v4", 1),
    ):
        with strategy.scope():
            table = te.TableConfig(4, 2, te.RowIdInitializer(), name="films")
            rule = te.FTRL(0.0, multiply_linear_by_learning_rate=multiply)
            embedding = te.TPUEmbedding(te.FeatureConfig(table), rule)
        embedding.enqueue(tf.constant([1, 3, 3]))

        def step(embedding: te.TPUEmbedding = embedding) -> None:
            embedding.apply_gradients(tf.ones_like(embedding.dequeue()))

        strategy.run(step)
        rows = embedding.core.checkpoint_rows()["films"]
        states.append({name: array.numpy() for name, array in rows.items()})
    assert_same_bits(states[1], states[0])
    bad = np.isnan(states[0]["parameters"][:, 0])
    assert bad.tolist() == [False, not multiply, False, not multiply]


def test_an_option_that_is_not_published() -> None:
    strategy = SoftwareTPUStrategy("v4", 1)
    with strategy.scope():
        feature = te.FeatureConfig(te.TableConfig(4, 1, name="films"))
        embedding = te.TPUEmbedding(feature, te.FrequencyEstimator(weight_exponent=0.5))
        with pytest.raises(
            tf.errors.UnimplementedError,
            match=r"frequency_estimator\.weight_exponent is 0\.5, but .* not published",
        ):
            embedding.build(2)
