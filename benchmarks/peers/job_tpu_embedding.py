"""te.TPUEmbedding under MultiWorkerMirroredStrategy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import tpu_embedding as te
from benchmarks.peers.job import Job, Running

_OPTIMIZERS: dict[str, Any] = {
    "sgd": te.SGD,
    "adagrad": te.Adagrad,
    "rowwise_adagrad": te.RowwiseAdagrad,
}


def start(job: Job) -> Running:
    """Joins the job and makes the tables."""
    tf.config.threading.set_intra_op_parallelism_threads(job.threads)
    tf.config.threading.set_inter_op_parallelism_threads(job.threads)
    job.set_tf_config()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    zeros = tf.zeros_initializer()
    features = [
        te.FeatureConfig(
            te.TableConfig(rows, job.scenario.dim, zeros, combiner="sum", name=f"t{t}")
        )
        for t, rows in enumerate(job.rows)
    ]
    with strategy.scope():
        embedding = te.TPUEmbedding(
            features,
            _OPTIMIZERS[job.optimizer](0.01),
            distributed_options=te.DistributedOptions(job.placement, job.wire),
        )
    ones = [tf.ones([job.scenario.batch_size, job.scenario.dim])] * len(features)

    @tf.function
    def train(ids: list[tf.Tensor]) -> None:
        embedding.enqueue(ids)
        embedding.dequeue()
        embedding.apply_gradients(ones)

    batches = [[tf.constant(ids) for ids in batch] for batch in job.batches()]
    engine: Any = embedding.core.create_engine()
    channel = getattr(engine, "channel", None)  # A job of one process has none.

    def bytes_sent() -> int:
        return sum(channel.traffic().bytes_sent.values()) if channel else 0

    return Running(
        lambda number: train(batches[number % len(batches)]),
        lambda: channel and channel.agree("construction", "the timing"),
        bytes_sent,
    )
