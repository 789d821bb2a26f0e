"""A TPUEstimator program of TensorFlow 1, with the names that TensorFlow 2.16 removed.

    python -m tpu_embedding run examples/drop_in/estimator.py

Recommends items to users, as programs of neural collaborative filtering do. Prints the
loss of an evaluation before and after training.
"""

import tempfile

import numpy as np
import tensorflow.compat.v1 as tf  # pyright: ignore[reportMissingImports]

tf.logging.set_verbosity(tf.logging.ERROR)
USERS, ITEMS, BATCH = 40, 60, 64
tpu = tf.estimator.tpu
column = tf.feature_column.categorical_column_with_identity
columns = [
    tf.tpu.experimental.embedding_column(column("user", USERS), dimension=8),
    tf.tpu.experimental.embedding_column(column("item", ITEMS), dimension=8),
]


def model_fn(features, labels, mode, params):
    del params
    vectors = [
        tf.reshape(part, [-1, 8])
        for part in tf.split(dense(features), len(columns), axis=1)
    ]
    score = tf.reduce_sum(vectors[0] * vectors[1], axis=1)
    loss = tf.losses.sigmoid_cross_entropy(labels, score)
    train_op = None
    if mode == tf.estimator.ModeKeys.TRAIN:
        optimizer = tf.tpu.CrossShardOptimizer(tf.train.GradientDescentOptimizer(0.1))
        scale = tf.get_variable("scale", initializer=1.0)
        loss += 0.0 * scale
        train_op = optimizer.minimize(loss, tf.train.get_or_create_global_step())
    return tpu.TPUEstimatorSpec(mode=mode, loss=loss, train_op=train_op)


def dense(features):
    import tpu_embedding.estimator

    return tpu_embedding.estimator.dense_features(features, columns)


def input_fn(params):
    rng = np.random.default_rng(0)
    tastes = rng.normal(size=(USERS, 3)) @ rng.normal(size=(3, ITEMS))
    users, items = rng.integers(0, USERS, 4096), rng.integers(0, ITEMS, 4096)
    features = {"user": users[:, None], "item": items[:, None]}
    labels = (tastes[users, items] > 0).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((features, labels)).repeat()
    return data.batch(params["batch_size"], drop_remainder=True)


resolver = tf.distribute.cluster_resolver.TPUClusterResolver("")
estimator = tpu.TPUEstimator(
    model_fn=model_fn,
    use_tpu=True,
    train_batch_size=BATCH,
    eval_batch_size=BATCH,
    config=tpu.RunConfig(
        cluster=resolver,
        model_dir=tempfile.mkdtemp(),
        tf_random_seed=1,
        tpu_config=tpu.TPUConfig(iterations_per_loop=50),
    ),
    embedding_config_spec=tpu.experimental.EmbeddingConfigSpec(
        feature_columns=columns,
        optimization_parameters=tf.tpu.experimental.AdagradParameters(0.3),
    ),
)
estimator.train(input_fn, steps=1)
before = estimator.evaluate(input_fn, steps=16)["loss"]
estimator.train(input_fn, steps=400)
after = estimator.evaluate(input_fn, steps=16)["loss"]
print(f"loss {before:.4f} to {after:.4f}")
