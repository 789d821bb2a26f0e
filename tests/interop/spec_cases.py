"""Feature columns and specs that several tests of tpu_embedding.interop share."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tpu_embedding import interop

fc = tf.feature_column


def ids(key: str, buckets: int = 8) -> Any:
    return fc.categorical_column_with_identity(key, buckets)


def sequence(key: str, buckets: int = 8) -> Any:
    return fc.sequence_categorical_column_with_identity(key, buckets)


def weighted(key: str, weight_key: str, buckets: int = 8) -> Any:
    return fc.weighted_categorical_column(ids(key, buckets), weight_key)


def embedding(key: str = "a", dimension: int = 2, **options: Any) -> Any:
    return interop.embedding_column(ids(key), dimension, **options)


def shared(*keys: str, dimension: int = 2, **options: Any) -> list[Any]:
    columns = [ids(key) for key in keys]
    return interop.shared_embedding_columns(columns, dimension, **options)


SGD = interop.StochasticGradientDescentParameters(0.5)
TABLE = interop.TableConfig(8, 2)
FEATURE = interop.FeatureConfig("t")


def spec(*columns: Any, parameters: Any = SGD, **options: Any) -> Any:
    """A spec of columns, or of one embedding column where none are given."""
    return interop.EmbeddingConfigSpec(columns or [embedding()], parameters, **options)


def dict_spec(features: Any = None, tables: Any = None, **options: Any) -> Any:
    """A spec of dicts; one feature "f" of one table "t" by default."""
    return interop.EmbeddingConfigSpec(
        feature_to_config_dict={"f": FEATURE} if features is None else features,
        table_to_config_dict={"t": TABLE} if tables is None else tables,
        **{"optimization_parameters": SGD, **options},
    )
