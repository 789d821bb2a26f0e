"""What an exported model is asked with: named tensors, and what to make of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.layout.plan import FeatureSpec
from tpu_embedding.serving import errors

Tensors = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Request:
    """What a signature makes of its inputs.

    Attributes:
      features: Ids in the structure of the feature configuration.
      weights: None, or the same structure with weights or None.
      dense: What else the model takes, by name.
    """

    features: Any
    weights: Any = None
    dense: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Signature:
    """One way to ask an exported model.

    Attributes:
      inputs: By name the tensors that a caller gives.
      read: From those tensors, by name, to a Request. It is traced into the model, so
        that it must be made of stock TensorFlow ops.
    """

    inputs: Mapping[str, tf.TensorSpec]
    read: Callable[[Tensors], Request]


@dataclasses.dataclass(frozen=True)
class SignatureOptions:
    """What the signatures of one export have in common.

    Attributes:
      features: All features of the plan.
      pack: From a list over `features` to the structure of the configuration.
      weighted: Paths of the features with weights.
      dense: By name what else the model takes, of shape [None, ...].
    """

    features: Sequence[FeatureSpec]
    pack: Callable[[list[Any]], Any]
    weighted: Collection[str]
    dense: Mapping[str, tf.TensorSpec]


@dataclasses.dataclass(frozen=True)
class _Field:
    """One feature's part of a signature.

    Attributes:
      inputs: The tensors of its ids, and its weights if it has any, by name.
      ids: From all inputs to its ids.
      weights: From all inputs to its weights, or to None.
    """

    inputs: Mapping[str, tf.TensorSpec]
    ids: Callable[[Tensors], Any]
    weights: Callable[[Tensors], Any]


def input_name(path: str) -> str:
    """A feature's path as a name that signatures allow.

    >>> input_name("user/0")
    'user_0'
    """
    name = re.sub(r"\W", "_", path, flags=re.ASCII)
    return name if re.match("[A-Za-z]", name) else f"feature_{name}"


def make_signature(kind: str, options: SignatureOptions) -> Signature:
    """One of the signatures that export makes by itself.

    Args:
      kind: "dense", "sparse", "ragged" or "examples".
      options: Of the export.

    Raises:
      ValueError: If there is no such signature, or two inputs have one name.
    """
    if kind not in _MAKERS:
        raise errors.unknown_signature(kind, _MAKERS)
    return _MAKERS[kind](options)


def _of_fields(make_field: Callable[[FeatureSpec, bool], _Field]) -> Any:
    """A maker of signatures in which each feature has inputs of its own."""

    def make(options: SignatureOptions) -> Signature:
        fields = [make_field(f, f.path in options.weighted) for f in options.features]
        inputs: dict[str, tf.TensorSpec] = {}
        sources: dict[str, str] = {}
        named = [
            (f"feature {spec.path}", field.inputs)
            for spec, field in zip(options.features, fields, strict=True)
        ]
        for source, specs in [*named, ("`dense_inputs`", options.dense)]:
            for name, spec in specs.items():
                if name in inputs:
                    raise errors.same_input_name(name, (sources[name], source))
                inputs[name], sources[name] = spec, source

        def read(tensors: Tensors) -> Request:
            return Request(
                features=options.pack([field.ids(tensors) for field in fields]),
                weights=options.pack([field.weights(tensors) for field in fields]),
                dense={name: tensors[name] for name in options.dense},
            )

        return Signature(inputs, read)

    return make


def _dense_field(feature: FeatureSpec, weighted: bool) -> _Field:
    name = input_name(feature.path)
    shape = _dense_shape(feature)
    inputs = {name: tf.TensorSpec(shape, tf.int64)}
    if weighted:
        inputs[f"{name}_weights"] = tf.TensorSpec(shape, tf.float32)
    return _Field(
        inputs,
        lambda tensors: tensors[name],
        lambda tensors: tensors[f"{name}_weights"] if weighted else None,
    )


def _dense_shape(feature: FeatureSpec) -> list[int | None]:
    """One id for each sample, or where that is not possible any number."""
    config = feature.config
    if config.max_sequence_length:
        return [None, None]
    if config.output_shape is None or len(config.output_shape) == 1:
        return [None]
    return [*config.output_shape, None]


def _sparse_field(feature: FeatureSpec, weighted: bool) -> _Field:
    name = input_name(feature.path)
    rank = 1 + len(feature.config.output_shape or (None,))
    inputs = {
        f"{name}_indices": tf.TensorSpec([None, rank], tf.int64),
        f"{name}_values": tf.TensorSpec([None], tf.int64),
        f"{name}_dense_shape": tf.TensorSpec([rank], tf.int64),
    }
    if weighted:
        inputs[f"{name}_weights"] = tf.TensorSpec([None], tf.float32)

    def ids(tensors: Tensors) -> tf.SparseTensor:
        return tf.SparseTensor(
            tensors[f"{name}_indices"],
            tensors[f"{name}_values"],
            tensors[f"{name}_dense_shape"],
        )

    def weights(tensors: Tensors) -> tf.SparseTensor | None:
        if not weighted:
            return None
        return ids(tensors).with_values(tensors[f"{name}_weights"])

    return _Field(inputs, ids, weights)


def _ragged_field(feature: FeatureSpec, weighted: bool) -> _Field:
    name = input_name(feature.path)
    inputs = {
        f"{name}_values": tf.TensorSpec([None], tf.int64),
        f"{name}_row_splits": tf.TensorSpec([None], tf.int64),
    }
    if weighted:
        inputs[f"{name}_weights"] = tf.TensorSpec([None], tf.float32)

    def with_splits(values: tf.Tensor, tensors: Tensors) -> tf.RaggedTensor:
        # The lookup checks the splits, and says which feature has the wrong ones.
        ragged: Any = tf.RaggedTensor  # pyright's stubs lack its methods.
        return ragged.from_row_splits(
            values, tensors[f"{name}_row_splits"], validate=False
        )

    return _Field(
        inputs,
        lambda tensors: with_splits(tensors[f"{name}_values"], tensors),
        lambda tensors: (
            with_splits(tensors[f"{name}_weights"], tensors) if weighted else None
        ),
    )


def _examples_signature(options: SignatureOptions) -> Signature:
    """Serialised tf.train.Examples: int64 lists by path, float lists of weights."""

    def lists(dtype: tf.DType) -> tf.io.RaggedFeature:
        return tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)

    parsed: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def add(name: str, feature: Any, source: str) -> None:
        if name in parsed:
            raise errors.same_input_name(name, (sources[name], source))
        parsed[name], sources[name] = feature, source

    for spec in options.features:
        add(spec.path, lists(tf.int64), f"feature {spec.path}")
        if spec.path in options.weighted:
            add(f"{spec.path}_weights", lists(tf.float32), f"feature {spec.path}")
    for name, spec in options.dense.items():
        feature = tf.io.FixedLenFeature(spec.shape[1:], spec.dtype)
        add(name, feature, "`dense_inputs`")

    def read(tensors: Tensors) -> Request:
        found = tf.io.parse_example(tensors["examples"], parsed)
        paths = [spec.path for spec in options.features]
        return Request(
            features=options.pack([found[path] for path in paths]),
            weights=options.pack([found.get(f"{path}_weights") for path in paths]),
            dense={name: found[name] for name in options.dense},
        )

    return Signature({"examples": tf.TensorSpec([None], tf.string)}, read)


_MAKERS: dict[str, Callable[[SignatureOptions], Signature]] = {
    "dense": _of_fields(_dense_field),
    "sparse": _of_fields(_sparse_field),
    "ragged": _of_fields(_ragged_field),
    "examples": _examples_signature,
}
KINDS = tuple(_MAKERS)
