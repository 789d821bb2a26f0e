"""A program for TPU v6e: TPUEmbeddingV2 with a custom optimizer and a combiner.

    python -m tpu_embedding run --on v6e:2 examples/drop_in/sparse_core.py

Prints the losses of the first and last step.
"""

import tensorflow as tf

BATCH, STEPS, ROWS = 16, 30, 24

resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu="")
strategy = tf.distribute.TPUStrategy(resolver)
embedding_api = tf.tpu.experimental.embedding

films = embedding_api.TableConfig(
    vocabulary_size=ROWS,
    dim=8,
    initializer=tf.ones_initializer(),
    optimizer=embedding_api.Adagrad(learning_rate=0.1),
    combiner="sum",
    name="films",
)
users = embedding_api.TableConfig(
    vocabulary_size=ROWS,
    dim=8,
    initializer=tf.ones_initializer(),
    optimizer=embedding_api.SGD(learning_rate=0.05),
    combiner="mean",
    name="users",
)
replicas = strategy.num_replicas_in_sync
features = {
    name: embedding_api.FeatureConfig(
        table=table, output_shape=[BATCH // replicas], name=name
    )
    for name, table in (("seen", films), ("user", users))
}
with strategy.scope():
    embedding = embedding_api.TPUEmbeddingV2(
        feature_config=features, optimizer=embedding_api.SGD(learning_rate=0.1)
    )
    embedding.build()


def dataset(context):
    ids = tf.range(BATCH * 8)
    rows = {"seen": ids % ROWS, "user": (ids * 7) % ROWS}
    size = context.get_per_replica_batch_size(BATCH)
    data = tf.data.Dataset.from_tensor_slices((rows, tf.cast(ids % 2, tf.float32)))
    return data.repeat().batch(size, drop_remainder=True)


options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
batches = iter(strategy.distribute_datasets_from_function(dataset, options))


@tf.function
def train(iterator):
    def step(rows, labels):
        with tf.GradientTape() as tape:
            activations, preserved = embedding(rows)
            tape.watch(activations)
            score = tf.reduce_sum(activations["seen"] * activations["user"], -1)
            loss = tf.reduce_sum((score - labels) ** 2) / BATCH
        gradients = tape.gradient(loss, activations)
        embedding.apply_gradients(gradients, preserved_outputs=preserved)
        return loss

    losses = strategy.run(step, args=next(iterator))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


losses = [float(train(batches)) for _ in range(STEPS)]
print(f"loss {losses[0]:.6f} to {losses[-1]:.6f}")
