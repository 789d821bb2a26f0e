"""Combines the rows of one sample into one activation.

With weights w_1..w_k (1 where none are given), entry j of a sample has the gain
  sum: w_j    mean: w_j / sum(w)    sqrtn: w_j / sqrt(sum(w^2)).
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, ClassVar

from tpu_embedding import errors

COMBINERS: tuple[str, ...] = ("sum", "mean", "sqrtn")


_LARGEST = (2 - 2**-23) * 2.0**127  # The largest number of float32.


@dataclasses.dataclass(frozen=True)
class CustomCombiner:
    """Combines the rows of each sample by a function of yours.

      combiner_computation(valency, vectors) -> activation
      combiner_computation(valency, vectors, weights) -> activation, if num_weights > 0

    `valency` is the number of ids of the sample, an int32 scalar. `vectors` are the
    rows of these ids in input order, each multiplied by its weight, float32
    [max_valency, D], padded with zeros. `weights` are float32 [num_weights], trained by
    SGD. The activation is float32 [D]. The function must be a pure function of
    TensorFlow ops (engines may call it once for all samples, vectorized) and must
    accept samples without ids. Only TPUEmbeddingV2 supports it. Arguments, their order
    and defaults are those of tf.tpu.experimental.embedding.CustomCombiner.

    >>> CustomCombiner(lambda valency, vectors: vectors[0], max_valency=4).num_weights
    0

    Attributes:
      combiner_computation: The function.
      max_valency: The largest number of ids of a sample.
      num_weights: The number of weights, for each table that uses the combiner.
      initializer: A callable of (shape, dtype) for the weights.
      combiner_weights_learning_rate: Learning rate of the weights: a number, or a
        callable without arguments that apply_gradients calls.

    Raises:
      ValueError: If a number is out of range, or `initializer` is missing although
        there are weights.
      TypeError: If a number or a callable is of the wrong type.
    """

    CUSTOM_COMBINER_SLOT_NAME: ClassVar[str] = "custom_combiner_variables"

    combiner_computation: Callable[..., Any]
    max_valency: int
    num_weights: int = 0
    initializer: Callable[..., Any] | None = None
    combiner_weights_learning_rate: Any = 0.01

    def __post_init__(self) -> None:
        for argument, smallest in (("max_valency", 1), ("num_weights", 0)):
            value = getattr(self, argument)
            if not errors.is_int(value):
                raise errors.argument_type(argument, value, "an int")
            errors.check_int(argument, value, smallest)
        if not callable(self.combiner_computation):
            raise errors.argument_type(
                "combiner_computation", self.combiner_computation, "a callable"
            )
        if self.initializer is None:
            if self.num_weights:
                raise ValueError(
                    "A CustomCombiner with weights needs an `initializer` for them. "
                    f"Received: num_weights={self.num_weights}, initializer=None."
                )
        elif not callable(self.initializer):
            raise errors.argument_type("initializer", self.initializer, "a callable")
        rate = self.combiner_weights_learning_rate
        if callable(rate):
            return
        argument = "combiner_weights_learning_rate"
        if not isinstance(rate, numbers.Real) or isinstance(rate, bool):
            raise errors.argument_type(argument, rate, "a number or a callable")
        if not abs(rate) <= _LARGEST:
            raise errors.argument_value(argument, rate, "finite in float32")

    def __str__(self) -> str:
        """Returns one word, like a named combiner, the same in all processes."""
        sizes = f"max_valency={self.max_valency}, num_weights={self.num_weights}"
        return f"custom_combiner({sizes})"

    def compute(
        self, valency: Any, vectors: Any, *weights: Any, table: str | None = None
    ) -> Any:
        """Computes the activation of one sample, [D], with the user's function.

        Args:
          valency: The number of ids of the sample, an int32 scalar.
          vectors: The rows of the ids, [max_valency, D].
          *weights: The trained weights, [num_weights], if there are any.
          table: The name of the table, for errors.

        Raises:
          ValueError: If the function returns another shape.
          TypeError: If it returns a value that is not a tensor of the vectors' dtype.
        """
        activation = self.combiner_computation(valency, vectors, *weights)
        wanted = (vectors.shape[1:], vectors.dtype)
        errors.check_returned(self.combiner_computation, activation, wanted, table)
        return activation


def convert_combiner(combiner: Any) -> Any:
    """Converts TensorFlow's CustomCombiner; returns other combiners unchanged.

    TensorFlow's class is recognized by its attribute `combiner_computation`, because
    this module does not import TensorFlow.
    """
    if isinstance(combiner, CustomCombiner):
        return combiner
    if getattr(combiner, "combiner", None) == "positional_weighted":
        raise NotImplementedError(
            "A PositionalWeightedCombiner is not supported. A CustomCombiner computes "
            "the same sum, and trains the weights by SGD: CustomCombiner(lambda "
            "valency, vectors, weights: tf.linalg.matvec(vectors, weights, True), "
            f"max_valency={combiner.max_valency}, num_weights={combiner.max_valency}, "
            "initializer=...)."
        )
    if hasattr(combiner, "combiner_computation"):
        initializers = combiner._slot_initializers()
        return CustomCombiner(
            combiner.combiner_computation,
            combiner.max_valency,
            combiner.num_weights,
            initializers[0] if initializers else None,
            combiner.combiner_weights_learning_rate,
        )
    if not isinstance(combiner, str) or combiner not in COMBINERS:
        allowed = ", ".join(f'"{name}"' for name in COMBINERS)
        raise errors.argument_value(
            "combiner", combiner, f"one of {allowed}, or a CustomCombiner"
        )
    return combiner
