"""How the rows that one sample names become one activation.

With weights w_1..w_k (1 where none are given), entry j of a sample has the gain
  sum: w_j    mean: w_j / sum(w)    sqrtn: w_j / sqrt(sum(w^2)).
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, ClassVar

from tpu_embedding import errors

COMBINERS: tuple[str, ...] = ("sum", "mean", "sqrtn")


@dataclasses.dataclass(frozen=True)
class CustomCombiner:
    """A function of the rows that one sample names.

      combiner_computation(valency, vectors) -> activation
      combiner_computation(valency, vectors, weights) -> activation, if num_weights > 0

    `valency` is the number of ids of the sample, an int32 scalar; `vectors` are their
    rows in the order of the input, each times its weight, float32 [max_valency, D], and
    zeros after them; `weights` are float32 [num_weights], trained by SGD; the
    activation is float32 [D]. The function is called for all samples at once where that
    is faster, so that it must be a pure function of TensorFlow ops; it must stand
    samples without ids. For TPUEmbeddingV2 only. Arguments, their order and defaults
    are those of tf.tpu.experimental.embedding.CustomCombiner.

    >>> CustomCombiner(lambda valency, vectors: vectors[0], max_valency=4).num_weights
    0

    Attributes:
      combiner_computation: The function.
      max_valency: The most ids that a sample may have.
      num_weights: How many weights it has, of each table that it is given to.
      initializer: A callable of (shape, dtype) for the weights.
      combiner_weights_learning_rate: Theirs: a number, or a callable of
        nothing, called by apply_gradients.

    Raises:
      ValueError: If a number is out of range, or `initializer` is missing.
      TypeError: If what is to be called cannot be.
    """

    NAME: ClassVar[str] = "custom_combiner_variables"

    combiner_computation: Callable[..., Any]
    max_valency: int
    num_weights: int = 0
    initializer: Callable[..., Any] | None = None
    combiner_weights_learning_rate: Any = 0.01

    def __post_init__(self) -> None:
        for argument, smallest in (("max_valency", 1), ("num_weights", 0)):
            value = getattr(self, argument)
            if not isinstance(value, int) or isinstance(value, bool):
                raise errors.argument_type(argument, value, "an int")
            if value < smallest:
                raise errors.argument_int(argument, value, smallest=smallest)
        for argument in ("combiner_computation", "initializer"):
            value = getattr(self, argument)
            optional = argument == "initializer" and self.num_weights == 0
            if not callable(value) and not (optional and value is None):
                raise errors.argument_type(argument, value, "a callable")
        rate = self.combiner_weights_learning_rate
        if not callable(rate):
            _check_rate("combiner_weights_learning_rate", rate)

    def compute(
        self, valency: Any, vectors: Any, *weights: Any, table: str | None = None
    ) -> Any:
        """The activation of one sample.

        Args:
          valency: int32 scalar.
          vectors: [max_valency, D].
          *weights: [num_weights], if there are any.
          table: Whose sample it is, for errors.

        Raises:
          ValueError: If the user's function returns another shape.
          TypeError: If it returns what is no tensor, or one of another dtype.
        """
        found = self.combiner_computation(valency, vectors, *weights)
        wanted = (vectors.shape[1:], vectors.dtype)
        error = errors.computed(self.combiner_computation, found, wanted, table)
        if error is not None:
            raise error
        return found


def _check_rate(argument: str, rate: Any) -> None:
    if not isinstance(rate, numbers.Real) or isinstance(rate, bool):
        raise errors.argument_type(argument, rate, "a number or a callable")
    if not math.isfinite(rate):
        raise errors.argument_value(argument, rate, "finite")


def adapt(combiner: Any) -> Any:
    """TensorFlow's CustomCombiner as one of ours, anything else as it is.

    It is known by its attribute `combiner_computation`: this module imports no
    TensorFlow.

    Raises:
      ValueError: If it is none of `COMBINERS` and no CustomCombiner.
    """
    if isinstance(combiner, CustomCombiner):
        return combiner
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
        raise errors.combiner(combiner)
    return combiner
