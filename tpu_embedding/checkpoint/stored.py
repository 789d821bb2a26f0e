"""Objects with tables, as checkpoints, exports, plans and telemetry see them."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint
from tpu_embedding.checkpoint.hashings import HashingRecord, hashing_records
from tpu_embedding.engines.base import Engine
from tpu_embedding.layout.output_shapes import InputShapes
from tpu_embedding.layout.partition import TableLayout
from tpu_embedding.layout.plan import UPDATES, Plan
from tpu_embedding.lookup.feature_structure import FeatureStructure
from tpu_embedding.tables.rows import PARAMETERS, MutableTableRows
from tpu_embedding.tables.table import Table, stored_table
from tpu_embedding.tables.variables import TableVariables
from tpu_embedding.tables.vocabularies import StoredVocabulary, Vocabulary


class StoredTables(abc.ABC):
    """The `core` of an object with tables, through which this package uses them.

    Attributes:
      plan: The tables and features.
      structure: The user's structure of the features.
      check_numerics: Whether weights and gradients must be finite.
      resets_updates: Whether a checkpoint without a number of updates resets it to 0.
    """

    plan: Plan
    structure: FeatureStructure
    check_numerics: bool = False
    resets_updates: bool = True

    @property
    def inputs(self) -> InputShapes | None:
        """The inputs declared or looked up so far, or None if nothing notes them."""
        return None

    @functools.cached_property
    def hashing_records(self) -> dict[str, HashingRecord]:
        """The records of hashed tables in checkpoints, beside their rows, by name."""
        return hashing_records(self.plan)

    @abc.abstractmethod
    def tables(self) -> dict[str, Table]:
        """Returns each table by name; see `TableStore.tables`.

        Their values may be out of date. The call makes the tables, but updates none.
        """

    def refresh(self) -> None:
        """Brings the values of `tables` up to date, after the pending update."""
        return  # Most tables are read in place.

    def growing(self) -> dict[str, Vocabulary]:
        """Returns the vocabularies of growing tables by name."""
        names = [spec.name for spec in self.plan.growing]
        tables: dict[str, Any] = self.tables() if names else {}
        return {name: tables[name].ids for name in names}

    def checkpoint_tables(self) -> dict[str, Table]:
        """Returns `tables`; raises an error if checkpoints cannot store all of them."""
        return self.tables()

    def checkpoint_targets(self) -> dict[str, dict[str, MutableTableRows]]:
        """Returns "parameters" and slots of each static table as matrices of rows."""
        tables = self.checkpoint_tables().items()
        return {name: dict(table.rows) for name, table in tables if table.rows}

    def checkpoint_rows(self) -> dict[str, dict[str, MutableTableRows]]:
        """Returns `checkpoint_targets` with their values after the pending update."""
        self.refresh()
        return self.checkpoint_targets()

    def checkpoint_updates(self) -> tf.Variable | None:
        """Returns the number of updates, if a rate or bfloat16 table needs it."""
        return None

    def completed(
        self, source: LogicalCheckpoint, names: Mapping[str, str]
    ) -> LogicalCheckpoint:
        """Adds to a checkpoint what only these tables can find in it.

        `names` has the name in the checkpoint of each table.
        """
        del names
        return source

    def load_checkpoint_rows(self) -> None:
        """Loads what callers have written to any of `checkpoint_rows`."""
        return  # Most rows are the tables themselves.

    def changes(self, consumer: str) -> Any:
        """See `TableStore.changes`."""
        del consumer
        raise NotImplementedError(
            "Deltas contain the rows that the tables' own optimizers change, but these "
            "tables have no optimizers of their own. Use a layer without "
            "`trainable_tables=True`, or a TPUEmbedding."
        )

    def tables_replaced(self) -> None:
        """Notes that something other than an update gives the tables new values."""
        return  # Only deltas need to know.


class VariableTables(StoredTables):
    """Tables that are one variable each, or a copy in each replica."""

    def __init__(
        self,
        plan: Plan,
        structure: FeatureStructure,
        variables: Callable[[], Mapping[str, Mapping[str, Any]]],
        vocabularies: Callable[[], Mapping[str, StoredVocabulary]] = dict,
        *,
        check_numerics: bool = False,
    ) -> None:
        """Takes functions: `variables` makes and returns variables by table and array.

        `vocabularies` returns the vocabularies of growing tables by name.
        """
        self.plan, self.structure = plan, structure
        self.check_numerics = check_numerics
        self._variables, self._vocabularies = variables, vocabularies
        self._inputs = InputShapes(len(plan.features))

    @property
    def inputs(self) -> InputShapes:
        """The inputs that were looked up so far."""
        return self._inputs

    def tables(self) -> dict[str, Table]:
        made, vocabularies = self._variables(), self._vocabularies()
        tables = {}
        for spec in self.plan.tables:
            arrays = {**made[spec.name]}
            stored = TableVariables(arrays.pop(PARAMETERS), arrays)
            ids = [vocabularies[spec.name]] if spec.name in vocabularies else []
            tables[spec.name] = stored_table(spec, [stored], vocabulary=ids)
        return tables


class EngineTables(StoredTables):
    """Tables that an engine holds, as checkpoints see them; an abstract class."""

    @property
    @abc.abstractmethod
    def layouts(self) -> tuple[TableLayout, ...]:
        """The place of each table if its checkpoints hold stacks, else nothing."""

    @abc.abstractmethod
    def create_engine(self, *, to_restore: bool = False) -> Engine:
        """Returns the engine, created if needed; `to_restore` may skip first values."""

    @abc.abstractmethod
    def can_create_engine(self) -> bool:
        """Returns whether the shapes that the engine needs are known."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Applies the pending update, if there is one."""

    @abc.abstractmethod
    def complete(self) -> None:
        """Makes the first values that `to_restore` skipped, if there is an engine."""

    @abc.abstractmethod
    def retrieve(self) -> None:
        """Updates the variables that are saved, if there is an engine."""

    def checkpoint_variables(self) -> dict[str, Any]:
        """Returns tables, slots and counters by their names in checkpoints."""
        engine = self.create_engine()
        engine.complete()
        engine.retrieve()
        return engine.checkpoint_variables()

    def checkpoint_updates(self) -> Any:
        return self.create_engine().checkpoint_variables().get(UPDATES)

    def tables(self) -> dict[str, Table]:
        return self.create_engine().tables()

    def refresh(self) -> None:
        self.create_engine().retrieve()

    def checkpoint_tables(self) -> dict[str, Table]:
        tables = self.tables()
        for table in self.plan.tables:
            combiner = table.config.custom_combiner
            if combiner is not None and combiner.num_weights:
                raise NotImplementedError(
                    f"Table {table.name!r}: tpu_embedding.checkpoint does not save the "
                    "weights of a CustomCombiner. Use tf.train.Checkpoint, which does."
                )
        return tables

    def load_checkpoint_rows(self) -> None:
        self.create_engine().load()


class SavesTables:
    """An object that `checkpoint.save`, `restore` and `serving.export` accept."""

    core: StoredTables


class WeightTable:
    """Base of a Keras layer whose table is a weight that Keras's optimizer trains."""

    @classmethod
    def core_of_model(cls, model: Any) -> WeightTables:
        """Returns the tables of all such layers of a model, or of one layer."""
        raise NotImplementedError


class WeightTables(StoredTables):
    """The tables of all `WeightTable`s of a Keras model.

    Attributes:
      feature_config: A FeatureConfig for each table, by the table's name.
    """

    feature_config: Mapping[str, Any]

    @abc.abstractmethod
    def engine_optimizer(self) -> Any:
        """Returns this package's optimizer with the same slots as the model's, or None.

        Raises:
          ValueError: If there is no such optimizer.
        """

    @abc.abstractmethod
    def inputs_of_model(self) -> tuple[dict[str, Any], Callable[[Any], Any]]:
        """Returns the input specs by name, and a function that makes them one argument.

        Raises:
          ValueError: If the model has no inputs of its own, such as a subclassed one.
        """

    @abc.abstractmethod
    def call_model(self, inputs: Any, readers: Mapping[str, Any]) -> Any:
        """Calls the model in a tf.function; its layers look up `readers`, by table."""

    @abc.abstractmethod
    def other_layers(self) -> list[Any]:
        """Returns the layers that have no table."""


def tables_of_weights(value: Any) -> WeightTables | None:
    """Returns the tables of a model or layer whose tables are all weights, or None."""
    found = _layers_with_tables(value)
    if found and all(isinstance(layer, WeightTable) for layer in found):
        return found[0].core_of_model(value)
    return None


def core_of(value: Any) -> StoredTables:
    """Returns the tables of an embedding, a layer, or the layers of a Keras model.

    Raises:
      TypeError: If the object has no tables.
      ValueError: If a model has several layers, not all of them te.keras.Embeddings.
    """
    if isinstance(value, SavesTables):
        return value.core
    tables = tables_of_weights(value)
    if tables is not None:
        return tables
    found = _layers_with_tables(value)
    if len(found) > 1:
        names = ", ".join(getattr(layer, "name", "") for layer in found)
        raise ValueError(
            f"The model has several layers with tables: {names}. Pass one of them, "
            "e.g. `model.get_layer(name)`."
        )
    if not found:
        raise errors.not_an_embedding(value)
    return found[0].core


def _layers_with_tables(value: Any) -> list[Any]:
    """Returns the layers with tables of a Keras model or layer."""
    layers = value._flatten_layers() if hasattr(value, "_flatten_layers") else ()
    return [x for x in layers if isinstance(x, (SavesTables, WeightTable))]
