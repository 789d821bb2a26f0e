"""Whole models over the tables of a scenario, the same for every library.

A model consists of its initial parameters and its loss, written in the few operations
of `Ops`. Tables and accumulators start with the same values everywhere: libraries that
compute the same have the same losses, which `benchmarks.run` compares.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.scenarios import POSITIONS, Scenario

FIRST_ACCUMULATOR = 0.1  # of Adagrad
DENSE_RATE = 0.01  # of SGD, for the dense parameters
STEPS = 5  # Before the loss that is compared.
_DENSE_FEATURES = 13


@dataclasses.dataclass(frozen=True)
class Ops:
    """What TensorFlow and torch name differently.

    Attributes:
      concat: Joins tensors along an axis.
      stack: Stacks tensors along a new axis.
      reshape: Gives a tensor another shape.
      swap: Exchanges the last two axes.
      constant: Converts a NumPy array.
      relu: Computes max(x, 0) of a tensor x.
      softplus: Computes log(1 + exp(x)).
      softmax: Computes the softmax over the last axis.
      logsumexp: Computes log(sum(exp(x))) over the last axis.
      sum: Sums over the last axis.
      mean: Computes the mean of all values.
    """

    concat: Callable[[Sequence[Any], int], Any]
    stack: Callable[[Sequence[Any], int], Any]
    reshape: Callable[[Any, Sequence[int]], Any]
    swap: Callable[[Any], Any]
    constant: Callable[[np.ndarray], Any]
    relu: Callable[[Any], Any]
    softplus: Callable[[Any], Any]
    softmax: Callable[[Any], Any]
    logsumexp: Callable[[Any], Any]
    sum: Callable[[Any], Any]
    mean: Callable[[Any], Any]


# Computes a loss from the parameters and the activations of each feature.
Loss = Callable[[Sequence[Any], Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """A dense part.

    Attributes:
      parameters: The initial values of the parameters.
      loss: Makes the function that gives the loss, a scalar.
    """

    parameters: list[np.ndarray]
    loss: Callable[[Ops], Loss]


def model_of(scenario: Scenario) -> Model:
    """Makes the model that the scenario is for, such as a DLRM.

    Raises:
      NotImplementedError: If the scenario is not for a model.
    """
    if scenario.name not in _MODELS:
        raise NotImplementedError(f"There is no model for {scenario.name}.")
    return _MODELS[scenario.name](scenario, np.random.default_rng(1))


def first_rows(rows: int, dim: int) -> np.ndarray:
    """The first values of a table: float32 [rows, dim], where no two rows are equal."""
    some = np.random.default_rng(2).normal(0.0, 0.1, 1_000_003)
    return np.resize(some.astype(np.float32), [rows, dim])


def last_loss(step: Callable[[], Any]) -> Callable[[], float]:
    """Returns a function that trains STEPS steps and returns the loss of the last."""
    return lambda: [float(step()) for _ in range(STEPS)][-1]


def _layers(generator: np.random.Generator, *widths: int) -> list[np.ndarray]:
    """Draws the kernels and biases of dense layers."""
    parameters = []
    for width, units in itertools.pairwise(widths):
        kernel = generator.normal(0.0, (2.0 / width) ** 0.5, [width, units])
        parameters += [kernel.astype(np.float32), np.zeros([units], np.float32)]
    return parameters


def _perceptron(ops: Ops, parameters: Sequence[Any], x: Any) -> Any:
    """Applies dense layers with ReLU between them."""
    for kernel, bias in zip(parameters[::2], parameters[1::2], strict=True):
        if kernel is not parameters[0]:
            x = ops.relu(x)
        x = x @ kernel + bias
    return x


def _dlrm(scenario: Scenario, generator: np.random.Generator) -> Model:
    vectors = len(scenario.rows) + 1
    below = _layers(generator, _DENSE_FEATURES, 512, 256, scenario.dim)
    above = _layers(generator, scenario.dim + vectors**2, 512, 256, 1)
    size = scenario.batch_size
    dense = generator.random([size, _DENSE_FEATURES], np.float32)
    clicked = generator.integers(0, 2, [size, 1]).astype(np.float32)

    def loss(ops: Ops) -> Loss:
        inputs, labels = ops.constant(dense), ops.constant(clicked)

        def of(parameters: Sequence[Any], activations: Sequence[Any]) -> Any:
            bottom = _perceptron(ops, parameters[: len(below)], inputs)
            stacked = ops.stack([bottom, *activations], 1)
            products = ops.reshape(stacked @ ops.swap(stacked), [size, vectors**2])
            top = ops.concat([bottom, products], 1)
            logits = _perceptron(ops, parameters[len(below) :], top)
            return ops.mean(ops.softplus(logits) - labels * logits)

        return of

    return Model([*below, *above], loss)


def _two_tower(scenario: Scenario, generator: np.random.Generator) -> Model:
    """Makes a model that finds each user's item among all items of the batch."""
    towers = [_layers(generator, scenario.dim, 128, scenario.dim) for _ in range(2)]

    def loss(ops: Ops) -> Loss:
        def of(parameters: Sequence[Any], activations: Sequence[Any]) -> Any:
            half = len(towers[0])
            user = _perceptron(ops, parameters[:half], activations[0])
            item = _perceptron(ops, parameters[half:], activations[1])
            scores = ops.logsumexp(user @ ops.swap(item))
            return ops.mean(scores - ops.sum(user * item))

        return of

    return Model([*towers[0], *towers[1]], loss)


def _sequence(scenario: Scenario, generator: np.random.Generator) -> Model:
    """Makes a block of causal self-attention, as in SASRec: which item comes next."""
    dim, length = scenario.dim, POSITIONS
    samples = scenario.batch_size // length
    places = generator.normal(0.0, 0.02, [length, dim]).astype(np.float32)
    attention = [_layers(generator, dim, dim)[0] for _ in range(3)]
    forward = _layers(generator, dim, dim, dim)
    mask = np.triu(np.full([length, length], -1e9, np.float32), 1)

    def loss(ops: Ops) -> Loss:
        causal = ops.constant(mask)

        def of(parameters: Sequence[Any], activations: Sequence[Any]) -> Any:
            items = ops.reshape(activations[0], [samples, length, dim])
            x = items + parameters[0]
            query, key, value = (x @ kernel for kernel in parameters[1:4])
            scores = query @ ops.swap(key) / dim**0.5 + causal
            x = x + ops.softmax(scores) @ value
            x = (x + _perceptron(ops, parameters[4:], x))[:, :-1]
            following = items[:, 1:]
            # A wrong item is the next item of another sample.
            wrong = ops.concat([following[1:], following[:1]], 0)
            right = ops.softplus(-ops.sum(x * following))
            return ops.mean(right + ops.softplus(ops.sum(x * wrong)))

        return of

    return Model([places, *attention, *forward], loss)


_MODELS: dict[str, Callable[[Scenario, np.random.Generator], Model]] = {
    "model_dlrm": _dlrm,
    "model_one_hot": _dlrm,
    "model_two_tower": _two_tower,
    "model_sequence": _sequence,
    "tiny": _dlrm,
}
