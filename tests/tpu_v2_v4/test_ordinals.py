"""Which of TensorFlow's enqueue ops takes a batch, and why.

In a program the ordinal is -1. When the compiler takes the op out of the program, one
for each replica, it marks the fixed forms with the replica, from which the ordinal
follows; the dynamic form, whose ordinal is a tensor, it leaves as it is. So that one is
for calls outside of programs, where the caller may give the device as a tensor. The
ragged forms say the table of each feature, as the configuration does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from described_tpu import Described
from everywhere.twins import Queue
from tensorflow.python.distribute import distribute_utils
from tpu_v2_v4.test_conformance import KINDS, make_strategy, make_twin

import tpu_embedding as te
from tpu_embedding import distribution
from tpu_embedding.engines.base import check_device

ENQUEUE = "EnqueueTPUEmbeddingArbitraryTensorBatch"
INPUTS = "%s, %i, %w, %m"
TYPES = "tensor<3xi32>, tensor<2xi64>, tensor<0xf32>, tensor<!tf_type.string>"
FIXED = {
    "EnqueueTPUEmbeddingArbitraryTensorBatch": "",
    "EnqueueTPUEmbeddingRaggedTensorBatch": ", table_ids = [0]",
}
PROGRAM = """
func.func @program(%s: tensor<3xi32>, %i: tensor<2xi64>, %w: tensor<0xf32>,
                   %m: tensor<!tf_type.string>) {{
  tf_executor.graph {{
    %c = tf_executor.island {{
      "tf_device.replicate"() ({{
        {op}
        tf_device.return
      }}) {{n = 2 : i32, operandSegmentSizes = array<i32: 0, 0>}} : () -> ()
      tf_executor.yield
    }}
    tf_executor.fetch
  }}
  return
}}
"""


def replicated(op: str) -> str:
    """What the compiler makes of an op in a program of two replicas."""
    return tf.mlir.experimental.run_pass_pipeline(
        PROGRAM.format(op=op), "func.func(tf-replicate-to-island)"
    )


@pytest.mark.parametrize("op", FIXED)
def test_fixed_forms_are_marked_with_their_replica(op: str) -> None:
    made = replicated(
        f'"tf.{op}"({INPUTS}) {{device_ordinal = -1 : i64, combiners = ["sum"]'
        f"{FIXED[op]}}} : ({TYPES}) -> ()"
    )
    assert made.count(f'"tf.{op}"') == 2
    assert "_xla_replica_id = 0" in made
    assert "_xla_replica_id = 1" in made


def test_the_dynamic_form_is_not() -> None:
    made = replicated(
        '%o = "tf.Const"() {value = dense<-1> : tensor<i32>} : () -> tensor<i32>\n'
        f'"tf.DynamicEnqueueTPUEmbeddingArbitraryTensorBatch"({INPUTS}, %o) '
        f'{{combiners = ["sum"]}} : ({TYPES}, tensor<i32>) -> ()'
    )
    assert made.count('"tf.Dynamic') == 2
    assert "_xla_replica_id" not in made


class CoreByCore(Queue):
    """Enqueues for one core after the other, by its number, the last one first."""

    def enqueue(
        self, features: Any, weights: Any = None, training: bool = True, **others: Any
    ) -> None:
        for core in reversed(range(self.core.topology.num_replicas)):
            own: Any = distribute_utils.select_replica(core, (features, weights))
            device = tf.constant(core)
            super().enqueue(own[0], own[1], training, device=device, **others)


def test_the_dynamic_form(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf.raw_ops, ENQUEUE, None)
    twin = make_twin(KINDS[:3], make_strategy(2), make=CoreByCore)
    twin.run(rng, 2)
    twin.evaluate(twin.draw(rng))


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_ragged_form_queues_the_same(
    dynamic: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the same splits: it can queue nothing that the other form cannot."""
    twin = make_twin(KINDS, make_strategy(2))
    tables = [feature.table for feature in twin.embedding.core.plan.features]

    def enqueue(
        sample_indices_or_row_splits: Any, device_ordinal: int, **inputs: Any
    ) -> Any:
        form = "DynamicEnqueue" if dynamic else "Enqueue"
        return getattr(tf.raw_ops, f"{form}TPUEmbeddingRaggedTensorBatch")(
            sample_splits=sample_indices_or_row_splits,
            device_ordinal=tf.constant(device_ordinal) if dynamic else device_ordinal,
            table_ids=tables,
            **inputs,
        )

    monkeypatch.setattr(tf.raw_ops, ENQUEUE, enqueue)
    twin.run(rng, 1)
    twin.evaluate(twin.draw(rng))


def test_a_device_known_only_when_the_graph_runs() -> None:
    strategy = make_strategy(4)
    with strategy.scope():
        table = te.TableConfig(9, 2, te.RowIdInitializer())
        embedding = te.TPUEmbedding(te.FeatureConfig(table), te.SGD(0.5))

    @tf.function
    def enqueue(ids: Any) -> None:
        for core in tf.range(tf.shape(ids)[0]):
            embedding.enqueue(ids[core], training=False, device=core)

    ids = tf.constant([[0, 1], [2, 3], [4, 5], [6, 7]])
    enqueue(ids)
    found = strategy.run(embedding.dequeue).values
    assert [own[:, 0].numpy().tolist() for own in found] == ids.numpy().tolist()
    first = ids[0]
    known = r"`device` of enqueue is 4, but the TPU devices .* are 0, 1, 2, 3\."
    for call in (embedding.enqueue, tf.function(embedding.enqueue)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=known):
            call(first, device=tf.constant(4))
    for wrong in (tf.constant(0.0), tf.constant([0])):
        with pytest.raises(ValueError, match="or its ordinal, an integer scalar"):
            embedding.enqueue(first, device=wrong)

    def inside(ids: Any) -> None:
        embedding.enqueue(ids, device=strategy.extended.worker_devices[0])

    with pytest.raises(ValueError, match=r"not supported inside strategy\.run"):
        strategy.run(inside, args=(first,))


def test_cores_of_a_replica_one_by_one() -> None:
    """Each takes a part of the replica's batch, the first time and later."""
    strategy = make_strategy(4, 2)
    with strategy.scope():
        table = te.TableConfig(9, 2, te.RowIdInitializer())
        embedding = te.TPUEmbedding(te.FeatureConfig(table), te.SGD(0.5))
    for make in (tf.constant, lambda core: f"/device:CPU:{core}"):
        for core in range(4):
            ids = tf.ragged.constant([[core], [core + 4, core + 5]])
            embedding.enqueue(ids, training=False, device=make(core))
        found = strategy.run(embedding.dequeue).values
        assert [own[:, 0].numpy().tolist() for own in found] == [
            [0, 4.5, 1, 5.5],
            [2, 6.5, 3, 7.5],
        ]
    with pytest.raises(ValueError, match=r"not match \(6,\).* one of 2 for the cores"):
        embedding.enqueue(tf.constant([1, 2, 3]), device=tf.constant(0))


def test_a_number_is_of_one_host() -> None:
    with tf.distribute.TPUStrategy(Described()).scope():
        topology = distribution.current()
    with pytest.raises(ValueError, match="a device of one host, but this TPU has 2"):
        check_device(topology, tf.constant(0))
