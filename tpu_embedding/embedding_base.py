"""What all TPUEmbedding classes share: the plan, the engine, structures, checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tpu_embedding import distribution, engines, errors
from tpu_embedding.checkpoint.trackable import TrackableTables
from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.distribution import Topology
from tpu_embedding.engines import Engine, EngineOptions
from tpu_embedding.inputs import IdBatch, InputKind, to_id_batch
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import Plan, make_plan
from tpu_embedding.layout.stacking import TableLayout
from tpu_embedding.layout.table_arrays import PARAMETERS, Rows
from tpu_embedding.lookup.combine import StoredReader
from tpu_embedding.nest_utils import Structure
from tpu_embedding.tf_configs import (
    adapt_features,
    adapt_optimizer,
    check_batch_size,
)

# The methods trace fine as they are; converting them would only cost time.
do_not_convert = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass(frozen=True)
class EmbeddingOptions:
    """What a constructor takes besides features and optimizer.

    Attributes:
      pipelined: Each update is applied after the lookups of the next step.
      invalid_ids: The rule for tables of tf.tpu.experimental.embedding, or None.
      check_numerics: Refuse weights and gradients that are not finite.
      sparse_core: How tables are stacked.
      initialize: On TPU v2 to v4 configure the engine; else share one.
      profile_data_directory: There, where the TPU writes what it learns of the ids.
    """

    pipelined: bool
    invalid_ids: str | None
    check_numerics: bool
    sparse_core: SparseCoreEmbeddingConfig = SparseCoreEmbeddingConfig(  # noqa: RUF009 - frozen
        disable_table_stacking=True
    )
    initialize: bool = True
    profile_data_directory: str | None = None


class EmbeddingBase(TrackableTables):
    """Tables, slots and what is done to them outside of steps; abstract."""

    # Whether tables may have a CustomOptimizer or a CustomCombiner.
    _takes_custom: ClassVar[bool] = False

    def __init__(
        self, feature_config: Any, optimizer: Any, options: EmbeddingOptions
    ) -> None:
        """Reads the configuration; tables are made by the first call that needs them.

        Args:
          feature_config: A FeatureConfig or a nested structure of them.
          optimizer: For tables without one of their own, or None.
          options: The rest.

        Raises:
          The errors of TPUEmbedding and TPUEmbeddingV2.
        """
        if not isinstance(options.check_numerics, bool):
            raise errors.argument_type(
                "check_numerics", options.check_numerics, "a bool"
            )
        adapted = adapt_features(feature_config, options.invalid_ids)
        self._structure = Structure(feature_config)
        self._plan = make_plan(
            adapted.paths,
            adapted.features,
            adapted.keys,
            adapt_optimizer(optimizer),
            custom=self._takes_custom,
        )
        self._topology = distribution.current()
        self._output_shapes = OutputShapes(self._plan.features)
        self._options = options
        self._layout = engines.lay_out(self._plan, self._topology, options.sparse_core)
        self._engine: Engine | None = None

    def _create_engine(self) -> Engine:
        """Makes the tables and slots, unless they are there."""
        if self._engine is not None:
            return self._engine
        with tf.init_scope():
            self._engine = engines.create_engine(
                EngineOptions(
                    plan=self._plan,
                    topology=self._topology,
                    output_shapes=self._output_shapes,
                    pipelined=self._options.pipelined,
                    check_numerics=self._options.check_numerics,
                    layout=self._layout,
                    sparse_core=self._options.sparse_core,
                    initialize=self._options.initialize,
                    profile_data_directory=self._options.profile_data_directory,
                )
            )
            self._track_state(self._engine)
        return self._engine

    def _can_create_engine(self) -> bool:
        if not engines.needs_shapes(self._topology):
            return True
        shapes = [self._output_shapes.activation(f.index) for f in self._plan.features]
        return all(None not in shape for shape in shapes)

    @property
    def _stored_layouts(self) -> tuple[TableLayout, ...]:
        return engines.stored_layouts(self._topology, self._layout)

    @property
    def _stored_dtypes(self) -> dict[str, tf.DType]:
        return {t.name: tf.as_dtype(t.config.dtype) for t in self._plan.tables}

    @do_not_convert
    def retrieve(self) -> None:
        """Makes variables that stand in for tables in a TPU hold what they hold now."""
        with tf.init_scope():
            self._retrieve()

    @property
    def plan(self) -> Plan:
        """Its tables and features, with optimizers and rules resolved."""
        return self._plan

    @property
    def structure(self) -> Structure:
        """The nesting of its features."""
        return self._structure

    @property
    def check_numerics(self) -> bool:
        """Whether weights and gradients that are not finite are refused."""
        return self._options.check_numerics

    def table_rows(self) -> dict[str, Rows]:
        """Each table by name as it is now, to be read by rows; on every engine."""
        engine = self._create_engine()
        engine.retrieve()
        return {name: arrays[PARAMETERS] for name, arrays in engine.rows().items()}

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
        """Forgets every batch that is queued, owed or pending; keeps the tables.

        For going on after an error or an interrupt in the middle of a step.

        Raises:
          NotImplementedError: On TPU v2 to v4, which only their initialization empties:
            save a checkpoint before it and restore it afterwards.
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
          RuntimeError: On TPU v2 to v4, in whose own memory the tables are: restore a
            checkpoint of them into an embedding made outside of the strategy.
        """
        return {key: table["parameters"] for key, table in self.variables.items()}

    @property
    def variables(self) -> dict[Any, dict[str, Any]]:
        """As `embedding_tables`, with a dict of "parameters" and slots for each.

        Raises:
          RuntimeError: On TPU v2 to v4, as `embedding_tables`.
        """
        engine = self._create_engine()
        self.flush()
        keys = [spec.key for spec in self._plan.tables]
        return dict(zip(keys, engine.variables(), strict=True))

    def _in_replica(self, method: str) -> tuple[Engine, int]:
        if self._engine is None:
            raise errors.not_built(method)
        replica = self._topology.replica()
        if replica is None:
            raise errors.outside_of_replica(method, self._topology.num_replicas)
        return self._engine, replica

    def _require_optimizers(self, method: str) -> None:
        without = [spec.name for spec in self._plan.tables if spec.optimizer is None]
        if without:
            raise errors.training_without_optimizer(method, without)

    def _read_replica(
        self, values: Sequence[Any], weights: Sequence[Any], cores: int = 1
    ) -> list[IdBatch]:
        """The batch of a replica, or of one of its `cores`."""
        specs = self._plan.features
        batches = [
            to_id_batch(spec.path, value, weight)
            for spec, value, weight in zip(specs, values, weights, strict=True)
        ]
        shapes = [tuple(batch.static_shape.as_list()) for batch in batches]
        for spec, batch, shape in zip(specs, batches, shapes, strict=True):
            ragged = batch.kind is InputKind.RAGGED
            self._output_shapes.check_input(
                spec.index, shape, ragged=ragged, cores=cores
            )
        self._output_shapes.remember_ranks(shapes)
        return batches

    def _check_gradients(self, gradients: Any) -> list[tf.Tensor | None]:
        flat = self._structure.flatten("gradients", gradients)
        return [self._check_gradient(i, g) for i, g in enumerate(flat)]

    def _check_gradient(self, feature: int, gradient: Any) -> tf.Tensor | None:
        if gradient is None:
            return None
        spec = self._plan.features[feature]
        if not isinstance(gradient, tf.Tensor) or not gradient.dtype.is_floating:
            raise errors.gradient_kind(spec.path, gradient)
        dim = self._plan.tables[spec.table].config.dim
        expected = (*self._output_shapes.activation(feature), dim)
        if not gradient.shape.is_compatible_with(expected):
            raise errors.gradient_shape(spec.path, expected, gradient.shape)
        return tf.cast(gradient, tf.float32)


class CallEmbedding(EmbeddingBase):
    """Tables that are looked up call by call, and updated with what a call gave.

    On every engine; for layers. No order of calls is prescribed, but for TPU v2 to
    v4, where the gradients of a training call come before the next one.
    """

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any,
        options: EmbeddingOptions,
        batch_size: int | None = None,
    ) -> None:
        """See `EmbeddingBase`.

        Args:
          feature_config: As there.
          optimizer: As there.
          options: As there.
          batch_size: The global size of every batch, or None for any size.

        Raises:
          ValueError: Also if the number of replicas does not divide `batch_size`.
        """
        super().__init__(feature_config, optimizer, options)
        size = per_replica(batch_size, self._topology)
        if size is not None:
            self._output_shapes.set_batch_size(size)

    @property
    def in_program(self) -> bool:
        """Whether the caller is traced as a program of a TPU."""
        return self._topology.program() is not None

    def is_in_replica(self) -> bool:
        """Whether `lookup` may be called here.

        Raises:
          RuntimeError: If a strategy is active that is not the embedding's own.
        """
        return self._topology.replica() is not None

    def logical_variables(self) -> dict[str, Any]:
        """By name in checkpoints each table and slot whole, as a variable or like one.

        Also the number of updates, where a rate asks for it.
        """
        return self._create_engine().logical_variables()

    def readers(self) -> list[StoredReader]:
        """For each table of the plan what stock ops read of it, in any graph."""
        return self._create_engine().readers()

    @do_not_convert
    def lookup(
        self, features: Any, weights: Any = None, *, training: bool = True
    ) -> tuple[Any, Any]:
        """Looks a batch up at once, past any queue.

        Args:
          features: In the structure of `feature_config`, int32 or int64: tf.Tensor
            [B] or [..., k], tf.SparseTensor [..., k] or tf.RaggedTensor [B, None],
            in any mix; inside strategy.run those of the replica.
          weights: None, or the same structure with floating point weights of each
            feature's own layout, or None for features without.
          training: Whether `submit` may follow.

        Returns:
          The activations in the structure of `feature_config`, float32
          [output shape..., dim] each, and a ticket for `submit`.

        Raises:
          TypeError: If a container or dtype is of the wrong type.
          ValueError: If a structure, rank or static shape does not fit.
          RuntimeError: If called outside of strategy.run with several replicas.
          NotImplementedError: On TPU v2 to v4, if gradients of an earlier lookup of
            this step may still come.
          tf.errors.InvalidArgumentError: If ids, weights or splits are not valid.
        """
        engine = self._create_engine()
        _, replica = self._in_replica("lookup")
        values = self._structure.flatten("features", features)
        flat_weights = self._structure.flatten_weights(weights)
        paths = [spec.path for spec in self._plan.features]
        engines.check_inputs(self._topology, paths, values)
        with self._output_shapes.forgets_refused():
            batch = self._topology.on_host(self._read_replica, values, flat_weights)
            result = engine.lookup(batch, replica, training=training)
        return self._structure.pack(result.activations), result.ticket

    @do_not_convert
    def submit(self, ticket: Any, gradients: Any) -> None:
        """Updates the tables with the gradients of one `lookup`.

        Args:
          ticket: What that lookup gave.
          gradients: In the structure of `feature_config` a tf.Tensor of the shape of
            the activation, or None, which counts as zeros.

        Raises:
          TypeError: If a container is of the wrong type.
          ValueError: If the structure differs, or a gradient is no tf.Tensor or has
            the wrong static shape.
          RuntimeError: If a table has no optimizer, or outside of strategy.run where
            there are several replicas.
          tf.errors.FailedPreconditionError: If the ticket was used before.
        """
        engine, replica = self._in_replica("submit")
        self._require_optimizers("submit")
        engine.submit(ticket, self._check_gradients(gradients), replica)


def per_replica(batch_size: int | None, where: Topology) -> int | None:
    """A global batch size as that of each replica.

    Raises:
      ValueError: If it is no int >= 1, or the number of replicas does not divide it.
    """
    check_batch_size("batch_size", batch_size)
    if batch_size is None:
        return None
    if batch_size % where.num_replicas:
        raise errors.batch_size_not_divisible(batch_size, where.num_replicas)
    return batch_size // where.num_replicas
