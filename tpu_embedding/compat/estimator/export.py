"""Signatures and inputs of exported models."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding import errors

_v1 = tf.compat.v1
DEFAULT_SIGNATURE = "serving_default"


@dataclasses.dataclass(frozen=True)
class PredictOutput:
    """Exports any outputs: a tensor, or a dict of tensors."""

    outputs: Any

    def _signature(self, inputs: Mapping[str, Any]) -> Any:
        return _v1.saved_model.predict_signature_def(inputs, _named(self.outputs))


@dataclasses.dataclass(frozen=True)
class ClassificationOutput:
    """Exports scores, classes (strings) or both, of serialized examples."""

    scores: Any = None
    classes: Any = None

    def _signature(self, inputs: Mapping[str, Any]) -> Any:
        return _v1.saved_model.classification_signature_def(
            _single("ClassificationOutput", inputs), self.classes, self.scores
        )


@dataclasses.dataclass(frozen=True)
class RegressionOutput:
    """Exports one number for each of the serialized examples."""

    value: Any

    def _signature(self, inputs: Mapping[str, Any]) -> Any:
        return _v1.saved_model.regression_signature_def(
            _single("RegressionOutput", inputs), self.value
        )


_OUTPUTS = (PredictOutput, ClassificationOutput, RegressionOutput)


@dataclasses.dataclass(frozen=True)
class ServingInputReceiver:
    """Holds the return value of a serving_input_receiver_fn.

    Attributes:
      features: The features of the model_fn.
      receiver_tensors: The tensor or dict of tensors that the server feeds.
    """

    features: Any
    receiver_tensors: Any


def build_raw_serving_input_receiver_fn(
    features: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Returns a serving_input_receiver_fn whose receiver is fed the features.

    Args:
      features: Tensors by name, which give the dtypes and shapes.
      default_batch_size: The first axis of each, or None for any.
    """

    def serving_input_receiver_fn() -> ServingInputReceiver:
        fed = {}
        for name, feature in features.items():
            shape = [default_batch_size, *feature.shape.as_list()[1:]]
            fed[name] = _v1.placeholder(feature.dtype, shape, name=name)
        return ServingInputReceiver(dict(fed), fed)

    return serving_input_receiver_fn


def build_parsing_serving_input_receiver_fn(
    feature_spec: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Returns a serving_input_receiver_fn whose receiver is fed tf.train.Examples.

    Args:
      feature_spec: A result of tf.feature_column.make_parse_example_spec.
      default_batch_size: The number of examples, or None for any.
    """

    def serving_input_receiver_fn() -> ServingInputReceiver:
        shape = [default_batch_size]
        examples = _v1.placeholder(tf.string, shape, name="input_example_tensor")
        parsed = tf.io.parse_example(examples, dict(feature_spec))
        return ServingInputReceiver(parsed, {"examples": examples})

    return serving_input_receiver_fn


def receive(serving_input_receiver_fn: Callable[[], Any]) -> ServingInputReceiver:
    """Calls the function and checks the returned ServingInputReceiver."""
    receiver = serving_input_receiver_fn()
    if not all(hasattr(receiver, name) for name in ("features", "receiver_tensors")):
        raise TypeError(
            "A serving_input_receiver_fn must return a ServingInputReceiver. "
            f"Received: {receiver!r} of type {errors.type_name(receiver)}. Does "
            "it lack a return?"
        )
    return receiver


def signatures(receiver: ServingInputReceiver, spec: Any) -> dict[str, Any]:
    """Returns the SignatureDefs of a model, by name; one of them is the default."""
    inputs = _named(receiver.receiver_tensors)
    outputs: dict[str, Any] = dict(spec.export_outputs or {DEFAULT_SIGNATURE: None})
    if outputs.get(DEFAULT_SIGNATURE, 1) is None:
        outputs[DEFAULT_SIGNATURE] = PredictOutput(spec.predictions)
    for name, output in outputs.items():
        if not isinstance(output, _OUTPUTS):
            raise TypeError(
                f"export_outputs[{name!r}] must be a PredictOutput, "
                f"ClassificationOutput or RegressionOutput. Received: {output!r} of "
                f"type {errors.type_name(output)}."
            )
    if len(outputs) == 1:
        outputs.setdefault(DEFAULT_SIGNATURE, *outputs.values())
    if DEFAULT_SIGNATURE not in outputs:
        raise ValueError(
            'One of several `export_outputs` must be called "serving_default". '
            f"Received: {errors.quoted(outputs)}."
        )
    return {name: output._signature(inputs) for name, output in outputs.items()}


def write(
    folder: str, graph: Any, checkpoint: str, signature_defs: Any, options: Any
) -> None:
    """Writes the default graph with the values of a checkpoint.

    `options` has the session's config, and whether to write text.
    """
    scaffold, (config, as_text) = graph.scaffold(), options
    saver = scaffold.saver or _v1.get_collection(_v1.GraphKeys.SAVERS)[0]
    local_init = scaffold.local_init_op or _v1.train.Scaffold.default_local_init_op()
    with _v1.Session(config=config) as session:
        saver.restore(session, checkpoint)
        session.run(local_init)
        builder = _v1.saved_model.Builder(folder)
        builder.add_meta_graph_and_variables(
            session,
            [tf.saved_model.SERVING],
            signature_def_map=signature_defs,
            assets_collection=_v1.get_collection(_v1.GraphKeys.ASSET_FILEPATHS),
            main_op=local_init,
            saver=saver,
            strip_default_attrs=True,
        )
        builder.save(as_text)


def new_folder(base: str | os.PathLike[str]) -> str:
    """Returns a new path below `base`, whose last part is the time in seconds."""
    stamp = int(time.time())
    while tf.io.gfile.exists(os.path.join(base, str(stamp))):
        stamp += 1
    return os.path.join(base, str(stamp))


def copy_assets(folder: str, assets: Mapping[str, str]) -> None:
    """Copies files, by their new relative paths, to assets.extra of a SavedModel."""
    for target, source in assets.items():
        path = os.path.join(folder, "assets.extra", target)
        tf.io.gfile.makedirs(os.path.dirname(path))
        tf.io.gfile.copy(source, path)


def _named(tensors: Any) -> dict[str, Any]:
    return dict(tensors) if isinstance(tensors, Mapping) else {"output": tensors}


def _single(output: str, inputs: Mapping[str, Any]) -> Any:
    if len(inputs) != 1:
        raise ValueError(
            f"{output} takes one receiver tensor of serialized examples. Received: "
            f"{errors.quoted(inputs)}. Use PredictOutput for several."
        )
    return next(iter(inputs.values()))
