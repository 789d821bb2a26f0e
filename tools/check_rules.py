"""Compares our update rules with TensorFlow's own: the end of `make check-tpu`.

TensorFlow's kernels for TPUs lower the update of each optimizer to a function of one
row. XLA compiles that function for the CPU, and three steps of it are compared with
three steps of the host engine. Runs in the environment of check_tpu.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import numpy as np
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.testing import tpu_compiler

ROWS, DIM, STEPS = 64, 8, 3
LIMIT = 3e-7  # Relative to the largest value that an array had.
RATE = 0.3


def optimizers() -> dict[str, Any]:
    """Returns 17 configurations of the optimizers of SparseCores."""
    strong: dict[str, Any] = {
        "l1_regularization_strength": 0.05,
        "l2_regularization_strength": 0.02,
        "beta": 0.3,
    }
    momentum = te.AdagradMomentum
    return {
        "SGD": te.SGD(RATE),
        "SGD, clipped": te.SGD(RATE, clip_weight_min=-0.05, clip_weight_max=0.05),
        "Adagrad": te.Adagrad(RATE),
        "Adagrad, clipped": te.Adagrad(RATE, clip_weight_min=-0.1, clip_weight_max=0.1),
        "AdagradMomentum": momentum(RATE, momentum=0.9),
        "AdagradMomentum, Nesterov": momentum(RATE, momentum=0.9, use_nesterov=True),
        "AdagradMomentum, beta2 0.9": momentum(RATE, momentum=0.7, beta2=0.9),
        "AdagradMomentum, beta2 0.999": momentum(RATE, momentum=0.7, beta2=0.999),
        "AdagradMomentum, exponent 3": momentum(
            RATE, momentum=0.5, exponent=3, epsilon=1e-3
        ),
        "FTRL": te.FTRL(RATE),
        "FTRL, l1, l2, beta": te.FTRL(RATE, **strong),
        "FTRL, linear times rate": te.FTRL(
            RATE, **strong, multiply_linear_by_learning_rate=True
        ),
        "FTRL, power -0.6": te.FTRL(
            RATE, learning_rate_power=-0.6, l1_regularization_strength=0.01
        ),
        "FTRL, power 0": te.FTRL(RATE, learning_rate_power=0.0),
        "Adam": te.Adam(RATE),
        "Adam, other root": te.Adam(RATE, sum_inside_sqrt=False),
        "Adam, other betas": te.Adam(RATE, beta_1=0.5, beta_2=0.99, epsilon=1e-2),
    }


def lowered_rule(optimizer: Any) -> str:
    """Returns the StableHLO of TensorFlow's rule for one row."""
    op = optimizer.sparse_core_op
    raw = getattr(
        tf.raw_ops, f"XlaSparseDenseMatmulGradWith{op.name}AndStaticBufferSize"
    )
    clips = ("clip_weight_min", "clip_weight_max")
    given = {c: getattr(optimizer, c) for c in clips}

    def update(entries: Any, gradients: Any, rate: Any, tables: Any) -> Any:
        pointers, samples, tokens, gains = entries
        return raw(
            row_pointers=pointers,
            sorted_sample_ids=samples,
            sorted_token_ids=tokens,
            sorted_gains=gains,
            activation_gradients=gradients,
            learning_rate=rate,
            num_minibatches_per_physical_sparse_core=tf.constant(1),
            max_ids_per_sparse_core=64,
            max_unique_ids_per_sparse_core=64,
            table_name="t",
            embedding_table=tables[0],
            **dict(zip(op.slots, tables[1:], strict=True)),
            **op.attributes(optimizer),
            **{name: value for name, value in given.items() if value is not None},
        )

    ids = tf.TensorSpec([64], tf.int32)
    entries = [tf.TensorSpec([16], tf.int32), ids, ids, tf.TensorSpec([64])]
    tables = [tf.TensorSpec([ROWS, DIM])] * (1 + len(op.slots))
    specs = [entries, tf.TensorSpec([8, DIM]), tf.TensorSpec([]), tables]
    traced = tf.function(update, autograph=False).get_concrete_function(*specs)
    return tpu_compiler.compiler_ir.from_concrete_function(
        traced, tf.nest.flatten(specs)
    )(stage="stablehlo", platform_name="TPU")


def compiled_rule(text: str) -> Callable[..., list[np.ndarray]]:
    """Compiles the rule in a lowered program by XLA for the CPU."""
    from jax._src import compiler  # pyright: ignore[reportMissingImports]
    from jax._src.interpreters import mlir  # pyright: ignore[reportMissingImports]
    from jax._src.lib import _jax  # pyright: ignore[reportMissingImports]
    from jaxlib.mlir import ir  # pyright: ignore[reportMissingImports]

    device = jax.devices("cpu")[0]
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        (rule,) = [
            op
            for op in module.body
            if op.operation.name == "func.func" and "private" in str(op).split("@")[0]
        ]
        own = str(rule.operation.get_asm(enable_debug_info=False))
        own = re.sub(
            r"func\.func private @[\w.]+", "func.func public @main", own, count=1
        )
        options = compiler.get_compile_options(1, 1)
        executable = compiler.backend_compile_and_load(
            device.client,
            ir.Module.parse(f"module @rule {{\n{own}\n}}"),
            _jax.DeviceList((device,)),
            options,
            [],
        )

    def run(*rows: np.ndarray) -> list[np.ndarray]:
        found = executable.execute_sharded([jax.device_put(r, device) for r in rows])
        arrays = found.disassemble_into_single_device_arrays()
        return [np.asarray(array[0]) for array in arrays]

    return run


def difference(optimizer: Any) -> float:
    """Returns the largest difference after any step, over its array's largest value.

    The largest value is that of all steps, because clipping makes a table smaller.
    """
    rng = np.random.default_rng(0)
    start = rng.normal(0, 0.3, (ROWS, DIM)).astype(np.float32)
    table = te.TableConfig(
        ROWS,
        DIM,
        initializer=lambda shape, dtype=None, **_: tf.constant(start),
        optimizer=optimizer,
        combiner="sum",
        name="t",
    )
    embedding = te.TPUEmbedding({"t": te.FeatureConfig(table, name="f")}, te.SGD(0.1))
    rule = compiled_rule(lowered_rule(optimizer))
    theirs = [start] + [
        np.full_like(start, slot.initial_value) for slot in optimizer.slots
    ]
    peaks = [np.abs(array).max() for array in theirs]
    rate, largest = np.full((1, DIM), RATE, np.float32), 0.0
    for _ in range(STEPS):
        scale = 10 ** rng.uniform(-3, 1, (ROWS, DIM))
        gradients = (rng.normal(size=(ROWS, DIM)) * scale).astype(np.float32)
        embedding.enqueue({"t": tf.range(ROWS, dtype=tf.int64)})
        embedding.dequeue()
        embedding.apply_gradients({"t": tf.constant(gradients)})
        rows = [
            rule(gradients[i : i + 1], *(array[i : i + 1] for array in theirs), rate)
            for i in range(ROWS)
        ]
        theirs = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
        (ours,) = embedding.variables.values()
        names = ["parameters", *(slot.name for slot in optimizer.slots)]
        peaks = [max(p, np.abs(a).max()) for p, a in zip(peaks, theirs, strict=True)]
        for name, array, peak in zip(names, theirs, peaks, strict=True):
            error = np.abs(ours[name].numpy() - array).max()
            largest = max(largest, float(error / peak))
    return largest


def main() -> int:
    """Prints a line for each configuration; returns 1 if one is beyond the limit."""
    tpu_compiler.answer_for_sparse_cores(2)
    failed = 0
    for name, optimizer in optimizers().items():
        found = difference(optimizer)
        failed += not found <= LIMIT
        print(f"{name:<30} {found:.1e} of the largest value", flush=True)
    print(f"{len(optimizers()) - failed} of {len(optimizers())} rules")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
