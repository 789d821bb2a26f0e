"""Takes the configuration objects of tf.tpu.experimental.embedding.

Every option is carried or refused by name; none is dropped. Objects of this
package pass through as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors, optimizers
from tpu_embedding.config import (
    FeatureConfig,
    SparseCoreEmbeddingConfig,
    TableConfig,
    check_invalid_ids,
)
from tpu_embedding.nest_utils import flatten_with_paths

_stock = tf.tpu.experimental.embedding
# Of an optimizer and what it belongs to, for errors.
OptimizerConverter = Callable[[Any, str], optimizers.Optimizer | None]

# TensorFlow's class -> ours. Exact classes: a subclass may have another rule.
_OPTIMIZERS: dict[type, Callable[..., optimizers.Optimizer]] = {
    _stock.SGD: optimizers.SGD,
    _stock.Adagrad: optimizers.Adagrad,
    _stock.AdagradMomentum: optimizers.AdagradMomentum,
    _stock.FTRL: optimizers.FTRL,
    _stock.Adam: optimizers.Adam,
}


@dataclasses.dataclass(frozen=True)
class AdaptedFeatures:
    """A feature configuration, flat and in our own classes.

    Attributes:
      paths: Where each feature stands in the user's structure, e.g. "user/0".
      features: The features in the order of tf.nest.flatten. Features that shared
        a table share one TableConfig.
      keys: For each TableConfig in `features`, the object that the user passed.
    """

    paths: tuple[str, ...]
    features: tuple[FeatureConfig, ...]
    keys: dict[TableConfig, Any]


@dataclasses.dataclass(frozen=True)
class ConstructorArguments:
    """Arguments of TPUEmbedding that TensorFlow 2.3 had in another order.

    Attributes:
      optimizer: The second argument now, the third then.
      pipelined: The third now, the fourth then.
      batch_size: A keyword now, the second then.
      initialize: A keyword now, the fifth then.
    """

    optimizer: Any
    pipelined: Any
    batch_size: Any
    initialize: Any

    def in_order(self, older: Sequence[Any]) -> ConstructorArguments:
        """Undoes the order of TensorFlow 2.3, which an int as optimizer betrays.

        Args:
          older: Positional arguments beyond the third.

        Raises:
          TypeError: If there are too many, or one is of the wrong type.
          ValueError: If the batch size is no int >= 1.
        """
        arguments = self
        if isinstance(self.optimizer, int) and not isinstance(self.optimizer, bool):
            if len(older) > 2:
                raise errors.too_many_arguments(older[2:])
            if self.batch_size is not None:
                raise errors.too_many_arguments([f"batch_size={self.batch_size}"])
            pipelined, initialize = (*older, *(False, self.initialize)[len(older) :])
            arguments = ConstructorArguments(
                optimizer=self.pipelined,
                pipelined=pipelined,
                batch_size=self.optimizer,
                initialize=initialize,
            )
        elif older:
            raise errors.too_many_arguments(older)
        arguments._check()
        return arguments

    def _check(self) -> None:
        for argument, value in (
            ("pipeline_execution_with_tensor_core", self.pipelined),
            ("initialize_tpu_embedding", self.initialize),
        ):
            if not isinstance(value, bool):
                raise errors.argument_type(argument, value, "a bool")
        check_batch_size("batch_size", self.batch_size)


def check_batch_size(argument: str, size: Any) -> None:
    """Raises ValueError unless a batch size is None or an int >= 1."""
    if size is not None and (type(size) is not int or size < 1):
        raise errors.argument_int(argument, size, smallest=1)


def adapt_sparse_core(config: Any) -> SparseCoreEmbeddingConfig:
    """Ours as it is, TensorFlow's as one of ours, None as the defaults.

    Raises:
      TypeError: If it is something else.
    """
    if config is None:
        return SparseCoreEmbeddingConfig()
    if isinstance(config, SparseCoreEmbeddingConfig):
        return config
    if type(config) is not _stock.SparseCoreEmbeddingConfig:
        raise errors.argument_type(
            "sparse_core_embedding_config", config, "a SparseCoreEmbeddingConfig"
        )
    return SparseCoreEmbeddingConfig(**vars(config))


def adapt_optimizer(
    optimizer: Any, where: str = "the whole embedding"
) -> optimizers.Optimizer | None:
    """Returns an optimizer, TensorFlow's or ours, as one of ours.

    Args:
      optimizer: An optimizer or None.
      where: What it belongs to, for the message.

    Raises:
      ValueError: If it is of another class.
    """
    if optimizer is None or isinstance(optimizer, optimizers.Optimizer):
        return optimizer
    if type(optimizer) is _stock.CustomOptimizer:
        return _adapt_custom(optimizer)
    ours = _OPTIMIZERS.get(type(optimizer))
    if ours is None:
        raise errors.unsupported_optimizer(where, optimizer, optimizers.OPTIMIZERS)
    # Both sides call their options the same, but TensorFlow keeps no `clipvalue`.
    options = {
        field.name: getattr(optimizer, field.name)
        for field in dataclasses.fields(ours)  # pyright: ignore[reportArgumentType]
        if field.name != "clipvalue"
    }
    return ours(clipvalue=_clipvalue(optimizer), **options)


def _adapt_custom(optimizer: Any) -> optimizers.CustomOptimizer:
    # The names and initializers of its slots are told by methods alone.
    return optimizers.CustomOptimizer(
        optimizer.custom_computation,
        learning_rate=optimizer.learning_rate,
        slot_names=optimizer._slot_names(),
        slot_initializers=optimizer._slot_initializers(),
        hyperparameters=optimizer.hyperparameters,
        slot_dims=getattr(optimizer, "slot_dims", None) or None,
    )


def adapt_features(
    feature_config: Any,
    invalid_ids: str | None = None,
    convert: OptimizerConverter = adapt_optimizer,
) -> AdaptedFeatures:
    """Flattens a feature configuration and turns it into our own classes.

    Args:
      feature_config: A FeatureConfig, or a nested dict, list, tuple or namedtuple
        of them, TensorFlow's and ours in any mix.
      invalid_ids: The rule for TensorFlow's own tables, which have none; None
        means "error". A table of ours keeps its own.
      convert: Converts the optimizer of a table, as `adapt_optimizer` does.

    Raises:
      ValueError: If it holds no feature or something else than features, or an
        option is wrong; the text names the path.
      NotImplementedError: If it holds an option that this release lacks.
    """
    if invalid_ids is not None:
        check_invalid_ids(invalid_ids)
    paths = []
    features = []
    tables: dict[Any, TableConfig] = {}  # By the object that the user passed.
    for path, leaf in flatten_with_paths(feature_config):
        if not isinstance(leaf, (FeatureConfig, _stock.FeatureConfig)):
            raise errors.not_a_feature_config(path, leaf)
        try:
            if leaf.table not in tables:
                tables[leaf.table] = _adapt_table(leaf.table, invalid_ids, convert)
            features.append(_adapt_feature(leaf, tables[leaf.table]))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise errors.located(path, error) from error
        paths.append(path)
    if not features:
        raise errors.no_features()
    keys = {ours: passed for passed, ours in tables.items()}
    return AdaptedFeatures(tuple(paths), tuple(features), keys)


def _adapt_table(
    table: Any, invalid_ids: str | None, convert: OptimizerConverter
) -> TableConfig:
    if not isinstance(table, (TableConfig, _stock.TableConfig)):
        raise errors.feature_table(table)
    optimizer = convert(table.optimizer, _describe(table))
    if isinstance(table, TableConfig):
        if optimizer is table.optimizer:
            return table
        return dataclasses.replace(table, optimizer=optimizer)
    return TableConfig(
        vocabulary_size=table.vocabulary_size,
        dim=table.dim,
        initializer=table.initializer,
        optimizer=optimizer,
        combiner=table.combiner,
        name=table.name,
        quantization_config=table.quantization_config,
        layout=table.layout,
        dtype=table.dtype,
        invalid_ids=invalid_ids or "error",
    )


def _adapt_feature(feature: Any, table: TableConfig) -> FeatureConfig:
    if isinstance(feature, FeatureConfig):
        if feature.table is table:
            return feature
        return dataclasses.replace(feature, table=table)
    return FeatureConfig(
        table=table,
        max_sequence_length=feature.max_sequence_length,
        validate_weights_and_indices=feature.validate_weights_and_indices,
        output_shape=feature.output_shape,
        name=feature.name,
    )


def _clipvalue(optimizer: Any) -> optimizers.ClipValue | None:
    lower, upper = optimizer.clip_gradient_min, optimizer.clip_gradient_max
    if lower is None and upper is None:
        return None
    if lower is not None and upper is not None and lower == -upper:
        return upper
    return (lower, upper)


def _describe(table: Any) -> str:
    return f"table {table.name!r}" if table.name else "an unnamed table"
