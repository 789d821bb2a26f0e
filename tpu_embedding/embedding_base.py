"""What all TPUEmbedding classes share: the plan, the engine, structures, checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import engines, errors, topology
from tpu_embedding.adapters import adapt_features, adapt_optimizer
from tpu_embedding.checkpoint.tracking import SavedTables
from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.engines import Engine, EngineOptions
from tpu_embedding.inputs import IdBatch, InputKind, to_id_batch
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.stacking import TableLayout
from tpu_embedding.layout.tables import Plan, make_plan
from tpu_embedding.structures import Structure

# The methods trace fine as they are; converting them would only cost time.
as_written = tf.autograph.experimental.do_not_convert


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


class EmbeddingBase(SavedTables):
    """Tables, slots and what is done to them outside of steps; abstract."""

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
        )
        self._topology = topology.current()
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
    def plan(self) -> Plan:
        """Its tables and features, with optimizers and rules resolved."""
        return self._plan

    @property
    def structure(self) -> Structure:
        """The nesting of its features."""
        return self._structure

    @as_written
    def flush(self) -> None:
        """Applies the update that pipelining left pending, if there is one."""
        if self._engine is not None:
            self._engine.flush()

    def _retrieve(self) -> None:
        if self._engine is not None:
            self._engine.retrieve()

    @as_written
    def reset(self) -> None:
        """Forgets every batch that is queued, owed or pending; keeps the tables.

        For going on after an error or an interrupt in the middle of a step.
        """
        if self._engine is not None:
            self._engine.reset()

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """The tables, [vocabulary_size, dim] of their dtype.

        Keyed by the TableConfig that the user passed. Variables; on SparseCores, where
        tables are stacked and in parts, tensors with what they hold now. Applies a
        pending update first.
        """
        return {key: table["parameters"] for key, table in self.variables.items()}

    @property
    def variables(self) -> dict[Any, dict[str, Any]]:
        """As `embedding_tables`, with a dict of "parameters" and slots for each."""
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
        self, values: Sequence[Any], weights: Sequence[Any]
    ) -> list[IdBatch]:
        specs = self._plan.features
        batches = [
            to_id_batch(spec.path, value, weight)
            for spec, value, weight in zip(specs, values, weights, strict=True)
        ]
        shapes = [tuple(batch.static_shape.as_list()) for batch in batches]
        for spec, batch, shape in zip(specs, batches, shapes, strict=True):
            ragged = batch.kind is InputKind.RAGGED
            self._output_shapes.check_input(spec.index, shape, ragged=ragged)
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
