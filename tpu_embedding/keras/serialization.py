"""The layer's configuration as JSON, and its tables and slots in weight files."""

from __future__ import annotations

import dataclasses
import importlib
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import init_ops_v2

from tpu_embedding import optimizers
from tpu_embedding.checkpoint.hashings import (
    check_hashing,
    hashing_arrays,
    hashing_name,
    parse_hashing,
)
from tpu_embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from tpu_embedding.initializers import RowIdInitializer
from tpu_embedding.keras.conversion import is_keras_optimizer
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.layout.plan import UPDATES, Plan
from tpu_embedding.nest_utils import flatten_with_paths
from tpu_embedding.optimizers.tpu_v2_v4 import updates_so_far
from tpu_embedding.tables.codes import stored_rows, values_of
from tpu_embedding.tables.rows import PARAMETERS, SCALE_OFFSET, checkpoint_name
from tpu_embedding.tables.vocabularies import Vocabulary
from tpu_embedding.tf_configs import convert_optimizer
from tpu_embedding.vocabulary import GrowingVocabulary, Hashing

# The rate of FrequencyEstimator, whose module does not import Keras.
keras_api.register(updates_so_far)


def encode_features(feature_config: Any, invalid_ids: str | None) -> dict[str, Any]:
    """Returns a feature configuration as JSON; a shared table is written once."""
    tables = list({f.table: None for _, f in flatten_with_paths(feature_config)})
    return {
        "tables": [_encode_table(table, invalid_ids) for table in tables],
        "features": _encode_structure(feature_config, tables),
    }


def decode_features(config: Mapping[str, Any]) -> Any:
    """Reverses `encode_features`, in classes of this package."""
    tables = [_decode_table(table) for table in config["tables"]]
    return _decode_structure(config["features"], tables)


@keras_api.register
@dataclasses.dataclass(frozen=True)
class ServingFeatures:
    """A `serving_config` in the nodes of a functional model, which Keras saves.

    Attributes:
      features: JSON, with the index of each table in the layer.
    """

    features: dict[str, Any]

    @classmethod
    def of(cls, serving_config: Any, tables: Sequence[Any]) -> ServingFeatures:
        """Encodes a configuration over some of a layer's tables."""
        return cls(_encode_structure(serving_config, tables))

    def over(self, tables: Sequence[Any]) -> Any:
        """Decodes the configuration over a layer's tables."""
        return _decode_structure(self.features, tables)

    def get_config(self) -> dict[str, Any]:
        return {"features": self.features}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ServingFeatures:
        return cls(**config)


def encode_sparse_core(config: Any) -> dict[str, Any] | None:
    """Returns a SparseCoreEmbeddingConfig, ours or TensorFlow's, as JSON."""
    if config is None:
        return None
    return {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in vars(config).items()
    }


def encode_optimizer(optimizer: Any, where: str) -> Any:
    """Returns as JSON any optimizer that the layer accepts."""
    if optimizer is None or isinstance(optimizer, str):
        return optimizer
    if is_keras_optimizer(optimizer):
        package = type(optimizer).__module__.split(".")[0]
        serialize = importlib.import_module(package).optimizers.serialize
        return {"package": package, "config": serialize(optimizer)}
    ours = convert_optimizer(optimizer, where)
    fields = dataclasses.fields(ours)  # pyright: ignore[reportArgumentType]
    options = {
        field.name: encode_object(
            f"`{field.name}` of the optimizer of {where}", getattr(ours, field.name)
        )
        for field in fields
    }
    return {"package": "tpu_embedding", "class": type(ours).__name__, **options}


def decode_optimizer(config: Any) -> Any:
    """Reverses `encode_optimizer`."""
    if config is None or isinstance(config, str):
        return config
    options = dict(config)
    package = options.pop("package")
    if package != "tpu_embedding":
        return importlib.import_module(package).optimizers.deserialize(
            options["config"]
        )
    name = options.pop("class")
    rule = optimizers.OPTIMIZERS.get(name)
    if rule is None:
        raise ValueError(
            f"The file was saved with the optimizer {name}, which this release does "
            f"not support. It supports {', '.join(optimizers.OPTIMIZERS)}."
        )
    options = {name: decode_object(value) for name, value in options.items()}
    clip = options["clipvalue"]
    options["clipvalue"] = tuple(clip) if isinstance(clip, list) else clip
    return rule(**options)


def _encode_feature(feature: Any, tables: Sequence[Any]) -> dict[str, Any]:
    shape = feature.output_shape
    if hasattr(shape, "as_list"):
        shape = None if shape.rank is None else shape.as_list()
    return {
        "table": tables.index(feature.table),
        "max_sequence_length": feature.max_sequence_length,
        "validate_weights_and_indices": feature.validate_weights_and_indices,
        "output_shape": None if shape is None else list(shape),
        "name": feature.name,
        **({} if getattr(feature, "salt", None) is None else {"salt": feature.salt}),
    }


def _encode_table(table: Any, invalid_ids: str | None) -> dict[str, Any]:
    where = f"table {table.name!r}" if table.name else "an unnamed table"
    quantization = table.quantization_config
    if quantization is not None:
        limits = (quantization.lower, quantization.upper)
        quantization = [quantization.num_buckets, *limits]
    ours = {
        field.name: getattr(table, field.name, field.default)
        for field in dataclasses.fields(TableConfig)
        if field.kw_only
    }
    rows = table.vocabulary_size
    has_options = isinstance(rows, (GrowingVocabulary, Hashing))
    return {
        **ours,
        "vocabulary_size": dataclasses.asdict(rows) if has_options else rows,
        "dim": table.dim,
        "initializer": _encode_initializer(where, table.initializer),
        "optimizer": encode_optimizer(table.optimizer, where),
        "combiner": table.combiner,
        "name": table.name,
        "quantization_config": quantization,
        # TensorFlow's TableConfig has had a dtype since 2.20.
        "dtype": tf.as_dtype(getattr(table, "dtype", "float32")).name,
        # TensorFlow's TableConfig has no policy; the layer's applies to it.
        "invalid_ids": getattr(table, "invalid_ids", invalid_ids or "error"),
    }


def _decode_table(config: Mapping[str, Any]) -> TableConfig:
    arguments = dict(config)
    if isinstance(config["vocabulary_size"], Mapping):
        options = config["vocabulary_size"]
        kind = Hashing if "hashes" in options else GrowingVocabulary
        arguments["vocabulary_size"] = kind(**options)
    arguments["initializer"] = _decode_initializer(config["initializer"])
    arguments["optimizer"] = decode_optimizer(config["optimizer"])
    if config["quantization_config"] is not None:
        arguments["quantization_config"] = QuantizationConfig(
            *config["quantization_config"]
        )
    return TableConfig(**arguments)


def _encode_structure(structure: Any, tables: Sequence[Any]) -> Any:
    """Returns nested containers as JSON that keeps their classes."""
    if isinstance(structure, Mapping):
        # JSON has no tuples. A list cannot be a key, so each list there was a tuple.
        items = [
            [
                list(key) if isinstance(key, tuple) else key,
                _encode_structure(value, tables),
            ]
            for key, value in structure.items()
        ]
        return {"kind": "dict", "items": items}
    if hasattr(structure, "_fields"):
        raise ValueError(
            f"The namedtuple {type(structure).__name__} in a feature configuration "
            "cannot be saved or cloned, because Keras does not save the class of a "
            "layer's inputs. Use a dict, or save with `save_weights` or "
            "tf.train.Checkpoint."
        )
    if isinstance(structure, (list, tuple)):
        kind = "list" if isinstance(structure, list) else "tuple"
        items = [_encode_structure(item, tables) for item in structure]
        return {"kind": kind, "items": items}
    return {"kind": "feature", **_encode_feature(structure, tables)}


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
            # tf.constant_initializer may hold an array.
            config = {
                key: value.tolist() if isinstance(value, np.ndarray) else value
                for key, value in initializer.get_config().items()
            }
            return {"tensorflow": name, "config": config}
    return encode_object(f"The initializer of {where}", initializer)


def _decode_initializer(config: Any) -> Any:
    if isinstance(config, Mapping) and "row_id_offset" in config:
        return RowIdInitializer(config["row_id_offset"])
    if isinstance(config, Mapping) and "tensorflow" in config:
        cls = getattr(init_ops_v2, config["tensorflow"])
        return cls.from_config(config["config"])
    return decode_object(config)


def encode_object(what: str, value: Any) -> Any:
    """Encodes a number, bool, None, tuple or object serializable by Keras as JSON."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, tuple):
        return list(value)
    cause = None
    if getattr(value, "__name__", "") != "<lambda>":
        try:
            config = keras_api.serialize(value)
            keras_api.deserialize(config)
            return config
        except (TypeError, ValueError, NotImplementedError) as error:
            cause = error
    raise ValueError(
        f"{what} cannot be saved: {value!r}. Use an object from Keras or this package, "
        "or register the function or class with "
        "`keras.saving.register_keras_serializable`."
    ) from cause


def decode_object(config: Any) -> Any:
    """Reverses `encode_object`; a tuple comes back as a list."""
    return keras_api.deserialize(config) if isinstance(config, Mapping) else config


def save_state(
    variables: Mapping[str, Any], growing: Mapping[str, Vocabulary], store: Any
) -> None:
    """Writes variables and growing tables; a "/" in a key would be an HDF5 group."""
    for name, variable in variables.items():
        _save(variable, _key(name), store)
    for name, ids in growing.items():
        for part, array in ids.read_in_turn():
            _save(array, _key(f"{name}/{part}"), store)


def _save(array: Any, key: str, store: Any) -> None:
    value = tf.convert_to_tensor(array)
    rounded = value.dtype == tf.bfloat16  # HDF5 has no bfloat16.
    store[key] = tf.cast(value, tf.float32) if rounded else value


def save_hashings(plan: Plan, store: Any) -> None:
    """Writes how ids become rows of hashed tables."""
    tables = {spec.name: spec.hashing for spec in plan.tables}
    for name, numbers in hashing_arrays(tables).items():
        store[_key(name)] = numbers


def check_hashings(plan: Plan, store: Any) -> None:
    """Raises ValueError if the file gives ids other rows."""
    stored = set(store.keys())
    for spec in plan.tables:
        key = _key(hashing_name(spec.name))
        found = parse_hashing("the file", store[key][()]) if key in stored else None
        if _key(spec.name) in stored:
            check_hashing(spec, "the file", found)


def load_state(
    layer: str,
    variables: Mapping[str, Any],
    growing: Mapping[str, Vocabulary],
    store: Any,
) -> None:
    """Reads what `save_state` wrote, after checking all names and shapes.

    A bfloat16 or int8 table takes the nearest values of a table of another dtype.
    """
    keys = {name: {PARAMETERS: _key(name)} for name in variables}
    for name, ids in growing.items():
        keys[name] = {part: _key(f"{name}/{part}") for part in ids.parts}
    store = _converted(keys, store)
    stored = set(store.keys())
    lacking = [n for n, own in keys.items() if not stored.issuperset(own.values())]
    missing = [name for name in lacking if name != UPDATES]
    if missing:
        raise ValueError(
            f"The file lacks some or all of {', '.join(missing)} of the layer "
            f"{layer!r}. Tables are found by name: give them the names and the "
            "optimizer with which they were saved."
        )
    values = {name: store[_key(name)] for name in variables if name not in lacking}
    for name, value in values.items():
        own, other = tuple(variables[name].shape), tuple(value.shape)
        if own != other:
            raise ValueError(
                f"{name} of the layer {layer!r} has shape {own}, but {other} in the "
                "file."
            )
    for name, ids in growing.items():
        ids.write({part: store[key][()] for part, key in keys[name].items()})
    for name, value in values.items():
        variables[name].assign(tf.cast(value[()], variables[name].dtype))


def _converted(keys: Mapping[str, Mapping[str, str]], store: Any) -> Any:
    """Converts arrays of tables that are int8 only in the layer or only in the file."""
    arrays: Any = store
    known = {key for own in keys.values() for key in own.values()}
    for name, own in keys.items():
        codes, grids = own[PARAMETERS], _key(checkpoint_name(name, SCALE_OFFSET))
        here = grids in known
        if codes not in store or here == (grids in store):
            continue
        arrays = {key: arrays[key] for key in arrays.keys()}  # noqa: SIM118 - a store.
        value = arrays[codes][()]
        if here and value.ndim == 2:
            arrays[codes], arrays[grids] = stored_rows(value)
        elif not here:
            bfloat16 = arrays.pop(grids)[()]
            arrays[codes] = values_of(np.asarray(value), np.asarray(bfloat16))
    return arrays


def _key(name: str) -> str:
    return urllib.parse.quote(name, safe="")
