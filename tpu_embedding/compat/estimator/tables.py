"""The tables of a TPUEstimator with use_tpu=True, in the graph of one mode.

As on a TPU the model's own optimizer does not train them: it differentiates with
respect to one dummy variable for each table. The gradient that then arrives at the
activations goes to the spec's optimizer.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tpu_embedding import errors
from tpu_embedding.compat.estimator import private_tensorflow
from tpu_embedding.compat.interop import columns
from tpu_embedding.compat.interop.parameters import slot_sources
from tpu_embedding.config import FeatureConfig
from tpu_embedding.embedding import TPUEmbedding
from tpu_embedding.lookup.graph_checks import Check, first, require, text
from tpu_embedding.lookup.input_rows import MAX_ROWS_PER_ID, MAX_UNBACKED_ROWS

_v1 = tf.compat.v1
DUMMY_PREFIX = "tpu_embedding_dummy_table_variable_"
_SCOPE = "tpu_embedding_tables"  # Keeps names of tables and of the model apart.


class _Step:
    """The global step before the update, for learning rate functions."""

    value: Any = None

    def __call__(self) -> Any:
        return self.value


class EmbeddingTables:
    """The embedding part of one graph.

    Attributes:
      flush: An op that applies the update that pipelining left pending, or None.
      ids: The ids of the step by feature, in training.
    """

    def __init__(self, spec: Any, *, training: bool) -> None:
        """Makes the tables, and the slots if training; in the default graph."""
        self._spec = spec
        self._training = training
        self._step = _Step()
        self._adapted = spec.adapt(self._step)
        self._configs = spec.feature_to_config()
        self._keys = sorted(self._configs)  # The order of the features in the plan.
        self._old_tables = spec.table_to_config()
        tables = self._adapted.tables
        if not training:
            tables = {
                key: dataclasses.replace(table, optimizer=None)
                for key, table in tables.items()
            }
        features = {
            key: FeatureConfig(tables[self._configs[key].table_id], name=key)
            for key in self._keys
        }
        optimizer = self._adapted.optimizer if training else None
        with tf.name_scope(_SCOPE):
            self._embedding = TPUEmbedding(features, optimizer)
            engine = self._embedding.core.engine_class
            if not engine.passes_tensors:
                raise NotImplementedError(
                    f"TPUEstimator does not run on the {engine.name} engine. It needs "
                    "the compiled library: `import tpu_embedding` warns if that cannot "
                    "be loaded, with the reason."
                )
            self._embedding.build()
        self._hide_state()
        self._dummies = {key: _dummy(key) for key in tables} if training else {}
        self._gradients: dict[str, tf.Tensor] = {}
        self._looked_up: Any = None
        self._read_step: Any = None
        self.flush: tf.Operation | None = None
        self.ids: dict[str, Any] = {}

    def activations(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model_fn's features: activations in place of ids and weights."""
        combiners = {key: table.combiner for key, table in self._old_tables.items()}
        inputs = split_inputs(features, self._configs, combiners)
        if self._training:
            self.ids = inputs.ids
            inputs = inputs.naming_row_0(self._safe_features())
        # The step is read before anything that depends on the lookups increases it.
        self._read_step = tf.identity(_v1.train.get_global_step().read_value())
        with tf.control_dependencies([self._read_step]):
            found, self._looked_up = _function(self._embedding.core.look_up)(
                [inputs.ids[key] for key in self._keys],
                [inputs.weights[key] for key in self._keys],
            )
        pairs = zip(self._keys, found, strict=True)
        shaped = {key: self._shaped(key, value) for key, value in pairs}
        if self._training:
            shaped = {key: self._hooked(key, value) for key, value in shaped.items()}
        return {**inputs.others, **shaped}

    def train_op(self, train_op: Any) -> tf.Operation:
        """Returns the model's train_op, followed by the update of the tables."""
        for key in self._configs:
            if key not in self._gradients:
                logging.warning(
                    "Feature %r: the train_op computed no gradient of its activations, "
                    "so it counts as zeros.",
                    key,
                )
        gradients = {key: self._gradients.get(key) for key in self._keys}
        with tf.control_dependencies([train_op]):
            if self._adapted.pipelined:
                pending = PendingUpdate(
                    self._update, (self._looked_up, gradients, self._read_step)
                )
                self.flush = pending.flush
                return tf.group(train_op, pending.step)
            updated = _function(self._update)(
                self._looked_up, gradients, self._read_step
            )
            return tf.group(train_op, updated)

    def named_variables(
        self, recorded: Mapping[str, private_tensorflow.RecordedVariable]
    ) -> dict[str, tf.Variable]:
        """Returns tables and slots by their names in checkpoints of the old software.

        `recorded` has what columns recorded while the model_fn was called.
        """
        names = self._names(recorded)
        named = {}
        for table, parts in self._embedding.variables.items():
            own = self._old_tables[table.name].optimization_parameters
            sources = slot_sources(own or self._spec.optimization_parameters)
            suffixes = {source.name: "/" + source.spellings[0] for source in sources}
            for part, variable in parts.items():
                named[names[table.name] + suffixes.get(part, "")] = variable
        return named

    def hide_dummies(self) -> None:
        """Keeps slots of dummies out of checkpoints, which then fit use_tpu=False."""
        _make_local(lambda variable: DUMMY_PREFIX in variable.op.name)

    def _hide_state(self) -> None:
        """Marks the engine's other variables (neither tables nor slots) as local."""
        kept = {
            id(variable)
            for parts in self._embedding.variables.values()
            for variable in parts.values()
        }
        _make_local(
            lambda variable: (
                variable.op.name.startswith(_SCOPE + "/") and id(variable) not in kept
            )
        )

    def _safe_features(self) -> list[str]:
        """Returns the features whose empty samples look up row 0 on CPUs."""
        return [
            column.get_feature_key_name()
            for column in self._spec.embedding_columns()
            if getattr(column, "use_safe_embedding_lookup", False)
            and not column.is_sequence_column()
        ]

    def _update(self, looked_up: Any, gradients: Any, step: Any) -> tf.Tensor:
        self._step.value = step
        scaled = self._adapted.scale(gradients, step)
        self._embedding.core.update(looked_up, [scaled[key] for key in self._keys])
        return tf.constant(True)

    def _shaped(self, key: str, activation: tf.Tensor) -> tf.Tensor:
        length = self._configs[key].max_sequence_length
        if not length:
            return activation
        return tf.reshape(activation, [-1, length, activation.shape[-1]])

    def _hooked(self, key: str, activation: tf.Tensor) -> tf.Tensor:
        """Returns the activation, with a gradient that is kept for the update."""

        @tf.custom_gradient
        def hook(dummy: Any, value: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                if key in self._gradients:
                    raise RuntimeError(
                        f"The gradients of feature {key!r} were computed twice. A "
                        "model_fn must differentiate once with respect to all "
                        "trainable variables."
                    )
                dim = value.shape[-1]
                self._gradients[key] = tf.reshape(upstream, [-1, dim])
                # The model's update, with the global step, comes after the lookups,
                # also if its gradients do not depend on the activations.
                with tf.control_dependencies([value]):
                    return tf.zeros_like(dummy), tf.zeros_like(value)

            return tf.identity(value), gradient

        dummy = self._dummies[self._configs[key].table_id].read_value()
        return hook(dummy, tf.stop_gradient(activation))

    def _names(
        self, recorded: Mapping[str, private_tensorflow.RecordedVariable]
    ) -> dict[str, str]:
        """Returns the name of each table's variable."""
        if self._spec.feature_columns is None:
            return {key: key for key in self._old_tables}
        names, own = {}, {}
        for column in self._spec.embedding_columns():
            variable = column.get_embedding_var_name()
            if variable not in recorded:
                raise RuntimeError(
                    f"The model_fn did not use column {column.name!r} of the "
                    "EmbeddingConfigSpec. Pass the same column to "
                    "tpu_embedding.estimator.dense_features (or to DenseFeatures of "
                    "tf_keras), or remove it from the spec."
                )
            found = recorded[variable]
            scope = found.variable_scope
            if not scope and not columns.is_shared(column):
                scope = found.name_scope  # The layers of Keras 2 use it.
            prefix = f"{scope}/" if scope else ""
            key = columns.table_key(column)
            names[key] = prefix + found.name
            own[key] = f"{prefix}{column.name}/{found.name}"
        count = collections.Counter(names.values())
        for key, name in names.items():
            if count[name] > 1:
                logging.warning(
                    "Several tables would be saved as %r, because the model opens no "
                    "scope for its columns; table %r is saved as %r. "
                    "tpu_embedding.estimator.dense_features opens scopes.",
                    name,
                    key,
                    own[key],
                )
        return {key: own[key] if count[n] > 1 else n for key, n in names.items()}


def _dummy(table: str) -> tf.Variable:
    """Makes a variable that the model's optimizer differentiates with respect to."""
    collections_ = [_v1.GraphKeys.LOCAL_VARIABLES, _v1.GraphKeys.TRAINABLE_VARIABLES]
    return _v1.get_variable(
        DUMMY_PREFIX + table,
        shape=[1],
        initializer=_v1.zeros_initializer(),
        collections=collections_,
        use_resource=True,
    )


def _make_local(hidden: Callable[[Any], bool]) -> None:
    """Removes variables from the saved collection; sessions still initialize them."""
    variables = _v1.get_collection_ref(_v1.GraphKeys.GLOBAL_VARIABLES)
    for variable in [v for v in variables if hidden(v)]:
        _v1.add_to_collection(_v1.GraphKeys.LOCAL_VARIABLES, variable)
    variables[:] = [v for v in variables if not hidden(v)]


def _function(function: Any) -> Any:
    """Makes a function one op of the graph, in which stateful ops keep their order."""
    return tf.function(function, autograph=False)


class PendingUpdate:
    """Pipelining, which applies each step's update after the next step's lookups.

    Attributes:
      step: An op that applies the update of the previous step, then keeps this one's.
      flush: An op that applies the update that is kept, if there is one.
    """

    def __init__(self, update: Callable[..., tf.Tensor], arguments: Any) -> None:
        """Adds the ops to the default graph.

        `update` applies one update; it is called while a tf.function is traced. Its
        nested `arguments` for this step must depend on this step's lookups; a None
        among them stays None.
        """
        flat = tf.nest.flatten(arguments)
        tensors = [tensor for tensor in flat if tensor is not None]
        kept = _v1.FIFOQueue(
            1, [t.dtype for t in tensors], shared_name="tpu_embedding_pending_update"
        )

        def apply(*taken: Any) -> tf.Tensor:
            values = iter(taken)
            full = [None if tensor is None else next(values) for tensor in flat]
            for tensor, value in zip(tensors, taken, strict=True):
                value.set_shape(tensor.shape)
            return update(*tf.nest.pack_sequence_as(arguments, full))

        def apply_kept() -> tf.Tensor:
            taken = kept.dequeue()
            values = taken if isinstance(taken, (list, tuple)) else [taken]
            return _function(apply)(*values)

        def applied() -> tf.Tensor:
            return tf.cond(kept.size() > 0, apply_kept, lambda: tf.constant(True))

        with tf.control_dependencies(tensors):
            done = applied()
        with tf.control_dependencies([done]):
            self.step: tf.Operation = kept.enqueue(tensors)
        with tf.control_dependencies(None):
            self.flush: tf.Operation = applied().op


@dataclasses.dataclass(frozen=True)
class EmbeddingInputs:
    """One batch, ready to be looked up.

    Attributes:
      ids: A SparseTensor [rows, n], or a Tensor [rows], for each feature. The rows of a
        sequence are its positions, sample after sample.
      weights: A SparseTensor of the same layout, or None, for each feature.
      others: The features that are left, and the lengths of sequences.
    """

    ids: dict[str, Any]
    weights: dict[str, Any]
    others: dict[str, Any]

    def naming_row_0(self, features: Sequence[str]) -> EmbeddingInputs:
        """Returns the inputs with (id 0, weight 0) in each empty sample of `features`.

        safe_embedding_lookup_sparse does the same, and so do the columns on a CPU. The
        entry adds nothing to an activation or gradient, but row 0 counts as touched:
        FTRL and Adam then change it, as in the reference runs.
        """
        ids, weights = dict(self.ids), dict(self.weights)
        for key in features:
            if isinstance(ids[key], tf.SparseTensor):
                ids[key], weights[key] = _filled(ids[key], weights[key])
        return EmbeddingInputs(ids, weights, self.others)


def split_inputs(
    features: Mapping[str, Any],
    configs: Mapping[str, columns.FeatureConfig],
    combiners: Mapping[str, str | None],
) -> EmbeddingInputs:
    """Takes the ids and weights of embeddings out of a batch's features.

    The rules are those of TensorFlow 1: a dense id of 0 means no entry, unless the
    table has no combiner, and sequences are truncated and padded.
    """
    if not isinstance(features, Mapping):
        raise errors.argument_type("features", features, "a dict")
    others = dict(features)
    ids: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for key in sorted(configs):
        config = configs[key]
        if key not in others:
            raise ValueError(
                f"Feature {key!r} of the EmbeddingConfigSpec is not among the "
                f"features of the input_fn: {errors.quoted(sorted(others))}."
            )
        value = _ids(key, others.pop(key), config, combiners[config.table_id])
        weight = None
        if config.weight_key is not None:
            weight = _weights(key, config.weight_key, others, value)
        length = config.max_sequence_length
        if length:
            others[key + columns.SEQUENCE_LENGTH_SUFFIX] = _lengths(value, length)
            positions = _Positions(key, value, length)
            value = positions.of(value)
            weight = None if weight is None else positions.of(weight)
        ids[key], weights[key] = value, weight
    return EmbeddingInputs(ids, weights, others)


def _ids(
    key: str, value: Any, config: columns.FeatureConfig, combiner: str | None
) -> Any:
    if isinstance(value, tf.RaggedTensor):
        raise ValueError(
            f"Feature {key!r} is a RaggedTensor, which feature columns do not take. "
            "Convert it with `.to_sparse()` in the input_fn."
        )
    if value.dtype == tf.string:
        raise ValueError(
            f"Feature {key!r} holds strings. A TPU takes integer ids only, so "
            "vocabularies have to be looked up in the input_fn."
        )
    flat = not config.max_sequence_length
    if flat and value.shape.rank is not None and value.shape.rank > 2:
        raise ValueError(
            f"Feature {key!r}: ids must be of shape [batch] or [batch, n]. Received "
            f"shape {value.shape}. Only sequence columns take ids of rank 3."
        )
    if isinstance(value, tf.SparseTensor):
        return _checked(key, value)
    value = tf.convert_to_tensor(value)
    if combiner is None and flat:
        if value.shape.rank != 1 and value.shape[-1] != 1:
            raise ValueError(
                f"Feature {key!r}: a table without combiner takes one id for each "
                f"sample, of shape [batch] or [batch, 1]. Received shape {value.shape}"
                "."
            )
        return tf.reshape(value, [-1])
    if value.shape.rank == 1:
        value = value[:, tf.newaxis]
    return tf.sparse.from_dense(value)  # This leaves out the zeros.


def _weights(key: str, weight_key: str, others: dict[str, Any], ids: Any) -> Any:
    if weight_key not in others:
        raise ValueError(
            f"Cannot find the weights {weight_key!r} of feature {key!r} among the "
            "features. Each weighted feature needs a weight feature of its own."
        )
    weights = others.pop(weight_key)
    if not isinstance(weights, tf.SparseTensor) or not isinstance(ids, tf.SparseTensor):
        raise ValueError(
            f"Feature {key!r} and its weights {weight_key!r} must both be "
            "SparseTensors on a TPU. Convert dense ones in the input_fn."
        )
    return tf.cast(_checked(weight_key, weights), tf.float32)


def _checked(key: str, sparse: tf.SparseTensor) -> tf.SparseTensor:
    """Returns `sparse`, to be read after a check of its shape and indices.

    A shape of many rows without entries would take memory here before a lookup can
    refuse it, and an index outside of the shape would name another sample.
    """
    indices, shape = sparse.indices, sparse.dense_shape
    num_entries = tf.size(sparse.values, tf.int64)
    most = tf.maximum(MAX_ROWS_PER_ID * num_entries, MAX_UNBACKED_ROWS)
    outside = tf.reduce_any((indices < 0) | (indices >= shape), axis=1)

    def of_shape(*words: Any) -> tf.Tensor:
        axes = tf.strings.reduce_join(tf.strings.as_string(shape), separator=", ")
        return text(f"Feature {key}: ", *words, " the dense_shape [", axes, "].")

    checks = [
        Check(
            tf.reduce_all(shape >= 0) & (shape[0] <= most),
            lambda: of_shape("there are ", num_entries, " sparse entries, too few for"),
        ),
        Check(
            ~tf.reduce_any(outside),
            lambda: of_shape("sparse entry ", first(outside), " is outside of"),
        ),
    ]
    with tf.control_dependencies(require(checks)):
        return tf.SparseTensor(
            tf.identity(indices), tf.identity(sparse.values), tf.identity(shape)
        )


def _filled(
    ids: tf.SparseTensor, weights: tf.SparseTensor | None
) -> tuple[tf.SparseTensor, tf.SparseTensor]:
    """Returns ids and weights with the entry (id 0, weight 0) in each empty row."""
    # This makes room for the entry; taking axes apart keeps the static batch size.
    rows, columns = tf.unstack(ids.dense_shape, num=2)
    shape = tf.stack([rows, tf.maximum(columns, 1)])
    values = tf.ones_like(ids.values, tf.float32) if weights is None else weights.values
    indices = ids.indices if weights is None else weights.indices
    ids = tf.SparseTensor(ids.indices, ids.values, shape)
    weights = tf.SparseTensor(indices, values, shape)
    zero = tf.zeros([], ids.dtype)
    return (
        tf.sparse.fill_empty_rows(ids, zero)[0],
        tf.sparse.fill_empty_rows(weights, 0.0)[0],
    )


def _lengths(ids: tf.SparseTensor, max_length: int) -> tf.Tensor:
    """Returns int64 [B], each sample's last position that has an entry, plus 1."""
    ends = tf.math.unsorted_segment_max(
        ids.indices[:, 1] + 1, ids.indices[:, 0], ids.dense_shape[0]
    )
    return tf.clip_by_value(ends, 0, max_length)  # Empty samples give the lowest int64.


class _Positions:
    """Converts the positions of sequences into samples, up to `max_length`."""

    def __init__(self, key: str, ids: tf.SparseTensor, max_length: int) -> None:
        rank = ids.shape.rank
        if rank not in (2, 3):
            raise ValueError(
                f"Sequence feature {key!r} must be of rank 2 [batch, position], or of "
                f"rank 3 [batch, position, entry]. Received rank {rank}."
            )
        sample, position = ids.indices[:, 0], ids.indices[:, 1]
        self._kept = position < max_length
        column = ids.indices[:, 2] if rank == 3 else tf.zeros_like(position)
        indices = tf.stack([sample * max_length + position, column], axis=1)
        self._indices = tf.boolean_mask(indices, self._kept)
        columns = ids.dense_shape[2] if rank == 3 else tf.constant(1, tf.int64)
        self._shape = tf.stack([ids.dense_shape[0] * max_length, columns])

    def of(self, values: tf.SparseTensor) -> tf.SparseTensor:
        """Returns ids or weights as [samples * positions, entries]."""
        kept = tf.boolean_mask(values.values, self._kept)
        return tf.SparseTensor(self._indices, kept, self._shape)
