"""TPUEmbedding: enqueue, dequeue and apply_gradients, on any engine."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.config import DistributedOptions
from tpu_embedding.embedding_base import EmbeddingBase, do_not_convert, per_replica
from tpu_embedding.engines import Call, EmbeddingOptions, Prepared, StepQueue
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.output_shapes import Shape
from tpu_embedding.packing import flatten_batch
from tpu_embedding.tf_configs import (
    ConstructorArguments,
    check_batch_size,
    convert_sparse_core,
)


class TPUEmbedding(EmbeddingBase):
    """Looks embedding tables up and trains them, step by step.

    A drop-in for tf.tpu.experimental.embedding.TPUEmbedding that also runs on the
    CPU, with the numbers of docs/semantics.md:

    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> films = te.TableConfig(8, 2, initializer=te.RowIdInitializer())
    >>> embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
    >>> embedding.enqueue({"film": tf.constant([3, 5])})
    >>> activations = embedding.dequeue()
    >>> activations["film"].numpy().tolist()
    [[3.0, 3.0], [5.0, 5.0]]
    >>> embedding.apply_gradients({"film": tf.ones([2, 2])})
    >>> embedding.embedding_tables[films].numpy()[3].tolist()
    [2.5, 2.5]

    enqueue(training=True), dequeue and apply_gradients make one training step;
    enqueue(training=False) and dequeue one evaluation step. Calls in another order
    raise tf.errors.FailedPreconditionError. Works eagerly, inside tf.function and
    in tf.range loops. Create it in the scope of the strategy that runs it: the
    replicas of a MirroredStrategy share one copy of each table, and the gradients
    of all replicas are summed into one update.

    The object is trackable: put it into a tf.train.Checkpoint to save the tables
    and slots.
    """

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any,
        pipeline_execution_with_tensor_core: Any = False,
        *older: Any,
        batch_size: int | None = None,
        initialize_tpu_embedding: bool = True,
        invalid_ids: str | None = None,
        check_numerics: bool = False,
        distributed_options: DistributedOptions | None = None,
        profile_data_directory: str | None = None,
        sparse_core_embedding_config: Any = None,
    ) -> None:
        """Reads the configuration; tables are made by build or the first enqueue.

        Args:
          feature_config: A FeatureConfig or a nested dict, list, tuple or namedtuple
            of them, of this package or of tf.tpu.experimental.embedding.
          optimizer: The optimizer of tables without their own; None: lookups only.
          pipeline_execution_with_tensor_core: Each update is applied after the
            lookups of the next step, which are thus one step old, and runs beside
            the dense computation of that step.
          *older: With an int as second argument the order is that of TensorFlow
            2.3: (feature_config, batch_size, optimizer,
            pipeline_execution_with_tensor_core, initialize_tpu_embedding).
          batch_size: The global size of every batch, or None for any size.
          initialize_tpu_embedding: On TPU v2 to v4, which have one engine, False
            shares that of another TPUEmbedding and its tables. The number of updates
            is not shared, so a learning-rate function must not take it: read a
            tf.Variable instead. Elsewhere any number of embeddings may exist.
          invalid_ids: The policy for tables of tf.tpu.experimental.embedding: "error"
            (also if None), "drop" or "mod". A TableConfig of this package has its own.
          check_numerics: Refuse weights and gradients that are not finite.
          distributed_options: How the processes of a MultiWorkerMirroredStrategy share
            the tables; None means the defaults of DistributedOptions.
          profile_data_directory: On TPU v2 to v4, a directory in which the TPU writes
            what it learns about the ids, for later runs. Elsewhere it must be None.
          sparse_core_embedding_config: The limits of SparseCores, and how they stack
            tables: a SparseCoreEmbeddingConfig, of this package or of
            tf.tpu.experimental.embedding, or None for its defaults. It is checked
            everywhere, but has no effect without SparseCores.

        Raises:
          ValueError: If the configuration is wrong: no features, two tables of one
            name, an unsupported optimizer, a batch_size that the number of replicas
            does not divide.
          TypeError: If an argument is of the wrong type.
          NotImplementedError: If no engine supports the strategy or an option.
        """
        arguments = ConstructorArguments(
            optimizer,
            pipeline_execution_with_tensor_core,
            batch_size,
            initialize_tpu_embedding,
        ).in_order(older)
        if not isinstance(profile_data_directory, (str, type(None))):
            raise errors.argument_type(
                "profile_data_directory", profile_data_directory, "a str or None"
            )
        # Output shapes of the batches queued in each graph, and of those queued first.
        self._queued_shapes: weakref.WeakKeyDictionary[Any, Any]
        self._queued_shapes = weakref.WeakKeyDictionary()
        self._first_shapes: Any = None
        self._one_shape = True
        super().__init__(
            feature_config,
            arguments.optimizer,
            EmbeddingOptions(
                pipelined=arguments.pipelined,
                check_numerics=check_numerics,
                sparse_core=convert_sparse_core(sparse_core_embedding_config),
                initialize=arguments.initialize,
                profile_data_directory=profile_data_directory,
                batch_size=arguments.batch_size,
                distributed=(
                    DistributedOptions()
                    if distributed_options is None
                    else distributed_options
                ),
            ),
            invalid_ids=invalid_ids,
        )
        self.core.set_batch_size(per_replica(arguments.batch_size, self.core.topology))
        if profile_data_directory and not self.core.engine_class.takes_profiles:
            raise NotImplementedError(
                f"The {self.core.topology.engine} engine does not support "
                f"`profile_data_directory={profile_data_directory!r}`: only TPU v2 to "
                "v4 write profiles. Leave it at None."
            )

    @do_not_convert
    def build(
        self,
        per_replica_input_shapes: Any = None,
        per_replica_batch_size: int | None = None,
    ) -> None:
        """Creates the tables and slots; the first enqueue calls it if needed.

        Args:
          per_replica_input_shapes: The input shapes of the features, in their
            structure or in any nesting with as many shapes, in the order of tf.nest;
            or an int, the batch size. None leaves them open.
          per_replica_batch_size: The batch size, as another way to pass that int.

        Raises:
          ValueError: If a shape is malformed or contradicts
            `FeatureConfig.output_shape`, or a batch size is not an int >= 1 or
            contradicts another.
          TypeError, ValueError: If there is not one shape for each feature.
        """
        if self.core.engine is not None:
            return
        shapes, size = per_replica_input_shapes, per_replica_batch_size
        check_batch_size("per_replica_batch_size", size)
        if isinstance(shapes, int):
            check_batch_size("per_replica_input_shapes", shapes)
            if size not in (None, shapes):
                raise errors.batch_size_conflict(size, shapes)
            shapes, size = None, shapes
        if shapes is not None:
            self._declare_inputs(shapes)
        if size is not None:
            self.core.output_shapes.set_batch_size(size)
        self.core.create_engine()

    @do_not_convert
    def enqueue(
        self,
        features: Any,
        weights: Any = None,
        training: bool = True,
        name: str | None = None,
        device: str | tf.Tensor | None = None,
    ) -> None:
        """Queues one batch of ids.

        Args:
          features: In the structure of `feature_config`, int32 or int64 (or whole
            numbers of a floating point dtype): tf.Tensor [B] or [..., k],
            tf.SparseTensor [..., k] or tf.RaggedTensor [B, None],
            in any mix; outside of strategy.run also distributed values, or one value
            for all replicas. It may also be what `te.pack` made for one replica.
          weights: None, or the same structure with floating point weights in the layout
            of each feature, or None for a feature without weights. `weight_gradients`
            returns their gradients.
          training: Whether gradients will be applied for this batch.
          name: A name for the ops.
          device: Outside of strategy.run the device of the strategy whose batch this
            is: a TPU core, or the device of a replica of a MirroredStrategy, a
            OneDeviceStrategy or, in its own process, a MultiWorkerMirroredStrategy. It
            is a name, or, for a TPU core of a single host, also an integer tensor with
            the number of the core, which may be known only when a graph runs.

        Raises:
          TypeError: If a container or dtype is of the wrong type.
          ValueError: If a structure, rank or static shape does not fit, or `device`
            is not one of the strategy. Under TPU v2 to v4 also if a static shape is not
            known or an input inside strategy.run is not one of its arguments.
          RuntimeError: If `training` and a table has no optimizer. Under TPU v2 to v4
            also if called in control flow inside strategy.run.
          tf.errors.InvalidArgumentError: If ids, weights or splits are not valid.
          tf.errors.FailedPreconditionError: If 64 batches are waiting already; on the
            software TPU of v2 to v4 a tf.errors.DeadlineExceededError after
            `meeting_timeout`.
        """
        topology = self.core.topology
        if device is None:
            place, replica = None, topology.replica()
        else:
            place, replica = self._core_or_replica(device)
        training = bool(training)
        with self.core.output_shapes.forgets_refused():
            with self.core.refusing("enqueue"):
                if training:
                    self.core.require_optimizers("enqueue(training=True)")
                values, flat_weights = flatten_batch(self._structure, features, weights)
                if device is not None:
                    self._refuse_distributed(values, flat_weights)
                topology.require_queueable(self.core.plan.paths, values)
                if not self.core.engine_class.differentiates_weights:
                    self.core.require_weight_gradients(flat_weights)
                tpu = None if place is None else topology.tpu
                cores = 1 if tpu is None else tpu.cores_per_replica
                batches = topology.on_host(
                    self._read, values, flat_weights, replica, cores
                )
                if not tf.executing_eagerly():
                    self._remember_static_shapes(batches)
                engine = self.core.engine or self.core.engine_for(batches[0], cores)
            with tf.name_scope(name or "embedding_enqueue"):
                call = Call(replica=replica, training=training, name=name, device=place)
                with self.core.refusing("enqueue"):
                    prepared = engine.prepare(batches, call)
                self._put(engine.queue, prepared, call)

    @do_not_convert
    def dequeue(self, name: str | None = None) -> Any:
        """Looks up the oldest batch in the queue.

        Args:
          name: A name for the ops.

        Returns:
          The activations in the structure of `feature_config`, float32
          [output shape..., dim] each; inside strategy.run those of the replica.

        Raises:
          RuntimeError: If called before build and enqueue, or outside of
            strategy.run where there are several replicas.
          tf.errors.FailedPreconditionError: If no batch is queued, or the batch
            before still owes its gradients; on the software TPU of v2 to v4 a
            tf.errors.DeadlineExceededError after `meeting_timeout`.
        """
        engine, replica = self.core.in_replica("dequeue")
        with tf.name_scope(name or "embedding_dequeue"):
            shapes = self._static_shapes()
            call = Call(replica=replica, name=name, shapes=shapes)
            activations = engine.queue.dequeue(call)
        return self._structure.pack_joined(activations)

    @do_not_convert
    def apply_gradients(
        self, gradients: Any, name: str | None = None, *, clock: Any = None
    ) -> None:
        """Updates the tables with the gradients of the batch dequeued last.

        The gradients of all entries of a row, of all features and replicas, are
        summed, clipped and given to the table's optimizer once.

        Args:
          gradients: In the structure of `feature_config` a tf.Tensor of the shape of
            the activation, or None, which counts as zeros.
          name: A name for the ops.
          clock: The time of the update, for tables of `GrowingVocabulary(clock=True)`:
            an integer or an integer scalar tensor that never goes back. If several
            processes pass different times, the largest counts; parameter servers
            use the latest time so far in place of an earlier one.

        Raises:
          TypeError: If a container has the wrong type, or the clock is not an integer.
          ValueError: If the structure differs, or a gradient is not a tf.Tensor or has
            the wrong static shape; or if a table has a clock and none is passed, or
            one is passed and no table has it.
          tf.errors.InvalidArgumentError: If the clock goes back, or a growing table
            is full; nothing has changed.
          RuntimeError: If called before build, without an optimizer, or outside of
            strategy.run where there are several replicas.
          tf.errors.FailedPreconditionError: If no dequeued batch owes gradients.
        """
        engine, replica = self.core.in_replica("apply_gradients")
        with self.core.refusing("update"):
            self.core.require_optimizers("apply_gradients")
            checked = self.core.check_gradients(self._structure.split(gradients))
            time = self.core.check_clock(clock)
        with tf.name_scope(name or "embedding_apply_gradients"):
            call = Call(replica=replica, name=name, clock=time)
            engine.queue.apply_gradients(checked, call)

    @do_not_convert
    def weight_gradients(self, gradients: Any, features: Any, weights: Any) -> Any:
        """Returns the gradients of the weights of the batch dequeued last.

        The queue does not keep features and weights, so pass them again.
        Call this after dequeue and before apply_gradients: it reads the tables as they
        are now.

        >>> import tensorflow as tf
        >>> import tpu_embedding as te
        >>> films = te.TableConfig(8, 2, te.RowIdInitializer(), combiner="sum")
        >>> embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
        >>> features = {"film": tf.constant([[3, 5]])}
        >>> weights = {"film": tf.constant([[1.0, 0.5]])}
        >>> embedding.enqueue(features, weights)
        >>> gradients = {"film": tf.ones_like(embedding.dequeue()["film"])}
        >>> found = embedding.weight_gradients(gradients, features, weights)
        >>> found["film"].numpy().tolist()
        [[6.0, 10.0]]
        >>> embedding.apply_gradients(gradients)

        Args:
          gradients: As for apply_gradients.
          features: The features passed to enqueue; in strategy.run the replica's.
          weights: The weights passed to enqueue; in strategy.run the replica's.

        Returns:
          The gradient of each feature's weights, in their form, or None for a feature
          without weights, in the structure of `feature_config`.

        Raises:
          TypeError, ValueError, tf.errors.InvalidArgumentError: As enqueue and
            apply_gradients do.
          RuntimeError: If called before build, or outside of strategy.run where there
            are several replicas.
          NotImplementedError: On TPUs, on several machines, with a CustomCombiner, and
            with `pipeline_execution_with_tensor_core=True`, where the tables have
            changed since the lookup.
        """
        self.core.in_replica("weight_gradients")
        if self.core.options.pipelined:
            raise NotImplementedError(
                "weight_gradients reads the tables as they were at the lookup, but "
                "`pipeline_execution_with_tensor_core=True` has updated them since "
                "then. Set it to False."
            )
        checked = self.core.check_gradients(self._structure.split(gradients))
        values, flat_weights = flatten_batch(self._structure, features, weights)
        given = [w for w in flat_weights if w is not None]
        # For sparse and ragged weights, the gradient is that of their values.
        sources = [w if isinstance(w, tf.Tensor) else w.values for w in given]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            activations = self.core.with_weight_gradients(
                [
                    tf.zeros([]) if gradient is None else tf.zeros_like(gradient)
                    for gradient in checked
                ],
                self.core.require_weight_gradients(flat_weights),
                values,
                flat_weights,
            )
            loss = tf.add_n(
                [
                    tf.reduce_sum(activation * gradient)
                    for activation, gradient in zip(activations, checked, strict=True)
                    if gradient is not None
                ]
                or [tf.zeros([])]
            )
        found = iter(
            tape.gradient(
                loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
        )
        results: list[Any] = []
        for weight in flat_weights:
            of_weight = None if weight is None else next(found)
            if isinstance(weight, (tf.SparseTensor, tf.RaggedTensor)):
                of_weight = weight.with_values(of_weight)
            results.append(of_weight)
        return self._structure.pack(self._structure.of_user(results))

    def _put(self, queue: StepQueue, prepared: Sequence[Prepared], call: Call) -> None:
        """Queues the batch of one replica or of all.

        An evaluation batch applies the pending update, but a refused one must not.
        Therefore the replicas synchronize, and queue the batches of all or of none.
        """
        topology = self.core.topology
        synchronizes = self.core.options.pipelined and not call.training
        if not synchronizes or call.replica is None or not topology.can_synchronize():
            queue.enqueue(prepared, call)
            return

        def enqueue(batches: list[Any]) -> None:
            of_all = [Prepared(batch) for batch in batches]
            queue.enqueue(of_all, dataclasses.replace(call, replica=None))

        topology.with_all_replicas(enqueue, prepared[0].value)

    def _refuse_distributed(
        self, features: Sequence[Any], weights: Sequence[Any]
    ) -> None:
        """Refuses values of several replicas together with the device of one."""
        given = {"feature": features, "weights of feature": weights}
        for what, values in given.items():
            for path, value in zip(self.core.plan.paths, values, strict=True):
                if _is_distributed(value):
                    raise ValueError(
                        "enqueue(device=...) takes only the batch of that device, but "
                        f"{what} {path} has one value for each replica. Pass the value "
                        "of the device, or leave `device` at None."
                    )

    def _declare_inputs(self, shapes: Any) -> None:
        """Takes the input shapes of all features, in any nesting."""
        leaves = self._structure.flatten_shapes("per_replica_input_shapes", shapes)
        pairs = zip(self._structure.paths, leaves, strict=True)
        shapes = self._structure.for_plan([_input_shape(*pair) for pair in pairs])
        self.core.output_shapes.declare_inputs(shapes)

    def _core_or_replica(
        self, device: str | tf.Tensor
    ) -> tuple[str | tf.Tensor | None, int | None]:
        """Returns the TPU core, or else the replica, to which a device's batch belongs.

        The engine resolves the number of a TPU core.
        """
        topology = self.core.topology
        if topology.tpu is None:
            return None, topology.replica_of(topology.find(device))
        return device if tf.is_tensor(device) else topology.find(device), 0

    def _remember_static_shapes(self, batches: Sequence[Sequence[IdBatch]]) -> None:
        """Keeps the known output shapes of batches queued in a graph, for `dequeue`."""
        of_replicas = [
            self.core.output_shapes.of_inputs(
                [tuple(batch.static_shape.as_list()) for batch in own]
            )
            for own in batches
        ]
        shapes = [_common(own) for own in zip(*of_replicas, strict=True)]
        self._queued_shapes.setdefault(tf.compat.v1.get_default_graph(), shapes)
        self._one_shape &= shapes in (self._first_shapes, self._first_shapes or shapes)
        self._first_shapes = self._first_shapes or shapes

    def _static_shapes(self) -> list[Any] | None:
        """Returns the static shapes of activations that `dequeue` will give in a graph.

        They are known if the graph contains an enqueue, and if all graphs so far have
        queued batches of the same shapes, so that any of these may be dequeued.
        """
        if tf.executing_eagerly() or not self._one_shape:
            return None
        graph: Any = tf.compat.v1.get_default_graph()
        while graph is not None and graph not in self._queued_shapes:
            graph = getattr(graph, "outer_graph", None)
        return None if graph is None else self._queued_shapes[graph]

    def _read(
        self,
        features: Sequence[Any],
        weights: Sequence[Any],
        replica: int | None,
        cores: int = 1,
    ) -> list[list[IdBatch]]:
        """Reads the batch of `replica`, or all if it is None; checks known shapes.

        If `cores` is more than 1, the batch is that of one core of the replica.
        """
        if not self.core.topology.is_distributed:
            return [self.core.read_replica(features, weights, cores)]
        values = self.core.topology.split(features)
        of_values = self.core.topology.split(weights)
        # If `replica` is given, the values are those of that replica alone.
        wanted = range(len(values) if replica is None else 1)
        read = self.core.read_replica
        return [read(values[r], of_values[r], cores) for r in wanted]


def _is_distributed(value: Any) -> bool:
    distributed = isinstance(value, tf.distribute.DistributedValues)
    return distributed and not isinstance(value, tf.Variable)


def _common(shapes: Sequence[Shape]) -> Shape:
    """Returns the axes that all replicas share, and None for those that differ."""
    axes = zip(*shapes, strict=True)
    return tuple(own[0] if len(set(own)) == 1 else None for own in axes)


def _input_shape(path: str, shape: Any) -> tuple[int | None, ...]:
    """Returns the shape of one feature passed to build() as a tuple."""
    try:
        read = tf.TensorShape(shape)
    except (TypeError, ValueError):
        read = None
    if read is None or not read.rank:  # Also if the rank is unknown or 0.
        raise ValueError(
            f"The input shape of feature {path} given to build() must have at least "
            f"one axis, with None for unknown axes. Received: {shape!r}."
        )
    return tuple(read.as_list())
