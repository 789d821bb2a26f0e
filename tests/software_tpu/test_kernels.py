"""Tests of the SparseCore kernels against the NumPy reference.

Updates on each system, quantization and clipping are in `sparse_core/test_conformance`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import optimizers as reference
from software_tpu import calls, partitioned

D = 8
EPSILON = float(np.finfo(np.float32).eps)
SPARSE_CORES = {"v5p": 4, "v6e": 2}
# Roundings of float32 in one update: those of the rule (as in
# tests/test_optimizer_rules.py), and those of a sum of up to 100 gradients.
ROUNDINGS = 40 + 100

SYSTEMS = [
    (generation, num_devices)
    for generation in SPARSE_CORES
    for num_devices in (1, 2, 4)
]
SUFFIXES = ("StaticBufferSize", "CsrInput")

# By the name in the op: the reference's name, the slots' inputs in its order, and
# pairs of the op's attributes and the arguments of the reference.
ADAGRAD_MOMENTUM = {"use_nesterov": False, "exponent": 2.0, "beta1": 0.0, "beta2": 1.0}
ADAM = {"use_sum_inside_sqrt": True, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-7}
NESTEROV = {"use_nesterov": True, "exponent": 3.0, "beta2": 0.99, "epsilon": 1e-3}
FTRL = {
    "multiply_linear_by_learning_rate": False,
    "beta": 0.0,
    "learning_rate_power": -0.5,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
}
SHRINKING = {
    "multiply_linear_by_learning_rate": True,
    "beta": 0.4,
    "learning_rate_power": -0.7,
    "l1_regularization_strength": 0.2,
    "l2_regularization_strength": 0.3,
}
OPTIMIZERS: list[tuple[str, dict[str, Any], str, list[str], dict[str, Any]]] = [
    ("Sgd", {}, "SGD", [], {}),
    ("Adagrad", {}, "Adagrad", ["accumulator"], {}),
    (
        "AdagradMomentum",
        {**ADAGRAD_MOMENTUM, "epsilon": 1e-3},
        "AdagradMomentum",
        ["accumulator", "momenta"],
        {"epsilon": 1e-3},
    ),
    (
        "AdagradMomentum",
        {**NESTEROV, "beta1": 0.9},
        "AdagradMomentum",
        ["accumulator", "momenta"],
        {**NESTEROV, "momentum": 0.9},
    ),
    ("Adam", ADAM, "Adam", ["momenta", "velocity"], {}),
    (
        "Adam",
        {**ADAM, "use_sum_inside_sqrt": False, "beta2": 0.9, "epsilon": 1e-2},
        "Adam",
        ["momenta", "velocity"],
        {"sum_inside_sqrt": False, "beta_2": 0.9, "epsilon": 1e-2},
    ),
    ("Ftrl", FTRL, "FTRL", ["accumulator", "linear"], {}),
    ("Ftrl", SHRINKING, "FTRL", ["accumulator", "linear"], SHRINKING),
]


def system_of(
    generation: str, num_devices: int, num_minibatches: int = 1
) -> partitioned.System:
    cores = SPARSE_CORES[generation]
    return partitioned.System(
        num_devices,
        cores,
        num_samples=3 * cores,
        num_rows=5 * cores * num_devices,
        num_minibatches=num_minibatches,
    )


def replicas_of(system: partitioned.System, rng: np.random.Generator) -> list:
    return [
        partitioned.random_entries(system, rng, per_sample=4)
        for _ in range(system.num_devices)
    ]


def assert_looked_up(
    actual: np.ndarray, entries: list[partitioned.Entry], table: np.ndarray
) -> None:
    expected = np.zeros(actual.shape)
    size = np.zeros(actual.shape)
    for sample, id_, gain in entries:
        expected[sample] += gain * table[id_].astype(np.float64)
        size[sample] += gain * np.abs(table[id_])
    # One rounding for each product and each sum of up to 4 entries.
    assert np.all(np.abs(actual - expected) <= 5 * EPSILON * size)


@pytest.mark.parametrize("num_minibatches", [1, 3])
@pytest.mark.parametrize(("generation", "num_devices"), SYSTEMS)
def test_lookup(
    generation: str, num_devices: int, num_minibatches: int, rng: np.random.Generator
):
    system = system_of(generation, num_devices, num_minibatches)
    table = rng.normal(size=(system.num_rows, D)).astype(np.float32)
    entries = replicas_of(system, rng)
    inputs = [
        {**system.csr(own), "embedding_table": part}
        for own, part in zip(entries, system.cut(table), strict=True)
    ]
    # Both ops are one kernel: in turn is enough.
    suffix = SUFFIXES[num_minibatches > 1]
    outputs = calls.call(
        calls.strategy_of(generation, num_devices),
        f"XlaSparseDenseMatmulWith{suffix}",
        inputs,
        **calls.lookup_attributes(system.num_samples),
    )
    for (activations,), own in zip(outputs, entries, strict=True):
        assert activations.shape == (system.num_samples, D)
        assert_looked_up(activations, own, table)


class Training:
    """A table and its slots, on a software TPU and on paper."""

    def __init__(
        self, system: partitioned.System, optimizer: tuple, rng: np.random.Generator
    ):
        self.system, self.rng = system, rng
        self.op, self.attributes, self.name, self.slot_inputs, self.hyper = optimizer
        shape = (system.num_rows, D)
        table = rng.normal(size=shape).astype(np.float32)
        slots = reference.initial_slots(self.name, self.hyper, shape)
        self.paper = (table, slots)
        values = (table, *(slot.astype(np.float32) for slot in slots.values()))
        self.parts = list(zip(*map(system.cut, values), strict=True))

    def step(self, strategy: Any, suffix: str, rate: float, entries: list) -> None:
        size = (self.system.num_samples, D)
        gradients = [self.rng.normal(size=size).astype(np.float32) for _ in entries]
        names = ["embedding_table", *self.slot_inputs]
        inputs = [
            {
                **self.system.csr(own),
                "activation_gradients": gradient,
                "learning_rate": np.float32(rate),
                **dict(zip(names, parts, strict=True)),
            }
            for own, gradient, parts in zip(entries, gradients, self.parts, strict=True)
        ]
        op = f"XlaSparseDenseMatmulGradWith{self.op}And{suffix}"
        self.parts = calls.call(strategy, op, inputs, **self.attributes)
        rows = partitioned.gradient_rows(entries, gradients)
        self.paper = reference.apply(self.name, self.hyper, *self.paper, rows, rate)

    def check(self, num_steps: int) -> None:
        relative = num_steps * ROUNDINGS * EPSILON
        expected = [self.paper[0], *self.paper[1].values()]
        for parts, value in zip(zip(*self.parts, strict=True), expected, strict=True):
            np.testing.assert_allclose(
                self.system.join(parts), value, rtol=relative, atol=relative
            )


# Both ops of an optimizer are one kernel: in turn is enough.
@pytest.mark.parametrize(
    ("optimizer", "suffix"),
    [(optimizer, SUFFIXES[n % 2]) for n, optimizer in enumerate(OPTIMIZERS)],
    ids=[f"{optimizer[0]}-{n}" for n, optimizer in enumerate(OPTIMIZERS)],
)
def test_each_optimizer(optimizer: tuple, suffix: str, rng: np.random.Generator):
    system = system_of("v6e", 2)
    training = Training(system, optimizer, rng)
    for rate in (0.25, 0.1):
        entries = replicas_of(system, rng)
        training.step(calls.strategy_of("v6e", 2), suffix, rate, entries)
    training.check(2)


def test_a_row_with_gradients_that_cancel_is_touched(rng: np.random.Generator):
    """Adam moves it by what its momenta hold."""
    system = system_of("v6e", 2)
    training = Training(system, OPTIMIZERS[4], rng)
    strategy = calls.strategy_of("v6e", 2)
    training.step(strategy, "CsrInput", 0.5, [[(0, 1, 1.0)], []])
    before = system.join([parts[0] for parts in training.parts])
    training.step(strategy, "CsrInput", 0.5, [[(0, 1, 0.0)], []])
    training.check(2)
    after = system.join([parts[0] for parts in training.parts])
    assert np.all(before[1] != after[1])
    np.testing.assert_array_equal(np.delete(before, 1, 0), np.delete(after, 1, 0))
