"""TensorFlow's variables under MultiWorkerMirroredStrategy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.peers.job import Job, Running


def start(job: Job) -> Running:
    """Joins the job and makes the tables, whole in each process."""
    if job.optimizer not in ("sgd", "adagrad") or job.wire != "float32":
        raise NotImplementedError(f"TensorFlow has no {job.optimizer}, {job.wire}.")
    tf.config.threading.set_intra_op_parallelism_threads(job.threads)
    tf.config.threading.set_inter_op_parallelism_threads(job.threads)
    job.set_tf_config()
    distribute: Any = tf.distribute
    ring = distribute.experimental.CommunicationImplementation.RING
    options = distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = distribute.MultiWorkerMirroredStrategy(communication_options=options)
    optimizers: Any = tf.compat.v1.train
    with strategy.scope():
        tables = [
            tf.Variable(tf.zeros((rows, job.scenario.dim)), name=f"t{t}")
            for t, rows in enumerate(job.rows)
        ]
        optimizer = (
            optimizers.AdagradOptimizer(0.01)
            if job.optimizer == "adagrad"
            else optimizers.GradientDescentOptimizer(0.01)
        )

    def replica(batch: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [
                    tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
                    for table, ids in zip(tables, batch, strict=True)
                ]
            )
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))

    @tf.function
    def train(batch: Any) -> None:
        strategy.run(replica, args=(batch,))

    @tf.function
    def barrier() -> Any:
        def meet() -> Any:
            context: Any = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tf.constant(1.0))

        return strategy.run(meet)

    batches = [[tf.constant(ids) for ids in batch] for batch in job.batches()]
    return Running(lambda number: train(batches[number % len(batches)]), barrier)
