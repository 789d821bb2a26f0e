"""TableConfig and FeatureConfig as TensorFlow 1 had them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.compat.interop.parameters import (
    FrequencyEstimatorParameters,
    check_parameters,
)

COMBINERS = ("mean", "sum", "sqrtn", None)


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """Describes one table of `table_to_config_dict`.

    Attributes:
      vocabulary_size: Number of rows, at least 1.
      dimension: Number of columns, at least 1.
      initializer: A callable of (shape, dtype); None becomes a truncated normal
        of standard deviation 1 / sqrt(dimension).
      combiner: "mean", "sum", "sqrtn", or None for features of one id for each sample.
      hot_id_replication: A hint to TPU v2-v4 that changes no number.
      learning_rate: The learning rate of this table alone; 0 freezes it.
      learning_rate_fn: A function of the global step, instead of `learning_rate`.
      optimization_parameters: The parameters of this table alone, or None.

    Raises:
      ValueError: If an argument is not as above.
    """

    vocabulary_size: int
    dimension: int
    initializer: Callable[..., Any] | None = None
    combiner: str | None = "mean"
    hot_id_replication: bool = False
    learning_rate: float | None = None
    learning_rate_fn: Callable[..., Any] | None = None
    optimization_parameters: Any = None

    def __post_init__(self) -> None:
        for argument in ("vocabulary_size", "dimension"):
            errors.check_int(argument, getattr(self, argument), 1)
        if self.initializer is not None and not callable(self.initializer):
            raise errors.argument_value(
                "initializer", self.initializer, "None or a callable"
            )
        if self.combiner not in COMBINERS:
            raise errors.argument_value(
                "combiner", self.combiner, '"mean", "sum", "sqrtn" or None'
            )
        if self.learning_rate is not None and self.learning_rate_fn is not None:
            raise ValueError(
                "Give a table `learning_rate` or `learning_rate_fn`, not both. "
                f"Received: learning_rate={self.learning_rate!r}, learning_rate_fn="
                f"{self.learning_rate_fn!r}."
            )
        self._check_parameters()
        if self.initializer is None:
            initializer = tf.compat.v1.truncated_normal_initializer(
                mean=0.0, stddev=1 / math.sqrt(self.dimension)
            )
            object.__setattr__(self, "initializer", initializer)

    def _check_parameters(self) -> None:
        if self.optimization_parameters is None:
            return
        check_parameters(self.optimization_parameters)
        one = isinstance(self.optimization_parameters, FrequencyEstimatorParameters)
        if one and self.dimension != 1:
            raise ValueError(
                "FrequencyEstimatorParameters estimate one number for each row, so "
                f"the table's `dimension` must be 1. Received: {self.dimension}."
            )


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """Describes one feature of `feature_to_config_dict`.

    Attributes:
      table_id: The key of its table in `table_to_config_dict`.
      max_sequence_length: Positions of a sequence; 0 combines the entries.
      weight_key: The key of the feature that holds the weights, or None.

    Raises:
      ValueError: If `max_sequence_length` is not an int of at least 0.
      TypeError: If `table_id` or `weight_key` is not a str.
    """

    table_id: str
    max_sequence_length: int = 0
    weight_key: str | None = None

    def __post_init__(self) -> None:
        errors.check_int("max_sequence_length", self.max_sequence_length, 0)
        if not isinstance(self.table_id, str):
            raise errors.argument_type("table_id", self.table_id, "a str")
        if not isinstance(self.weight_key, str | None):
            raise errors.argument_type("weight_key", self.weight_key, "a str or None")
