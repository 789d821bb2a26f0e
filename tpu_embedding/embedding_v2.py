"""TPUEmbeddingV2: lookups that hand their batch out, updates that take it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors, preprocessing
from tpu_embedding.checkpoint import sparse_core_format
from tpu_embedding.config import DistributedOptions
from tpu_embedding.embedding_base import EmbeddingBase, do_not_convert
from tpu_embedding.engines import Call, EmbeddingOptions, Prepared
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import (
    DEFAULT_MAX_IDS_PER_TABLE,
    DEFAULT_MAX_UNIQUE_IDS_PER_TABLE,
    PartitionedCsrFormatTensor,
    PreprocessedFeatures,
)
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.lookup.features import watched
from tpu_embedding.packing import flatten_batch
from tpu_embedding.tf_configs import convert_sparse_core


class TPUEmbeddingV2(EmbeddingBase):
    """Looks embedding tables up and trains them, without a queue, on any machine.

    A drop-in for tf.tpu.experimental.embedding.TPUEmbeddingV2. A lookup gives the
    activations and, as plain tensors, the batch that it looked up; apply_gradients
    takes that batch back. There is no queue in between:

    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> films = te.TableConfig(8, 2, initializer=te.RowIdInitializer(), name="films")
    >>> embedding = te.TPUEmbeddingV2({"film": te.FeatureConfig(films)}, te.SGD(0.5))
    >>> activations, preserved = embedding({"film": tf.constant([3, 5])})
    >>> activations["film"].numpy().tolist()
    [[3.0, 3.0], [5.0, 5.0]]
    >>> preserved["films"].sorted_token_ids.numpy().tolist()
    [3, 5]
    >>> embedding.apply_gradients({"film": tf.ones([2, 2])}, preserved)
    >>> embedding.embedding_tables[films].numpy()[3].tolist()
    [2.5, 2.5]

    The numbers are those of docs/semantics.md and of TPUEmbedding. Batches can be
    prepared ahead, inside tf.data:

    >>> ids = tf.data.Dataset.from_tensors({"film": [3, 5]})
    >>> for batch in ids.map(embedding.preprocess_features):
    ...     activations, preserved = embedding.embedding_lookup(batch)
    >>> activations["film"].numpy()[0].tolist()
    [2.5, 2.5]

    Under a MirroredStrategy the replicas share one copy of each table, and the
    gradients of the n-th apply_gradients of every replica make up one update.

    A GrowingVocabulary gives rows to ids as in TPUEmbedding; every lookup counts as a
    training lookup. The rows of a lookup stay while its preserved outputs exist, whose
    tokens are ids. Under a ParameterServerStrategy the update of a growing table must
    be in the tf.function of its lookup.

    Under TPUStrategy and testing.SoftwareTPUStrategy the tables are stacked and
    divided among the SparseCores of all devices, and TensorFlow's XLA ops look them up
    and update them. docs/sparse_core.md says what these ops need and do not support.
    """

    _hands_out_stacks = True
    DEFAULT_MAX_IDS_PER_TABLE = DEFAULT_MAX_IDS_PER_TABLE
    DEFAULT_MAX_UNIQUE_IDS_PER_TABLE = DEFAULT_MAX_UNIQUE_IDS_PER_TABLE

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any = None,
        pipeline_execution_with_tensor_core: bool = False,
        sparse_core_embedding_config: Any = None,
        *,
        invalid_ids: str | None = None,
        check_numerics: bool = False,
        distributed_options: DistributedOptions | None = None,
    ) -> None:
        """Reads the configuration; tables are made by build or the first call.

        Args:
          feature_config: A FeatureConfig or a nested dict, list, tuple or namedtuple
            of them, of this package or of tf.tpu.experimental.embedding.
          optimizer: The optimizer of tables without their own; None: lookups only.
          pipeline_execution_with_tensor_core: Each update is applied after the
            lookups of the next step, which are thus one step old. Call `flush` before
            an evaluation.
          sparse_core_embedding_config: A SparseCoreEmbeddingConfig, of this package or
            of tf.tpu.experimental.embedding, or None for its defaults.
          invalid_ids: The policy for tables of tf.tpu.experimental.embedding: "error"
            (also if None), "drop" or "mod". A TableConfig of this package has its own.
          check_numerics: Refuse weights and gradients that are not finite.
          distributed_options: How the processes of a MultiWorkerMirroredStrategy share
            the tables; None means the defaults of DistributedOptions.

        Raises:
          ValueError: If the configuration is wrong: no features, two tables or stacks
            of one name, an unsupported optimizer.
          TypeError: If an argument is of the wrong type.
          NotImplementedError: If no engine supports the strategy or an option.
        """
        errors.check_flag(
            "pipeline_execution_with_tensor_core", pipeline_execution_with_tensor_core
        )
        options = EmbeddingOptions(
            pipelined=pipeline_execution_with_tensor_core,
            check_numerics=check_numerics,
            sparse_core=convert_sparse_core(sparse_core_embedding_config),
            distributed=(
                DistributedOptions()
                if distributed_options is None
                else distributed_options
            ),
        )
        super().__init__(
            feature_config, optimizer, options, invalid_ids=invalid_ids, custom=True
        )
        for table in self.core.plan.growing if options.pipelined else ():
            if table.growth.when_full == "error":
                raise NotImplementedError(
                    f"Table {table.name!r}: TPUEmbeddingV2 submits an update while "
                    "another one is pending, so it cannot know whether the table will "
                    'be full. Set when_full="shared_row" in its GrowingVocabulary, or '
                    "`pipeline_execution_with_tensor_core=False`, or use TPUEmbedding."
                )

    @do_not_convert
    def build(self) -> None:
        """Creates the tables and slots; the first lookup calls it if needed."""
        self.core.create_engine()

    @do_not_convert
    def __call__(
        self, features: Any, weights: Any = None
    ) -> tuple[Any, dict[str, PartitionedCsrFormatTensor]]:
        """See `embedding_lookup`."""
        return self.embedding_lookup(features, weights)

    @do_not_convert
    def embedding_lookup(
        self, features: Any, weights: Any = None
    ) -> tuple[Any, dict[str, PartitionedCsrFormatTensor]]:
        """Looks one batch up: enqueue, then dequeue.

        Args:
          features: In the structure of `feature_config`, int32 or int64 (or whole
            numbers of a floating point dtype): tf.Tensor [B] or [..., k],
            tf.SparseTensor [..., k] or tf.RaggedTensor [B, None],
            in any mix; or what `te.pack` or `preprocess_features` gave.
          weights: None, or the same structure with floating point weights in the layout
            of each feature, or None for a feature without weights. On CPUs a
            tf.GradientTape finds their gradient through the activations.

        Returns:
          The activations in the structure of `feature_config`, float32
          [output shape..., dim] each, and the preserved outputs for apply_gradients: a
          dict of PartitionedCsrFormatTensors by the name of the stacked table.

        Raises:
          TypeError: If a container or dtype is of the wrong type.
          ValueError: If a structure, rank or static shape does not fit.
          RuntimeError: If called outside of strategy.run with several replicas.
          tf.errors.InvalidArgumentError: If ids, weights or splits are not valid.
        """
        if isinstance(features, PreprocessedFeatures):
            self.build()
            return self.dequeue(self.enqueue(features, weights))
        replica = self.core.require_replica("embedding_lookup")
        core = self.core
        with core.output_shapes.forgets_refused(), tf.name_scope("embedding_lookup"):
            with self.core.refusing("lookup"):
                values, flat_weights = flatten_batch(self._structure, features, weights)
                watched_features = self.core.require_weight_gradients(flat_weights)
                batch = self._read_features(values, flat_weights)
                engine = self.core.engine_for(batch)
                shapes = core.static_shapes_of(batch)
                call = Call(replica=replica, shapes=shapes, tensors=True)
            (prepared,) = engine.prepare([batch], call)
            activations, looked_up = engine.lookup(prepared, call)
            if watched_features:
                activations = self.core.with_weight_gradients(
                    # The portable engine's activations have gradients already.
                    [tf.stop_gradient(activation) for activation in activations],
                    watched_features,
                    values,
                    flat_weights,
                )
        return self._structure.pack_joined(activations), _tensors(looked_up).tables

    @do_not_convert
    def preprocess_features(
        self, features: Any, weights: Any = None
    ) -> PreprocessedFeatures:
        """Checks the batch of one replica and lays it out, as enqueue does.

        It touches no table and no queue, so that it can run in tf.data.Dataset.map.

        Args:
          features: As for embedding_lookup.
          weights: As for embedding_lookup.

        Returns:
          A batch for embedding_lookup, enqueue or dequeue.

        Raises:
          ValueError: If features or weights are refused; embedding_lookup lists all
            errors of both. Under a MultiWorkerMirroredStrategy, the lookup raises the
            errors about values, in all processes.
        """
        return self._preprocess(features, weights, None)

    @do_not_convert
    def enqueue(
        self, features: Any, weights: Any = None, device: str | None = None
    ) -> PreprocessedFeatures:
        """Prepares one replica's batch for dequeue.

        Args:
          features: As for embedding_lookup.
          weights: As for embedding_lookup.
          device: Outside of strategy.run the name of the device whose batch this is: a
            TPU, or the device of a replica of a MirroredStrategy, a OneDeviceStrategy
            or, in its own process, a MultiWorkerMirroredStrategy.

        Raises:
          ValueError: If `device` is not one of the strategy, or features or weights are
            refused; embedding_lookup lists all errors of both.
        """
        place = None if device is None else self.core.topology.find(device)
        if self.core.topology.tpu is None:
            place = None  # All replicas are in this process.
        if not isinstance(features, PreprocessedFeatures):
            with self.core.refusing("lookup"):  # The other processes call dequeue.
                return self._preprocess(features, weights, place)
        if weights is not None:
            raise ValueError(
                "`weights` cannot be passed with preprocessed features: pass them to "
                "preprocess_features."
            )
        return features

    @do_not_convert
    def dequeue(
        self, partitioned_tensors: PreprocessedFeatures
    ) -> tuple[Any, dict[str, PartitionedCsrFormatTensor]]:
        """Looks up what enqueue gave; see embedding_lookup.

        Args:
          partitioned_tensors: What `enqueue` or `preprocess_features` returned.

        Returns:
          What `embedding_lookup` returns.

        Raises:
          TypeError: If `partitioned_tensors` is something else.
          ValueError: If it comes from an embedding of other stacks or features.
          RuntimeError: If called before build, or outside of strategy.run with several
            replicas.
        """
        engine, replica = self.core.in_replica("dequeue")
        with tf.name_scope("embedding_lookup"):
            with self.core.refusing("lookup"):
                given = self._check_batch(partitioned_tensors)
                batch = engine.from_tensors(given, looked_up=False)
            activations, looked_up = engine.lookup(batch, Call(replica=replica))
        return self._structure.pack_joined(activations), _tensors(looked_up).tables

    def _check_batch(self, batch: Any) -> PreprocessedFeatures:
        """Refuses anything but a preprocessed batch of this embedding."""
        if not isinstance(batch, PreprocessedFeatures):
            raise TypeError(
                "dequeue takes the PreprocessedFeatures that enqueue or "
                f"preprocess_features returns. Received: {type(batch).__name__}. Use "
                "embedding_lookup for raw features."
            )
        number, own = len(batch.output_shapes), len(self.core.plan.features)
        if number != own:
            raise ValueError(
                f"The preprocessed batch has {number} features, but this embedding "
                f"has {own}. Preprocess it with this embedding."
            )
        return batch

    @do_not_convert
    def apply_gradients(
        self,
        gradients: Any,
        preserved_outputs: Mapping[str, PartitionedCsrFormatTensor],
        *,
        clock: Any = None,
    ) -> None:
        """Updates the tables with the gradients of one lookup.

        The gradients of all entries of a row, of all features and replicas, are
        summed, clipped and given to the table's optimizer once.

        Args:
          gradients: In the structure of `feature_config` a tf.Tensor of the shape of
            the activation, or None, which counts as zeros.
          preserved_outputs: The second output of that lookup.
          clock: As for `TPUEmbedding.apply_gradients`.

        Raises:
          TypeError: If a container is of the wrong type.
          ValueError: If a structure differs, or a gradient is not a tf.Tensor or has
            the wrong static shape.
          RuntimeError: If called before build, without an optimizer, or outside of
            strategy.run where there are several replicas.
          tf.errors.InvalidArgumentError: If gradients and preserved outputs do not
            belong together, before anything has changed.
          tf.errors.FailedPreconditionError: Under a ParameterServerStrategy with
            growing tables, if the lookup was in another function.
        """
        engine, replica = self.core.in_replica("apply_gradients")
        with tf.name_scope("embedding_apply_gradients"):
            with self.core.refusing("update"):
                self.core.require_optimizers("apply_gradients")
                checked = self.core.check_gradients(self._structure.split(gradients))
                tables: Any = preserved_outputs
                given = PreprocessedFeatures(tables, (), {}, {})
                time = self.core.check_clock(clock)
                looked_up = engine.from_tensors(given, looked_up=True)
            engine.update(looked_up, checked, Call(replica=replica, clock=time))

    @classmethod
    def compute_sparse_core_stats(
        cls,
        features: Any,
        feature_config: Any,
        num_tpu_chips: int,
        num_sc_per_chip: int = 4,
        optimizer: Any = None,
        sparse_core_embedding_config: Any = None,
    ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Computes the max_ids_per_table and max_unique_ids_per_table of a batch.

        Args:
          features: One replica's batch, as for embedding_lookup.
          feature_config: As for the constructor; each feature needs an output_shape.
          num_tpu_chips: The number of devices that share the tables.
          num_sc_per_chip: The number of SparseCores of each device.
          optimizer: As for the constructor; it decides which tables are stacked.
          sparse_core_embedding_config: As for the constructor; its limits are ignored.

        Returns:
          Two dicts of int32 scalars by the name of the stack: the largest number of
          ids that one SparseCore asks another for, and that of distinct ids.

        Raises:
          ValueError: If the configuration or the batch is refused; the constructor and
            embedding_lookup list all errors.
        """
        found = cls.compute_sparse_core_requirements(
            features,
            feature_config,
            num_tpu_chips,
            num_sc_per_chip,
            optimizer,
            sparse_core_embedding_config,
        )
        return found.max_ids, found.max_unique_ids

    @staticmethod
    def compute_sparse_core_requirements(
        features: Any,
        feature_config: Any,
        num_tpu_chips: int,
        num_sc_per_chip: int = 4,
        optimizer: Any = None,
        sparse_core_embedding_config: Any = None,
    ) -> preprocessing.SparseCoreRequirements:
        """Computes what compute_sparse_core_stats does, and the size of the id buffer.

        >>> import tpu_embedding as te
        >>> films = te.TableConfig(64, 8, name="films")
        >>> feature = te.FeatureConfig(films, output_shape=[8], name="film")
        >>> ids = tf.range(8) * 16
        >>> needs = te.TPUEmbeddingV2.compute_sparse_core_requirements(
        ...     ids % 64, feature, num_tpu_chips=2)
        >>> int(needs.max_ids["films"]), int(needs.required_ids["films"])
        (2, 32)
        """
        return preprocessing.requirements(
            features,
            feature_config,
            preprocessing.Hardware(num_tpu_chips, num_sc_per_chip),
            optimizer,
            convert_sparse_core(sparse_core_embedding_config),
        )

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """The tables, [vocabulary_size, dim], keyed by the user's TableConfig.

        As in TensorFlow a name is a key, too: on SparseCores the name of a stack gives
        an object whose `values` are the variables of its devices, with padding. Any
        other name is that of a table.
        """
        tables = super().embedding_tables
        by_name = {s.name: tables[s.key] for s in self.core.plan.tables}
        if self.core.engine_class.stores_stacks:
            stacks = self.stacked_tables
            by_name |= {name: _StackedTable(parts) for name, parts in stacks.items()}
        return _TablesByConfig(tables, by_name)

    @property
    def embedding_table_shards(self) -> dict[Any, list[tuple[str, tf.Tensor]]]:
        """The parts of each table as pairs (device, value), without padding.

        The keys are the TableConfigs that the user passed. On SparseCores a table has
        a part for each device; on the host engine its only part is the whole table.
        """
        tables = self.core.create_engine().tables()
        self.flush()
        return {spec.key: tables[spec.name].shards() for spec in self.core.plan.tables}

    @property
    def stacked_tables(self) -> dict[str, tuple[tf.Variable, ...]]:
        """The variables that store each stack, in the order of its rows, by its name.

        On SparseCores they are the parts of the devices; on the host engine they are
        the tables of the stack themselves.
        """
        tables = self.core.create_engine().tables()
        self.flush()
        names, found = [table.name for table in self.core.plan.tables], {}
        for stack in self._stacks.stacks:
            own = [tables[names[index]].variables() for index in stack.tables]
            # The tables of a stack may be in the same variables.
            once = {id(variable): variable for each in own for variable in each}
            found[stack.name] = tuple(once.values())
        return found

    @property
    def embedding_layouts(self) -> dict[str, Any]:
        """The place of each table in its stack, a SparseCoreTableLayout, by table name.

        On the host engine one shard holds the whole stack, without padding.
        """
        return {
            table.table_name: sparse_core_format.to_proto(table)
            for table in self._stacks.tables
        }

    @property
    def _stacks(self) -> Layout:
        layout = self.core.lay_out()
        assert layout is not None  # This class always has one.
        return layout

    def _read_features(
        self, values: Sequence[Any], weights: Sequence[Any]
    ) -> list[IdBatch]:
        core = self.core
        core.check_inputs(values)
        return core.topology.on_host(core.read_replica, values, weights)

    def _preprocess(
        self, features: Any, weights: Any, place: str | None
    ) -> PreprocessedFeatures:
        """Returns the batch as plain tensors."""
        values, flat_weights = flatten_batch(self._structure, features, weights)
        if watched(flat_weights):
            raise NotImplementedError(
                "A preprocessed batch has no gradients of weights, but a "
                "tf.GradientTape watches a value that the weights depend on. Pass "
                "features and weights to embedding_lookup, or "
                "tf.stop_gradient(weights)."
            )
        with self.core.output_shapes.forgets_refused():
            batch = self._read_features(values, flat_weights)
            engine = self.core.engine_for(batch)
            replica = self.core.topology.replica()
            call = Call(replica=replica, training=False, device=place, tensors=True)
            (prepared,) = engine.prepare([batch], call)
            return _tensors(prepared)


def _tensors(batch: Prepared) -> PreprocessedFeatures:
    assert batch.tensors is not None  # The call has asked for them.
    return batch.tensors


@dataclasses.dataclass(frozen=True)
class _StackedTable:
    """A stack as the `embedding_tables` of TensorFlow's class have it.

    Attributes:
      values: The variable of each device, [rows of a device, width].
    """

    values: tuple[tf.Variable, ...]


class _TablesByConfig(dict[Any, Any]):
    """A dict of values by TableConfig that also accepts names as keys."""

    def __init__(self, values: Mapping[Any, Any], by_name: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._by_name = by_name

    def __missing__(self, key: Any) -> Any:
        return self._by_name[key]

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or key in self._by_name

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default
