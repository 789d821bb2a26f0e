"""The layer's configuration, once names and Keras optimizers are resolved."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from tpu_embedding import optimizers as rules
from tpu_embedding.keras import errors
from tpu_embedding.keras.optimizers import is_keras_optimizer, translate_keras_optimizer
from tpu_embedding.layout.plan import Plan, make_plan
from tpu_embedding.nest_utils import Structure
from tpu_embedding.tf_configs import adapt_features, adapt_optimizer

_NAMES = {
    "sgd": rules.SGD,
    "adagrad": rules.Adagrad,
    "adam": rules.Adam,
    "ftrl": rules.FTRL,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Resolved:
    """A feature configuration in our own classes.

    Attributes:
      structure: The user's structure.
      plan: Its tables and features; the `key` of a table is the user's object.
      optimizer: For tables without one of their own, or None.
    """

    structure: Structure
    plan: Plan
    optimizer: rules.Optimizer | None

    def features(self) -> Any:
        """The configuration for a core embedding, in the user's structure."""
        return self.structure.pack([spec.config for spec in self.plan.features])

    def completed_features(self, batch_size: int | None) -> Any:
        """As `features`, with all names, and with output shapes as far as known.

        Args:
          batch_size: Of a replica: the samples of each feature without a shape.
        """
        tables = [
            dataclasses.replace(spec.config, name=spec.name)
            for spec in self.plan.tables
        ]
        return self.structure.pack(
            [
                dataclasses.replace(
                    spec.config,
                    table=tables[spec.table],
                    name=spec.config.name or spec.path,
                    output_shape=_output_shape(spec.config, batch_size),
                )
                for spec in self.plan.features
            ]
        )


def resolve(feature_config: Any, optimizer: Any, invalid_ids: str | None) -> Resolved:
    """Reads what the user passed to the layer.

    Raises:
      The errors of TPUEmbedding that concern the configuration.
      ValueError: If a string or a Keras optimizer cannot be used.
    """
    structure = Structure(feature_config)
    users: dict[Any, Any] = {}  # A table with its optimizer resolved -> the user's.
    resolved: dict[Any, Any] = {}  # The other way round.
    leaves = []
    for leaf in structure.flatten("feature_config", feature_config):
        table = getattr(leaf, "table", None)
        if table is None:
            leaves.append(leaf)  # adapt_features has an error for it.
            continue
        if table not in resolved:
            resolved[table] = _resolve_table(table)
            users[resolved[table]] = table
        leaves.append(_with_table(leaf, resolved[table]))
    adapted = adapt_features(structure.pack(leaves), invalid_ids)
    fallback = resolve_optimizer(optimizer, "the whole embedding")
    plan = make_plan(
        adapted.paths,
        adapted.features,
        {ours: users[table] for ours, table in adapted.keys.items()},
        fallback,
    )
    return Resolved(structure, plan, fallback)


def resolve_serving(serving_config: Any, layer: Resolved) -> Resolved:
    """Other features over the tables of a layer.

    Raises:
      ValueError: If a table is none of the layer's, or the configuration is wrong.
    """
    own = {spec.key: spec for spec in layer.plan.tables}
    structure = Structure(serving_config)
    leaves = structure.flatten("serving_config", serving_config)
    paths = adapt_features(
        structure.pack([_without_optimizer(leaf) for leaf in leaves])
    ).paths
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf.table not in own:
            raise errors.serving_table(path)
    features = [_with_table(leaf, own[leaf.table].config) for leaf in leaves]
    adapted = adapt_features(structure.pack(features))
    plan = make_plan(
        adapted.paths,
        adapted.features,
        {spec.config: spec.key for spec in layer.plan.tables},
        None,
    )
    # Unnamed tables are called by their place, which may be another one here.
    names = {spec.config: spec.name for spec in layer.plan.tables}
    tables = [dataclasses.replace(t, name=names[t.config]) for t in plan.tables]
    plan = dataclasses.replace(plan, tables=tuple(tables))
    return Resolved(structure, plan, None)


def resolve_optimizer(optimizer: Any, where: str) -> rules.Optimizer | None:
    """An optimizer of ours for whatever the layer takes.

    Raises:
      ValueError: If it is none that the layer takes.
    """
    if isinstance(optimizer, str):
        if optimizer not in _NAMES:
            raise errors.optimizer_name(where, optimizer, _NAMES)
        return _NAMES[optimizer]()
    if is_keras_optimizer(optimizer):
        return translate_keras_optimizer(optimizer)
    return adapt_optimizer(optimizer, where)


def _output_shape(feature: Any, batch_size: int | None) -> Any:
    if feature.output_shape is None and not feature.max_sequence_length and batch_size:
        return (batch_size,)
    return feature.output_shape


def _resolve_table(table: Any) -> Any:
    where = f"table {table.name!r}" if table.name else "an unnamed table"
    optimizer = resolve_optimizer(table.optimizer, where)
    return _replace(table, optimizer=optimizer)


def _with_table(feature: Any, table: Any) -> Any:
    return _replace(feature, table=table)


def _without_optimizer(leaf: Any) -> Any:
    table = getattr(leaf, "table", None)
    return leaf if table is None else _with_table(leaf, _replace(table, optimizer=None))


def _replace(config: Any, **changes: Any) -> Any:
    """A copy; TensorFlow's own configurations are no dataclasses."""
    if dataclasses.is_dataclass(config):
        return dataclasses.replace(config, **changes)  # pyright: ignore[reportArgumentType]
    duplicate = copy.copy(config)
    for attribute, value in changes.items():
        setattr(duplicate, attribute, value)
    return duplicate
