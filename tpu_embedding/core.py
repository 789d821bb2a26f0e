"""Does the work of the public classes on an engine, with flat lists of features.

It is the `core` of TPUEmbedding, TPUEmbeddingV2 and the Keras layer, through which
Keras, serving, checkpoints and telemetry reach the tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.checkpoint.stored import EngineTables
from tpu_embedding.config import DistributedOptions
from tpu_embedding.distribution import Topology
from tpu_embedding.engines.base import Engine, TableStore
from tpu_embedding.engines.calls import (
    Call,
    Counts,
    EmbeddingOptions,
    EngineOptions,
    Prepared,
)
from tpu_embedding.engines.process_group import calling
from tpu_embedding.inputs import IdBatch, InputKind
from tpu_embedding.layout.output_shapes import InputShapes, OutputShapes
from tpu_embedding.layout.partition import TableLayout
from tpu_embedding.layout.plan import UPDATES, Plan, TableSpec
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.lookup.feature_structure import FeatureStructure, read_features
from tpu_embedding.lookup.features import (
    watched,
    with_rows_of_ids,
    with_weight_gradients,
)
from tpu_embedding.tables.growing import FrozenTable, freeze
from tpu_embedding.tables.rows import MutableTableRows
from tpu_embedding.tables.table import RowChanges
from tpu_embedding.tables.trackable import CopiedCounter, LogicalVariable
from tpu_embedding.tables.vocabularies import Vocabulary
from tpu_embedding.vocabulary import VocabularyContents

# The methods trace fine as they are; converting them would only cost time.
do_not_convert = tf.autograph.experimental.do_not_convert


class Core(EngineTables):
    """Tables, slots and lookups over flat lists of features, in plan order.

    Attributes:
      options: The options of the engine.
      topology: The strategy's replicas and devices.
      output_shapes: What is known of the features' outputs.
      engine_class: The class of the engine.
      engine: The engine, or None before the first call that needs it.
      telemetry: The te.Telemetry that counts, or None.
      delta_writers: The te.serving.DeltaWriters by the name of their consumer.
    """

    def __init__(
        self,
        plan: Plan,
        structure: FeatureStructure,
        options: EmbeddingOptions,
        *,
        topology: Topology,
        engine_class: type[Engine],
        hands_out_stacks: bool = False,
        on_created: Callable[[TableStore], None] | None = None,
        made_by: str,
    ) -> None:
        """Takes the plan and options; the first call that needs tables makes them.

        Args:
          plan: The tables and features.
          structure: The user's structure of the features.
          options: The options of the engine.
          topology: The replicas and devices of the active strategy.
          engine_class: What `engines.choose` returned for the topology and the plan.
          hands_out_stacks: Whether the public class hands out stacks, even if the
            engine stores none.
          on_created: A function that is called with the engine once it is created.
          made_by: The name of the class of the user's object.
        """
        errors.check_flag("check_numerics", options.check_numerics)
        if not isinstance(options.distributed, DistributedOptions):
            raise errors.argument_type(
                "distributed_options", options.distributed, "a DistributedOptions"
            )
        self.plan, self.structure = plan, structure
        self._hands_out_stacks = hands_out_stacks
        self._on_created = on_created
        self.topology, self.engine_class = topology, engine_class
        self.output_shapes = OutputShapes(plan.features)
        self.options = options
        self.check_numerics = options.check_numerics
        self._engine_options = EngineOptions(
            **vars(options),
            plan=plan,
            topology=self.topology,
            output_shapes=self.output_shapes,
            made_by=made_by,
        )
        self._complete(channel=self.engine_class.check(self._engine_options))
        if self.can_create_engine():
            self.lay_out()  # Raises its errors early.
        self._without_optimizer = [t.name for t in plan.tables if t.optimizer is None]
        self.engine: Engine | None = None
        self.telemetry: Any = None  # The te.Telemetry that counts.
        self.delta_writers: dict[str, Any] = {}  # Those of te.serving, by consumer.

    def lay_out(self) -> Layout | None:
        """Lays out stacks, if the engine stores them or the class hands them out."""
        wanted = self.engine_class.stores_stacks or self._hands_out_stacks
        if self._engine_options.layout is None and wanted:
            self._complete(layout=self.engine_class.lay_out(self._engine_options))
        return self._engine_options.layout

    def _complete(self, **decided: Any) -> None:
        self._engine_options = dataclasses.replace(self._engine_options, **decided)

    def refusing(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """See `Channel.refusing`; without a channel it does nothing."""
        channel = self._engine_options.channel
        return contextlib.nullcontext() if channel is None else channel.refusing(phase)

    def create_engine(self, *, to_restore: bool = False) -> Engine:
        """Makes the tables and slots, unless they are there; see `EngineOptions`."""
        if self.engine is not None:
            return self.engine
        with tf.init_scope():
            self.lay_out()
            options = dataclasses.replace(self._engine_options, to_restore=to_restore)
            self.engine = self.engine_class(options)
            if self._on_created is not None:
                self._on_created(self.engine)
        return self.engine

    def engine_for(self, batch: Sequence[IdBatch], cores: int = 1) -> Engine:
        """Returns the engine; creates it if needed, on TPUs with the batch's shapes."""
        if self.engine is not None or self.topology.tpu is None:
            return self.create_engine()
        shapes = [tuple(feature.static_shape.as_list()) for feature in batch]
        with self.output_shapes.completed_by(shapes, cores):
            return self.create_engine()

    def can_create_engine(self) -> bool:
        if not self.engine_class.needs_shapes:
            return True
        shapes = [self.output_shapes.activation(f.index) for f in self.plan.features]
        return all(None not in shape for shape in shapes)

    @property
    def layouts(self) -> tuple[TableLayout, ...]:
        if not self.engine_class.stores_stacks:
            return ()
        layout = self.lay_out()
        assert layout is not None
        return layout.tables

    @property
    def inputs(self) -> InputShapes:
        """The inputs declared or looked up so far."""
        return self.output_shapes.inputs

    def set_batch_size(self, size: int | None) -> None:
        """Fixes the batch size of a replica, unless `size` is None."""
        if size is not None:
            self.output_shapes.set_batch_size(size)

    def complete(self) -> None:
        """Makes the first values that `EngineOptions.to_restore` left out."""
        if self.engine is not None:
            self.engine.complete()

    @do_not_convert
    def retrieve(self) -> None:
        """Copies tables that are in a TPU into their variables."""
        if self.engine is not None:
            with tf.init_scope():
                self.engine.retrieve()

    @do_not_convert
    def flush(self) -> None:
        """Applies the pending update, if there is one."""
        engine = self.engine_to_synchronize()
        if engine is not None:
            engine.flush()

    def engine_to_synchronize(self) -> Engine | None:
        """Returns the engine, if it exists or other processes may wait for it."""
        return self.create_engine() if self.engine_class.synchronizes else self.engine

    def in_replica(self, method: str) -> tuple[Engine, int]:
        if self.engine is None:
            raise RuntimeError(
                f"{method} was called before the embedding was built. Call build() or "
                "enqueue() first."
            )
        return self.engine, self.require_replica(method)

    def require_replica(self, method: str) -> int:
        replica = self.topology.replica()
        if replica is None:
            number = self.topology.num_replicas
            place = f"one of {number} replicas" if number > 1 else "a replica"
            raise RuntimeError(
                f"{method} must run inside {place}. Call it in the function that you "
                "pass to `strategy.run`."
            )
        return replica

    def require_optimizers(
        self, method: str, way_out: str = "use `training=False`"
    ) -> None:
        if self._without_optimizer:
            without = ", ".join(self._without_optimizer)
            raise RuntimeError(
                f"{method} cannot train the tables {without}: they have no "
                "optimizer. Pass `optimizer` to the constructor or to each "
                f"TableConfig, or {way_out}."
            )

    def read_replica(
        self, values: Sequence[Any], weights: Sequence[Any], cores: int = 1
    ) -> list[IdBatch]:
        """Reads the batch of a replica, or of one of its `cores`."""
        specs = self.plan.features
        as_rows = not self.engine_class.hashes_ids
        batches = read_features(specs, values, weights, as_rows=as_rows)
        for spec, batch in zip(specs, batches, strict=True):
            shape = tuple(batch.static_shape.as_list())
            ragged = batch.kind is InputKind.RAGGED
            self.output_shapes.check_input(
                spec.index, shape, ragged=ragged, cores=cores
            )
        return batches

    def require_weight_gradients(self, weights: Sequence[Any]) -> list[int]:
        """Returns features with watched weights; raises if they have no gradients."""
        features = watched(weights)
        for i in features:
            spec = self.plan.features[i]
            table = self.plan.tables[spec.table]
            reason = None
            if not self.engine_class.differentiates_weights:
                reason = f"the {self.engine_class.name} engine"
            elif table.config.custom_combiner is not None:
                reason = f"the CustomCombiner of table {table.name!r}"
            if reason:
                raise NotImplementedError(
                    f"The weights of feature {spec.path} depend on a value that a "
                    f"tf.GradientTape watches, and {reason} has no gradients of "
                    "weights. Pass tf.stop_gradient(weights) to train without this "
                    "gradient, or multiply the activations instead."
                )
        return features

    def with_weight_gradients(
        self,
        activations: Sequence[tf.Tensor],
        features: Sequence[int],
        values: Sequence[Any],
        weights: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Returns activations whose gradient also reaches weights of `features`."""
        if not features:
            return list(activations)
        tables = self.tables()
        readers = {t.spec.index: t.reader.in_steps() for t in tables.values()}
        finds = {tables[n].spec.index: ids.find for n, ids in self.growing().items()}
        with tf.device(self.topology.device):
            lookup, values = with_rows_of_ids(
                features, (self.plan, readers), values, finds
            )
            return with_weight_gradients(activations, features, lookup, values, weights)

    def start_counting(self, every: int) -> Callable[[int | None], Counts]:
        """See `TableStore.start_counting`."""
        return self.create_engine().start_counting(every)

    def changes(self, consumer: str) -> RowChanges:
        """See `TableStore.changes`."""
        return self.create_engine().changes(consumer)

    def tables_replaced(self) -> None:
        for writer in self.delta_writers.values():
            writer.mark_all_rows()

    def load_checkpoint_rows(self) -> None:
        super().load_checkpoint_rows()
        self.tables_replaced()

    @property
    def knows_invalid_ids(self) -> bool:
        """Whether the counts of a batch include its invalid ids."""
        return not self._hands_out_stacks  # A stack has valid entries only.

    def logical_variables(self) -> dict[str, Any]:
        """Returns static tables, slots and the number of updates by checkpoint name.

        An array that is not a single tf.Variable is a `LogicalVariable`.
        """
        objects: dict[str, Any] = {}
        tables = self.tables()
        for spec in self.plan.static:
            objects |= tables[spec.name].ids.objects(self._logical_variable)
        updates = self.checkpoint_updates()
        if updates is not None:
            copies = getattr(updates, "values", None)  # One for each replica.
            objects[UPDATES] = updates if copies is None else CopiedCounter(copies)
        return objects

    @calling("vocabularies")
    def vocabularies(self) -> dict[Any, VocabularyContents]:
        """Returns the contents of growing vocabularies by the user's TableConfig."""
        found = self.growing()
        self.flush()
        return {s.key: found[s.name].contents() for s in self.plan.growing}

    @calling("freeze_vocabulary")
    def freeze_vocabulary(self, table: Any) -> FrozenTable:
        """See `TPUEmbedding.freeze_vocabulary`."""
        spec, ids = self._growing_table(table)
        return freeze(spec, ids.read())

    @calling("evict")
    def evict(self, table: Any) -> int:
        """See `TPUEmbedding.evict`."""
        spec, ids = self._growing_table(table)
        if spec.growth.eviction is None:
            raise ValueError(
                f"Table {spec.name!r} has eviction=None, which does not say which rows "
                "to evict. Set `eviction` in its GrowingVocabulary."
            )
        return ids.evict()

    def _growing_table(self, table: Any) -> tuple[TableSpec, Vocabulary]:
        """Finds the growing table of a TableConfig, and applies any pending update."""
        found = self.growing()
        for spec in self.plan.growing:
            if spec.key is table:
                self.flush()
                return spec, found[spec.name]
        raise ValueError(
            f"`table` must be the TableConfig of a growing table. Received: {table!r}. "
            f"Growing tables: {', '.join(found) or 'none'}."
        )

    def parameters(self) -> dict[str, Any]:
        """Returns each table by name; see `Identity.parameters`."""
        tables = self.tables().items()
        return {n: table.ids.parameters(self._logical_variable) for n, table in tables}

    def _logical_variable(self, name: str, rows: MutableTableRows) -> LogicalVariable:
        engine = self.create_engine()

        def read() -> np.ndarray:
            engine.retrieve()
            return rows.numpy()

        def write(value: np.ndarray) -> None:
            engine.retrieve()  # The written array is loaded together with the others.
            rows.write(0, value)
            engine.load()
            self.tables_replaced()

        return LogicalVariable(name, rows.shape, rows.dtype, read, write)

    def look_up(
        self,
        values: Sequence[Any],
        weights: Sequence[Any] | None = None,
        *,
        training: bool = True,
    ) -> tuple[list[tf.Tensor], Prepared]:
        """Looks up a flat batch at once, bypassing any queue; for layers.

        Lookups and updates may come in any order, except on TPU v2 to v4, where the
        gradients of a training lookup must come before the next one.

        Args:
          values: The ids of each feature; inside strategy.run those of the replica.
          weights: The weights of each feature or None; None for no weights at all.
          training: Whether `update` may follow.

        Returns:
          The activations, float32 [output shape..., dim] for each feature, and what
          `update` takes, which it accepts only once.
        """
        engine = self.create_engine()
        replica = self.require_replica("The lookup")
        self.check_inputs(values)
        with self.output_shapes.forgets_refused():
            with self.refusing("lookup"):
                batch = self.topology.on_host(
                    self.read_replica, values, weights or [None] * len(values)
                )
                call = Call(
                    replica=replica,
                    training=training,
                    shapes=self.static_shapes_of(batch),
                )
                (prepared,) = engine.prepare([batch], call)
            return engine.lookup(prepared, call)

    def update(self, looked_up: Prepared, gradients: Sequence[Any]) -> None:
        """Updates with the gradients of one `look_up`; None counts as zeros."""
        engine, replica = self.in_replica("apply_gradients")
        with self.refusing("update"):
            self.require_optimizers("apply_gradients")
            checked = self.check_gradients(gradients)
        engine.update(looked_up, checked, Call(replica=replica))

    def check_inputs(self, values: Sequence[Any]) -> None:
        """Refuses features that the engine cannot take at this point of a program."""
        if self.engine_class.needs_arguments:
            self.topology.require_arguments(self.plan.paths, values)

    def static_shapes_of(self, batch: Sequence[IdBatch]) -> list[Any] | None:
        """Returns the static activation shapes of a batch in a graph; None eagerly."""
        if tf.executing_eagerly():
            return None
        shapes = [tuple(feature.static_shape.as_list()) for feature in batch]
        return self.output_shapes.of_inputs(shapes)

    def check_gradients(self, gradients: Sequence[Any]) -> list[tf.Tensor | None]:
        return [self._check_gradient(i, g) for i, g in enumerate(gradients)]

    def check_clock(self, clock: Any) -> tf.Tensor | None:
        """Returns the clock that a user passed as an int64 scalar, or None.

        Raises:
          ValueError: If a clock is needed and missing, or passed and not needed.
          TypeError: If it is not an integer scalar.
        """
        tables = self.plan.tables_with_clock
        if clock is None:
            if tables:
                raise ValueError(
                    f"apply_gradients: table {tables[0]!r} has clock=True. Pass "
                    "`clock`, an integer that never decreases."
                )
            return None
        if not tables:
            raise ValueError(
                "apply_gradients: `clock` was passed, but no table has a clock. "
                'Set `clock=True` and `eviction="age"` in the GrowingVocabulary of '
                "a table, or leave `clock` out."
            )
        is_bool = isinstance(clock, bool)
        time = tf.convert_to_tensor(clock)
        if is_bool or not time.dtype.is_integer or time.shape.rank not in (None, 0):
            raise errors.argument_type(
                "clock", clock, "an integer or an integer scalar tensor"
            )
        return tf.ensure_shape(tf.cast(time, tf.int64), [])

    def _check_gradient(self, feature: int, gradient: Any) -> tf.Tensor | None:
        if gradient is None:
            return None
        spec = self.plan.features[feature]
        if not isinstance(gradient, tf.Tensor) or not gradient.dtype.is_floating:
            raise ValueError(
                f"The gradient of feature {spec.path} must be a floating point "
                f"tf.Tensor or None. Received: {gradient!r} of type "
                f"{errors.type_name(gradient)}. Convert tf.IndexedSlices with "
                "tf.convert_to_tensor."
            )
        dim = self.plan.tables[spec.table].config.dim
        expected = (*self.output_shapes.activation(feature), dim)
        if not gradient.shape.is_compatible_with(expected):
            raise ValueError(
                f"The gradient of feature {spec.path} must have the shape of its "
                f"activation, {expected}. Received: {gradient.shape}."
            )
        return tf.cast(gradient, tf.float32)
