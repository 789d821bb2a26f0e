"""What all TPUEmbedding classes share: the plan, the engine, structures, checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tpu_embedding import distribution, engines, errors
from tpu_embedding.checkpoint.trackable import TrackableTables
from tpu_embedding.config import DistributedOptions
from tpu_embedding.distribution import Topology
from tpu_embedding.engines import (
    EmbeddingOptions,
    Engine,
    EngineOptions,
    Prepared,
    StepQueue,
    TableArrays,
)
from tpu_embedding.engines.base import Membership
from tpu_embedding.engines.full_table_view import full_variables
from tpu_embedding.engines.telemetry import Counts
from tpu_embedding.inputs import IdBatch, InputKind, to_id_batch
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import Plan, make_plan
from tpu_embedding.layout.stacking import Layout, TableLayout
from tpu_embedding.lookup.weight_gradients import watched, with_weight_gradients
from tpu_embedding.nest_utils import Structure
from tpu_embedding.tables.rows import PARAMETERS, TableRows
from tpu_embedding.tf_configs import (
    check_batch_size,
    convert_features,
    convert_optimizer,
    freeze_configs,
)

# The methods trace fine as they are; converting them would only cost time.
do_not_convert = tf.autograph.experimental.do_not_convert


class EmbeddingBase(TrackableTables):
    """Tables, slots and lookups over flat lists of features, in plan order.

    The engine's class is chosen once, by the strategy that is active.
    """

    # True: the class hands out stacks, also those of engines that store none.
    _hands_out_stacks: ClassVar[bool] = False

    def __init__(
        self,
        plan: Plan,
        options: EmbeddingOptions,
        *,
        topology: Topology | None = None,
    ) -> None:
        """Tables are made by the first call that needs them.

        Args:
          plan: The tables and features.
          options: The options of the engine.
          topology: The topology of the active strategy; None: ask for it.

        Raises:
          NotImplementedError: If the engine cannot serve the plan.
          ValueError: If another process of the job is configured differently.
        """
        if not isinstance(options.check_numerics, bool):
            raise errors.argument_type(
                "check_numerics", options.check_numerics, "a bool"
            )
        if not isinstance(options.distributed, DistributedOptions):
            raise errors.argument_type(
                "distributed_options", options.distributed, "a DistributedOptions"
            )
        self._plan = plan
        self._topology = topology or distribution.current()
        self._engine_class = engines.choose(self._topology, plan)
        self._engine_class.check_plan(plan, self._topology, options)
        self._output_shapes = OutputShapes(plan.features)
        self._options = options
        self._layout: Layout | None = None
        if self._can_create_engine():
            self._lay_out()  # Raises its errors early.
        self._without_optimizer = [t.name for t in plan.tables if t.optimizer is None]
        self._engine: Engine | None = None
        self._queue: StepQueue | None = None
        self.telemetry: Any = None  # The te.Telemetry that counts.
        self._membership: Membership | None = None
        self._membership = self._engine_class.join(self._engine_options())

    def _lay_out(self) -> Layout | None:
        """The stacks, where the engine stores them or the class hands them out.

        Raises:
          ValueError: If the engine needs output shapes that are not known yet.
        """
        wanted = self._engine_class.stores_stacks or self._hands_out_stacks
        if self._layout is None and wanted:
            self._layout = self._engine_class.lay_out(
                self._plan,
                self._topology,
                self._options.sparse_core,
                self._output_shapes,
            )
        return self._layout

    @contextlib.contextmanager
    def _refusing(self, phase: str) -> Iterator[None]:
        """Tells other processes what this one raises before it meets them.

        Args:
          phase: The first one in which the call would meet them.
        """
        try:
            yield
        except Exception as error:
            if self._membership is not None:
                self._membership.refuse(phase, error)
            raise

    def _engine_options(self) -> EngineOptions:
        return EngineOptions(
            **vars(self._options),
            plan=self._plan,
            topology=self._topology,
            output_shapes=self._output_shapes,
            layout=self._layout,
            membership=self._membership,
            made_by=type(self).__name__,
        )

    def _create_engine(self) -> Engine:
        """Makes the tables and slots, unless they are there."""
        if self._engine is not None:
            return self._engine
        with tf.init_scope():
            self._lay_out()
            self._engine = self._engine_class(self._engine_options())
            self._track_state(self._engine)
        return self._engine

    def _engine_for(self, batch: Sequence[IdBatch], cores: int = 1) -> Engine:
        """The engine; the first batch makes it, and on TPUs fixes all shapes."""
        if self._engine is not None or self._topology.tpu is None:
            return self._create_engine()
        shapes = [tuple(feature.static_shape.as_list()) for feature in batch]
        with self._output_shapes.completed_by(shapes, cores):
            return self._create_engine()

    def _can_create_engine(self) -> bool:
        if not self._engine_class.needs_shapes:
            return True
        shapes = [self._output_shapes.activation(f.index) for f in self._plan.features]
        return all(None not in shape for shape in shapes)

    @property
    def _stored_layouts(self) -> tuple[TableLayout, ...]:
        if not self._engine_class.stores_stacks:
            return ()
        layout = self._lay_out()
        assert layout is not None
        return layout.tables

    @property
    def _stored_dtypes(self) -> dict[str, tf.DType]:
        return {t.name: tf.as_dtype(t.config.dtype) for t in self._plan.tables}

    def set_batch_size(self, size: int | None) -> None:
        """Internal: fixes the batch size of a replica, unless `size` is None."""
        if size is not None:
            self._output_shapes.set_batch_size(size)

    @do_not_convert
    def retrieve(self) -> None:
        """Internal: copies tables that are in a TPU into their variables."""
        with tf.init_scope():
            self._retrieve()

    @property
    def plan(self) -> Plan:
        """Internal: the tables and features, with their optimizers and policies."""
        return self._plan

    @property
    def check_numerics(self) -> bool:
        """Internal: whether weights and gradients must be finite."""
        return self._options.check_numerics

    def table_rows(self) -> dict[str, TableRows]:
        """Internal: each table by name, to be read by rows, on every engine."""
        engine = self._create_engine()
        engine.retrieve()
        return {name: t.rows[PARAMETERS] for name, t in engine.tables().items()}

    @do_not_convert
    def flush(self) -> None:
        """Applies the update that pipelining left pending, if there is one."""
        if self._engine is not None:
            self._engine.flush()

    def _retrieve(self) -> None:
        if self._engine is not None:
            self._engine.retrieve()

    @do_not_convert
    def reset(self) -> None:
        """Discards queued batches, owed gradients and pending updates, not the tables.

        For use after an error or an interrupt in the middle of a step.

        Raises:
          NotImplementedError: On TPU v2 to v4, where only the initialization of the TPU
            does this: save a checkpoint before it and restore it afterwards.
        """
        if self._engine is not None:
            self._engine.reset()

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """The tables, [vocabulary_size, dim] of their dtype.

        Keyed by the TableConfig that the user passed. Variables; on SparseCores, where
        tables are stacked and in parts, tensors with what they hold now. Applies a
        pending update first.

        Raises:
          RuntimeError: On TPU v2 to v4, because the tables are in the TPU's memory:
            restore a checkpoint of them into an embedding created outside of the
            strategy.
        """
        return {key: table["parameters"] for key, table in self.variables.items()}

    @property
    def variables(self) -> dict[Any, dict[str, Any]]:
        """As `embedding_tables`, with a dict of "parameters" and slots for each.

        Raises:
          RuntimeError: On TPU v2 to v4, as `embedding_tables`.
        """
        tables = self._create_engine().tables()
        self.flush()
        return {s.key: dict(tables[s.name].values()) for s in self._plan.tables}

    def _in_replica(self, method: str) -> tuple[Engine, int]:
        if self._engine is None:
            raise RuntimeError(
                f"{method} was called before the embedding was built. Call build() or "
                "enqueue() first."
            )
        return self._engine, self._require_replica(method)

    def _require_replica(self, method: str) -> int:
        replica = self._topology.replica()
        if replica is None:
            number = self._topology.num_replicas
            among = f", of {number}" if number > 1 else ""
            raise RuntimeError(
                f"{method} belongs to one replica{among}. Call it in the function that "
                "you pass to `strategy.run`."
            )
        return replica

    def _require_optimizers(self, method: str) -> None:
        if self._without_optimizer:
            without = ", ".join(self._without_optimizer)
            raise RuntimeError(
                f"{method} cannot train the tables {without}: they have no "
                "optimizer. Pass `optimizer` to the constructor or to each "
                "TableConfig, or use `training=False`."
            )

    def _read_replica(
        self, values: Sequence[Any], weights: Sequence[Any], cores: int = 1
    ) -> list[IdBatch]:
        """The batch of a replica, or of one of its `cores`."""
        specs = self._plan.features
        batches = [
            to_id_batch(spec.path, value, weight)
            for spec, value, weight in zip(specs, values, weights, strict=True)
        ]
        for spec, batch in zip(specs, batches, strict=True):
            shape = tuple(batch.static_shape.as_list())
            ragged = batch.kind is InputKind.RAGGED
            self._output_shapes.check_input(
                spec.index, shape, ragged=ragged, cores=cores
            )
        return batches

    def require_weight_gradients(self, weights: Sequence[Any]) -> list[int]:
        """Internal: the features whose weights a tf.GradientTape watches.

        Args:
          weights: For each feature its weights or None.

        Raises:
          NotImplementedError: If there are any, and the engine or a CustomCombiner has
            no gradients for them.
        """
        features = watched(weights)
        for i in features:
            spec = self._plan.features[i]
            table = self._plan.tables[spec.table]
            reason = None
            if not self._engine_class.differentiates_weights:
                reason = f"the {self._engine_class.name} engine"
            elif table.config.custom_combiner is not None:
                reason = f"the CustomCombiner of table {table.name!r}"
            if reason:
                raise NotImplementedError(
                    f"The weights of feature {spec.path} depend on a value that a "
                    f"tf.GradientTape watches, and {reason} has no gradients of "
                    "weights. Pass tf.stop_gradient(weights) to train without it, or "
                    "multiply the activations instead."
                )
        return features

    def with_weight_gradients(
        self,
        activations: Sequence[tf.Tensor],
        features: Sequence[int],
        values: Sequence[Any],
        weights: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Internal: the activations; their gradient also reaches watched weights.

        Args:
          activations: For each feature its activations.
          features: What `require_weight_gradients(weights)` returned.
          values: For each feature its ids.
          weights: For each feature its weights or None.
        """
        if not features:
            return list(activations)
        engine = self._create_engine()
        tables = engine.tables()
        readers = {s.index: tables[s.name].reader for s in self._plan.tables}
        with tf.device(self._topology.device):
            return with_weight_gradients(
                activations, features, (self._plan, readers), values, weights
            )

    def start_counting(self, every: int) -> None:
        """Internal: see `Engine.start_counting`."""
        self._create_engine().start_counting(every)

    def counts(self, num_hot_rows: int) -> Counts:
        """Internal: see `Engine.counts`."""
        return self._create_engine().counts(num_hot_rows)

    @property
    def knows_invalid_ids(self) -> bool:
        """Internal: whether `counts` has the invalid ids of a batch."""
        return not self._hands_out_stacks  # A stack has valid entries only.

    def counted_core(self) -> EmbeddingBase:
        """Internal: what te.Telemetry counts; of a Keras layer a part."""
        return self

    def logical_variables(self) -> dict[str, Any]:
        """Internal: see `full_variables`."""
        return full_variables(self._create_engine())

    def tables(self) -> dict[str, TableArrays]:
        """Internal: each table by name with its slots; see `Engine.tables`."""
        return self._create_engine().tables()

    def look_up(
        self,
        values: Sequence[Any],
        weights: Sequence[Any] | None = None,
        *,
        training: bool = True,
    ) -> tuple[list[tf.Tensor], Prepared]:
        """Internal: looks a flat batch up at once, past any queue; for layers.

        No order of lookups and updates is prescribed, except on TPU v2 to v4, where the
        gradients of a training lookup come before the next one.

        Args:
          values: For each feature its ids; inside strategy.run those of the replica.
          weights: For each feature its weights or None; None for no weights at all.
          training: Whether `update` may follow.

        Returns:
          The activations, float32 [output shape..., dim] for each feature, and what
          `update` takes, once.

        Raises:
          TypeError: If ids or weights are of the wrong dtype.
          ValueError: If a kind of input, a rank or a static shape does not fit.
          RuntimeError: If called outside of strategy.run with several replicas.
          NotImplementedError: On TPU v2 to v4, if gradients of an earlier lookup of
            this step may still come.
          tf.errors.InvalidArgumentError: If ids, weights or splits are not valid.
        """
        engine = self._create_engine()
        replica = self._require_replica("The lookup")
        self._engine_class.check_inputs(self._topology, self._plan.paths, values)
        with self._output_shapes.forgets_refused():
            with self._refusing("lookup"):
                batch = self._topology.on_host(
                    self._read_replica, values, weights or [None] * len(values)
                )
                prepared = engine.prepare(batch, training=training)
            return engine.lookup(
                prepared,
                replica,
                training=training,
                shapes=self._static_shapes_of(batch),
            )

    def update(self, looked_up: Prepared, gradients: Sequence[Any]) -> None:
        """Internal: updates the tables with the gradients of one `look_up`.

        Args:
          looked_up: What that lookup returned.
          gradients: For each feature a tf.Tensor of the shape of its activation, or
            None, which counts as zeros.

        Raises:
          ValueError: If a gradient is no tf.Tensor or has the wrong static shape.
          RuntimeError: If a table has no optimizer, or outside of strategy.run where
            there are several replicas.
          tf.errors.FailedPreconditionError: If `looked_up` was used before.
        """
        engine, replica = self._in_replica("apply_gradients")
        with self._refusing("update"):
            self._require_optimizers("apply_gradients")
            checked = self._check_gradients(gradients)
        engine.update(looked_up, checked, replica)

    def _static_shapes_of(self, batch: Sequence[IdBatch]) -> list[Any] | None:
        """In a graph what is known of the activations of this batch."""
        if tf.executing_eagerly():
            return None
        shapes = [tuple(feature.static_shape.as_list()) for feature in batch]
        return self._output_shapes.of_inputs(shapes)

    def _check_gradients(self, gradients: Sequence[Any]) -> list[tf.Tensor | None]:
        return [self._check_gradient(i, g) for i, g in enumerate(gradients)]

    def _check_gradient(self, feature: int, gradient: Any) -> tf.Tensor | None:
        if gradient is None:
            return None
        spec = self._plan.features[feature]
        if not isinstance(gradient, tf.Tensor) or not gradient.dtype.is_floating:
            raise ValueError(
                f"The gradient of feature {spec.path} must be a floating point "
                f"tf.Tensor or None. Received: {gradient!r} of type "
                f"{errors.type_name(gradient)}. Convert tf.IndexedSlices with "
                "tf.convert_to_tensor."
            )
        dim = self._plan.tables[spec.table].config.dim
        expected = (*self._output_shapes.activation(feature), dim)
        if not gradient.shape.is_compatible_with(expected):
            raise ValueError(
                f"The gradient of feature {spec.path} must have the shape of its "
                f"activation, {expected}. Received: {gradient.shape}."
            )
        return tf.cast(gradient, tf.float32)


class NestedEmbedding(EmbeddingBase):
    """Tables whose features come in the user's structure; abstract."""

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any,
        options: EmbeddingOptions,
        *,
        invalid_ids: str | None = None,
        custom: bool = False,
    ) -> None:
        """Reads the configuration.

        Args:
          feature_config: A FeatureConfig or a nested structure of them.
          optimizer: For tables without one of their own, or None.
          options: The options of the engine.
          invalid_ids: The policy for tables of tf.tpu.experimental.embedding, or None.
          custom: Whether tables may have a CustomOptimizer or a CustomCombiner.

        Raises:
          The errors of TPUEmbedding and TPUEmbeddingV2.
        """
        converted = convert_features(feature_config, invalid_ids)
        self._structure = Structure(feature_config)
        plan = make_plan(
            converted.paths,
            converted.features,
            converted.keys,
            convert_optimizer(optimizer),
            custom=custom,
        )
        super().__init__(plan, options)
        freeze_configs(feature_config)

    @property
    def structure(self) -> Structure:
        """Internal: the nested structure of the features."""
        return self._structure


def per_replica(batch_size: int | None, where: Topology) -> int | None:
    """A global batch size as that of each replica.

    Raises:
      ValueError: If it is no int >= 1, or the number of replicas does not divide it.
    """
    check_batch_size("batch_size", batch_size)
    if batch_size is None:
        return None
    if batch_size % where.all_replicas:
        raise ValueError(
            "`batch_size` is global and must be divisible by the number of replicas. "
            f"Received: {batch_size} for {where.all_replicas} replicas."
        )
    return batch_size // where.all_replicas
