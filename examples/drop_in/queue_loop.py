"""A program for TPU v4 in the form that TensorFlow documents: train, evaluate, serve.

    python -m tpu_embedding run --on v4:2 examples/drop_in/queue_loop.py

It uses only names of TensorFlow. Prints the loss of the last step, and a sum of
served vectors.
"""

import tempfile

import tensorflow as tf

BATCH, STEPS, ROWS = 16, 30, 24

resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="")
tf.config.experimental_connect_to_cluster(resolver)
tf.tpu.experimental.initialize_tpu_system(resolver)
strategy = tf.distribute.TPUStrategy(resolver)
embedding_api = tf.tpu.experimental.embedding

films = embedding_api.TableConfig(
    vocabulary_size=ROWS, dim=4, initializer=tf.ones_initializer(), combiner="mean"
)
features = {
    "seen": embedding_api.FeatureConfig(table=films),
    "liked": embedding_api.FeatureConfig(table=films),
}
with strategy.scope():
    embedding = embedding_api.TPUEmbedding(
        feature_config=features, optimizer=embedding_api.Adagrad(learning_rate=0.1)
    )


def dataset(context):
    ids = tf.range(BATCH * 8)
    rows = {"seen": ids % ROWS, "liked": (ids * 7) % ROWS}
    labels = tf.cast(ids % 2, tf.float32)
    size = context.get_per_replica_batch_size(BATCH)
    data = tf.data.Dataset.from_tensor_slices((rows, labels)).repeat()
    return data.batch(size, drop_remainder=True)


options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
batches = iter(strategy.distribute_datasets_from_function(dataset, options))


@tf.function
def train(iterator):
    def step(labels):
        with tf.GradientTape() as tape:
            activations = embedding.dequeue()
            tape.watch(activations)
            score = tf.reduce_sum(activations["seen"] * activations["liked"], -1)
            loss = tf.reduce_sum((score - labels) ** 2) / BATCH
        embedding.apply_gradients(tape.gradient(loss, activations))
        return loss

    loss = 0.0
    for _ in tf.range(STEPS):
        rows, labels = next(iterator)
        embedding.enqueue(rows, training=True)
        losses = strategy.run(step, args=(labels,))
        loss = strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
    return loss


@tf.function
def evaluate(iterator):
    def step():
        return tf.reduce_sum(embedding.dequeue()["seen"])

    rows, _ = next(iterator)
    embedding.enqueue(rows, training=False)
    return strategy.run(step)


loss = train(batches)
evaluate(batches)
folder = tempfile.mkdtemp()
path = tf.train.Checkpoint(embedding=embedding).save(f"{folder}/checkpoint")
serving = embedding_api.TPUEmbeddingForServing(
    feature_config=features, optimizer=embedding_api.Adagrad(learning_rate=0.1)
)
serving.build()
tf.train.Checkpoint(embedding=serving).restore(path).expect_partial()
served = serving(features={k: tf.constant([1, 2]) for k in features}, weights=None)
print(f"loss {float(loss):.6f} served {float(tf.reduce_sum(served['seen'])):.6f}")
