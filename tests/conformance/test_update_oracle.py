"""TensorFlow's update ops as a second oracle of update rules.

If TensorFlow has an op with the same rule, or an op that has the same rule for some
arguments, the op gets the gradient of each touched row and must compute the same
table and slots. Rules without such an op are compared only with the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from steps import train_on

import tpu_embedding as te

V, D, STEPS = 9, 5, 3
RATE = 0.25
raw = tf.raw_ops
Update = Callable[[Any, dict[str, Any], tf.Tensor, tf.Tensor], None]


@dataclasses.dataclass(frozen=True)
class Oracle:
    """One of our optimizers, and TensorFlow's op for the same rule.

    Attributes:
      update: (table, slots, gradient of the touched rows, the rows) -> None; the
        slots are resource handles by our names for them.
    """

    optimizer: te.SGD | Any
    update: Update


def op(
    name: str, slots: dict[str, str], *, rate: float = RATE, **numbers: Any
) -> Update:
    """The op of this name; `slots` are our names of slots by the op's arguments."""

    def update(table: Any, ours: Any, gradient: tf.Tensor, rows: tf.Tensor) -> None:
        resources = {argument: ours[slot] for argument, slot in slots.items()}
        function = getattr(tf.raw_ops, f"ResourceSparseApply{name}")
        given = {"var": table, "grad": gradient, "indices": rows, "lr": rate}
        function(**given, **resources, **numbers)

    return update


def adagrad(rate: float = RATE) -> Update:
    return op("Adagrad", {"accum": "accumulators"}, rate=rate)


def momentum(*, nesterov: bool) -> Update:
    slots = {"accum": "momenta"}
    return op("Momentum", slots, momentum=0.75, use_nesterov=nesterov)


def rms_prop(name: str, **slots: str) -> Update:
    return op(name, slots, rho=0.875, momentum=0.75, epsilon=1e-3)


def ftrl(power: float, *, multiply: bool) -> Update:
    return op(
        "Ftrl",
        {"accum": "accumulators", "linear": "linears"},
        l1=0.125,
        # quadratic = a^q / lr + 2 * l2 + beta / lr: the op has no beta of its own.
        l2=0.25 + 0.5 / (2 * RATE),
        lr_power=power,
        multiply_linear_by_lr=multiply,
    )


adadelta = op(
    "Adadelta",
    {"accum": "accumulators", "accum_update": "updates"},
    rho=0.875,
    epsilon=1e-3,
)
proximal_adagrad = op("ProximalAdagrad", {"accum": "accumulators"}, l1=0.125, l2=0.25)


def sgd(table: Any, slots: Any, gradient: tf.Tensor, rows: tf.Tensor) -> None:
    raw.ResourceScatterSub(resource=table, indices=rows, updates=RATE * gradient)


def adagrad_momentum(*, nesterov: bool) -> Update:
    def update(table: Any, slots: Any, gradient: tf.Tensor, rows: tf.Tensor) -> None:
        # From zeros at a rate of -1, Adagrad's op gives the preconditioned gradient.
        scaled = tf.Variable(tf.zeros([V, D]))
        adagrad(-1.0)(scaled.handle, slots, gradient, rows)
        momentum(nesterov=nesterov)(table, slots, tf.gather(scaled, rows), rows)

    return update


def rescaled_rms_prop(table: Any, slots: Any, *gradient_and_rows: tf.Tensor) -> None:
    # RMSProp's momenta have the rate in them; ours are divided by it.
    momenta = tf.Variable(
        RATE * raw.ReadVariableOp(resource=slots["momenta"], dtype=tf.float32)
    )
    handles = {"ms": slots["accumulators"], "mom": momenta.handle}
    rms_prop("RMSProp", ms="ms", mom="mom")(table, handles, *gradient_and_rows)
    raw.AssignVariableOp(resource=slots["momenta"], value=momenta / RATE)


def adam(table: Any, slots: Any, gradient: tf.Tensor, rows: tf.Tensor) -> None:
    # The op takes the whole table; with powers of 0 it corrects no bias.
    whole = tf.scatter_nd(rows[:, tf.newaxis], gradient, [V, D])
    raw.ResourceApplyAdam(
        var=table,
        m=slots["momenta"],
        v=slots["velocities"],
        beta1_power=0.0,
        beta2_power=0.0,
        lr=RATE,
        beta1=0.75,
        beta2=0.875,
        epsilon=1e-3,
        grad=whole,
    )


def proximal_yogi(table: Any, slots: Any, gradient: tf.Tensor, rows: tf.Tensor) -> None:
    def read(slot: str) -> tf.Tensor:
        value = raw.ReadVariableOp(resource=slots[slot], dtype=tf.float32)
        return tf.gather(value, rows)

    def write(slot: str, value: tf.Tensor) -> None:
        raw.ResourceScatterUpdate(resource=slots[slot], indices=rows, updates=value)

    square = gradient * gradient
    m = 0.75 * read("m") + 0.25 * gradient
    v = read("v") - 0.125 * tf.sign(read("v") - square) * square
    write("m", m)
    write("v", v)
    # The op adds m^2 to its accumulator, and takes the root of that for its divisor.
    accumulator = tf.Variable(tf.zeros([V, D]))
    accumulator.scatter_update(tf.IndexedSlices((tf.sqrt(v) + 1e-3) ** 2 - m * m, rows))
    handles = {"accumulators": accumulator.handle}
    proximal_adagrad(table, handles, m, rows)


FTRL = {"l1_regularization_strength": 0.125, "l2_regularization_strength": 0.25}
ORACLES = {
    "SGD": Oracle(te.SGD(RATE), sgd),
    "Adagrad": Oracle(te.Adagrad(RATE, initial_accumulator_value=0.5), adagrad()),
    "AdagradMomentum": Oracle(
        te.AdagradMomentum(RATE, 0.75), adagrad_momentum(nesterov=False)
    ),
    "AdagradMomentum nesterov": Oracle(
        te.AdagradMomentum(RATE, 0.75, use_nesterov=True),
        adagrad_momentum(nesterov=True),
    ),
    "AdagradMomentum beta2": Oracle(
        te.AdagradMomentum(RATE, 0.75, beta2=0.875, epsilon=1e-3), rescaled_rms_prop
    ),
    "FTRL": Oracle(te.FTRL(RATE, beta=0.5, **FTRL), ftrl(-0.5, multiply=False)),
    "FTRL power": Oracle(
        te.FTRL(RATE, -0.75, beta=0.5, **FTRL), ftrl(-0.75, multiply=False)
    ),
    "FTRL times rate": Oracle(
        te.FTRL(RATE, beta=0.5, multiply_linear_by_learning_rate=True, **FTRL),
        ftrl(-0.5, multiply=True),
    ),
    "Adam": Oracle(
        te.Adam(RATE, 0.75, 0.875, 1e-3, lazy_adam=False, sum_inside_sqrt=False), adam
    ),
    "Momentum": Oracle(te.Momentum(RATE, 0.75), momentum(nesterov=False)),
    "Momentum nesterov": Oracle(te.Momentum(RATE, 0.75, True), momentum(nesterov=True)),
    "RMSProp": Oracle(
        te.RMSProp(RATE, 0.875, 0.75, 1e-3), rms_prop("RMSProp", ms="ms", mom="mom")
    ),
    "CenteredRMSProp": Oracle(
        te.CenteredRMSProp(RATE, 0.875, 0.75, 1e-3),
        rms_prop("CenteredRMSProp", mg="mg", ms="ms", mom="mom"),
    ),
    "Adadelta": Oracle(te.Adadelta(RATE, 0.875, 1e-3), adadelta),
    "ProximalAdagrad": Oracle(te.ProximalAdagrad(RATE, 0.5, **FTRL), proximal_adagrad),
    "ProximalYogi": Oracle(
        te.ProximalYogi(RATE, 0.75, 0.875, 1e-3, **FTRL), proximal_yogi
    ),
}


@pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES)
def test_update(oracle: Oracle, rng: np.random.Generator) -> None:
    start = rng.standard_normal((V, D)).astype(np.float32)
    config = te.TableConfig(V, D, lambda shape, dtype: start, combiner="sum")
    embedding = te.TPUEmbedding(te.FeatureConfig(config), oracle.optimizer)
    embedding.build()
    ours = embedding.variables[config]
    theirs = {name: tf.Variable(variable) for name, variable in ours.items()}
    for _ in range(STEPS):
        rows = tf.constant(rng.permutation(V)[:6])
        gradient = tf.constant(rng.standard_normal((6, D)), tf.float32)
        train_on(embedding, rows, gradient)
        handles = {name: variable.handle for name, variable in theirs.items()}
        oracle.update(handles["parameters"], handles, gradient, rows)
    for name, variable in theirs.items():
        scale = max(1.0, float(tf.reduce_max(tf.abs(variable))))
        bound = 2 * cases.tolerance(1, scale, STEPS)  # Both sides round.
        cases.assert_close(ours[name], variable.numpy(), bound, name)
