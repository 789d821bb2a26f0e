"""The engine for several processes: each holds a part of the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tpu_embedding.distribution import ProcessTopology
from tpu_embedding.engines import fingerprint
from tpu_embedding.engines.calls import EngineOptions
from tpu_embedding.engines.host.batches import plan_record
from tpu_embedding.engines.host.engine import CollectiveCall, HostEngine, Messages
from tpu_embedding.engines.host.part import TablePart
from tpu_embedding.engines.process_group import Channel, calling, connect
from tpu_embedding.engines.telemetry import Counts
from tpu_embedding.layout.balancing import place_tables, rows_of_plan
from tpu_embedding.layout.placement import Placement
from tpu_embedding.ops import library
from tpu_embedding.tables.reach import InJob
from tpu_embedding.tables.variables import Place, TableVariables, create_parts


class Processes:
    """The processes of a synchronous job, each with a part of the tables."""

    def __init__(self, record: bytes, channel: Channel) -> None:
        self.record, self.is_owner = record, True
        self.size = self.num_senders = channel.size
        self._channel = channel

    def to_owners(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> list[Messages]:
        """See `Transport.to_owners`: this process has one part."""
        return [self.to_senders(collective, messages, refusal)]

    def to_senders(
        self, collective: CollectiveCall, messages: Messages, refusal: tf.Tensor
    ) -> Messages:
        """See `Transport.to_senders`."""
        return self._channel.exchange(
            collective.phase, messages, refusal, collective.name, collective.role
        )

    def push(self) -> Any:
        """See `Transport.push`: each step of a job runs once."""
        return library.NO_NUMBER


class ShardedEngine(HostEngine):
    """The host engine over the tables of all processes of a synchronous job.

    This process has one part of them. All processes must make the same calls in the
    same order: calls of the queue, `lookup`, `update`, `flush`, `reset`, and views of
    the tables.
    """

    name = "sharded"
    synchronizes = True
    differentiates_weights = False
    stand_in = None

    def __init__(self, options: EngineOptions) -> None:
        """Makes this process's part of the tables; see `Engine`."""
        self._placement = _placement(options)
        assert options.channel is not None
        self._channel = options.channel
        own = dataclasses.replace(
            options, plan=rows_of_plan(options.plan, self._placement)
        )
        record = plan_record(own, self._placement)
        variables = _create_parts(options, self._placement)
        part = TablePart(
            own, record, variables, self._placement, range(len(variables)), routed=True
        )
        self._channel.queues = [part.handle]
        reach = InJob(self._placement, self._channel)
        # IDs and batches refer to whole tables.
        super().__init__(options, [part], Processes(record, self._channel), reach)

    @classmethod
    def check(cls, options: EngineOptions) -> Channel:
        super().check(options)
        description = _description(options, _placement(options))
        timeout_seconds = options.distributed.timeout_seconds
        return connect(options.topology, description, timeout_seconds)

    @property
    def channel(self) -> Channel:
        """The channel by which the processes of this embedding exchange messages."""
        return self._channel

    def flush(self) -> None:
        """See `TableStore.flush`; with pipelining all processes must call it."""
        if self.pipelined:
            with calling("flush"):  # An outer call keeps its name.
                self._channel.agree("update")
        super().flush()

    def reset(self) -> None:
        """See `Steps.reset`; all processes must call it."""
        self._channel.agree("update", "reset")
        super().reset()

    def _rates_to_send(self) -> tf.Tensor:
        with self._channel.refusing("update"), self._channel.after_exchange():
            return super()._rates_to_send()

    def start_counting(self, every: int) -> Callable[[int | None], Counts]:
        """See `TableStore.start_counting`: it counts the rows of this process."""
        read = super().start_counting(every)

        def with_exchanges(num_hot_rows: int | None) -> Counts:
            traffic = self._channel.traffic()
            return dataclasses.replace(
                read(num_hot_rows),
                bytes_sent=traffic.bytes_sent,
                waited_seconds=traffic.waited_seconds,
            )

        return with_exchanges


def _create_parts(options: EngineOptions, placement: Placement) -> list[TableVariables]:
    device = options.topology.device
    places: list[list[Place]] = [
        [(device, placement.rows_of(spec.index, spec.config.max_rows))]
        for spec in options.plan.tables
    ]
    return [part for (part,) in create_parts(options.plan, places)]


def _placement(options: EngineOptions) -> Placement:
    topology = options.topology
    assert isinstance(topology, ProcessTopology)
    return place_tables(
        options.plan,
        topology.rank,
        len(topology.processes),
        options.distributed.placement,
    )


def _description(options: EngineOptions, placement: Placement) -> dict[str, Any]:
    """Returns the settings that must be equal in all processes, by name."""
    plan = options.plan
    found: dict[str, Any] = {
        "the TensorFlow version": tf.__version__,
        "the class": options.made_by,
        "`pipeline_execution_with_tensor_core`": options.pipelined,
        "`check_numerics`": options.check_numerics,
        "`batch_size`": options.batch_size,
        "`wire_dtype` of DistributedOptions": options.distributed.wire_dtype,
        "`timeout_seconds` of DistributedOptions": options.distributed.timeout_seconds,
        "the names of the tables": [spec.name for spec in plan.tables],
        "the paths of the features": list(plan.paths),
    }
    for spec, owner in zip(plan.tables, placement.owners, strict=True):
        config, optimizer = spec.config, spec.optimizer
        fields = {
            "vocabulary_size": config.vocabulary_size,
            "dim": config.dim,
            "hashing": str(spec.hashing),
            "combiner": str(config.combiner),
            "dtype": config.dtype,
            "invalid_ids": config.invalid_ids,
            "quantization_config": str(config.quantization_config),
            "rounding_seed": spec.rounding_seed,
            "owner": owner,
            "initializer": fingerprint.of_initializer(config.initializer),
            "optimizer": type(optimizer).__name__,
        }
        if optimizer is not None:
            options_of: Any = optimizer
            fields |= {
                f"the optimizer's {field.name}": str(getattr(optimizer, field.name))
                for field in dataclasses.fields(options_of)
                if not callable(getattr(optimizer, field.name))
            }
        for name, value in fields.items():
            found[f"{name} of table {spec.name!r}"] = value
    for feature in plan.features:
        length, shape = feature.config.max_sequence_length, feature.config.output_shape
        found[f"max_sequence_length of feature {feature.path!r}"] = length
        found[f"output_shape of feature {feature.path!r}"] = str(shape)
        found[f"the table of feature {feature.path!r}"] = plan.tables[
            feature.table
        ].name
    return found
