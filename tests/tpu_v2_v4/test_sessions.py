"""An embedding ends with the initialization of its TPU; the next one is not its own."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.testing import SoftwareTPUStrategy

IDS = tf.constant([1, 2])
ENDED = "embedding are lost, because the TPU was initialized again"


def make(strategy: SoftwareTPUStrategy) -> te.TPUEmbedding:
    with strategy.scope():
        films = te.TableConfig(4, 2, te.RowIdInitializer(), name="films")
        embedding = te.TPUEmbedding(te.FeatureConfig(films), te.SGD(0.25))
        embedding.build(2)
    return embedding


def calls_of(
    old: te.TPUEmbedding, strategy: SoftwareTPUStrategy, folder: Any
) -> list[Any]:
    """What can be done with an embedding, two of it traced already."""

    @tf.function
    def enqueue() -> None:
        old.enqueue(IDS, training=False)

    @tf.function
    def step() -> Any:
        def program(ids: Any) -> Any:
            old.enqueue(ids, training=False)
            return old.dequeue()

        return strategy.run(program, args=(IDS,))

    def apply() -> None:
        old.apply_gradients(tf.ones([2, 2]))

    enqueue()
    step()
    return [
        enqueue,
        step,
        lambda: old.enqueue(IDS),
        lambda: old.enqueue(IDS, device=strategy.extended.worker_devices[1]),
        lambda: strategy.run(old.dequeue),
        lambda: strategy.run(apply),
        lambda: checkpoint.save(old, folder / "saved"),
        old.core.load_checkpoint_rows,
    ]


def test_what_was_made_before_has_ended(tmp_path: Any) -> None:
    """Not even with the same configuration does it get into the next one's way."""
    strategy = SoftwareTPUStrategy("v4", 2, meeting_timeout=20)
    calls = calls_of(make(strategy), strategy, tmp_path)

    def check() -> None:
        for call in calls:
            with pytest.raises(tf.errors.FailedPreconditionError, match=ENDED):
                call()

    # As `initialize_tpu_system` does; nothing is configured, then the same again.
    again = SoftwareTPUStrategy("v4", 2, meeting_timeout=20)
    check()
    new = make(again)
    check()
    assert not list(tmp_path.iterdir())
    new.enqueue(IDS)
    assert again.run(new.dequeue).values[1][:, 0].numpy().tolist() == [1, 2]
