"""The signatures of exported models: named tensors, and how to read them."""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.layout.plan import FeatureSpec

Tensors = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Request:
    """Holds the inputs of one call of an exported model.

    Attributes:
      features: Ids in the structure of the feature configuration.
      weights: None, or the same structure with weights or None.
      dense: Further inputs of the model, by name.
    """

    features: Any
    weights: Any = None
    dense: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Signature:
    """Describes one way to call an exported model.

    Attributes:
      inputs: The specs of the tensors that a caller passes, by name.
      read: A function from those tensors, by name, to a Request. It is traced into the
        model, so it must consist of TensorFlow's ops. Keras preprocessing layers and
        tf.lookup tables that it refers to are saved with the model.
    """

    inputs: Mapping[str, tf.TensorSpec]
    read: Callable[[Tensors], Request]


@dataclasses.dataclass(frozen=True)
class SignatureOptions:
    """The options of all signatures of one export.

    Attributes:
      features: All features of the plan.
      pack: Converts a list over `features` to the structure of the configuration.
      weighted: Paths of the features with weights.
      dense: The further inputs of the model by name, of shape [None, ...].
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
      ids: A function from all inputs to the feature's ids.
      weights: A function from all inputs to the feature's weights, or to None.
    """

    inputs: Mapping[str, tf.TensorSpec]
    ids: Callable[[Tensors], Any]
    weights: Callable[[Tensors], Any]


def input_name(path: str) -> str:
    """Returns a feature's path as a name that signatures allow.

    The inputs of a signature are arguments of a Python method.

    >>> input_name("user/0"), input_name("from")
    ('user_0', 'feature_from')
    """
    name = re.sub(r"\W", "_", path, flags=re.ASCII)
    reserved = keyword.iskeyword(name) or name == "self"
    return f"feature_{name}" if reserved or not name[:1].isalpha() else name


def make_signature(kind: str, options: SignatureOptions) -> Signature:
    """Makes the signature "dense", "sparse", "ragged" or "examples"."""
    if kind not in _MAKERS:
        raise ValueError(
            f"Unknown signature {kind!r}. Use one of {', '.join(_MAKERS)}, or pass a "
            "dict from names to Signature objects."
        )
    return _MAKERS[kind](options)


class _Inputs:
    """The inputs of a signature, each under a name of its own.

    Attributes:
      specs: The spec of each input by name.
    """

    def __init__(self, *, case_matters: bool = False) -> None:
        """Takes whether names may differ only in case, which graph inputs must not."""
        self.specs: dict[str, Any] = {}
        self._case_matters = case_matters
        self._taken: dict[str, tuple[str, str]] = {}  # name and source

    def add(self, name: str, spec: Any, source: str) -> None:
        """Adds an input of `source`, under a name of its own."""
        key = name if self._case_matters else name.lower()
        if key in self._taken:
            other, first = self._taken[key]
            raise ValueError(
                f"Both {first} and {source} would be the input {name!r} of the "
                "exported model. Rename one of them in the feature configuration."
                if other == name
                else f"The inputs {other!r}, of {first}, and {name!r}, of {source}, of "
                "the exported model differ only in case, which TensorFlow does not "
                "support. Rename one of them in the feature configuration."
            )
        self._taken[key] = name, source
        self.specs[name] = spec


def _of_fields(make_field: Callable[[FeatureSpec, bool], _Field]) -> Any:
    """Returns a function that makes signatures with separate inputs per feature."""

    def make(options: SignatureOptions) -> Signature:
        fields = [make_field(f, f.path in options.weighted) for f in options.features]
        inputs = _Inputs()
        named = [
            (f"feature {spec.path}", field.inputs)
            for spec, field in zip(options.features, fields, strict=True)
        ]
        for source, specs in [*named, ("`dense_inputs`", options.dense)]:
            for name, spec in specs.items():
                inputs.add(name, spec, source)

        def read(tensors: Tensors) -> Request:
            return Request(
                features=options.pack([field.ids(tensors) for field in fields]),
                weights=options.pack([field.weights(tensors) for field in fields]),
                dense={name: tensors[name] for name in options.dense},
            )

        return Signature(inputs.specs, read)

    return make


def _dense_field(feature: FeatureSpec, weighted: bool) -> _Field:
    name = input_name(feature.path)
    shape = _dense_shape(feature)
    inputs = {name: tf.TensorSpec(shape, _dtype(feature))}
    if weighted:
        inputs[f"{name}_weights"] = tf.TensorSpec(shape, tf.float32)
    return _Field(
        inputs,
        lambda tensors: tensors[name],
        lambda tensors: tensors[f"{name}_weights"] if weighted else None,
    )


def _dtype(feature: FeatureSpec) -> tf.DType:
    return tf.string if feature.string_ids else tf.int64


def _dense_shape(feature: FeatureSpec) -> list[int | None]:
    """Returns the shape of dense ids: one per sample, or any number where allowed."""
    config = feature.config
    if config.max_sequence_length:
        return [None, None]
    if config.output_shape is None or len(config.output_shape) == 1:
        return [None]
    return [None, *config.output_shape[1:], None]


def _sparse_field(feature: FeatureSpec, weighted: bool) -> _Field:
    name = input_name(feature.path)
    rank = 1 + len(feature.config.output_shape or (None,))
    inputs = {
        f"{name}_indices": tf.TensorSpec([None, rank], tf.int64),
        f"{name}_values": tf.TensorSpec([None], _dtype(feature)),
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
        f"{name}_values": tf.TensorSpec([None], _dtype(feature)),
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
    """Makes the signature of serialized tf.train.Examples: int64 ids, float weights."""

    def lists(dtype: tf.DType) -> tf.io.RaggedFeature:
        return tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)

    parsed = _Inputs(case_matters=True)  # They are no inputs of the graph.
    for spec in options.features:
        source = f"feature {spec.path}"
        parsed.add(spec.path, lists(_dtype(spec)), source)
        if spec.path in options.weighted:
            parsed.add(f"{spec.path}_weights", lists(tf.float32), source)
    for name, spec in options.dense.items():
        feature = tf.io.FixedLenFeature(spec.shape[1:], spec.dtype)
        parsed.add(name, feature, "`dense_inputs`")

    def read(tensors: Tensors) -> Request:
        found = tf.io.parse_example(tensors["examples"], parsed.specs)
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
