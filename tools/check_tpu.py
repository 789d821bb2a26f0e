"""Compiles the options of the SparseCore engine by libtpu: `make check-tpu`.

Runs with the Python of an environment with the extra `tpu-check`, one process for each
topology, and prints a line for each program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

TOPOLOGIES = ("v5p:2x2x1", "v6e:2x2", "7x:2x2x1")
SAMPLES = 64


def table(optimizer: Any = None, name: str = "t", **options: Any) -> Any:
    """A table of 10,000 rows of 16 columns."""
    import tpu_embedding as te

    options = {"combiner": "mean", **options}
    return te.TableConfig(
        10_000, 16, optimizer=optimizer or te.Adagrad(0.1), name=name, **options
    )


def keras_step(strategy: Any) -> Any:
    """The training step of a Keras model."""
    import keras
    import tensorflow as tf

    import tpu_embedding as te
    from tpu_embedding.keras import TPUEmbedding

    with strategy.scope():
        layer = TPUEmbedding(
            te.FeatureConfig(table(), name="f"),
            te.Adagrad(0.1),
            batch_size=SAMPLES * strategy.num_replicas_in_sync,
        )
        layer.build()
        dense_part = keras.Sequential(
            [
                keras.layers.Dense(32, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.1),
                keras.layers.Dense(1),
            ]
        )
        dense_part.build((None, 16))
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(dense_part.trainable_variables)
    (virtual,) = layer.trainable_variables

    def step(ids: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            found = dense_part(layer(ids), training=True)[:, 0]
            loss = tf.reduce_mean(tf.square(found - labels))
        variables = dense_part.trainable_variables
        gradients = tape.gradient(loss, [virtual, *variables])
        optimizer.apply_gradients(zip(gradients[1:], variables, strict=True))
        return loss

    return step, [tf.TensorSpec([SAMPLES], tf.int64), tf.TensorSpec([SAMPLES])]


def v0(strategy: Any) -> Any:
    """A lookup of TPUEmbeddingV0."""
    import tensorflow as tf

    import tpu_embedding as te

    with strategy.scope():
        embedding = te.TPUEmbeddingV0(te.FeatureConfig(table(), name="f"))

    def step(ids: Any) -> Any:
        return tf.reduce_sum(embedding(ids))

    return step, [tf.TensorSpec([SAMPLES], tf.int64)]


def sparse_core_cases() -> dict[str, Callable[..., Any]]:
    """The options of the SparseCore engine: name -> builder of a step."""
    import tensorflow as tf

    import tpu_embedding as te

    dense = tf.TensorSpec([SAMPLES], tf.int64)
    ragged = tf.RaggedTensorSpec([SAMPLES, None], tf.int64)
    sparse = tf.SparseTensorSpec([SAMPLES, None], tf.int64)

    def embed(
        tables: Any = None, spec: Any = dense, shape: Any = (SAMPLES,), **options: Any
    ) -> Callable[..., Any]:
        tables = [tables or table()] if not isinstance(tables, list) else tables
        config = te.SparseCoreEmbeddingConfig(**options.pop("config", {}))

        def build(strategy: Any) -> Any:
            features = {
                f"f{i}": te.FeatureConfig(own, output_shape=shape, name=f"f{i}")
                for i, own in enumerate(tables)
            }
            with strategy.scope():
                embedding = te.TPUEmbeddingV2(
                    features,
                    te.SGD(0.1),
                    sparse_core_embedding_config=config,
                    **options,
                )
            embedding.build()

            def step(ids: Any) -> Any:
                activations, kept = embedding(ids)
                embedding.apply_gradients(
                    {name: tf.tanh(a) for name, a in activations.items()}, kept
                )
                return tf.add_n([tf.reduce_sum(a) for a in activations.values()])

            return step, [dict.fromkeys(features, spec)]

        return build

    def rule(gradient: Any, row: Any, slots: Any, rate: Any, numbers: Any) -> Any:
        square = numbers[0] * slots[0] + gradient * gradient
        return row - rate * numbers[1] * gradient / tf.sqrt(square), square

    def scalar_rule(gradient: Any, row: Any, _: Any, rate: Any, numbers: Any) -> Any:
        return row - tf.fill([1, 16], rate * numbers[0]) * gradient

    def combine(valency: Any, vectors: Any, weights: Any) -> Any:
        count = tf.maximum(tf.cast(valency, tf.float32), 1.0)
        return tf.linalg.matvec(vectors[:3], weights, transpose_a=True) / count

    custom = te.CustomOptimizer(rule, 0.1, ["a"], [0.1], [0.9, 2.0])
    combiner = te.CustomCombiner(combine, 4, 3, tf.ones_initializer(), 0.1)
    plain_combiner = te.CustomCombiner(lambda _, vectors: tf.reduce_sum(vectors, 0), 4)

    ftrl = te.FTRL(
        0.1,
        l1_regularization_strength=0.1,
        l2_regularization_strength=0.1,
        beta=0.5,
        multiply_linear_by_learning_rate=True,
    )
    nesterov = te.AdagradMomentum(
        0.1, momentum=0.9, use_nesterov=True, exponent=3, beta2=0.9
    )
    clipped = te.Adagrad(0.1, clip_weight_min=-1.0, clip_weight_max=1.0)
    shared = table()
    return {
        "minibatching": embed(config={"minibatching": True}),
        "id dropping": embed(
            config={"allow_id_dropping": True, "max_ids_per_chip_per_sample": 8}
        ),
        "check_numerics": embed(check_numerics=True),
        "callable rate": embed(table(te.Adam(lambda: tf.constant(0.1)))),
        "clipping": embed(table(clipped)),
        "Nesterov, exponent, beta2": embed(table(nesterov)),
        "FTRL options": embed(table(ftrl)),
        "Adam, other root": embed(table(te.Adam(0.1, sum_inside_sqrt=False))),
        "sequence": embed(spec=ragged, shape=(SAMPLES, 5)),
        "ragged": embed(spec=ragged),
        "sparse": embed(spec=sparse),
        "shared table": embed([shared, shared]),
        "no stacking": embed(
            [table(name=name) for name in "abc"],
            config={"disable_table_stacking": True},
        ),
        "quantization": embed(
            table(quantization_config=te.QuantizationConfig(16, -1.0, 1.0))
        ),
        "pipelined": embed(pipeline_execution_with_tensor_core=True),
        "invalid_ids mod": embed(table(invalid_ids="mod")),
        "custom optimizer": embed(table(custom)),
        "custom scalars": embed(
            table(te.CustomOptimizer(scalar_rule, 0.1, None, None, [2.0]))
        ),
        "custom combiner": embed(table(combiner=combiner)),
        "combiner, no weights": embed(table(combiner=plain_combiner)),
        "both custom": embed(table(custom, combiner=combiner)),
        "Keras train step": keras_step,
    }


def run_topology(topology: str, names: list[str]) -> int:
    """Compiles the cases for one topology; returns how many failed."""
    from tpu_embedding import tpu_generations
    from tpu_embedding.testing import tpu_compiler

    cases = sparse_core_cases()
    generation, _ = tpu_generations.topology(topology)
    if generation.embedding == "none":
        cases = {"TPUEmbeddingV0": v0}
    failed = 0
    for name, build in cases.items():
        if names and name not in names:
            continue
        start = time.process_time()
        facts = tpu_compiler.check(build, topology)
        seconds = time.process_time() - start
        expected = sum(
            s["array_bytes"] * s["arrays"] + s["buffer_bytes"] for s in facts["stacks"]
        )
        found = facts.get("argument_bytes", 0)
        failed += "error" in facts
        print(
            f"{topology:<10} {name:<26} "
            + (facts.get("error", "")[:1500] or f"compiles, {seconds:5.1f} s of CPU")
            + f"; arguments {found} bytes, planned {expected}; limits "
            + f"{facts.get('compiled_limits')}, preprocessor "
            + f"{[(s['max_ids'], s['max_unique_ids']) for s in facts['stacks']]}",
            flush=True,
        )
    return failed


def main() -> int:
    """Runs each topology in a process of its own."""
    if len(sys.argv) > 2 and sys.argv[1] == "--one":
        return min(run_topology(sys.argv[2], sys.argv[3:]), 100)
    from tpu_embedding.testing.compilation import ENVIRONMENT, PYTHON_VARIABLE

    python = os.environ.get(PYTHON_VARIABLE, sys.executable)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.getcwd()}
    failed = 0
    for topology in (*TOPOLOGIES, "v5e:2x2"):
        command = [python, __file__, "--one", topology, *sys.argv[1:]]
        failed += subprocess.run(command, env=environment, check=False).returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
