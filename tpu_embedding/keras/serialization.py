"""The layer's configuration as JSON."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import init_ops_v2

from tpu_embedding import optimizers as rules
from tpu_embedding.config import (
    FeatureConfig,
    QuantizationConfig,
    SparseCoreEmbeddingConfig,
    TableConfig,
)
from tpu_embedding.initializers import RowIdInitializer
from tpu_embedding.keras import errors
from tpu_embedding.keras.optimizers import is_keras_optimizer
from tpu_embedding.nest_utils import Structure
from tpu_embedding.optimizers.frequency_estimator import updates_so_far
from tpu_embedding.tf_configs import adapt_optimizer

# The rate of FrequencyEstimator, whose module knows no Keras.
keras.saving.register_keras_serializable("tpu_embedding")(updates_so_far)


def encode_features(feature_config: Any, invalid_ids: str | None) -> dict[str, Any]:
    """A feature configuration as JSON; a table that is shared is written once.

    Raises:
      ValueError: If it holds something that cannot be written.
    """
    structure = Structure(feature_config)
    leaves = structure.flatten("feature_config", feature_config)
    tables = list({leaf.table: None for leaf in leaves})
    features = [
        _Feature(_encode_feature(leaf, tables.index(leaf.table))) for leaf in leaves
    ]
    return {
        "tables": [_encode_table(table, invalid_ids) for table in tables],
        "features": _encode_structure(structure.pack(features)),
    }


def decode_features(config: Mapping[str, Any]) -> Any:
    """What `encode_features` was given, in classes of this package."""
    tables = [_decode_table(table) for table in config["tables"]]
    return _decode_structure(config["features"], tables)


@keras.saving.register_keras_serializable("tpu_embedding")
@dataclasses.dataclass(frozen=True)
class ServingFeatures:
    """A `serving_config` in the nodes of a functional model, which Keras saves.

    Attributes:
      features: JSON; a table is its place among those of the layer.
    """

    features: dict[str, Any]

    @classmethod
    def of(cls, serving_config: Any, tables: Sequence[Any]) -> ServingFeatures:
        """For a configuration over some of a layer's tables."""
        structure = Structure(serving_config)
        leaves = structure.flatten("serving_config", serving_config)
        features = [
            _Feature(_encode_feature(leaf, tables.index(leaf.table))) for leaf in leaves
        ]
        return cls(_encode_structure(structure.pack(features)))

    def over(self, tables: Sequence[Any]) -> Any:
        """The configuration over the tables of a layer, in classes of this package."""
        return _decode_structure(self.features, tables)

    def get_config(self) -> dict[str, Any]:
        return {"features": self.features}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ServingFeatures:
        return cls(**config)


def encode_sparse_core(config: Any) -> dict[str, Any] | None:
    """A SparseCoreEmbeddingConfig, of this package or of TensorFlow, as JSON."""
    if config is None:
        return None
    return {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in vars(config).items()
    }


def decode_sparse_core(config: Any) -> SparseCoreEmbeddingConfig | None:
    """What `encode_sparse_core` was given, in the class of this package."""
    return None if config is None else SparseCoreEmbeddingConfig(**config)


def encode_optimizer(optimizer: Any, where: str) -> Any:
    """An optimizer of any kind that the layer takes, as JSON."""
    if optimizer is None or isinstance(optimizer, str):
        return optimizer
    if is_keras_optimizer(optimizer):
        package = type(optimizer).__module__.split(".")[0]
        serialize = importlib.import_module(package).optimizers.serialize
        return {"package": package, "config": serialize(optimizer)}
    ours = adapt_optimizer(optimizer, where)
    fields = dataclasses.fields(ours)  # pyright: ignore[reportArgumentType]
    options = {
        field.name: encode_object(
            f"`{field.name}` of the optimizer of {where}", getattr(ours, field.name)
        )
        for field in fields
    }
    return {"package": "tpu_embedding", "class": type(ours).__name__, **options}


def decode_optimizer(config: Any) -> Any:
    """What `encode_optimizer` was given."""
    if config is None or isinstance(config, str):
        return config
    options = dict(config)
    package = options.pop("package")
    if package != "tpu_embedding":
        return importlib.import_module(package).optimizers.deserialize(
            options["config"]
        )
    rule = rules.OPTIMIZERS[options.pop("class")]
    options = {name: decode_object(value) for name, value in options.items()}
    clip = options["clipvalue"]
    options["clipvalue"] = tuple(clip) if isinstance(clip, list) else clip
    return rule(**options)


def _encode_feature(feature: Any, table: int) -> dict[str, Any]:
    shape = feature.output_shape
    if hasattr(shape, "as_list"):
        shape = None if shape.rank is None else shape.as_list()
    return {
        "table": table,
        "max_sequence_length": feature.max_sequence_length,
        "validate_weights_and_indices": feature.validate_weights_and_indices,
        "output_shape": None if shape is None else list(shape),
        "name": feature.name,
    }


def _encode_table(table: Any, invalid_ids: str | None) -> dict[str, Any]:
    where = f"table {table.name!r}" if table.name else "an unnamed table"
    quantization = table.quantization_config
    if quantization is not None:
        quantization = [
            quantization.num_buckets,
            quantization.lower,
            quantization.upper,
        ]
    return {
        "vocabulary_size": table.vocabulary_size,
        "dim": table.dim,
        "initializer": _encode_initializer(where, table.initializer),
        "optimizer": encode_optimizer(table.optimizer, where),
        "combiner": table.combiner,
        "name": table.name,
        "quantization_config": quantization,
        # TensorFlow's own tables have no rule; the layer's stands in for it.
        "invalid_ids": getattr(table, "invalid_ids", invalid_ids or "error"),
        **_encode_storage(table),
    }


def _encode_storage(table: Any) -> dict[str, Any]:
    """How the rows are stored, where that is not as float32."""
    name = tf.as_dtype(table.dtype).name
    seed = getattr(table, "rounding_seed", None)
    return {} if name == "float32" else {"dtype": name, "rounding_seed": seed}


def _decode_table(config: Mapping[str, Any]) -> TableConfig:
    arguments = dict(config)
    arguments["initializer"] = _decode_initializer(config["initializer"])
    arguments["optimizer"] = decode_optimizer(config["optimizer"])
    if config["quantization_config"] is not None:
        arguments["quantization_config"] = QuantizationConfig(
            *config["quantization_config"]
        )
    return TableConfig(**arguments)


@dataclasses.dataclass(frozen=True)
class _Feature:
    """A leaf; a dict would be taken for one of the user's."""

    arguments: dict[str, Any]


def _encode_structure(structure: Any) -> Any:
    """Containers as JSON that tells them apart."""
    if isinstance(structure, Mapping):
        # JSON has no tuples; a list is no key, so lists that are read were tuples.
        items = [
            [list(key) if isinstance(key, tuple) else key, _encode_structure(value)]
            for key, value in structure.items()
        ]
        return {"kind": "dict", "items": items}
    if hasattr(structure, "_fields"):
        raise errors.namedtuple(type(structure).__name__)  # Keras makes them lists.
    if isinstance(structure, (list, tuple)):
        kind = "list" if isinstance(structure, list) else "tuple"
        return {"kind": kind, "items": [_encode_structure(s) for s in structure]}
    return {"kind": "feature", **structure.arguments}


def _decode_structure(config: Mapping[str, Any], tables: Sequence[Any]) -> Any:
    kind = config["kind"]
    if kind == "dict":
        return {
            tuple(key) if isinstance(key, list) else key: _decode_structure(
                value, tables
            )
            for key, value in config["items"]
        }
    if kind in ("list", "tuple"):
        items = [_decode_structure(item, tables) for item in config["items"]]
        return items if kind == "list" else tuple(items)
    arguments = {k: value for k, value in config.items() if k != "kind"}
    arguments["table"] = tables[config["table"]]
    return FeatureConfig(**arguments)


def _encode_initializer(where: str, initializer: Any) -> Any:
    if isinstance(initializer, RowIdInitializer):
        return {"row_id_offset": initializer.offset}
    if isinstance(initializer, init_ops_v2.Initializer):
        name = type(initializer).__name__
        if getattr(init_ops_v2, name, None) is type(initializer):
            return {"tensorflow": name, "config": initializer.get_config()}
    return encode_object(f"The initializer of {where}", initializer)


def _decode_initializer(config: Any) -> Any:
    if isinstance(config, Mapping) and "row_id_offset" in config:
        return RowIdInitializer(config["row_id_offset"])
    if isinstance(config, Mapping) and "tensorflow" in config:
        cls = getattr(init_ops_v2, config["tensorflow"])
        return cls.from_config(config["config"])
    return decode_object(config)


def encode_object(what: str, value: Any) -> Any:
    """A number, a flag, None, a pair, or what Keras can serialise."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, tuple):
        return list(value)
    if getattr(value, "__name__", "") == "<lambda>":
        raise errors.not_serializable(what, value)
    try:
        config = keras.saving.serialize_keras_object(value)
        keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise errors.not_serializable(what, value) from error
    return config


def decode_object(config: Any) -> Any:
    """What `encode_object` was given; a pair comes back as a list."""
    if isinstance(config, Mapping):
        return keras.saving.deserialize_keras_object(config)
    return config
