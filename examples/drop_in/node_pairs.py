"""A TFRS program: learns vectors of the nodes of a graph from its edges.

    pip install tensorflow-recommenders==0.7.7 tf_keras==2.21.*
    python -m tpu_embedding run --on mirrored:2 examples/drop_in/node_pairs.py

Like google-research's graph_embedding, it has two features of one table, a distance and
a custom training loop under TPUStrategy. Prints the losses of the first and last step.
"""

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs  # pyright: ignore[reportMissingImports]

NODES, BATCH, STEPS = 30, 16, 60

resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="")
tf.tpu.experimental.initialize_tpu_system(resolver)
strategy = tf.distribute.TPUStrategy(resolver)
embedding_api = tf.tpu.experimental.embedding

with strategy.scope():
    optimizer = tf.keras.optimizers.legacy.SGD(learning_rate=0.5)
    table = embedding_api.TableConfig(
        NODES,
        8,
        initializer=tf.keras.initializers.RandomUniform(-0.5, 0.5, seed=1),
        name="nodes",
    )
    features = {
        side: embedding_api.FeatureConfig(table=table) for side in ("left", "right")
    }
    inputs = {
        side: tf.keras.Input((), BATCH, dtype=tf.int32, name=side) for side in features
    }
    layer = tfrs.layers.embedding.TPUEmbedding(
        feature_config=features, optimizer=optimizer
    )
    vectors = layer(inputs)
    score = tf.keras.layers.Dot(axes=1)([vectors["left"], vectors["right"]])
    model = tf.keras.Model(inputs, score)


def dataset(context):
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, NODES, (2, 4096)).astype(np.int32)
    labels = (np.abs(left - right) < 5).astype(np.float32)[:, None]
    size = context.get_per_replica_batch_size(BATCH)
    data = tf.data.Dataset.from_tensor_slices(({"left": left, "right": right}, labels))
    return data.repeat().batch(size, drop_remainder=True)


batches = iter(strategy.distribute_datasets_from_function(dataset))


@tf.function
def train(iterator):
    def step(pairs, labels):
        with tf.GradientTape() as tape:
            entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels, model(pairs))
            loss = tf.reduce_sum(entropy) / BATCH
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    losses = strategy.run(step, args=next(iterator))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


losses = [float(train(batches)) for _ in range(STEPS)]
print(f"loss {losses[0]:.6f} to {losses[-1]:.6f}")
