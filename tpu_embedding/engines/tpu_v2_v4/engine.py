"""TPUV2V4Engine: the embedding engine in the hardware of TPU v2 to v4.

TensorFlow calls this hardware EmbeddingFeature.V1.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model import save_context

from tpu_embedding.distribution import TPUSystem
from tpu_embedding.engines.base import Engine, TracedTicket
from tpu_embedding.engines.calls import Call, EngineOptions, Prepared
from tpu_embedding.engines.tpu_v2_v4.configuration import (
    ProgramRates,
    counts_updates,
    make_configuration,
)
from tpu_embedding.engines.tpu_v2_v4.hardware_queue import TPUQueue, core_shape
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout import limits
from tpu_embedding.layout.csr import PreprocessedFeatures
from tpu_embedding.layout.plan import UPDATES, TableSpec, require_options
from tpu_embedding.tables.initial import ShardInfo, slot_values, table_values
from tpu_embedding.tables.readers import PartsReader
from tpu_embedding.tables.rows import (
    PARAMETERS,
    MutableTableRows,
    by_checkpoint_name,
    joined,
)
from tpu_embedding.tables.table import Identity, Table
from tpu_embedding.tables.trackable import ShardedArray
from tpu_embedding.tables.variables import VariableRows, create_state, user_slots

_INITIALIZED_AGAIN = (
    "The tables of this embedding are lost, because the TPU was initialized again "
    "after the embedding was created. (Creating a SoftwareTPUStrategy does so, too.) "
    "Create the TPUEmbedding or the Keras layer again, and restore a checkpoint."
)


# The key under which preserved outputs hold the number of their lookup.
_MARKER = "lookup"


class TPUV2V4Engine(Engine):
    """Keeps the tables in the TPU's memory, and copies of them on the hosts."""

    name = "tpu_v2_v4"
    takes_profiles = True
    needs_arguments = True
    needs_shapes = True

    def __init__(self, options: EngineOptions) -> None:
        """Configures and loads the TPU, or shares its engine; see `Engine`."""
        super().__init__(options)
        topology = options.topology
        assert topology.tpu is not None
        self._tpu: TPUSystem = topology.tpu
        if options.check_numerics and not self._tpu.programs_can_fail:
            raise NotImplementedError(
                "`check_numerics=True` is not supported under TPUStrategy: a program "
                "on a TPU cannot fail because of a value. Leave it at False there."
            )
        if not options.initialize and counts_updates(self._plan):
            raise NotImplementedError(
                "`initialize_tpu_embedding=False` shares the tables of another "
                "TPUEmbedding, but not its count of updates: a learning rate that "
                "takes the number of updates would start at 0. Pass a callable without "
                "arguments that reads a tf.Variable, which both can share."
            )
        shapes = self._shapes = self._output_shape_list()
        cores = self._tpu.cores_per_replica
        self._config: bytes = make_configuration(
            self._plan,
            self._tpu,
            [
                core_shape(feature.path, shape, cores)
                for feature, shape in zip(self._plan.features, shapes, strict=True)
            ],
            pipelined=options.pipelined,
            profile_data_directory=options.profile_data_directory,
        ).SerializeToString()
        self._tickets = QueuedTickets()
        self._still_there = self._tpu.watch(_INITIALIZED_AGAIN)
        self._configure()
        self._rates = ProgramRates(self._plan, topology.strategy)
        self.queue = self._queue = TPUQueue(
            options, self._config, shapes, self._rates, self._still_there
        )
        self._tables = {
            spec.name: HostTable(spec, self._tpu, self.load)
            for spec in self._plan.tables
        }
        if options.initialize:
            self.load()
        else:
            self.retrieve()

    @classmethod
    def check(cls, options: EngineOptions) -> None:
        plan, topology = options.plan, options.topology
        assert topology.tpu is not None
        for table in plan.tables:
            if table.optimizer is None:
                raise ValueError(
                    f"Table {table.name} has no optimizer, and a TPU needs one even "
                    "for evaluation. Pass `optimizer` to the constructor or to the "
                    "TableConfig."
                )
            if table.optimizer.tpu is None:
                raise NotImplementedError(
                    f"Table {table.name}: TPU v2 to v4 do not support "
                    f"`optimizer={type(table.optimizer).__name__!r}`. Give the table "
                    "another optimizer."
                )
            if table.config.custom_combiner is not None:
                raise NotImplementedError(
                    f"Table {table.name}: TPU v2 to v4 do not support a "
                    "CustomCombiner. Use the combiner 'sum', 'mean' or 'sqrtn'."
                )
            if table.config.layout is not None:
                raise NotImplementedError(
                    f"Table {table.name}: TPU v2 to v4 do not support "
                    f"`layout={table.config.layout!r}`. Leave it at None."
                )
        require_options(plan, cls.name)
        tpu = topology.tpu
        devices = sum(len(cores) for cores in tpu.devices)
        limits.raise_first(limits.whole_table_excesses(plan, tpu.generation, devices))

    def prepare(
        self, batches: Sequence[Sequence[IdBatch]], call: Call
    ) -> list[Prepared]:
        """See `Steps.prepare`: plain tensors are what the enqueue op takes."""
        if not call.tensors:
            # The queue prepares them.
            return [Prepared(list(batch)) for batch in batches]
        return [Prepared(None, self._tensors_of(batch)) for batch in batches]

    def _tensors_of(self, batch: Sequence[IdBatch]) -> PreprocessedFeatures:
        inputs = self._options.topology.on_host(self._queue.inputs, list(batch))
        return PreprocessedFeatures(
            tables={},
            output_shapes=tuple(tf.constant(shape, tf.int64) for shape in self._shapes),
            dropped_ids={t.name: tf.zeros([], tf.int64) for t in self._plan.tables},
            sizes={},
            inputs=inputs,
        )

    def from_tensors(
        self, features: PreprocessedFeatures, *, looked_up: bool
    ) -> Prepared:
        """See `Steps.from_tensors`; `lookup` marks the tensors with its number.

        Raises:
          tf.errors.FailedPreconditionError: If gradients come in another program than
            their lookup, or after a later lookup.
        """
        tables: Any = features.tables
        expected = {_MARKER} if looked_up else set()
        if not isinstance(tables, Mapping) or set(tables) != expected:
            raise ValueError(
                "On TPU v2 to v4, preserved outputs are the number of a lookup, and a "
                "preprocessed batch has no stacked tables. Pass the second output of "
                "embedding_lookup to apply_gradients, and the result of this "
                "embedding's preprocess_features or enqueue to a lookup."
            )
        if not looked_up:
            return Prepared(None, features)
        program = self._options.topology.program()
        ticket = self._tickets.of(program)
        number = tf.get_static_value(tables[_MARKER])
        if ticket is None or number not in (None, ticket.number):
            raise tf.errors.FailedPreconditionError(
                None,
                None,
                "On TPU v2 to v4 the gradients of a lookup must be applied in the same "
                "strategy.run, before the next lookup. Call apply_gradients in the "
                "function that called embedding_lookup.",
            )
        return Prepared(ticket)

    def lookup(
        self, prepared: Prepared, call: Call
    ) -> tuple[list[tf.Tensor], Prepared]:
        """See `Steps.lookup`: enqueues the batch and dequeues it at once."""
        program = self._options.topology.program()
        ticket = self._tickets.begin(program, training=call.training)
        # A batch with a name is an evaluation batch if no gradients use that name.
        name = ticket.content if call.training else None
        call = dataclasses.replace(call, name=name)
        self._queue.enqueue([prepared], call)
        activations = self._queue.dequeue(call)
        marker: dict[str, Any] = {_MARKER: tf.constant(ticket.number, tf.int64)}
        return activations, Prepared(ticket, PreprocessedFeatures(marker, (), {}, {}))

    def update(
        self, looked_up: Prepared, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        call = dataclasses.replace(call, name=looked_up.value.take())
        self._queue.apply_gradients(gradients, call)

    def tables(self) -> dict[str, Table]:
        """See `TableStore.tables`; current only after `retrieve`."""
        return {
            spec.name: Table(
                spec=spec,
                ids=Identity(
                    spec.name, {name: a.rows() for name, a in table.arrays.items()}
                ),
                stored=PartsReader(
                    table.arrays[PARAMETERS].shards, lambda ids: ids, spec.config.dim
                ),
                values=functools.partial(_values_while_saving, table),
                shards=_refuse_values,
                variables=_refuse_values,
            )
            for spec, table in zip(
                self._plan.tables, self._tables.values(), strict=True
            )
        }

    def checkpoint_variables(self) -> dict[str, Any]:
        arrays = {name: table.arrays for name, table in self._tables.items()}
        objects: dict[str, Any] = {**by_checkpoint_name(arrays)}
        if self._rates.updates is not None:
            objects[UPDATES] = self._rates.updates
        return objects

    def load(self) -> None:
        self._still_there()
        config = self._config
        for table in self._tables.values():
            table.load(config)
            config = b""

    def retrieve(self) -> None:
        self._still_there()
        config = self._config
        for table in self._tables.values():
            table.retrieve(config)
            config = b""

    def flush(self) -> None:
        """See `TableStore.flush`: retrieving one table applies the update of all."""
        if not self._options.pipelined:
            return
        if self._options.topology.program() is not None:
            raise NotImplementedError(
                "On TPU v2 to v4, `flush()` reads a table through the host, which is "
                "impossible in a program on the TPU. Call it outside of strategy.run."
            )
        self._still_there()
        smallest = min(
            self._plan.tables, key=lambda t: t.config.vocabulary_size * t.config.dim
        )
        self._tables[smallest.name].retrieve(self._config)

    def reset(self) -> None:
        raise NotImplementedError(
            "TPU v2 to v4 cannot discard queued batches: no op of TensorFlow empties "
            "the queues. Only initializing the TPU system does, which also ends all "
            "tables and variables. Save a checkpoint, call "
            "tf.tpu.experimental.initialize_tpu_system (for the software TPU, the "
            "strategy's method of that name), create the strategy's objects again and "
            "restore."
        )

    def _configure(self) -> None:
        """Configures the TPU's engine, or checks that another object has done so."""
        with tf.device(self._tpu.system):
            initialized = tf.raw_ops.IsTPUEmbeddingInitialized()
            if not self._options.initialize:
                if not initialized:
                    raise RuntimeError(
                        "`initialize_tpu_embedding=False` shares the engine that "
                        "another TPUEmbedding has configured, but there is none. Leave "
                        "it at True."
                    )
                return
            if initialized:
                raise RuntimeError(
                    "The TPU's embedding engine is already configured by another "
                    "TPUEmbedding or Keras layer. A TPU system has one engine. Use "
                    "that object (`load_weights` loads other tables into a Keras "
                    "layer), or initialize the TPU system again and create a new "
                    "strategy. A tpu_embedding.TPUEmbedding can share the engine with "
                    "`initialize_tpu_embedding=False`."
                )
            tf.raw_ops.ConfigureTPUEmbedding(config=self._config)

    def _output_shape_list(self) -> list[tuple[int, ...]]:
        """Returns the activations' shapes per replica, without the embedding axis."""
        shapes = self._options.output_shapes.full()
        for spec, shape in zip(self._plan.features, shapes, strict=True):
            if 0 in shape:
                raise ValueError(
                    f"Feature {spec.path}: a TPU is configured for one output shape, "
                    f"but there are no samples in {shape}. Skip empty batches."
                )
        return shapes


def _values_while_saving(table: HostTable) -> dict[str, Any]:
    """Returns the host's variables for saving a model, the only use that is allowed."""
    if not save_context.in_save_context():
        _refuse_values()
    return {name: array.shards[0] for name, array in table.arrays.items()}


def _refuse_values() -> Any:
    raise RuntimeError(
        "The embedding tables are in the TPU's own memory: variables on the host would "
        "be stale, and writing to them would change nothing. Save a checkpoint and "
        "restore it into an embedding made outside of the TPU strategy, or call "
        "tpu_embedding.checkpoint.save."
    )


class QueuedTicket(TracedTicket):
    """The ticket of one lookup in a queue; its content is the name of the ops.

    Attributes:
      number: The number of the lookup.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"lookup_{number}")
        self.number = number


class QueuedTickets:
    """The tickets of an engine with one queue: one lookup at a time owes gradients.

    The content of a ticket is a name that tells the ops of one lookup from others.
    """

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, QueuedTicket] = (
            weakref.WeakKeyDictionary()
        )
        self._numbers = itertools.count(1)

    def of(self, program: Any) -> QueuedTicket | None:
        """Returns the last ticket for training in a program."""
        return None if program is None else self._last.get(program)

    def begin(self, program: Any, *, training: bool) -> QueuedTicket:
        """Makes a ticket for a new lookup, traced in `program`.

        With `training` gradients may follow; until they do, no other ticket is made.
        """
        before = self._last.get(program)
        if before is not None and not before.taken:
            raise NotImplementedError(
                "On TPU v2 to v4 a lookup of a training step waits until the gradients "
                "of the previous lookup were applied, so a step cannot look up twice "
                "before its backward pass. Look up once, with more features over the "
                "same tables; or apply the gradients of the first call before the "
                "second; or use a TPU with SparseCores."
            )
        ticket = QueuedTicket(next(self._numbers))
        if training:
            self._last[program] = ticket
        return ticket


class HostArray(ShardedArray):
    """A table or slot in one variable on each host that has rows of it."""

    def __init__(
        self,
        shards: Sequence[tf.Variable],
        initial_value: float | None,
        on_restore: Callable[[], None],
    ) -> None:
        """See `ShardedArray`; `initial_value` is that of a slot, None for a table."""
        super().__init__(shards, on_restore)
        self._initial_value = initial_value

    def rows(self) -> MutableTableRows:
        """Returns all rows; after rows were written, load them into the TPU."""
        parts = [VariableRows(shard, self._initial_value) for shard in self.shards]
        return joined(parts, self._initial_value)

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        # A NotImplementedError would make TensorFlow leave out the table.
        raise RuntimeError(
            "Tables of TPU v2 to v4 cannot be saved asynchronously. Leave "
            "`experimental_enable_async_checkpoint` of tf.train.CheckpointOptions at "
            "False."
        )

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        # A SavedModel would contain a function that saves, which cannot save slices.
        if save_type == "savedmodel":
            raise NotImplementedError(
                "tf.saved_model.save cannot save a TPUEmbedding on TPU v2 to v4: its "
                "tables are in the TPU's memory. Save a checkpoint; for serving "
                "restore it into an embedding made outside of the TPU strategy, and "
                "call tpu_embedding.serving.export. Or leave the embedding out of what "
                "the module tracks."
            )
        return super()._trackable_children(save_type, **kwargs)


class HostTable:
    """The hosts' copies of one table and its slots, which ops load and retrieve.

    Host h of H has the rows [h * V / H, (h + 1) * V / H); the first hosts have one more
    row if H does not divide V.

    Attributes:
      arrays: The arrays by "parameters" and slot name, in the order of the ops.
    """

    def __init__(
        self, spec: TableSpec, tpu: TPUSystem, on_restore: Callable[[], None]
    ) -> None:
        """Creates the variables, with their initial values."""
        optimizer = spec.optimizer
        assert optimizer is not None
        assert optimizer.tpu is not None
        self._name = spec.name
        self._hosts = tpu.hosts
        operation = f"TPUEmbedding{optimizer.tpu.ops}Parameters"
        self._load = getattr(tf.raw_ops, f"Load{operation}")
        self._retrieve = getattr(tf.raw_ops, f"Retrieve{operation}")
        heights = _heights(spec.config.vocabulary_size, len(tpu.hosts))
        shards: dict[str, list[tf.Variable]] = {
            name: [] for name in (PARAMETERS, *(slot.name for slot in optimizer.slots))
        }
        for host, value in zip(tpu.hosts, _parameters(spec, heights), strict=False):
            with tf.device(host):
                parameters = create_state(spec.name, value)
                shards[PARAMETERS].append(parameters)
                for name, slot in _create_slots(spec, parameters).items():
                    shards[name].append(slot)
        initial_values = {slot.name: slot.initial_value for slot in optimizer.slots}
        self.arrays: dict[str, HostArray] = {
            name: HostArray(own, initial_values.get(name), on_restore)
            for name, own in shards.items()
        }

    def load(self, config: bytes) -> None:
        """Loads the TPU from the variables; the first table alone has a `config`."""
        for shard, host in enumerate(self._hosts):
            with tf.device(host):
                self._load(
                    **{n: self._shard(a, shard) for n, a in self.arrays.items()},
                    **self._place(shard),
                    config=config if shard == 0 else b"",
                )

    def retrieve(self, config: bytes) -> None:
        """Retrieves the variables from the TPU; `config` as for `load`."""
        for shard, host in enumerate(self._hosts):
            with tf.device(host):
                values = self._retrieve(
                    **self._place(shard), config=config if shard == 0 else b""
                )
            arrays = list(self.arrays.values())
            values = [values] if len(arrays) == 1 else list(values)
            for array, value in zip(arrays, values, strict=True):
                if shard < len(array.shards):  # Other hosts have only padding.
                    array.shards[shard].assign(value)

    def _place(self, shard: int) -> dict[str, Any]:
        return {
            "table_name": self._name,
            "num_shards": len(self._hosts),
            "shard_id": shard,
        }

    @staticmethod
    def _shard(array: HostArray, shard: int) -> tf.Tensor:
        if shard < len(array.shards):
            return array.shards[shard].read_value()
        return tf.zeros_like(array.shards[0])  # One row of padding.


def _create_slots(spec: TableSpec, parameters: tf.Variable) -> dict[str, tf.Variable]:
    """Creates the slots of the part of a table on one host."""
    assert spec.optimizer is not None
    if spec.optimizer.slot_variable_creation_fn is not None:
        return user_slots(spec, parameters)
    rows: Any = parameters.shape[0]
    made = {}
    for slot in spec.optimizer.slots:
        values = slot_values(spec, slot)
        part = values.part((rows, values.shape[1]))
        made[slot.name] = create_state(values.name, part)
    return made


def _heights(rows: int, num_hosts: int) -> list[int]:
    """Returns the number of rows of each host that has rows."""
    least, more = divmod(rows, num_hosts)
    heights = [least + (host < more) for host in range(num_hosts)]
    return [height for height in heights if height]


def _parameters(spec: TableSpec, heights: Sequence[int]) -> list[tf.Tensor]:
    """Returns the initial values of each shard of the whole table.

    As in TensorFlow, an initializer that takes `shard_info` is called for each shard.
    """
    values = table_values(spec)
    if not values.takes_shard_info:
        return tf.split(values.whole(), heights)
    shapes = [(height, spec.config.dim) for height in heights]
    starts = itertools.accumulate(heights, initial=0)
    return [
        values.part(shape, shard_info=ShardInfo(shape, (start, 0)))
        for start, shape in zip(starts, shapes, strict=False)
    ]
