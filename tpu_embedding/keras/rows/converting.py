"""Makes Embedding layers and optimizers of Keras models or processes work by rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from absl import logging

from tpu_embedding.errors import type_name
from tpu_embedding.keras.keras_api import keras_api, of_other_keras
from tpu_embedding.keras.rows.embedding import Embedding, OwnEmbedding, regularizes
from tpu_embedding.keras.rows.optimizer import (
    CLASSES,
    RowSparseOptimizer,
    UpdatesRows,
    innermost,
    plain_optimizer,
)
from tpu_embedding.keras.rows.waiting import make_plain

_DENSE = ", but the gradient of its regularizer is dense: as costly as in Keras"


def convert(model: Any, lazy: bool = False) -> Any:
    """Makes the Embedding layers and the optimizer of a Keras model work by rows.

    Each `keras.layers.Embedding` becomes a `te.keras.Embedding`, and the optimizer of a
    compiled model a `te.keras.RowSparseOptimizer`: the same objects, with their
    weights, slots and names. Subclasses and layers of keras-rs stay as they are, with a
    warning that names them.

    >>> import keras
    >>> model = keras.Sequential([keras.Input([2]), keras.layers.Embedding(10, 4)])
    >>> model.compile("adagrad", "mse")
    >>> convert(model).layers[0].combiner is None
    True

    Args:
      model: A model of the Keras of this process, built or loaded, compiled or not.
      lazy: As for `RowSparseOptimizer`.

    Returns:
      `model`.

    Raises:
      TypeError: If `model` is not a model of Keras.
      ValueError: If `RowSparseOptimizer` refuses the optimizer of the model, such as
        one that updates rows already for `lazy=True`. Then nothing has changed.
      NotImplementedError: If `RowSparseOptimizer` does not support the strategy.
      RuntimeError: If Keras does not run on TensorFlow.
    """
    keras_api.require_tensorflow("convert")
    layers = _layers(model, keras_api.Embedding)
    bound = _read_by_functions(model)
    layers = [layer for layer in layers if layer not in bound]
    optimizer = innermost(getattr(model, "optimizer", None))
    if optimizer is not None:
        RowSparseOptimizer(optimizer, lazy or getattr(optimizer, "lazy", False))
    for layer in layers:
        keras_api.change_class(layer, Embedding)
    for layer in model._flatten_layers():
        if isinstance(layer, Embedding) and layer not in bound:
            layer.is_read_by_functions = False
            layer.make_tables()
    if optimizer is not None:
        optimizer.wait_for(model.trainable_variables)
    _warn_of_skipped(model)
    _forget_traces(model)
    return model


def _warn_of_skipped(model: Any) -> None:
    """Warns of layers that look rows up but were not converted."""
    skipped = [
        f"{layer.name} of {type(layer).__module__}.{type(layer).__qualname__}"
        for layer in model._flatten_layers()
        if (isinstance(layer, keras_api.Embedding) and not isinstance(layer, Embedding))
        or (
            type(layer).__module__.startswith("keras_rs.")
            and "Embed" in type(layer).__name__
        )
    ]
    if skipped:
        logging.warning(
            "te.keras.convert did not change %s. It converts keras.layers.Embedding, "
            "but not its subclasses, and not layers with tables that functions of a "
            "SavedModel read. Derive your own class from te.keras.Embedding, create "
            "the model in code, and replace keras-rs layers by te.keras.TPUEmbedding.",
            ", ".join(skipped),
        )


def load_model(path: Any, lazy: bool = False, **options: Any) -> Any:
    """Loads a model that Keras has saved, and converts it as `convert` does.

    Files of converted models are files of Keras, which do not say whether their models
    were converted: `keras.saving.load_model` loads plain ones.

    >>> import tempfile
    >>> import keras
    >>> model = keras.Sequential([keras.Input([2]), Embedding(10, 4)])
    >>> model.compile(RowSparseOptimizer("adam"), "mse")
    >>> model.optimizer.build(model.trainable_variables)
    >>> model.save(path := tempfile.mkdtemp() + "/model.keras")
    >>> type(keras.saving.load_model(path).layers[0]) is keras.layers.Embedding
    True
    >>> load_model(path).layers[0].combiner is None
    True

    Args:
      path: A file or folder that the Keras of this process loads. Slots and iterations
        are read from it.
      lazy: As for `RowSparseOptimizer`. Files of earlier versions of this package
        store it; if it is True there, it stays True.
      **options: As for `keras.saving.load_model`: `custom_objects`, `compile` and
        `safe_mode`.

    Returns:
      The model.

    Raises:
      ValueError: If Keras cannot load the model, or `convert` refuses it.
      NotImplementedError: As `convert` does.
      RuntimeError: If Keras does not run on TensorFlow.
    """
    keras_api.require_tensorflow("load_model")
    return convert(keras_api.load_model(path, **options), lazy)


def unconvert(model: Any) -> Any:
    """Makes the Embedding layers and the optimizer of a model those of Keras again.

    `model.save` does not need it: files of both models name the classes of Keras.

    Args:
      model: A model with layers or an optimizer of `te.keras`.

    Returns:
      `model`.

    Raises:
      TypeError: If `model` is not a model of Keras.
      ValueError: If a layer has a combiner or a Hashing, which Keras does not have.
        Then nothing has changed.
    """
    layers = _layers(model, Embedding, OwnEmbedding)
    bags = [x.name for x in layers if x.combiner is not None or x.hashing is not None]
    if bags:
        raise ValueError(
            f"unconvert: {', '.join(bags)} combine bags or hash ids, which "
            "keras.layers.Embedding cannot do. `layer.get_weights()` returns the table "
            "for a layer of your own."
        )
    optimizer = innermost(getattr(model, "optimizer", None))
    if isinstance(optimizer, UpdatesRows):
        plain_optimizer(optimizer)
    for layer in layers:
        for weight in layer.trainable_weights:
            make_plain(weight)
        keras_api.change_class(layer, keras_api.Embedding)
    _forget_traces(model)
    return model


def convert_process(note: Callable[[str, str], None] = lambda what, why: None) -> None:
    """Converts each Embedding and each optimizer of this process when it is built.

    It calls `note` with a description of each and the reason not to convert it, or "".
    """
    keras_api.require_tensorflow("convert")
    _hook_embeddings(note)
    _hook_optimizers(note)


def _hook_embeddings(note: Callable[[str, str], None]) -> None:
    build = keras_api.Embedding.build

    @functools.wraps(build)
    def build_and_convert(self: Any, *args: Any, **kwargs: Any) -> None:
        what = f"layer {self.name} ({self.input_dim} x {self.output_dim})"
        convertible = type(self) is keras_api.Embedding
        if convertible:
            keras_api.change_class(self, Embedding)
        build(self, *args, **kwargs)
        if convertible:
            dense = regularizes(self.embeddings_regularizer)
            note(what + (_DENSE if dense else ""), "")
        elif not isinstance(self, Embedding):
            own_call = type(self).call is not keras_api.Embedding.call
            why = (
                " with a call of its own"
                if own_call
                else ": derive it from te.keras.Embedding"
            )
            note(what, f"{type(self).__name__} is a subclass{why}")

    keras_api.Embedding.build = build_and_convert


def _hook_optimizers(note: Callable[[str, str], None]) -> None:
    # The `build` of a class runs before that of its base, which it calls.
    classes = [(cls, "build") for cls in CLASSES if "build" in vars(cls)]
    for owner, name in (*keras_api.slot_makers, *classes):
        setattr(owner, name, _convert_before(name, getattr(owner, name), note))


def _convert_before(
    name: str, make_slots: Callable[..., None], note: Callable[[str, str], None]
) -> Callable[..., None]:
    @functools.wraps(make_slots)
    def convert_and_make(self: Any, *args: Any, **kwargs: Any) -> None:
        seen = getattr(self, "_seen_by_rows", False)  # tf_keras builds in each step.
        if not (
            seen or issubclass(type(self), UpdatesRows) or innermost(self) is not self
        ):
            self._seen_by_rows = True
            what, why = f"optimizer {type(self).__name__}", ""
            try:
                RowSparseOptimizer(self)
            except (NotImplementedError, ValueError) as error:
                why = str(error)
            note(what, why)
            if not why:
                getattr(self, name)(*args, **kwargs)  # The method of its new class.
                return
        make_slots(self, *args, **kwargs)

    return convert_and_make


def _layers(model: Any, *classes: Any) -> list[Any]:
    if not isinstance(model, keras_api.Model):
        raise TypeError(
            "`model` must be a model of the Keras of this process, "
            f"{keras_api.Model.__module__.partition('.')[0]}. Received: {model!r} of "
            f"type {type_name(model)}.{of_other_keras(model)}"
        )
    return [layer for layer in model._flatten_layers() if type(layer) in classes]


def _read_by_functions(model: Any) -> list[Any]:
    """Returns the layers inside of layers that call functions of a SavedModel."""
    callers = list(filter(keras_api.runs_functions, model._flatten_layers()))
    if keras_api.is_part_of_saved_model(model):
        callers.append(model)
    return [part for caller in callers for part in caller._flatten_layers()]


def _forget_traces(model: Any) -> None:
    """Makes `fit`, `evaluate` and `predict` trace the model again."""
    model.train_function = model.test_function = model.predict_function = None
