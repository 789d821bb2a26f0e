"""Converts the configuration objects of tf.tpu.experimental.embedding.

Every option is converted or raises an error that names it; none is ignored. Objects of
this package are returned unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding import errors, optimizers
from tpu_embedding.config import (
    FeatureConfig,
    SparseCoreEmbeddingConfig,
    TableConfig,
    check_invalid_ids,
)
from tpu_embedding.nest_utils import flatten_with_paths

_tf = tf.tpu.experimental.embedding
# Takes an optimizer and, for errors, where it was given.
OptimizerConverter = Callable[[Any, str], optimizers.Optimizer | None]

# TensorFlow's class -> ours. A subclass is refused: its rule may be different.
_OPTIMIZERS: dict[type, Callable[..., optimizers.Optimizer]] = {
    _tf.SGD: optimizers.SGD,
    _tf.Adagrad: optimizers.Adagrad,
    _tf.AdagradMomentum: optimizers.AdagradMomentum,
    _tf.FTRL: optimizers.FTRL,
    _tf.Adam: optimizers.Adam,
}


class ConvertedFeatures(NamedTuple):
    """A feature configuration, flattened and in the classes of this package.

    These are the first arguments of `make_plan`.

    Attributes:
      paths: The place of each feature in the user's structure, such as "user/0".
      features: The features in the order of tf.nest.flatten. Features that shared
        a table share one TableConfig.
      keys: The object that the user passed, for each TableConfig in `features`.
    """

    paths: tuple[str, ...]
    features: tuple[FeatureConfig, ...]
    keys: dict[TableConfig, Any]


@dataclasses.dataclass(frozen=True)
class ConstructorArguments:
    """Arguments of TPUEmbedding whose order differed in TensorFlow 2.3.

    Attributes:
      optimizer: The second argument; the third in TensorFlow 2.3.
      pipelined: The third argument; the fourth in TensorFlow 2.3.
      batch_size: A keyword; the second argument in TensorFlow 2.3.
      initialize: A keyword; the fifth argument in TensorFlow 2.3.
    """

    optimizer: Any
    pipelined: Any
    batch_size: Any
    initialize: Any

    def in_order(self, older: Sequence[Any]) -> ConstructorArguments:
        """Accepts the TF 2.3 argument order, detected by an int as second argument.

        `older` has the positional arguments beyond the third.
        """
        arguments, extra = self, tuple(older)
        if errors.is_int(self.optimizer):
            older, extra = extra[:2], extra[2:]
            if self.batch_size is not None:
                extra = (*extra, f"batch_size={self.batch_size}")
            pipelined, initialize = (*older, *(False, self.initialize)[len(older) :])
            arguments = ConstructorArguments(
                optimizer=self.pipelined,
                pipelined=pipelined,
                batch_size=self.optimizer,
                initialize=initialize,
            )
        if extra:
            raise TypeError(
                "TPUEmbedding takes (feature_config, optimizer, "
                "pipeline_execution_with_tensor_core), or with an int as second "
                "argument (feature_config, batch_size, optimizer, "
                "pipeline_execution_with_tensor_core, initialize_tpu_embedding). Also "
                f"received: {extra!r}."
            )
        arguments._check()
        return arguments

    def _check(self) -> None:
        errors.check_flag("pipeline_execution_with_tensor_core", self.pipelined)
        errors.check_flag("initialize_tpu_embedding", self.initialize)
        check_batch_size("batch_size", self.batch_size)


def check_batch_size(argument: str, size: Any) -> None:
    """Raises ValueError unless a batch size is None or an int >= 1."""
    if size is not None:
        errors.check_int(argument, size, 1)


def convert_sparse_core(config: Any) -> SparseCoreEmbeddingConfig:
    """Converts TensorFlow's SparseCoreEmbeddingConfig; None gives the defaults."""
    if config is None:
        return SparseCoreEmbeddingConfig()
    if isinstance(config, SparseCoreEmbeddingConfig):
        return config
    if type(config) is not _tf.SparseCoreEmbeddingConfig:
        raise errors.argument_type(
            "sparse_core_embedding_config", config, "a SparseCoreEmbeddingConfig"
        )
    return SparseCoreEmbeddingConfig(**vars(config))


def convert_optimizer(
    optimizer: Any, where: str = "the whole embedding"
) -> optimizers.Optimizer | None:
    """Converts TensorFlow's optimizer; errors say `where` it was given."""
    if optimizer is None or isinstance(optimizer, optimizers.Optimizer):
        return optimizer
    if type(optimizer) is _tf.CustomOptimizer:
        # TensorFlow has methods, not attributes, for names and initializers of slots.
        return optimizers.CustomOptimizer(
            optimizer.custom_computation,
            learning_rate=optimizer.learning_rate,
            slot_names=optimizer._slot_names(),
            slot_initializers=optimizer._slot_initializers(),
            hyperparameters=optimizer.hyperparameters,
            slot_dims=getattr(optimizer, "slot_dims", None) or None,
        )
    ours = _OPTIMIZERS.get(type(optimizer))
    if ours is None:
        raise ValueError(
            f"Unsupported optimizer for {where}: {optimizer!r} of type "
            f"{errors.type_name(optimizer)}. Supported are "
            f"{', '.join(optimizers.OPTIMIZERS)}, and those of "
            "tf.tpu.experimental.embedding with the same names."
        )
    # The options have the same names in both classes, except that TensorFlow keeps
    # two limits instead of `clipvalue`, and lacks our keyword-only options.
    options = {
        field.name: getattr(optimizer, field.name)
        for field in dataclasses.fields(ours)  # pyright: ignore[reportArgumentType]
        if field.name != "clipvalue" and not field.kw_only
    }
    lower, upper = optimizer.clip_gradient_min, optimizer.clip_gradient_max
    clipvalue: optimizers.ClipValue | None = (lower, upper)
    if lower is None and upper is None:
        clipvalue = None
    elif lower is not None and upper is not None and lower == -upper:
        clipvalue = upper
    return ours(clipvalue=clipvalue, **options)


def convert_features(
    feature_config: Any,
    invalid_ids: str | None = None,
    convert: OptimizerConverter = convert_optimizer,
) -> ConvertedFeatures:
    """Flattens a feature configuration and converts TensorFlow's objects in it.

    Args:
      feature_config: A FeatureConfig, or a nested dict, list, tuple or namedtuple
        of FeatureConfigs of TensorFlow or of this package, in any mix.
      invalid_ids: The policy for TensorFlow's tables, which have none; None
        means "error". A table of this package keeps its own policy.
      convert: Converts the optimizer of a table.
    """
    if invalid_ids is not None:
        check_invalid_ids(invalid_ids)
    paths = []
    features = []
    tables: dict[Any, TableConfig] = {}  # Keys are the objects that the user passed.
    for path, leaf in flatten_with_paths(feature_config):
        if not isinstance(leaf, (FeatureConfig, _tf.FeatureConfig)):
            raise ValueError(
                f"Feature {path}: each leaf of `feature_config` must be a "
                "FeatureConfig, of this package or of tf.tpu.experimental.embedding. "
                f"Received: {leaf!r} of type {errors.type_name(leaf)}."
            )
        try:
            if leaf.table not in tables:
                tables[leaf.table] = _convert_table(leaf.table, invalid_ids, convert)
            features.append(_convert_feature(leaf, tables[leaf.table]))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise type(error)(f"Feature {path}: {error}") from error
        paths.append(path)
    if not features:
        raise ValueError(
            "`feature_config` holds no FeatureConfig. Pass one, or a dict, list or "
            "tuple of them."
        )
    if invalid_ids is not None and all(isinstance(t, TableConfig) for t in tables):
        raise ValueError(
            f"`invalid_ids={invalid_ids!r}` applies only to tables of "
            "tf.tpu.experimental.embedding, but `feature_config` has none. Leave it "
            f"out, and set tpu_embedding.TableConfig(invalid_ids={invalid_ids!r})."
        )
    keys = {ours: passed for passed, ours in tables.items()}
    return ConvertedFeatures(tuple(paths), tuple(features), keys)


def freeze_configs(feature_config: Any) -> None:
    """Forbids changes of the configs, because an embedding or layer now uses them.

    TensorFlow's configs can still be changed; the embedding has copies of them.
    """
    for _, leaf in flatten_with_paths(feature_config):
        for config in (leaf, leaf.table):
            if isinstance(config, (FeatureConfig, TableConfig)):
                config.freeze()


def _convert_table(
    table: Any, invalid_ids: str | None, convert: OptimizerConverter
) -> TableConfig:
    if not isinstance(table, (TableConfig, _tf.TableConfig)):
        raise errors.argument_value(
            "table",
            table,
            "a TableConfig, of this package or of tf.tpu.experimental.embedding",
        )
    where = f"table {table.name!r}" if table.name else "an unnamed table"
    optimizer = convert(table.optimizer, where)
    if isinstance(table, TableConfig):
        table.check_again()
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
        dtype=getattr(table, "dtype", "float32"),  # New in TensorFlow 2.20.
        invalid_ids=invalid_ids or "error",
    )


def _convert_feature(feature: Any, table: TableConfig) -> FeatureConfig:
    if isinstance(feature, FeatureConfig):
        feature.check_again()
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
