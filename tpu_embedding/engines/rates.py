"""Calls functions of users: evaluates learning rates and traces rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.layout.plan import Plan
from tpu_embedding.optimizers.base import takes_step


@dataclasses.dataclass(frozen=True)
class UpdateScalars:
    """Holds the float32 scalars of one update of one table.

    Attributes:
      rate: The learning rate.
      hyperparameters: The hyperparameters of a CustomOptimizer.
      combiner_rate: The learning rate of the weights of its CustomCombiner, or 0.
    """

    rate: tf.Tensor
    hyperparameters: list[tf.Tensor]
    combiner_rate: tf.Tensor


class Rates:
    """The learning rates of a plan's tables, and the other numbers of an update.

    Attributes:
      updates: The number of updates already applied, an int64 scalar variable, or None
        if neither a rate nor the rounding of a table needs it.
    """

    def __init__(self, plan: Plan, create_counter: Callable[[], tf.Variable]) -> None:
        """Reads the rates; calls `create_counter` if a rate or a table needs it."""
        self._rates = [
            spec.optimizer.learning_rate if spec.optimizer else 0.0
            for spec in plan.tables
        ]
        # The numbers of user rules and combiners by table, which follow the rates.
        self._others: list[tuple[str, Any]] = []
        self._spans: list[tuple[int, int, int]] = []
        for spec in plan.tables:
            start = len(plan.tables) + len(self._others)
            own = spec.optimizer.hyperparameters_of_rule if spec.optimizer else ()
            self._others += [("hyperparameters", number) for number in own]
            combiner = spec.config.custom_combiner
            end = len(plan.tables) + len(self._others)
            if combiner is not None:
                rate = combiner.combiner_weights_learning_rate
                self._others.append(("combiner_weights_learning_rate", rate))
            self._spans.append((start, end, end + (combiner is not None)))
        self.updates: tf.Variable | None = None
        rounds = any(spec.optimizer and spec.is_rounded for spec in plan.tables)
        if rounds or any(callable(r) and takes_step(r) for r in self._rates):
            self.updates = create_counter()

    @property
    def size(self) -> int:
        """The number of scalars: each table's rate, then those of user functions."""
        return len(self._rates) + len(self._others)

    def evaluate(self) -> tf.Tensor:
        """Returns the numbers, float32 [size]; calls each distinct callable once."""
        values: dict[Any, Any] = {}
        for rate in self._rates:
            if callable(rate) and id(rate) not in values:
                values[id(rate)] = evaluate_rate(rate, self.updates)
        for argument, number in self._others:
            if callable(number) and id(number) not in values:
                values[id(number)] = _scalar(argument, number, number())
        numbers = [*self._rates, *(number for _, number in self._others)]
        found = [values[id(n)] if callable(n) else float(n) for n in numbers]
        return tf.stack(found) if values else tf.constant(found, tf.float32)

    def of_table(self, evaluated: tf.Tensor, table: int) -> UpdateScalars:
        """Returns the numbers of one table, out of what `evaluate` returned."""
        start, end, stop = self._spans[table]
        return UpdateScalars(
            rate=evaluated[table],
            hyperparameters=[evaluated[at] for at in range(start, end)],
            combiner_rate=evaluated[end] if stop > end else tf.zeros([]),
        )


def evaluate_rate(rate: Callable[..., Any], updates: Any) -> tf.Tensor:
    """Evaluates a callable learning rate after `updates` updates: a float32 scalar."""
    arguments = [updates] if takes_step(rate) else []
    return _scalar("learning_rate", rate, rate(*arguments))


def trace_function(
    table: str, what: str, function: Callable[..., Any], inputs: Sequence[Any]
) -> Any:
    """Traces a rule or combiner; a note on its errors names the table."""
    try:
        return tf.function(function, autograph=False).get_concrete_function(*inputs)
    except Exception as error:
        error.add_note(
            f"The function of the {what} of table {table!r} raised this error."
        )
        raise


def returned_number(argument: str, function: Any, value: Any) -> tf.Tensor:
    """Converts what a callable argument returned to float32 of any shape."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise _no_number(argument, function, value) from error
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise _no_number(argument, function, value)
    return tf.cast(tensor, tf.float32)


def _scalar(argument: str, rate: Any, value: Any) -> tf.Tensor:
    """Converts what a callable returned to a float32 scalar."""
    tensor = returned_number(argument, rate, value)
    if tensor.shape.rank != 0:
        raise ValueError(
            f"A callable `{argument}` must return a scalar. {rate!r} returned shape "
            f"{tensor.shape}."
        )
    return tensor


def _no_number(argument: str, function: Any, value: Any) -> TypeError:
    return TypeError(
        f"A callable `{argument}` must return a number or a scalar tensor. "
        f"{function!r} returned {value!r} of type {errors.type_name(value)}. Does it "
        "lack a return?"
    )
