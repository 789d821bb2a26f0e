"""Compiles the options of the SparseCore engine by libtpu: `make check-tpu`.

Runs with the Python of an environment with the extra `tpu-check`, for which it builds
this package's library into build/tpu_check. One process for each topology prints a line
for each program: whether it compiles, and the plan's bytes of a device over those of
the compiler.

    make check-tpu CHECK='"custom optimizer" pipelined'   some programs
    make check-tpu CHECK='--limits --seed 3'              only check_limits.py

Without names check_rules.py and check_limits.py run at the end.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

TOPOLOGIES = ("v5p:2x2x1", "v6e:2x2", "7x:2x2x1")
SAMPLES = 64
PLAN_LIMIT = 0.05
BUILD = "build/tpu_check"
# As in a checkout, so that objects of the core are compiled once.
OBJECTS = f"build/temp.linux-x86_64-cpython-{sys.version_info[0]}{sys.version_info[1]}"


def table(optimizer: Any = None, name: str = "t", **options: Any) -> Any:
    """Makes a table of 10,000 rows of 16 columns."""
    import tpu_embedding as te

    options = {"combiner": "mean", "dim": 16, "vocabulary_size": 10_000, **options}
    return te.TableConfig(**options, optimizer=optimizer or te.Adagrad(0.1), name=name)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step of tables.

    Attributes:
      tables: The tables, each with one feature.
      kind: The kind of each feature, "dense", "ragged" or "sparse".
      shape: `output_shape` of each feature.
      queued: Whether TPUEmbedding's queue feeds it.
      enqueues: Whether the step enqueues, too.
      config: Arguments of SparseCoreEmbeddingConfig.
      options: More arguments of the class.
    """

    tables: Sequence[Any]
    kind: str = "dense"
    shape: tuple[int, ...] = (SAMPLES,)
    queued: bool = False
    enqueues: bool = False
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def features(self) -> dict[str, Any]:
        """Returns the feature configuration."""
        import tpu_embedding as te

        return {
            f"f{i}": te.FeatureConfig(own, output_shape=self.shape, name=f"f{i}")
            for i, own in enumerate(self.tables)
        }

    def build(self, strategy: Any) -> Any:
        """The step and the specs of its arguments, as `compile_step` takes them."""
        import tensorflow as tf

        import tpu_embedding as te

        cls: Any = te.TPUEmbedding if self.queued else te.TPUEmbeddingV2
        features = self.features()
        with strategy.scope():
            embedding = cls(
                features,
                te.SGD(0.1),
                sparse_core_embedding_config=self.sparse_core(),
                **self.options,
            )
        embedding.build()

        def step(*ids: Any) -> Any:
            if self.enqueues:
                embedding.enqueue(*ids)
            found = embedding.dequeue() if self.queued else embedding(*ids)
            activations, *kept = (found,) if self.queued else found
            embedding.apply_gradients(
                {name: tf.tanh(a) for name, a in activations.items()}, *kept
            )
            return tf.add_n([tf.reduce_sum(a) for a in activations.values()])

        make: Any = {
            "dense": tf.TensorSpec,
            "ragged": tf.RaggedTensorSpec,
            "sparse": tf.SparseTensorSpec,
        }[self.kind]
        shape = [self.shape[0], *([] if self.kind == "dense" else [None])]
        specs = [dict.fromkeys(features, make(shape, tf.int64))]
        return step, [] if self.queued and not self.enqueues else specs

    def sparse_core(self) -> Any:
        """Returns the configuration of SparseCores, with the limits."""
        import tpu_embedding as te

        return te.SparseCoreEmbeddingConfig(**self.config)

    def planned(self, topology: str) -> Any:
        """Returns the placement that `te.plan` gives."""
        import tpu_embedding as te

        option = "pipeline_execution_with_tensor_core"
        (place,) = [
            place
            for place in te.plan(
                self.features(),
                te.SGD(0.1),
                topologies=[topology],
                processes=[],
                sparse_core_embedding_config=self.sparse_core(),
                pipeline_execution_with_tensor_core=self.options.get(option, False),
            ).placements
            if place.kind == "tpu"
        ]
        return place


def option_cases() -> dict[str, Case]:
    """Returns the cases of 16 options of the engine."""
    import tpu_embedding as te

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
    quantized = table(quantization_config=te.QuantizationConfig(16, -1.0, 1.0))
    separate = [table(name=name) for name in "abc"]
    return {
        "minibatching": Case([table()], config={"minibatching": True}),
        "id dropping": Case(
            [table()],
            config={"allow_id_dropping": True, "max_ids_per_chip_per_sample": 8},
        ),
        "check_numerics": Case([table()], options={"check_numerics": True}),
        "callable rate": Case([table(te.Adam(constant_rate))]),
        "clipping": Case([table(clipped)]),
        "Nesterov, exponent, beta2": Case([table(nesterov)]),
        "FTRL options": Case([table(ftrl)]),
        "Adam, other root": Case([table(te.Adam(0.1, sum_inside_sqrt=False))]),
        "sequence": Case([table()], kind="ragged", shape=(SAMPLES, 5)),
        "ragged": Case([table()], kind="ragged"),
        "sparse": Case([table()], kind="sparse"),
        "shared table": Case([shared, shared]),
        "no stacking": Case(separate, config={"disable_table_stacking": True}),
        "quantization": Case([quantized]),
        "pipelined": Case([table()], options=PIPELINED),
        "invalid_ids mod": Case([table(invalid_ids="mod")]),
    }


PIPELINED = {"pipeline_execution_with_tensor_core": True}


def constant_rate() -> Any:
    """Returns a learning rate that the step computes."""
    import tensorflow as tf

    return tf.constant(0.1)


def custom_cases() -> dict[str, Case]:
    """Custom optimizers and combiners, also of a width that SparseCores pad."""
    import tensorflow as tf

    import tpu_embedding as te

    def rule(gradient: Any, row: Any, slots: Any, rate: Any, numbers: Any) -> Any:
        square = numbers[0] * slots[0] + gradient * gradient
        return row - rate * numbers[1] * gradient / tf.sqrt(square), square

    def scalar_rule(gradient: Any, row: Any, _: Any, rate: Any, numbers: Any) -> Any:
        return row - tf.fill([1, 16], rate * numbers[0]) * gradient

    def combine(valency: Any, vectors: Any, weights: Any) -> Any:
        count = tf.maximum(tf.cast(valency, tf.float32), 1.0)
        return tf.linalg.matvec(vectors[:3], weights, transpose_a=True) / count

    custom = te.CustomOptimizer(rule, 0.1, ["a"], [0.1], [0.9, 2.0])
    scalars = te.CustomOptimizer(scalar_rule, 0.1, None, None, [2.0])
    combiner = te.CustomCombiner(combine, 4, 3, tf.ones_initializer(), 0.1)
    plain = te.CustomCombiner(lambda _, vectors: tf.reduce_sum(vectors, 0), 4)
    return {
        "custom optimizer": Case([table(custom)]),
        "custom optimizer, dim 12": Case([table(custom, dim=12)]),
        "custom scalars": Case([table(scalars)]),
        "custom combiner": Case([table(combiner=combiner)]),
        "combiner without weights": Case([table(combiner=plain, dim=12)]),
        "both custom": Case([table(custom, combiner=combiner)]),
        "both custom, dim 100": Case([table(custom, combiner=combiner, dim=100)]),
    }


def queued_cases() -> dict[str, Case]:
    """Returns the cases of TPUEmbedding, whose queue on the host feeds the step."""
    import tpu_embedding as te

    tables = [table(te.Adam(0.1)), table(te.FTRL(0.1), "u", dim=40)]
    return {
        "TPUEmbedding": Case(tables, queued=True),
        "TPUEmbedding, pipelined": Case(tables, queued=True, options=PIPELINED),
        "TPUEmbedding, enqueue inside": Case(tables, queued=True, enqueues=True),
        "TPUEmbedding, check_numerics": Case(
            tables, queued=True, options={"check_numerics": True}
        ),
        "TPUEmbedding, pipelined, check_numerics": Case(
            tables, queued=True, options={**PIPELINED, "check_numerics": True}
        ),
    }


def keras_step(strategy: Any) -> Any:
    """Makes the training step of a Keras model."""
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
    """Makes a lookup of TPUEmbeddingV0."""
    import tensorflow as tf

    import tpu_embedding as te

    with strategy.scope():
        embedding = te.TPUEmbeddingV0(te.FeatureConfig(table(), name="f"))

    def step(ids: Any) -> Any:
        return tf.reduce_sum(embedding(ids))

    return step, [tf.TensorSpec([SAMPLES], tf.int64)]


def cases_of(topology: str) -> dict[str, Any]:
    """Returns a topology's programs: name -> a Case, or a builder of a step."""
    from tpu_embedding import tpu_generations

    generation, _ = tpu_generations.topology(topology)
    if generation.embedding == "none":
        return {"TPUEmbeddingV0": v0}
    return {
        **option_cases(),
        **custom_cases(),
        **queued_cases(),
        "Keras train step": keras_step,
    }


def run_topology(topology: str, names: Sequence[str]) -> int:
    """Compiles the cases for one topology; returns how many failed."""
    from tpu_embedding.testing import tpu_compiler

    failed = done = 0
    for name, case in cases_of(topology).items():
        if names and name not in names:
            continue
        start = time.process_time()
        build = case.build if isinstance(case, Case) else case
        facts = tpu_compiler.check(build, topology)
        seconds = time.process_time() - start
        line, bad = facts.get("error", "")[:1500], "error" in facts
        if not bad:
            line = f"compiles, {seconds:4.1f} s of CPU"
            if isinstance(case, Case):
                place = case.planned(topology)
                planned = place.device_bytes[0] - place.program_bytes
                ratio = planned / facts["argument_bytes"]
                bad |= abs(ratio - 1) > PLAN_LIMIT
                line += f", planned / arguments {ratio:.3f}"
            own = [(s["max_ids"], s["max_unique_ids"]) for s in facts["stacks"]]
            bad |= {tuple(pair) for pair in facts["compiled_limits"]} != set(own)
            bad |= bool(facts["copied"])
            line += f", limits {facts['compiled_limits']}, preprocessor {own}"
            line += f", copies {facts['copied']}" if facts["copied"] else ""
        failed += bad
        done += 1
        print(f"{topology:<10} {name:<28} {'FAILED ' * bad}{line}", flush=True)
    print(f"{topology:<10} {done - failed} of {done} programs", flush=True)
    return failed


def main() -> int:
    """Runs each topology in a process of its own."""
    if len(sys.argv) > 2 and sys.argv[1] == "--one":
        return min(run_topology(sys.argv[2], sys.argv[3:]), 100)
    from tpu_embedding.testing.compilation import ENVIRONMENT, PYTHON_VARIABLE

    python = os.environ.get(PYTHON_VARIABLE, sys.executable)
    environment = {**os.environ, **ENVIRONMENT}
    build_library(python, environment)
    environment["PYTHONPATH"] = os.path.abspath(BUILD)
    beside = os.path.dirname(os.path.abspath(__file__))

    def compare(name: str, *arguments: str) -> bool:
        """Returns whether another check of this environment fails."""
        command = [python, os.path.join(beside, name), *arguments]
        return subprocess.run(command, env=environment, check=False).returncode != 0

    if sys.argv[1:2] == ["--limits"]:
        return int(compare("check_limits.py", *sys.argv[2:]))
    failed = 0
    for topology in (*TOPOLOGIES, "v5e:2x2"):
        command = [python, __file__, "--one", topology, *sys.argv[1:]]
        failed += subprocess.run(command, env=environment, check=False).returncode != 0
    if len(sys.argv) == 1:
        failed += compare("check_rules.py") + compare("check_limits.py")
    return int(failed > 0)


def build_library(python: str, environment: Mapping[str, str]) -> None:
    """Builds this package for the TensorFlow of that Python."""
    options = ["--build-lib", BUILD, "--build-temp", OBJECTS]
    subprocess.run(
        [python, "setup.py", "--quiet", "build", *options],
        env={**environment, "TPU_EMBEDDING_BUILD_SOFTWARE_TPU": "0"},
        check=True,
    )


if __name__ == "__main__":
    sys.exit(main())
