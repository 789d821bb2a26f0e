"""The steps of the host engine, on the parts of tables that this process reaches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tpu_embedding.config import DTYPES
from tpu_embedding.engines.base import Engine
from tpu_embedding.engines.calls import (
    Call,
    Counts,
    EngineOptions,
    Prepared,
    StepQueue,
    joined,
)
from tpu_embedding.engines.cpu_base import refuse_tpu_options
from tpu_embedding.engines.host.batches import HostBatches, plan_record
from tpu_embedding.engines.host.part import TablePart
from tpu_embedding.engines.host.waiting import waiting_bytes
from tpu_embedding.engines.process_group import Channel
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import PreprocessedFeatures
from tpu_embedding.layout.placement import Placement
from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.ops import library
from tpu_embedding.tables.growing import check_growth
from tpu_embedding.tables.reach import ALONE, Reach
from tpu_embedding.tables.table import RowChanges, Table, stored_table
from tpu_embedding.tables.trackable import RowsVariable
from tpu_embedding.tables.variables import TableVariables, create_variables
from tpu_embedding.tables.vocabularies import StoredVocabulary

Messages = Sequence[tf.Tensor]


class CollectiveCall(NamedTuple):
    """A call in which all processes take part, in the form that they compare.

    Attributes:
      phase: One of `PHASES` of process_group.py.
      name: The call, with the arguments that must be alike everywhere.
      role: Its role in a step, one of `ROLES`.
    """

    phase: str
    name: str
    role: str


DEQUEUE = CollectiveCall("lookup", "dequeue", "continues")
_UPDATE = CollectiveCall("update", "apply_gradients", "continues")


class Transport(Protocol):
    """The way between this process and the owners of tables.

    Attributes:
      record: The plan by which a batch is divided over the owners.
      size: Number of owners.
      num_senders: Number of processes that send to an owner in one step.
      is_owner: Whether this process is an owner itself.
    """

    record: bytes
    size: int
    num_senders: int
    is_owner: bool

    def to_owners(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> list[Messages]:
        """Sends one message to each owner.

        Args:
          collective: The call that the messages belong to.
          messages: The message to each owner.
          refusal: Why this process refuses the step, or "".

        Returns:
          For each part of the tables that ops of this process work on, the messages
          that have arrived, by sender.
        """
        ...

    def to_senders(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> Messages:
        """Sends one part's answers; returns what has arrived here from that part."""
        ...

    def push(self) -> Any:
        """Returns this push's number; an empty tensor if no push can come twice."""
        ...


class Routed(NamedTuple):
    """A batch that was divided over the owners of its rows.

    Attributes:
      own: What this process needs of the batch to combine rows and send gradients.
      parts: The requests that each part of the tables has received.
      ready: Tensors that exist once no owner can refuse the batch any more.
    """

    own: tf.Tensor
    parts: list[tf.Tensor]
    ready: list[tf.Tensor]


class HostEngine(Engine, StepQueue):
    """Runs one op per step and direction for all tables (see docs/architecture.md).

    Either the tables are whole, as one part in this process, or a transport leads to
    the owners of their parts. Data then travels to or from the owners three times in
    each step: IDs when a batch is prepared or queued, rows or activations in the
    lookup, and gradients of samples in the update. See ops/cc/core/routing.h. The queue
    of batches is in the resource of this process's part; that of a job has routed
    batches.

    Attributes:
      pipelined: Whether an update stays pending until the lookups of the next step.
    """

    name = "host"
    table_dtypes = DTYPES
    differentiates_weights = True
    passes_tensors = True
    stand_in = "portable"
    hashes_ids = True
    grows = True

    def __init__(
        self,
        options: EngineOptions,
        parts: Sequence[TablePart] = (),
        transport: Transport | None = None,
        reach: Reach = ALONE,
    ) -> None:
        """Keeps the parts of the tables; without `parts` it makes whole tables.

        Args:
          options: See `Engine`.
          parts: The parts of the tables that ops of this process work on.
          transport: The way to the owners of all parts.
          reach: How this process reaches the tables outside of steps.
        """
        super().__init__(options)
        self._ops = library.load()
        self.pipelined = options.pipelined
        record = plan_record(options)
        if not parts:
            waits = [waiting_bytes(t, t.config.max_rows) for t in options.plan.static]
            variables = create_variables(options.plan, self._device, sum(waits))
            number = len(variables)
            whole = Placement(0, 1, (0,) * number)
            parts = [TablePart(options, record, variables, whole, range(number))]
        self._parts, self._transport, self._reach = parts, transport, reach
        self._tables = self._all_tables()
        self._grows = any(part.vocabularies for part in parts)
        device = None if transport and not transport.is_owner else self._device
        self._batches = HostBatches(options, device, record, groups=not transport)
        self.queue: StepQueue = self

    @classmethod
    def check(cls, options: EngineOptions) -> Channel | None:
        refuse_tpu_options(cls.name, options.plan)
        for table in options.plan.growing:
            check_growth(table)
        return None

    def prepare(
        self, batches: Sequence[Sequence[IdBatch]], call: Call
    ) -> list[Prepared]:
        """See `Steps.prepare`; the op that takes a batch raises errors in values."""
        prepare, training = self._batches.prepare, self._trains(call, call.tensors)
        prepared = [Prepared(prepare(batch, training=training)) for batch in batches]
        return [self._with_tensors(p) for p in prepared] if call.tensors else prepared

    def _trains(self, call: Call, tensors: bool) -> bool:
        """Returns whether an update may take the batch itself, not its tensors.

        With growing tables a training lookup is marked even if it returns tensors.
        """
        return call.training and (self._grows or not tensors)

    def _with_tensors(
        self, prepared: Prepared, looked_up: Sequence[tf.Tensor] = ()
    ) -> Prepared:
        """Adds the tensors of a batch; in a job only its lookup raises a refusal."""
        raises = not self._is_owner
        tensors = self._batches.to_tensors(prepared.value, looked_up, raises=raises)
        return prepared._replace(tensors=tensors)

    def route(
        self,
        batch: tf.Tensor,
        collective: CollectiveCall,
        *,
        training: bool,
        looked_up: Sequence[tf.Tensor] = (),
    ) -> Routed:
        """Tells the owners what a prepared batch needs of them.

        Args:
          batch: The batch of this process.
          collective: What the user called.
          training: Whether an update may follow.
          looked_up: For an update, what its lookup asked each server for, if known;
            the servers keep these rows until the update.

        Raises:
          tf.errors.InvalidArgumentError: If the batch was refused, or in a job the
            batch of another process.
          tf.errors.FailedPreconditionError: In all processes, if their calls differ.
        """
        transport = self._transport
        assert transport is not None
        with tf.device(self._batches.device):
            sent = self._ops.tpu_embedding_route(
                batch=batch,
                num_messages=transport.size,
                plan=transport.record,
                training=training,
            )
        received = transport.to_owners(collective, sent.messages, sent.refusal)
        parts = [
            part.receive_batch(
                [sent.routed] if transport.is_owner else [],
                messages,
                looked_up[k : k + 1],
                training=training,
            )
            for k, (part, messages) in enumerate(
                zip(self._parts, received, strict=True)
            )
        ]
        return Routed(sent.routed, parts, parts)

    def route_enqueued(self, batch: tf.Tensor, call: Call) -> Routed:
        """Routes a batch that enters a queue."""
        name = f"enqueue(training={call.training})"
        collective = CollectiveCall("enqueue", name, "begins")
        return self.route(batch, collective, training=call.training)

    def lookup(
        self, prepared: Prepared, call: Call
    ) -> tuple[list[tf.Tensor], Prepared]:
        if self._transport is None:
            (part,) = self._parts
            found = part.look_up(
                [prepared.value], call, self._batches.activation_shapes(call)
            )
            activations, looked_up = found.activations, found.looked_up
        else:
            # An update from plain tensors routes them again.
            training = self._trains(call, prepared.tensors is not None)
            name = f"embedding_lookup(training={training})"
            collective = CollectiveCall("lookup", name, "begins")
            routed = self.route(prepared.value, collective, training=training)
            activations, looked_up = self.look_up_routed(routed, collective, call)
        if self._grows and prepared.tensors is not None:
            prepared = self._keep_rows(prepared, looked_up)
        return activations, prepared._replace(value=looked_up)

    def _keep_rows(self, prepared: Prepared, looked_up: Any) -> Prepared:
        """Adds tensors; while they exist, the rows of the lookup are not evicted."""
        own = looked_up.own if isinstance(looked_up, Routed) else looked_up
        return self._with_tensors(prepared, [own])

    def _parts_kept(self, tensors: PreprocessedFeatures) -> Sequence[tf.Tensor]:
        """Returns what each server looked up, if attributes of `tensors` keep it."""
        del tensors
        return ()

    def look_up_routed(
        self, routed: Routed, collective: CollectiveCall, call: Call
    ) -> tuple[list[tf.Tensor], Routed]:
        """Looks up a batch that `route` returned; also returns what an update takes."""
        parts = [[part] for part in routed.parts]
        served, received = self._serve(parts, collective, call)
        looked_up = [answer.looked_up for answer in served]
        own = looked_up[0] if self._is_owner else routed.own
        found = self._combine([], own, received, call)
        return found.activations, Routed(own, looked_up, found.activations[:1])

    def _serve(
        self,
        batches: Sequence[Sequence[tf.Tensor]],
        collective: CollectiveCall,
        call: Call,
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """Returns what each part serves, and the messages that arrived, by owner."""
        transport = self._transport
        assert transport is not None
        shapes = self._batches.activation_shapes(call) if transport.is_owner else []
        served = [
            part.serve(batch, shapes, transport.num_senders)
            for part, batch in zip(self._parts, batches, strict=True)
        ]
        received = [
            message
            for answer in served
            for message in transport.to_senders(
                collective, answer.messages, answer.refusal
            )
        ]
        return served, received

    def _combine(
        self,
        queues: Sequence[tf.Tensor],
        batch: tf.Tensor,
        received: Sequence[tf.Tensor],
        call: Call,
    ) -> Any:
        with tf.device(self._batches.device):
            return self._ops.tpu_embedding_combine(
                queues=queues,
                batch=batch,
                received=received,
                num_features=len(self._plan.features),
                output_shapes=self._batches.activation_shapes(call),
            )

    def update(
        self, looked_up: Prepared, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        if looked_up.tensors is not None:
            gradients = self._batches.stacks.by_sample(gradients)
        if self._transport is None:
            (part,) = self._parts
            part.apply(part.submit([looked_up.value], gradients, call))
            return
        routed = looked_up.value
        if looked_up.tensors is not None:
            kept = self._parts_kept(looked_up.tensors)
            routed = self.route(routed, _UPDATE, training=True, looked_up=kept)
        self.send_gradients(routed, gradients, call)

    def send_gradients(
        self, routed: Routed | None, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        """Sends the owners their gradients, and updates.

        Args:
          routed: The batch, or None for the one that was dequeued last.
          gradients: See `update`.
          call: See `update`.
        """
        transport, first = self._transport, self._parts[0]
        assert transport is not None
        queues = [] if routed else [first.handle]
        growing = [first.handle] if self._grows and self._is_owner else []
        nothing = tf.zeros([0])  # Servers evaluate the rates of their own tables.
        with (
            tf.device(self._batches.device),
            tf.control_dependencies(routed.ready if routed else []),
        ):
            sent = self._ops.tpu_embedding_send_gradients(
                queues=queues,
                batches=[routed.own] if routed else [],
                gradients=[g for g in gradients if g is not None],
                rates=self._rates_to_send() if transport.is_owner else nothing,
                growing=growing,
                clock=call.clock_or_none,
                num_messages=transport.size,
                has_gradient=[g is not None for g in gradients],
            )
        received = transport.to_owners(_UPDATE, sent.messages, sent.refusal)
        push = transport.push()
        refused: tf.errors.OpError | None = None
        for k, (part, messages) in enumerate(zip(self._parts, received, strict=True)):
            with tf.device(part.device):
                rates = nothing if transport.is_owner else part.rates.evaluate()
            batches = [routed.parts[k]] if routed else []
            try:
                part.apply(part.receive_gradients(batches, messages, rates, push))
            except tf.errors.OpError as error:
                # Each server refuses alone. In a graph nothing is raised here.
                refused = refused or error
        if refused is not None:
            raise refused

    def _rates_to_send(self) -> tf.Tensor:
        """Returns the rates of an update, in a process that sends them to owners."""
        return self._parts[0].rates.evaluate()

    def enqueue(self, batches: Sequence[Prepared], call: Call) -> None:
        (part,) = self._parts
        values = [batch.value for batch in batches]
        if self._transport is not None:
            routed = [self.route_enqueued(value, call) for value in values]
            values = [own for each in routed for own in each.parts]
        apply_now = part.enqueue(values, call)
        if self.pipelined and not call.training:
            part.apply(apply_now)

    def dequeue(self, call: Call) -> list[tf.Tensor]:
        (part,) = self._parts
        if self._transport is None:
            found = part.look_up([], call, self._batches.activation_shapes(call))
        else:
            (served,), received = self._serve([[]], DEQUEUE, call)
            found = self._combine([part.handle], served.looked_up, received, call)
        if self.pipelined:
            part.apply(found.apply_now)
        return found.activations

    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        if self._transport is not None:
            self.send_gradients(None, gradients, call)
            return
        (part,) = self._parts
        part.apply(part.submit([], gradients, call))

    def from_tensors(
        self, features: PreprocessedFeatures, *, looked_up: bool
    ) -> Prepared:
        """See `Steps.from_tensors`; the op that takes the result raises its errors."""
        tensors = super().from_tensors(features, looked_up=looked_up).tensors
        assert tensors is not None
        return Prepared(self._batches.from_tensors(tensors), tensors)

    @property
    def _is_owner(self) -> bool:
        """Whether other processes ask this one for rows."""
        return self._transport is not None and self._transport.is_owner

    def _all_tables(self) -> dict[str, Table]:
        variables: list[list[TableVariables]] = [[] for _ in self._plan.tables]
        vocabularies: list[list[StoredVocabulary]] = [[] for _ in self._plan.tables]
        for part in self._parts:
            for table, local in zip(part.tables, part.variables, strict=True):
                variables[table].append(local)
                name = self._plan.tables[table].name
                vocabularies[table] += filter(None, [part.vocabularies.get(name)])
        return {
            s.name: stored_table(s, local, self._reach, vocabularies[s.index])
            for s, local in zip(self._plan.tables, variables, strict=True)
        }

    def tables(self) -> dict[str, Table]:
        """See `TableStore.tables`; all processes must read rows together."""
        return self._tables

    def checkpoint_variables(self) -> dict[str, Any]:
        """See `TableStore.checkpoint_variables`: whole tables, gathered when saved."""
        return self._saved

    @functools.cached_property
    def _saved(self) -> dict[str, Any]:
        objects: dict[str, Any] = {}
        for table in self._tables.values():
            objects |= table.ids.objects(RowsVariable)
        updates = self._updates()
        return objects if updates is None else {**objects, UPDATES: updates}

    def _updates(self) -> Any:
        """Returns the counter of updates already applied; None if nothing needs it."""
        (part,) = self._parts
        return part.rates.updates

    def start_counting(self, every: int) -> Callable[[int | None], Counts]:
        parts = self._parts
        reads = self._reach.call(lambda: [part.start_counting(every) for part in parts])

        def read(num_hot_rows: int | None) -> Counts:
            counts = self._reach.call(lambda: [each(num_hot_rows) for each in reads])
            return joined(counts, num_hot_rows)

        return read

    def changes(self, consumer: str) -> RowChanges:
        """See `TableStore.changes`: all processes must call it and use it alike."""
        tables = list(self._tables.values())
        return RowChanges(self._parts, tables, consumer, self._reach)

    def flush(self) -> None:
        for part in self._parts:
            if self.pipelined:
                part.apply_all()
            part.catch_up()

    def reset(self) -> None:
        for part in self._parts:
            part.reset()
