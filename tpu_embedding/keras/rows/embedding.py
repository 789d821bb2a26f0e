"""The layer `keras.layers.Embedding`, for tables of many rows and for bags of ids."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.saved_model import save_context

from tpu_embedding.checkpoint.hashings import (
    HashingRecord,
    differs,
    hashing_numbers,
    parse_hashing,
    stored_hashings,
)
from tpu_embedding.checkpoint.stored import WeightTable, WeightTables
from tpu_embedding.checkpoint.tensorflow_format import Bundle
from tpu_embedding.combiners import COMBINERS
from tpu_embedding.hashing import join_rows, rows_of
from tpu_embedding.inputs import InputKind, to_id_batch
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.keras.rows.tables import ModelTables, served_table, value_dim
from tpu_embedding.keras.rows.waiting import make_table
from tpu_embedding.layout.plan import HASHING
from tpu_embedding.lookup.entries import gains_of
from tpu_embedding.tables.waiting import flush_before, is_recording
from tpu_embedding.vocabulary import Hashing, RowHash

_FIRST = ("input_dim", "output_dim", "embeddings_initializer")
_RECORD = "hashing_record"  # The child of a hashed layer in checkpoints.
_TABLES = ("_embeddings", "embeddings")  # Its table in Keras 3 and in tf_keras.
_LARGEST_FLOAT = 2**24  # The smallest whole number whose successor is not a float32.


class _Bags(NamedTuple):
    """The n entries of bags: ids [n], bags [n], weights [n]; and the shape of the bags.

    `bags` has the number of each entry's bag, in row-major order.
    """

    ids: tf.Tensor
    bags: tf.Tensor
    weights: tf.Tensor
    shape: tf.Tensor


class Embedding(WeightTable, keras_api.RowEmbedding):
    """`keras.layers.Embedding` whose cost depends on the batch, not on the table.

    It is a subclass of the layer of this process's Keras, with its arguments, weights,
    files, masks, LoRA and quantization, and the same numbers. It reads only the rows of
    the ids of a batch; with `te.keras.RowSparseOptimizer` only these are updated.

    Files contain the name `keras.layers.Embedding`, and load without this package;
    `te.keras.load_model` makes the layers this class again. A layer with a combiner or
    a Hashing is of a subclass, whose files need this package.

    >>> import keras
    >>> layer = Embedding(1000, 8)
    >>> layer(tf.constant([[3, 1, 3]])).shape
    TensorShape([1, 3, 8])
    >>> bags = Embedding(1000, 8, combiner="mean")
    >>> bags(tf.ragged.constant([[3, 1, 3], []])).shape
    TensorShape([2, 8])

    Args:
      *args: As for `keras.layers.Embedding`. `input_dim` may be a te.Hashing: then any
        integer is an id, whose value has `output_dim` columns. The attributes
        `input_dim` and `output_dim` are then those of the stored table, and the
        default of `embeddings_initializer` is that of a TableConfig.
      combiner: None, or "sum", "mean" or "sqrtn": the ids of the last axis are a bag,
        and the result is the sum of their rows, divided by the sum of the weights
        ("mean") or by the root of the sum of their squares ("sqrtn"). A bag without ids
        gives zeros; with `mask_zero=True` the id 0 does not count as an entry.
      **kwargs: As for `keras.layers.Embedding`.

    Raises:
      ValueError: If `combiner` is none of these.
      RuntimeError: If Keras does not run on TensorFlow.
    """

    combiner: str | None = None  # The default also serves converted layers.
    hashing: Hashing | None = None
    is_read_by_functions = False  # Whether functions of a SavedModel may read it.

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns an OwnEmbedding if the arguments have an option that Keras lacks."""
        is_own = kwargs.get("combiner") is not None or _of_table(args, kwargs)[2]
        made: Any = OwnEmbedding if is_own and cls is Embedding else cls
        return super().__new__(made, *args, **kwargs)

    def __init__(self, *args: Any, combiner: str | None = None, **kwargs: Any) -> None:
        if combiner is not None and combiner not in COMBINERS:
            raise ValueError(
                f"`combiner` must be None or one of {', '.join(COMBINERS)}. Received: "
                f"{combiner!r}."
            )
        args, kwargs, hashing = _of_table(args, kwargs)
        super().__init__(*args, **kwargs)
        self.combiner = combiner
        self.hashing = hashing
        if hashing is not None:
            self.hashing_record = HashingRecord(hashing)

    def add_weight(self, *args: Any, **kwargs: Any) -> Any:
        """Adds a weight; drops a regularizer of strength 0, whose gradient is dense."""
        if not regularizes(kwargs.get("regularizer")):
            kwargs["regularizer"] = None
        weight = super().add_weight(*args, **kwargs)
        if keras_api.loads_functions():
            self.is_read_by_functions = True  # `convert` clears it in other layers.
        else:
            make_table(weight)
        return weight

    @classmethod
    def core_of_model(cls, model: Any) -> WeightTables:
        return ModelTables(model)

    def make_tables(self) -> None:
        """Lets the rows of the weights wait for gradients, even in a copied layer."""
        for weight in self.trainable_weights:
            make_table(weight)

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Returns the rows of the ids, combined if the layer has a combiner.

        Args:
          inputs: The ids, integers: a dense tensor [..., n], or a sparse or ragged one.
            With a combiner sparse and ragged ids are of rank 2, [batch, n].
          weights: With a combiner, a floating point weight for each id, in the kind and
            the layout of the ids. None means 1.

        Returns:
          A tensor [..., n, output_dim], or [..., output_dim] with a combiner, of the
          compute dtype of the layer.

        Raises:
          ValueError: If weights are given without a combiner, or ids for a combiner
            have too few axes.
        """
        served = served_table(self)
        if served is not None:
            return self._combined(served, inputs, weights)
        if not self.is_read_by_functions:
            self.make_tables()
        exports = save_context.in_save_context() or (
            keras_api.is_training(self) is None and not is_recording()
        )
        with flush_before() if exports else contextlib.nullcontext():
            return self._combined(super().call, inputs, weights)

    def quantized_call(self, inputs: Any, weights: Any = None) -> Any:
        """Does what `call` does, for a table that Keras has quantized."""
        return self._combined(super().quantized_call, inputs, weights)

    def _combined(self, look_up: Any, inputs: Any, weights: Any) -> Any:
        self._check(inputs, weights)
        if self.combiner is None:
            return _look_up_rows(look_up, self.name, inputs, self.hashing)
        entries = _bags(self.name, inputs, weights)
        gains = entries.weights
        if self.mask_zero:
            gains = tf.where(entries.ids == 0, 0.0, gains)
        count = tf.reduce_prod(entries.shape)
        gains = gains_of(self.combiner, entries.bags, gains, count)

        def combine(rows: tf.Tensor) -> tf.Tensor:
            products = rows * tf.cast(gains, rows.dtype)[:, tf.newaxis]
            return tf.math.unsorted_segment_sum(products, entries.bags, count)

        sums = _look_up_rows(look_up, self.name, entries.ids, self.hashing, combine)
        dim = value_dim(self.hashing, self.output_dim)
        width = tf.constant([dim], entries.shape.dtype)
        found = tf.reshape(sums, tf.concat([entries.shape, width], 0))
        return tf.ensure_shape(found, [*inputs.shape[:-1], dim])

    def _check(self, ids: Any, weights: Any) -> None:
        """Refuses ids and weights that the combiner cannot take, also symbolic ones."""
        if self.combiner is None:
            if weights is not None:
                raise ValueError(
                    f"{self.name}: `weights` need a combiner. Create the layer with "
                    'Embedding(..., combiner="sum"), "mean" or "sqrtn".'
                )
            return
        if type(weights) is not type(ids) and weights is not None:
            raise ValueError(
                f"{self.name}: `weights` must have the type of the ids, "
                f"{type(ids).__name__}. Received: {type(weights).__name__}."
            )
        kind = keras_api.symbol(ids).kind
        dense = kind not in (InputKind.RAGGED, InputKind.SPARSE)
        rank = tf.TensorShape(ids.shape).rank
        if rank is None or rank < 2 or (not dense and rank != 2):
            raise ValueError(
                f"{self.name}: a combiner needs ids of the shape [batch, n]"
                f"{', or [..., n]' if dense else ''}. Received: shape {ids.shape}."
            )

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Returns the shape and dtype of a result; Keras 3 asks when it has no ids."""
        self._check(inputs, weights)
        if self.combiner is None:
            return super().compute_output_spec(inputs)
        shape = self.compute_output_shape(inputs.shape)
        return keras_api.placeholder(shape, self.compute_dtype)

    def compute_mask(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the mask of the ids; bags have none."""
        if self.combiner is not None:
            return None
        return super().compute_mask(inputs, *args, **kwargs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the result for a shape of ids."""
        axes = input_shape if self.combiner is None else input_shape[:-1]
        return (*axes, value_dim(self.hashing, self.output_dim))

    def save_own_variables(self, store: Any) -> None:
        """Writes the variables of Keras's layer, and the Hashing."""
        super().save_own_variables(store)
        if self.hashing is not None:
            store[HASHING] = hashing_numbers(self.hashing)

    def load_own_variables(self, store: Any) -> None:
        """Reads the variables of Keras's layer.

        Raises:
          ValueError: If the file gives ids other rows, or its table has another shape.
        """
        super().load_own_variables(_checked_store(self.name, self.hashing, store))

    def _checkpoint_adapter(self, path: str) -> Any:
        # Restoring calls this before it reads any value.
        if self.hashing is not None:
            _check_checkpoint(self.name, self.hashing, path)
        return super()._checkpoint_adapter(path)

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # Restoring calls this for each child that the saved layer had.
        if name == _RECORD and self.hashing is None:
            return _NoRecord(self.name)
        return super()._lookup_dependency(name, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration of Keras's layer, with combiner and Hashing."""
        config = super().get_config()
        if self.hashing is not None:
            dim = value_dim(self.hashing, self.output_dim)
            config |= {"input_dim": dataclasses.asdict(self.hashing), "output_dim": dim}
        if self.combiner is not None:
            config["combiner"] = self.combiner
        return config


class OwnEmbedding(Embedding):
    """An Embedding with options that Keras lacks, which has its own name in files."""


OwnEmbedding.__name__ = Embedding.__name__  # Files store its weights by this name.
keras_api.register(OwnEmbedding)
keras_api.save_as(Embedding, keras_api.Embedding)


def regularizes(regularizer: Any) -> bool:
    """Returns whether there is a regularizer, other than one of strength 0."""
    kinds = (keras_api.regularizers.L2, keras_api.regularizers.L1L2)
    if type(regularizer) in kinds:
        return any(regularizer.get_config().values())
    return regularizer is not None


def _bags(name: str, ids: Any, weights: Any) -> _Bags:
    """Converts ids and weights of any kind."""
    if isinstance(ids, tf.RaggedTensor):
        flat, bags, shape = ids.values, ids.value_rowids(), ids.nrows()[tf.newaxis]
    elif isinstance(ids, tf.SparseTensor):
        flat, bags, shape = ids.values, ids.indices[:, 0], ids.dense_shape[:1]
    else:
        shape = tf.shape(ids, tf.int64)[:-1]
        flat = tf.reshape(ids, [-1])
        bags = tf.repeat(tf.range(tf.reduce_prod(shape)), tf.shape(ids)[-1])
    if weights is None:
        return _Bags(flat, bags, tf.ones_like(flat, tf.float32), shape)
    dense = not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
    given = tf.reshape(weights, [-1]) if dense else weights.values
    given = tf.cast(given, tf.float32)
    with tf.control_dependencies(
        [
            tf.debugging.assert_equal(
                tf.shape(given),
                tf.shape(flat),
                f"{name}: `weights` must have as many values as there are ids.",
            )
        ]
    ):
        return _Bags(flat, bags, tf.identity(given), shape)


class _NoRecord(tf.__internal__.tracking.Trackable):
    """Takes the place of a Hashing's record in a layer that is not hashed."""

    def __init__(self, layer: str) -> None:
        """Takes the name of the layer."""
        self._layer = layer

    def _checkpoint_adapter(self, path: str) -> Any:
        stored = stored_hashings(Bundle(path), _RECORD, _TABLES)
        hashing = next(each for each in stored if each is not None)
        raise differs(f"The layer {self._layer!r}", path, None, hashing)


def _check_checkpoint(layer: str, hashing: Hashing, path: str) -> None:
    """Checks a hashed layer before tf.train.Checkpoint restores it.

    If the checkpoint has several layers, one of them must fit. Which one the layer
    restores is known only when its record is read, and the record checks that one.

    Raises:
      ValueError: If no layer of the checkpoint gives ids the same rows.
    """
    stored = stored_hashings(Bundle(path), _RECORD, _TABLES)
    if stored and hashing not in stored:
        raise differs(f"The layer {layer!r}", path, hashing, stored[0])


def _of_table(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Hashing | None]:
    """Returns the arguments of Keras's layer for the table, and the Hashing or None.

    `get_config` returns the options of a Hashing in place of `input_dim`.
    """
    named = {**dict(zip(_FIRST, args, strict=False)), **kwargs}
    hashing = named.get("input_dim")
    if isinstance(hashing, Mapping):
        hashing = Hashing(**hashing)
    if not isinstance(hashing, Hashing):
        return args, kwargs, None
    named["input_dim"] = hashing.num_rows
    if isinstance(named.get("output_dim"), int):  # Keras refuses anything else.
        named["output_dim"] = width = hashing.width(named["output_dim"])
        stddev = 1 / math.sqrt(max(width, 1) * hashing.hashes)
        options = {"mean": 0.0, "stddev": stddev, "seed": None}
        default = {"class_name": "TruncatedNormal", "config": options}
        named.setdefault("embeddings_initializer", default)
    return args[len(_FIRST) :], named, hashing


def _checked_store(name: str, hashing: Hashing | None, store: Any) -> Any:
    """Returns the weights of a file as Keras's layer reads them.

    Raises:
      ValueError: If the file gives ids other rows.
    """
    keys = {*store.keys()}  # A store cannot say whether it has a key.
    stored = None
    if HASHING in keys:
        stored = parse_hashing("the file", store[HASHING][()])
    if not keys:
        return store  # Keras says that there are no weights.
    if stored == hashing:
        return {key: store[key] for key in keys - {HASHING}} if hashing else store
    raise differs(f"The layer {name!r}", "the file", hashing, stored)


def _look_up_rows(
    look_up: Callable[[Any], Any],
    name: str,
    ids: Any,
    hashing: Hashing | None,
    combine: Callable[[tf.Tensor], tf.Tensor] = lambda rows: rows,
) -> Any:
    """Looks up ids; combines the rows of each hash, then joins those of all hashes.

    Args:
      look_up: A function that reads rows by their numbers.
      name: The name of the layer, for messages.
      ids: The ids, a dense, sparse or ragged tensor.
      hashing: The Hashing that gives ids rows; None if an id is the number of its row.
      combine: A function that combines the rows of the ids.
    """
    if hashing is None:
        return combine(look_up(ids))
    if isinstance(ids, tf.SparseTensor):
        ids = tf.sparse.to_dense(ids)  # Keras looks up 0 where there is no id.
    if isinstance(ids, tf.RaggedTensor):
        flat = _look_up_rows(look_up, name, ids.flat_values, hashing, combine)
        return ids.with_flat_values(flat)
    whole = _integers(name, ids)
    rows = [rows_of(whole, RowHash(hashing, k)) for k in range(hashing.hashes)]
    parts = tf.unstack(look_up(tf.stack(rows)), hashing.hashes)
    return join_rows([combine(part) for part in parts], hashing)


def _integers(name: str, ids: Any) -> tf.Tensor:
    """Converts ids to int64 or int32; float32 lacks some integers above 2**24."""
    ids = tf.convert_to_tensor(ids)
    if not ids.dtype.is_floating:
        flat = to_id_batch(name, tf.reshape(ids, [-1])).ids
        return tf.reshape(flat, tf.shape(ids))
    text = (
        f"{name}: an id of a floating point dtype must be a whole number of at most "
        f"{_LARGEST_FLOAT:,}: floats above it are rounded. Pass integers: "
        'keras.Input(shape, dtype="int64").'
    )
    fits = (tf.abs(ids) <= _LARGEST_FLOAT) & (ids == tf.floor(ids))
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(fits), [text])]):
        return tf.cast(ids, tf.int64)
