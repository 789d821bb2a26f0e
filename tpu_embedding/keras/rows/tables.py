"""The tables of Keras models, in the form that checkpoints, serving and plans use."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint
from tpu_embedding.checkpoint.keras_format import plain_name
from tpu_embedding.checkpoint.statistics import row_hashes
from tpu_embedding.checkpoint.stored import WeightTable, WeightTables
from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.engines.calls import Counts
from tpu_embedding.inputs import InputKind
from tpu_embedding.keras.conversion import translate_keras_optimizer
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.keras.rows.counting import start_counting
from tpu_embedding.keras.rows.optimizer import (
    CLASSES,
    UpdatesRows,
    innermost,
    keras_class,
    slots_at,
)
from tpu_embedding.keras.rows.rules import checkpoint_names
from tpu_embedding.keras.rows.waiting import TableVariable, components
from tpu_embedding.layout.plan import TableSpec, make_plan
from tpu_embedding.lookup.feature_structure import FeatureStructure
from tpu_embedding.serving.signatures import input_name
from tpu_embedding.tables.readers import TableReader, VariableReader
from tpu_embedding.tables.rows import PARAMETERS, MutableTableRows, TableRows
from tpu_embedding.tables.table import Identity, Table
from tpu_embedding.tables.variables import VariableRows
from tpu_embedding.tables.vocabularies import Changed
from tpu_embedding.tf_configs import convert_features
from tpu_embedding.vocabulary import Hashing

_LAYER = "te.keras.Embedding"
# The delta writers of each model, by consumer.
_DELTA_WRITERS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class ModelTables(WeightTables):
    """The tables of the `te.keras.Embedding`s of a model, by the names of the layers.

    Their slots are those of the model's optimizer. A layer alone has none.
    """

    resets_updates = False  # The iterations also belong to other layers.
    knows_invalid_ids = False  # Keras refuses them in lookups.

    def __init__(self, model: Any) -> None:
        self._model = model
        self.delta_writers = _DELTA_WRITERS.setdefault(
            model, weakref.WeakValueDictionary()
        )
        layers = [x for x in model._flatten_layers() if isinstance(x, WeightTable)]
        self.layers: list[Any] = list({id(layer): layer for layer in layers}.values())
        for layer in self.layers:
            _check(layer)
        features = {x.name: FeatureConfig(_table(x), name=x.name) for x in self.layers}
        if len(features) < len(self.layers):
            names = sorted(x.name for x in self.layers)
            raise ValueError(
                f"Two {_LAYER} layers of the model have the same name: "
                f"{', '.join(names)}. Tables are found by the names of their layers: "
                "give each layer a different `name`."
            )
        converted = convert_features(features, None)
        self.plan = make_plan(*converted, None)
        self.structure = FeatureStructure(features, self.plan.features)
        self.feature_config = features

    @property
    def _optimizer(self) -> Any:
        """The innermost optimizer of the model, or None."""
        return innermost(getattr(self._model, "optimizer", None))

    def _slots(self) -> Iterator[tuple[str, str, Any]]:
        """Yields table, name and variable of each slot; creates the slots if needed."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        cls = keras_class(optimizer)
        if cls not in CLASSES:
            raise NotImplementedError(
                f"The slots of {cls.__module__}.{cls.__qualname__} are not known, "
                f"so the tables of a model with {_LAYER} that it trains cannot be "
                "saved or restored. Pass a layer, whose table has no slots: "
                "`model.get_layer(name)`."
            )
        if not keras_api.is_built(optimizer):
            with self._model.distribute_strategy.scope():
                self._model.optimizer.build(self._model.trainable_variables)
        names = checkpoint_names(cls)
        for layer in self.layers:
            index = keras_api.find_index(optimizer, layer.embeddings)
            if index is not None:
                for name, slot in slots_at(optimizer, cls, index).items():
                    yield layer.name, names[name], slot

    def tables(self) -> dict[str, Table]:
        for layer in self.layers:  # Their weights may have changed.
            _check(layer)
        rows: dict[str, dict[str, MutableTableRows]] = {
            layer.name: {PARAMETERS: _rows(layer.embeddings)} for layer in self.layers
        }
        for table, name, slot in self._slots():
            start = 0.0
            if name == "accumulators":
                start = float(self._optimizer.initial_accumulator_value)
            rows[table][name] = _rows(slot, start)
        layers = {layer.name: layer for layer in self.layers}
        return {
            spec.name: _view(spec, layers[spec.name], rows[spec.name])
            for spec in self.plan.tables
        }

    def refresh(self) -> None:
        for waiting in self._waiting():
            waiting.flush()

    def _waiting(self) -> list[Any]:
        parts = [p for layer in self.layers for p in components(layer.embeddings)]
        found = [getattr(part, "waiting", None) for part in parts]
        return [waiting for waiting in found if waiting is not None]

    def checkpoint_updates(self) -> Any:
        """Returns the variable of the optimizer's iterations."""
        optimizer = self._optimizer
        return None if optimizer is None else keras_api.value_of(optimizer.iterations)

    def completed(
        self, source: LogicalCheckpoint, names: Mapping[str, str]
    ) -> LogicalCheckpoint:
        """Adds the slots of a Keras file, if its model and optimizer match these."""
        numbered, optimizer = source.numbered, self._optimizer
        if numbered is None or optimizer is None:
            return source
        slots = {id(slot): (table, name) for table, name, slot in self._slots()}
        variables = list(optimizer.variables)
        name = keras_class(optimizer).__name__.lower()
        if numbered.optimizer not in ("", name, plain_name(optimizer.name)):
            return source
        ranks = [len(shape) for shape in numbered.shapes]
        if ranks != [len(variable.shape) for variable in variables]:
            return source
        tables = {name: dict(table.slots) for name, table in source.items()}
        for number, variable in enumerate(variables):
            table, slot = slots.get(id(variable), ("", ""))
            stored = names.get(table)
            if stored not in tables:
                continue
            if numbered.shapes[number] != source[stored].parameters.shape:
                return source
            tables[stored][slot] = numbered.slots[number]
        return LogicalCheckpoint(
            source.path,
            source.format,
            {n: dataclasses.replace(t, slots=tables[n]) for n, t in source.items()},
            numbered.iterations,
        )

    def inputs_of_model(self) -> tuple[dict[str, Any], Callable[[Any], Any]]:
        try:
            structure = self._model.input
        except (AttributeError, ValueError) as error:
            raise ValueError(
                f"The model {self._model.name!r} does not know its inputs, because it "
                "is subclassed or not built. Pass `signatures`: a dict of "
                "te.serving.Signature, whose Request has the argument of the model as "
                "`features`."
            ) from error
        fields = [_field(each) for each in tf.nest.flatten(structure)]

        def pack(tensors: Mapping[str, tf.Tensor]) -> Any:
            values = [make(tensors) for _, make in fields]
            return tf.nest.pack_sequence_as(structure, values)

        return {name: spec for specs, _ in fields for name, spec in specs.items()}, pack

    def call_model(self, inputs: Any, readers: Mapping[str, TableReader]) -> Any:
        with contextlib.ExitStack() as stack:
            for waiting in self._waiting():
                stack.enter_context(waiting.quiet())
            token = _served.set({id(x): readers[x.name] for x in self.layers})
            stack.callback(_served.reset, token)
            outputs = self._model(inputs, training=False)
        if not isinstance(outputs, (list, tuple)):
            return outputs
        names = getattr(self._model, "output_names", None) or [
            f"output_{n}" for n in range(len(outputs))
        ]
        return dict(zip(names, outputs, strict=True))

    def other_layers(self) -> list[Any]:
        return [
            layer
            for layer in self._model._flatten_layers(include_self=False)
            if not any(isinstance(x, WeightTable) for x in layer._flatten_layers())
        ]

    def engine_optimizer(self) -> Any:
        optimizer = self._optimizer
        if optimizer is None:
            return None
        inner = keras_class(optimizer).from_config(optimizer.get_config())
        return translate_keras_optimizer(inner)

    def changes(self, consumer: str) -> ComparedRows:
        """See `StoredTables.changes`; it compares rows: Keras writes them, too."""
        del consumer
        return ComparedRows(self.tables)

    @property
    def telemetry(self) -> Any:
        """The te.Telemetry that counts, or None once another one counts."""
        owners = [getattr(t.counter, "owner", None) for t in self._counted().values()]
        return self._telemetry if set(owners) == {self} else None

    @telemetry.setter
    def telemetry(self, value: Any) -> None:
        self._telemetry = value

    def start_counting(self, every: int) -> Callable[[int | None], Counts]:
        """Counts the updates of the optimizer; see `TableStore.start_counting`."""
        optimizer, tables = self._optimizer, self._counted()
        if every and optimizer is not None and not isinstance(optimizer, UpdatesRows):
            raise NotImplementedError(
                "te.Telemetry counts the updates of te.keras.RowSparseOptimizer, and "
                f"this model with {_LAYER} is compiled with "
                f"{type(optimizer).__name__}. Call te.keras.convert(model) first."
            )
        if every and getattr(self._model, "train_function", None) is not None:
            self._model.make_train_function(force=True)  # It is traced again.
        return start_counting(tables, every, self)

    def _counted(self) -> dict[str, TableVariable]:
        tables = {x.name: keras_api.value_of(x.embeddings) for x in self.layers}
        for name, table in tables.items():
            if not isinstance(table, TableVariable):
                raise NotImplementedError(
                    f"te.Telemetry cannot count the updates of the {_LAYER} {name!r}, "
                    "whose table belongs to a strategy or to functions of a SavedModel."
                    " Train a model that was made in code or loaded from a `.keras` "
                    "file, without a strategy."
                )
        return tables


# The table that is looked up in place of the weight of each layer, by the layer's id.
_served: contextvars.ContextVar[Mapping[int, TableReader] | None] = (
    contextvars.ContextVar("served", default=None)
)


def served_table(layer: Any) -> Callable[[Any], Any] | None:
    """Returns a function that looks ids up in the exported table, or None elsewhere."""
    reader = (_served.get() or {}).get(id(layer))
    if reader is None:
        return None
    dim = layer.output_dim

    def read(ids: tf.Tensor) -> tf.Tensor:
        rows = tf.cast(ids, tf.int64)
        if keras_api.COUNTS_FROM_THE_END:
            rows = tf.where(rows < 0, rows + layer.input_dim, rows)
        values = reader.read(tf.reshape(rows, [-1]))
        values = tf.reshape(values, tf.concat([tf.shape(ids), [dim]], 0))
        return tf.cast(tf.ensure_shape(values, [*ids.shape, dim]), layer.compute_dtype)

    def look_up(ids: Any) -> Any:
        if isinstance(ids, tf.SparseTensor):
            ids = tf.sparse.to_dense(ids)
        return tf.ragged.map_flat_values(read, ids)

    return look_up


def _field(tensor: Any) -> tuple[dict[str, tf.TensorSpec], Callable[[Any], Any]]:
    """Returns a signature's inputs for one input of a model, and what joins them."""
    name = input_name(tensor._keras_history[0].name)
    described = keras_api.symbol(tensor)
    shape, dtype = list(described.shape), tf.as_dtype(tensor.dtype)
    if described.kind is InputKind.SPARSE:
        parts = {
            f"{name}_indices": tf.TensorSpec([None, len(shape)], tf.int64),
            f"{name}_values": tf.TensorSpec([None], dtype),
            f"{name}_dense_shape": tf.TensorSpec([len(shape)], tf.int64),
        }
        return parts, lambda given: tf.SparseTensor(*(given[key] for key in parts))
    if described.kind is InputKind.RAGGED:
        parts = {
            f"{name}_values": tf.TensorSpec([None, *shape[2:]], dtype),
            f"{name}_row_splits": tf.TensorSpec([None], tf.int64),
        }
        make: Any = tf.RaggedTensor
        return parts, lambda given: make.from_row_splits(*(given[k] for k in parts))
    return {name: tf.TensorSpec(shape, dtype)}, lambda given: given[name]


def _check(layer: Any) -> None:
    if not layer.built:
        raise ValueError(
            f"The {_LAYER} {layer.name!r} is not built. Call the model on a batch "
            "first."
        )
    for option in ("lora_enabled", "quantization_mode"):
        if getattr(layer, option, None):
            raise NotImplementedError(
                f"The table of the {_LAYER} {layer.name!r} is split into several "
                f"weights (`{option}`), which only `model.save(...)` of Keras can save."
            )


def value_dim(hashing: Hashing | None, columns: int) -> int:
    """Returns the width of an id's value in a table with this number of columns."""
    if hashing is None or hashing.combine == "sum":
        return columns
    return columns * hashing.hashes


def _table(layer: Any) -> TableConfig:
    dim = value_dim(layer.hashing, layer.output_dim)
    rows = layer.hashing or layer.input_dim
    return TableConfig(rows, dim, name=layer.name, combiner=layer.combiner or "mean")


def _view(spec: TableSpec, layer: Any, rows: Mapping[str, MutableTableRows]) -> Table:
    weight = keras_api.value_of(layer.embeddings)
    ids = Identity(spec.name, rows)
    return Table(
        spec=spec,
        ids=ids,
        stored=VariableReader(weight),
        values=ids.values,
        shards=lambda: [(weight.device, weight.read_value())],
        variables=lambda: [weight],
    )


def _rows(variable: Any, start: float | None = None) -> MutableTableRows:
    return VariableRows(keras_api.value_of(variable), start, reads_stored=False)


class ComparedRows:
    """Finds the rows of static tables that changed for a consumer; see `RowChanges`.

    It compares a fingerprint of 64 bits of each row, so updates need not be noted. Two
    values of a row have the same one with a probability of about 2^-64.
    """

    group = None

    def __init__(self, tables: Callable[[], Mapping[str, Table]]) -> None:
        self._tables = tables
        self.commit(end=True)

    def mark(self, rows: Sequence[Any]) -> None:
        """See `RowChanges.mark`. Changes count from the first call on."""
        if not self._marked:
            self._taken = [_fingerprints(table) for table in self._tables().values()]
            self.commit()
        for marked, some in zip(self._marked, rows, strict=True):
            marked[some] = True

    def take(self) -> list[Changed]:
        """See `RowChanges.take`."""
        tables = list(self._tables().values())
        self._taken = [_fingerprints(table) for table in tables]
        columns = zip(self._taken, self._committed, self._marked, strict=True)
        rows = [np.flatnonzero((now != before) | m) for now, before, m in columns]
        return [
            Changed(own, table.matrix(own, "export_delta"))
            for table, own in zip(tables, rows, strict=True)
        ]

    def matrix(self, table: int, rows: np.ndarray) -> TableRows:
        """See `RowChanges.matrix`."""
        return list(self._tables().values())[table].matrix(rows, "export_delta")

    def commit(self, *, end: bool = False) -> None:
        """See `RowChanges.commit`."""
        if end:
            self._taken: list[np.ndarray] = []
        self._committed = self._taken
        self._marked = [np.zeros(len(each), bool) for each in self._committed]


def _fingerprints(table: Table) -> np.ndarray:
    """Returns a fingerprint of the values of each row, uint64 [V]."""
    rows = table.rows[PARAMETERS]
    found = np.empty([rows.shape[0]], np.uint64)
    for start in range(0, len(found), rows.slice_rows):
        stop = min(start + rows.slice_rows, len(found))
        found[start:stop] = row_hashes(rows.read(start, stop))
    return found
