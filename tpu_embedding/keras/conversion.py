"""Converts the layer's configuration into classes of this package, once."""

from __future__ import annotations

import dataclasses
from typing import Any

from tpu_embedding import optimizers as rules
from tpu_embedding import tf_configs
from tpu_embedding.keras.optimizers import is_keras_optimizer, translate_keras_optimizer
from tpu_embedding.layout.plan import FeatureSpec, Plan, feature_specs, make_plan
from tpu_embedding.lookup.feature_structure import FeatureStructure

_OPTIMIZERS_BY_NAME = {
    "sgd": rules.SGD,
    "adagrad": rules.Adagrad,
    "adam": rules.Adam,
    "ftrl": rules.FTRL,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Features:
    """A converted feature configuration.

    Attributes:
      structure: The nesting of the user's configuration.
      plan: The tables and features; `TableSpec.key` is the user's TableConfig.
      optimizer: The optimizer of tables without one of their own, or None.
    """

    structure: FeatureStructure
    plan: Plan
    optimizer: rules.Optimizer | None


def convert_features(
    feature_config: Any, optimizer: Any, invalid_ids: str | None
) -> Features:
    """Converts the arguments of the layer."""
    converted = tf_configs.convert_features(
        feature_config, invalid_ids, convert_optimizer
    )
    fallback = convert_optimizer(optimizer, "the whole embedding")
    plan = make_plan(*converted, fallback, growing=True)
    tf_configs.freeze_configs(feature_config)
    return Features(FeatureStructure(feature_config, plan.features), plan, fallback)


def convert_serving(serving_config: Any, layer: Features) -> Features:
    """Converts other features over the tables of a layer."""
    # A TableConfig of the layer may have an optimizer that only the layer converts.
    converted = tf_configs.convert_features(
        serving_config, None, lambda optimizer, where: None
    )
    tables = {spec.key: spec for spec in layer.plan.tables}
    features: list[FeatureSpec] = []
    for path, feature in zip(converted.paths, converted.features, strict=True):
        table = tables.get(converted.keys[feature.table])
        if table is None:
            raise ValueError(
                f"Feature {path} of `serving_config` has a TableConfig that does not "
                "belong to the layer. Use the TableConfig objects that the layer was "
                "created with; for a loaded layer they are the keys of "
                "`layer.embedding_tables`."
            )
        features += feature_specs(
            len(features), path, feature, table.index, table.config
        )
    plan = dataclasses.replace(layer.plan, features=tuple(features))
    return Features(FeatureStructure(serving_config, plan.features), plan, None)


def convert_optimizer(optimizer: Any, where: str) -> rules.Optimizer | None:
    """Converts what the layer accepts as an optimizer; errors name `where` it is."""
    if isinstance(optimizer, str):
        if optimizer not in _OPTIMIZERS_BY_NAME:
            names = ", ".join(map(repr, _OPTIMIZERS_BY_NAME))
            raise ValueError(
                f"Unknown optimizer {optimizer!r} for {where}. The names are {names}; "
                "pass other optimizers as objects."
            )
        return _OPTIMIZERS_BY_NAME[optimizer]()
    if is_keras_optimizer(optimizer):
        return translate_keras_optimizer(optimizer)
    return tf_configs.convert_optimizer(optimizer, where)
