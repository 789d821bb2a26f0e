"""What engines do: hold the tables, look batches up, apply gradients.

An engine is an `Engine`, and a `Queue` or `Stacks` or both.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.distribution import Topology
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import (
    PartitionedCsrFormatTensor,
    PreprocessedFeatures,
)
from tpu_embedding.layout.errors import combiner_weights_saved
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.layout.table_arrays import MutableRows
from tpu_embedding.lookup.combine import StoredReader

QUEUE_CAPACITY = 64  # batches of one replica that may wait


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What an engine is built from.

    Attributes:
      plan: The tables and features.
      topology: Replicas and devices.
      output_shapes: What is declared of each feature's output.
      pipelined: Leave each update pending until the lookups of the next step.
      check_numerics: Refuse weights and gradients that are not finite.
      layout: What `Engine.lay_out` gave.
      sparse_core: What it was given: limits and how SparseCores fill the tables.
      initialize: Configure the TPU's engine; else share one that is configured.
      profile_data_directory: Where a TPU writes what it learns of the ids, or None.
    """

    plan: Plan
    topology: Topology
    output_shapes: OutputShapes
    pipelined: bool
    check_numerics: bool
    layout: Layout
    sparse_core: SparseCoreEmbeddingConfig = SparseCoreEmbeddingConfig()  # noqa: RUF009 - frozen
    initialize: bool = True
    profile_data_directory: str | None = None


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One lookup past the queue.

    Attributes:
      activations: One for each feature, in plan order.
      ticket: What `Engine.submit` takes, once, opaque; or `Stacks.update_stacked`.
    """

    activations: list[tf.Tensor]
    ticket: Any


class Engine(abc.ABC):
    """Tables, and lookups and updates call by call; features flat, in plan order.

    All methods may be called eagerly or while tracing a tf.function.
    """

    name: ClassVar[str]
    # True: `checkpoint_variables` are stacks, which a record of the layout goes with.
    stores_stacks: ClassVar[bool] = False
    takes_profiles: ClassVar[bool] = False
    table_dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    # True: made for batches of one shape, which must be known before.
    needs_shapes: ClassVar[bool] = False
    # The engine that stands in where a table has a function of the user's, or None.
    for_custom: ClassVar[str | None] = None

    def __init__(self, options: EngineOptions) -> None:
        """Subclasses make the variables; to be called in an eager context."""
        self._options = options
        self._plan = options.plan
        self._device = options.topology.device

    @classmethod
    @abc.abstractmethod
    def lay_out(
        cls, plan: Plan, topology: Topology, config: SparseCoreEmbeddingConfig
    ) -> Layout:
        """Stacks the tables of a plan that this engine can carry.

        Args:
          plan: The tables and features.
          topology: Replicas and devices.
          config: How to stack.

        Raises:
          NotImplementedError: If a table has an option that the engine lacks.
          ValueError: If the tables cannot be stacked.
        """

    @classmethod
    def check_inputs(
        cls, topology: Topology, paths: Sequence[str], values: Sequence[Any]
    ) -> None:
        """Checks where the features of an enqueue come from, before all else.

        Args:
          topology: Replicas and devices.
          paths: Of the features.
          values: The features as the user gave them.

        Raises:
          ValueError: If the engine cannot take one from there.
          RuntimeError: If it cannot take any from where the call is.
        """
        del topology, paths, values  # Most engines take them from anywhere.

    @abc.abstractmethod
    def variables(self) -> list[dict[str, Any]]:
        """For each table of the plan its values by "parameters" and slots, [V, ...].

        Variables where each table is one, else tensors with what they hold now.
        """

    @abc.abstractmethod
    def table_shards(self) -> list[list[tuple[str, tf.Tensor]]]:
        """For each table (device, rows there) of each part, without padding."""

    @abc.abstractmethod
    def stacked_tables(self) -> dict[str, tuple[tf.Variable, ...]]:
        """By name of the stack the variables that store it, in order of its rows."""

    @abc.abstractmethod
    def checkpoint_variables(self) -> dict[str, Any]:
        """Every object to be tracked for checkpoints, by its name there."""

    @abc.abstractmethod
    def logical_variables(self) -> dict[str, Any]:
        """By the same names each table and slot as one variable [V, ...], unpadded.

        Or, where it is stored otherwise, as a `LogicalVariable`.
        """

    @abc.abstractmethod
    def readers(self) -> list[StoredReader]:
        """For each table of the plan what stock ops read of it, in any graph."""

    @abc.abstractmethod
    def updates(self) -> tf.Variable | None:
        """The number of updates already applied, where anything asks for it."""

    @abc.abstractmethod
    def rows(self) -> dict[str, dict[str, MutableRows]]:
        """Tables in their logical form: by name "parameters" and slots, unpadded."""

    def require_plain_rows(self) -> None:
        """Refuses tables with more to them than `rows` has.

        Raises:
          NotImplementedError: If a CustomCombiner has weights.
        """
        for table in self._plan.tables:
            combiner = table.config.custom_combiner
            if combiner is not None and combiner.num_weights:
                raise combiner_weights_saved(table.name)

    def retrieve(self) -> None:
        """Makes `rows` and `checkpoint_variables` hold what the tables hold now."""
        self.flush()

    def load(self) -> None:
        """Takes over what was written into `rows` or `checkpoint_variables`."""
        return  # Where they are the tables themselves.

    @abc.abstractmethod
    def lookup(
        self, batch: Sequence[IdBatch], replica: int, *, training: bool = True
    ) -> Lookup:
        """Looks a batch up at once; `submit` may follow.

        Any number of lookups may share a step, if the engine has no queue for them.

        Args:
          batch: The features of `replica`.
          replica: Who calls.
          training: Whether `submit` may follow.

        Raises:
          NotImplementedError: If it must wait for the `submit` of an earlier one.
        """

    @abc.abstractmethod
    def submit(
        self, ticket: Any, gradients: Sequence[tf.Tensor | None], replica: int
    ) -> None:
        """Applies the gradients of one lookup; the last replica's call updates.

        Args:
          ticket: The lookup's own.
          gradients: float32, of the activations' shapes; None counts as zeros.
          replica: Who calls.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Forgets every batch that is queued, owed or pending; keeps the tables."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Applies the update that pipelining left pending, if there is one."""


class Queue(abc.ABC):
    """Steps over batches that wait in a queue; flat lists of features, in plan order.

    A `replica` of None stands for all replicas at once.
    """

    def tagged(self, name: str | None) -> contextlib.AbstractContextManager[None]:
        """Marks the ops of the calls made inside with a name, where that matters."""
        del name
        return contextlib.nullcontext()

    @abc.abstractmethod
    def enqueue(
        self,
        batches: Sequence[Sequence[IdBatch]],
        replica: int | None,
        *,
        training: bool,
    ) -> None:
        """Checks and queues one batch.

        Args:
          batches: For each replica (or for `replica` alone) its features.
          replica: The one replica that calls, or None for all.
          training: Whether gradients will be applied for this batch.
        """

    def enqueue_on(
        self, device: str | tf.Tensor, batch: Sequence[IdBatch], *, training: bool
    ) -> None:
        """Checks and queues the batch of one device.

        Args:
          device: Its name, or its number on the one host.
          batch: Its features.
          training: As for `enqueue`.

        Raises:
          ValueError: If the engine places batches itself.
        """
        del batch, training
        raise errors.enqueue_device(device)

    @abc.abstractmethod
    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """The activations of the next batch of `replica`, one for each feature."""

    @abc.abstractmethod
    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], replica: int
    ) -> None:
        """Takes the gradients that `replica` owes; the last replica's call updates.

        Args:
          gradients: float32, of the activations' shapes; None counts as zeros.
          replica: Who calls.
        """


class Stacks(abc.ABC):
    """Lookups that hand their batch out as plain tensors, and updates that take it."""

    @abc.abstractmethod
    def preprocess(self, batch: Sequence[IdBatch]) -> PreprocessedFeatures:
        """Checks the features of one replica and lays them out in stacks.

        Touches no state, so that it can run ahead, in tf.data.
        """

    def preprocess_on(
        self, device: str, batch: Sequence[IdBatch]
    ) -> PreprocessedFeatures:
        """As `preprocess`, on the host of a device that the caller names.

        Args:
          device: The full name of the TPU device whose batch it is.
          batch: Its features.

        Raises:
          ValueError: If the engine has no such devices.
        """
        del batch
        raise errors.enqueue_device(device)

    @abc.abstractmethod
    def lookup_stacked(self, batch: PreprocessedFeatures, replica: int) -> Lookup:
        """Looks up what `preprocess` gave; the ticket is what `update_stacked` takes.

        Args:
          batch: Of `replica`.
          replica: Who calls.
        """

    @abc.abstractmethod
    def update_stacked(
        self,
        tables: Mapping[str, PartitionedCsrFormatTensor],
        gradients: Sequence[tf.Tensor | None],
        replica: int,
    ) -> None:
        """Applies the gradients of one batch; the last replica's call updates.

        Args:
          tables: The ticket of a lookup: its batch, by name of the stack.
          gradients: As for `Engine.submit`.
          replica: Who calls.
        """
