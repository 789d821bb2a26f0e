"""A program for TPUs without embedding hardware (v5e): TPUEmbeddingV0.

    python -m tpu_embedding run --on v5e:2 examples/drop_in/variables.py

Prints the losses of the first and last step.
"""

import tensorflow as tf

BATCH, STEPS, ROWS = 16, 30, 24

resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu="")
strategy = tf.distribute.TPUStrategy(resolver)
embedding_api = tf.tpu.experimental.embedding
with strategy.scope():
    table = embedding_api.TableConfig(
        vocabulary_size=ROWS, dim=4, initializer=tf.ones_initializer(), combiner="mean"
    )
    embedding = embedding_api.TPUEmbeddingV0(
        feature_config={"seen": embedding_api.FeatureConfig(table=table)},
        optimizer=embedding_api.SGD(learning_rate=0.1),
    )
    embedding.build()
    kernel = tf.Variable(tf.ones([4, 1]))


def dataset(context):
    ids = tf.range(BATCH * 8)
    size = context.get_per_replica_batch_size(BATCH)
    data = tf.data.Dataset.from_tensor_slices(
        ({"seen": ids % ROWS}, tf.cast(ids % 2, tf.float32))
    )
    return data.repeat().batch(size, drop_remainder=True)


batches = iter(strategy.distribute_datasets_from_function(dataset))


@tf.function
def train(iterator):
    def step(rows, labels):
        variables = [*embedding.embedding_tables.values(), kernel]
        with tf.GradientTape() as tape:
            score = tf.squeeze(embedding(rows)["seen"] @ kernel, -1)
            loss = tf.reduce_sum((score - labels) ** 2) / BATCH
        gradients = tape.gradient(loss, variables)
        context = tf.distribute.get_replica_context()
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        totals = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        for variable, total in zip(variables, totals, strict=True):
            variable.assign_sub(0.1 * total)
        return loss

    losses = strategy.run(step, args=next(iterator))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


losses = [float(train(batches)) for _ in range(STEPS)]
print(f"loss {losses[0]:.6f} to {losses[-1]:.6f}")
