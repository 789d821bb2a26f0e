"""The protocol of all engines: their steps, their tables, and what comes before."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tpu_embedding.distribution import Topology
from tpu_embedding.engines.calls import Call, Counts, EngineOptions, Prepared, StepQueue
from tpu_embedding.engines.process_group import Channel
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import (
    CombinedCsrFormatTensor,
    PartitionedCsrFormatTensor,
    PreprocessedFeatures,
)
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout, lay_out_whole
from tpu_embedding.lookup.graph_checks import Check, require, text
from tpu_embedding.tables.table import RowChanges, Table


class Steps(abc.ABC):
    """The methods of an engine on batches: it prepares them, looks up and updates.

    Lists of features are flat and in plan order. All methods may be called eagerly
    or while tracing a tf.function. One training step of a replica is

        (prepared,) = engine.prepare([batch], call)
        activations, looked_up = engine.lookup(prepared, call)
        engine.update(looked_up, gradients, call)

    With several replicas the n-th updates of all replicas make up one update of the
    tables, with the gradients summed in replica order; the replica that completes it
    evaluates the learning rates.

    Pipelining: an engine with `EngineOptions.pipelined` has at most one pending
    update. It covers all tables, and keeps the learning rates and the number for
    stochastic rounding of its own step. It is applied exactly once: by `flush` (also
    when tables are read or saved, or an evaluation batch enters the queue), when the
    next update arrives, or with a StepQueue when all replicas have looked up the next
    step. A refused call leaves it pending.

    Counting: the variable `UPDATES` counts an update when its last replica submits
    gradients; the update's rounding number is the count before that. `reset` takes a
    discarded pending update out of the count.

    Attributes:
      queue: The queue of TPUEmbedding.
    """

    queue: StepQueue
    _options: EngineOptions
    _plan: Plan

    @abc.abstractmethod
    def prepare(
        self, batches: Sequence[Sequence[IdBatch]], call: Call
    ) -> list[Prepared]:
        """Checks batches and brings them into the form that lookups need.

        On one machine it touches no state, so it may run ahead in tf.data. Errors in
        values are raised here or by the call that takes the result. With `call.tensors`
        they are raised here; in a job, the lookup raises them in all processes.

        Args:
          batches: One batch, with an element for each feature; outside of strategy.run
            one batch for each replica.
          call: What the engine needs to know about the call.

        Returns:
          The prepared form of each batch.

        Raises:
          tf.errors.InvalidArgumentError: If ids, weights or splits are not valid.
        """

    @abc.abstractmethod
    def lookup(
        self, prepared: Prepared, call: Call
    ) -> tuple[list[tf.Tensor], Prepared]:
        """Looks up a batch, bypassing any queue.

        Args:
          prepared: What `prepare` or `from_tensors` returned.
          call: The call of a replica.

        Returns:
          The activations, float32 [output shape..., dim] for each feature, and the
          input of `update`, which accepts it only once.

        Raises:
          tf.errors.InvalidArgumentError: If `prepare` refused the batch.
          tf.errors.FailedPreconditionError: If this replica has submitted gradients of
            a step in this strategy.run and another replica has not: the loop over
            steps belongs outside of strategy.run.
          NotImplementedError: On TPU v2 to v4, if the `update` of an earlier lookup
            must come first.
        """

    @abc.abstractmethod
    def update(
        self, looked_up: Prepared, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        """Submits the gradients of one lookup; the last replica completes the update.

        Args:
          looked_up: What `lookup` returned, or `from_tensors` of its tensors.
          gradients: The gradients of the activations, float32; None counts as zeros.
          call: The call of a replica.

        Raises:
          tf.errors.InvalidArgumentError: If a gradient has another shape than its
            activation, or with `check_numerics` if a gradient is not finite.
          tf.errors.FailedPreconditionError: If the lookup was used before, or belongs
            to a step that was discarded.
        """

    def from_tensors(
        self, features: PreprocessedFeatures, *, looked_up: bool
    ) -> Prepared:
        """Makes a batch from the tensors that a user passes, which may hold anything.

        Args:
          features: `Prepared.tensors` of a batch. For `update` its `output_shapes` may
            be empty; the `sample_count` of each table then gives the number of samples.
          looked_up: Whether the tensors must come from a lookup, which adds to `tables`
            what its update needs.

        Raises:
          TypeError: If `features.tables` is not a mapping.
          ValueError: If it does not hold this engine's stacks, each of the right class.
          tf.errors.InvalidArgumentError: If the engine did not make these tensors;
            raised here or by the call that takes the result.
        """
        tables: Any = features.tables
        assert self._options.layout is not None
        if not isinstance(tables, Mapping):
            raise TypeError(
                "Preserved outputs must be a dict keyed by the names of stacked "
                f"tables. Received: {type(tables).__name__}. Pass the second output of "
                "embedding_lookup."
            )
        stacks = self._options.layout.stacks
        if set(tables) != {stack.name for stack in stacks}:
            names = [stack.name for stack in stacks]
            raise ValueError(
                "Preserved outputs have the stacked tables "
                f"{', '.join(map(str, list(tables)))}, but this embedding has "
                f"{', '.join(names)}. Pass the second output of embedding_lookup."
            )
        for stack in stacks:
            config = self._plan.tables[stack.tables[0]].config
            combined = looked_up and config.custom_combiner is not None
            kind = CombinedCsrFormatTensor if combined else PartitionedCsrFormatTensor
            if not isinstance(tables[stack.name], kind):
                raise ValueError(
                    f"The batch of stacked table {stack.name!r} must be a "
                    f"{kind.__name__}. Received: {type(tables[stack.name]).__name__}. "
                    "Pass the second output of embedding_lookup to apply_gradients, "
                    "and the result of this embedding's preprocess_features or enqueue "
                    "to a lookup."
                )
        own = {stack.name: tables[stack.name] for stack in stacks}
        return Prepared(None, features._replace(tables=own))

    @abc.abstractmethod
    def reset(self) -> None:
        """Discards queued batches, owed gradients and the pending update.

        The tables stay. A discarded pending update is taken out of the count.
        """


class TableStore(abc.ABC):
    """The tables of an engine: what checkpoints, serving and reading need."""

    name: ClassVar[str]

    @abc.abstractmethod
    def tables(self) -> dict[str, Table]:
        """Returns all tables by name: the one view of what the engine stores."""

    @abc.abstractmethod
    def checkpoint_variables(self) -> dict[str, Any]:
        """Returns every object to be tracked for checkpoints, by its name there.

        `UPDATES`, the number of updates already applied, is there if anything needs it.
        """

    def start_counting(self, every: int) -> Callable[[int | None], Counts]:
        """Resets counts, and counts the next update applied and every n-th after it.

        Args:
          every: The n of every n-th update; 0 counts nothing.

        Returns:
          A function, to be called eagerly, that returns the counts since this call. It
          takes the number of hottest rows to return; None leaves out the tables.

        Raises:
          NotImplementedError: If the engine cannot count.
        """
        del every
        raise NotImplementedError(
            f"The {self.name} engine has no telemetry. Use telemetry with the same "
            "tables on the host engine: create the embedding outside of the scope of a "
            "TPU strategy, where the compiled library can be loaded, and without a "
            "CustomOptimizer or CustomCombiner."
        )

    def changes(self, consumer: str) -> RowChanges:
        """Returns the rows that change for a consumer of deltas after its first mark.

        Raises:
          NotImplementedError: If the engine does not track them.
        """
        del consumer
        raise NotImplementedError(
            f"The {self.name} engine does not track the rows that change, so it writes "
            "no deltas. Train on the host engine, outside of the scope of a TPU "
            "strategy, or export the model again."
        )

    @abc.abstractmethod
    def flush(self) -> None:
        """Applies the pending update, if there is one."""

    def complete(self) -> None:
        """Makes the first values that `EngineOptions.to_restore` postponed."""
        return  # Most engines postpone none.

    def retrieve(self) -> None:
        """Brings the rows of `tables` and `checkpoint_variables` up to date."""
        self.flush()

    def load(self) -> None:
        """Loads what was written to the rows or to `checkpoint_variables`."""
        return  # Most engines store the rows themselves.


class Engine(Steps, TableStore):
    """Base of all engines: steps, tables, and decisions before tables exist.

    The attributes of the class say what an engine can do.
    """

    # True: the tables are stored as stacks; checkpoints hold stacks and their layout.
    stores_stacks: ClassVar[bool] = False
    takes_profiles: ClassVar[bool] = False
    table_dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    # True: inside strategy.run the features must be arguments of the program.
    needs_arguments: ClassVar[bool] = False
    # True: all output shapes must be known before the engine is created.
    needs_shapes: ClassVar[bool] = False
    # True: the tables can be read in every graph, for the gradients of weights.
    differentiates_weights: ClassVar[bool] = False
    # True: what `lookup` returns for `update` is tensors, which a function may return.
    passes_tensors: ClassVar[bool] = False
    # True: the engine itself finds the rows of ids in hashed tables.
    hashes_ids: ClassVar[bool] = False
    # True: tables may have a GrowingVocabulary.
    grows: ClassVar[bool] = False
    # True: all processes must call `flush` and `reset`, even before the first step.
    synchronizes: ClassVar[bool] = False
    # The engine that replaces this one if a table has a user function, or None.
    stand_in: ClassVar[str | None] = None

    def __init__(self, options: EngineOptions) -> None:
        """Keeps the options; subclasses create the variables, in an eager context."""
        self._options = options
        self._plan = options.plan
        self._device = options.topology.device

    @classmethod
    def check(cls, options: EngineOptions) -> Channel | None:
        """Checks whether the engine supports an embedding that is being constructed.

        Args:
          options: The arguments of the engine's constructor, still without stacks.

        Returns:
          The channel between the processes of a job; None for one process.

        Raises:
          NotImplementedError: If the engine does not support the number of replicas, or
            an option of the embedding or of a table.
          ValueError: In all processes of a job, if their configurations differ.
        """
        del options
        return None

    @classmethod
    def lay_out(cls, options: EngineOptions) -> Layout:
        """Stacks the tables of a plan that has passed `check`.

        It is called only if the engine stores stacks or the public class hands them
        out. An engine that stores whole tables stacks by `options.sparse_core` alone.

        Raises:
          NotImplementedError: If the engine does not support an option of a table.
          ValueError: If the tables cannot be stacked, or the engine needs a shape that
            is not known.
        """
        return lay_out_whole(options.plan, options.sparse_core)


class TracedTicket:
    """The right to update with one lookup's batch, taken at most once by a program.

    Attributes:
      content: What the engine needs for the update.
      taken: Whether the right was taken.
    """

    def __init__(self, content: Any) -> None:
        self.content = content
        self.taken = False

    def take(self) -> Any:
        """Returns the content, once.

        Raises:
          tf.errors.FailedPreconditionError: If the right was taken before.
        """
        if self.taken:
            raise tf.errors.FailedPreconditionError(
                None,
                None,
                "The gradients of this lookup were applied already; each lookup takes "
                "them once. Call the layer again, or take all gradients with one "
                "tape.gradient call.",
            )
        self.taken = True
        return self.content


def check_device(topology: Topology, device: str | tf.Tensor) -> list[Any]:
    """Refuses a `device` that is not supported; returns the checks of an ordinal."""
    assert topology.tpu is not None
    if topology.program() is not None:
        raise ValueError(
            "Argument `device` of enqueue is not supported inside strategy.run, "
            "where each replica enqueues for its own core. "
            f"Received: {device}. Leave it at None."
        )
    if isinstance(device, str):
        return []
    if not device.dtype.is_integer or device.shape.rank != 0:
        raise ValueError(
            "Argument `device` of enqueue must be the name of a TPU device, or its "
            f"ordinal, an integer scalar tensor. Received: {device}."
        )
    if len(topology.tpu.hosts) > 1:
        raise ValueError(
            "Argument `device` of enqueue is an ordinal, which identifies a device "
            f"of one host, but this TPU has {len(topology.tpu.hosts)} hosts. Pass the "
            "name of the device."
        )
    number = tf.cast(device, tf.int64)
    known = [topology.tpu.ordinal(name) for name in topology.tpu.all_devices]

    def unknown() -> tf.Tensor:
        ordinals = ", ".join(map(str, known))
        return text(
            "Argument `device` of enqueue is ",
            number,
            f", but the TPU devices of the strategy are {ordinals}.",
        )

    ok = tf.reduce_any(number == tf.constant(known, tf.int64))
    return require([Check(ok, unknown)])
