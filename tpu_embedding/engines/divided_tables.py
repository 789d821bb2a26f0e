"""Tables whose rows are divided over parameter servers.

A worker prepares the batch, asks each server for the distinct rows that it has, and
combines them in the order of the entries; the gradients of samples go to the servers
of their rows. So each sum has the order that it has on one machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.engines.base import EngineOptions, Prepared, TableArrays
from tpu_embedding.engines.cpu_base import lay_out_whole
from tpu_embedding.engines.host import HostBatches, HostEngine
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import PreprocessedFeatures
from tpu_embedding.layout.output_shapes import Shape, ShapesOfPart
from tpu_embedding.layout.partition import Partition
from tpu_embedding.layout.placement import (
    ALL_PROCESSES,
    Placement,
    part_of_plan,
    rows_of_plan,
)
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.ops import library
from tpu_embedding.tables.initial import initial_rows
from tpu_embedding.tables.readers import PartsReader
from tpu_embedding.tables.rows import (
    PARAMETERS,
    MutableTableRows,
    checkpoint_name,
    interleaved,
)
from tpu_embedding.tables.trackable import LogicalVariable
from tpu_embedding.tables.variables import TableVariables, variable_rows


class DividedBatch(NamedTuple):
    """A batch between its lookup and its update.

    Attributes:
      divided: On the worker, what the ops there need of it.
      parts: For each server the batch of its rows, which stays there.
      rows: For each server the rows that it sent.
    """

    divided: tf.Tensor
    parts: list[tf.Tensor]
    rows: list[tf.Tensor]


class DividedTables:
    """The tables of a plan that are divided by rows, with their servers.

    Attributes:
      engines: For each server the engine of its rows.
      features: Indices of their features in the whole plan.
    """

    def __init__(
        self,
        options: EngineOptions,
        tables: Sequence[int],
        variables: Sequence[Sequence[TableVariables]],
    ) -> None:
        """Makes an engine on each server.

        Args:
          options: The options of an engine for the whole plan.
          tables: The divided tables, as indices in plan order.
          variables: For each of them its part on each server.
        """
        self._ops = library.load()
        servers = options.topology.servers
        self._plan, self.features = part_of_plan(options.plan, tables)
        self._variables = variables
        owners = (ALL_PROCESSES,) * len(tables)
        places = [Placement(k, len(servers), owners) for k in range(len(servers))]
        own = dataclasses.replace(
            options,
            plan=self._plan,
            output_shapes=ShapesOfPart(options.output_shapes, self.features),
            layout=options.layout
            and lay_out_whole(
                self._plan, SparseCoreEmbeddingConfig(disable_table_stacking=True)
            ),
        )
        # Where the call is: on the worker. Its variants do not travel.
        self._batches = HostBatches(own, None, places[0])
        self.engines = [
            HostEngine(
                dataclasses.replace(
                    own,
                    plan=rows_of_plan(self._plan, place),
                    topology=dataclasses.replace(options.topology, device=device),
                    layout=None,
                    check_numerics=False,  # The worker does, for all samples.
                ),
                [parts[place.process] for parts in variables],
                place,
            )
            for place, device in zip(places, servers, strict=True)
        ]

    def check(self, batch: Sequence[IdBatch]) -> Any:
        """Raises the errors of a batch of the whole plan; returns a control input."""
        return self._ops.tpu_embedding_check_batch(batch=self._prepare(batch))

    def look_up(
        self,
        prepared: Prepared,
        *,
        training: bool,
        shapes: Sequence[Shape] | None,
    ) -> tuple[list[tf.Tensor], DividedBatch | None]:
        """Looks up the part of a batch that belongs to these tables.

        Args:
          prepared: A batch of the whole plan.
          training: Whether an update may follow.
          shapes: As of `Engine.lookup`, for the whole plan.

        Returns:
          The activations of `features`, and what `gradients_of_servers` takes, or None
          if that is to take the plain tensors of the batch.
        """
        from_tensors = prepared.tensors is not None
        if prepared.tensors is not None:
            batch = self._from_tensors(prepared.tensors)
        else:
            batch = self._prepare(prepared.value[0])
        training = training and not from_tensors
        looked_up = self._ask(batch, training=training, with_rows=True)
        activations = self._ops.tpu_embedding_combine_rows(
            divided=looked_up.divided,
            rows=looked_up.rows,
            num_features=len(self.features),
            is_bfloat16=[t.config.dtype == "bfloat16" for t in self._plan.tables],
            output_shapes=self._batches.activation_shapes(
                shapes and [shapes[f] for f in self.features]
            ),
        )
        return activations, None if from_tensors else looked_up

    def from_tensors(self, tensors: PreprocessedFeatures) -> DividedBatch:
        """The batch for an update, from plain tensors of the whole plan."""
        batch = self._from_tensors(tensors)
        return self._ask(batch, training=True, with_rows=False)

    def gradients_of_servers(
        self, batch: DividedBatch, gradients: Sequence[tf.Tensor | None]
    ) -> tuple[list[tf.Tensor], list[list[tf.Tensor | None]]]:
        """Checks the gradients of the whole plan and sends each server its own.

        Args:
          batch: From `look_up` or `from_tensors`.
          gradients: By feature of the whole plan.

        Returns:
          Tensors that exist once the gradients were accepted; and for each server the
          gradients that its engine takes.

        Raises:
          tf.errors.InvalidArgumentError: If a gradient has a wrong shape or is refused.
        """
        own = [gradients[f] for f in self.features]
        has_gradient = [gradient is not None for gradient in own]
        messages = self._ops.tpu_embedding_divide_gradients(
            divided=batch.divided,
            gradients=[gradient for gradient in own if gradient is not None],
            num_servers=len(self.engines),
            has_gradient=has_gradient,
        )
        found: list[list[tf.Tensor | None]] = []
        for engine, part, message in zip(
            self.engines, batch.parts, messages, strict=True
        ):
            with tf.device(engine.device):
                split = iter(
                    self._ops.tpu_embedding_split_gradients(
                        batch=part,
                        message=message,
                        num_gradients=sum(has_gradient),
                        has_gradient=has_gradient,
                    )
                )
            found.append([next(split) if given else None for given in has_gradient])
        return [*messages, *batch.rows], found

    def flat_gradients(
        self, gradients: Sequence[tf.Tensor | None]
    ) -> list[tf.Tensor | None]:
        """Gradients of the whole plan, those of `features` as [samples, D]."""
        found = list(gradients)
        for f, dim in zip(self.features, self._plan.dims, strict=True):
            gradient = found[f]
            if gradient is not None:
                found[f] = tf.reshape(gradient, [-1, dim])
        return found

    def tables(self) -> dict[str, TableArrays]:
        """See `Engine.tables`."""
        return {
            spec.name: self._arrays(spec, parts)
            for spec, parts in zip(self._plan.tables, self._variables, strict=True)
        }

    def stacked_tables(self) -> dict[str, tuple[tf.Variable, ...]]:
        """See `Engine.stacked_tables`: for each table its part on each server."""
        return {
            spec.name: tuple(part.parameters for part in parts)
            for spec, parts in zip(self._plan.tables, self._variables, strict=True)
        }

    def checkpoint_variables(self) -> dict[str, Any]:
        """See `Engine.checkpoint_variables`: whole tables, joined when saved."""
        found: dict[str, Any] = {}
        tables = self.tables()
        for spec, parts in zip(self._plan.tables, self._variables, strict=True):
            for array, rows in tables[spec.name].rows.items():
                name = checkpoint_name(spec.name, array)
                found[name] = _DividedVariable(
                    name,
                    rows,
                    [
                        part.parameters if array == PARAMETERS else part.slots[array]
                        for part in parts
                    ],
                )
        return found

    def _arrays(self, spec: TableSpec, parts: Sequence[TableVariables]) -> TableArrays:
        slots = {s.name: s for s in spec.optimizer.slots} if spec.optimizer else {}
        by_server = [variable_rows(spec, part) for part in parts]
        rows: dict[str, MutableTableRows] = {
            name: interleaved(
                [part[name] for part in by_server],
                initial_rows(slots[name]) if name in slots else None,
            )
            for name in (PARAMETERS, *slots)
        }
        parameters = [part.parameters for part in parts]
        heights = [part[PARAMETERS].shape[0] for part in by_server]
        starts = [sum(heights[:k]) for k in range(len(heights))]
        partition = Partition(len(parts))

        def row_of(ids: tf.Tensor) -> tf.Tensor:
            first = tf.gather(tf.constant(starts, tf.int64), partition.owner(ids))
            return first + partition.local(ids)

        return TableArrays(
            rows=rows,
            reader=PartsReader(parameters, row_of, spec.config.dim),
            values=lambda: {n: tf.constant(r.numpy()) for n, r in rows.items()},
            shards=lambda: [(p.device, p.read_value()) for p in parameters],
        )

    def _prepare(self, batch: Sequence[IdBatch]) -> tf.Tensor:
        own = [batch[f] for f in self.features]
        # Servers group rows for an update.
        return self._batches.prepare(own, training=False)

    def _from_tensors(self, tensors: PreprocessedFeatures) -> tf.Tensor:
        shapes = tensors.output_shapes
        return self._batches.from_tensors(
            tensors._replace(
                tables={
                    spec.name: tensors.tables[spec.name] for spec in self._plan.tables
                },
                output_shapes=shapes and tuple(shapes[f] for f in self.features),
            )
        )

    def _ask(
        self, batch: tf.Tensor, *, training: bool, with_rows: bool
    ) -> DividedBatch:
        asked = self._ops.tpu_embedding_divide(
            batch=batch,
            num_servers=len(self.engines),
            plan=self._batches.plan_record,
            training=training,
        )
        served = [
            engine.serve_rows(request, training=training, with_rows=with_rows)
            for engine, request in zip(self.engines, asked.requests, strict=True)
        ]
        return DividedBatch(
            asked.divided,
            [answer.batch for answer in served],
            [answer.rows for answer in served],
        )


class _DividedVariable(LogicalVariable):
    """A table or slot in checkpoints of TensorFlow, which hold it whole."""

    def __init__(
        self, name: str, rows: MutableTableRows, parts: Sequence[tf.Variable]
    ) -> None:
        super().__init__(
            name, rows.shape, rows.dtype, rows.numpy, lambda value: rows.write(0, value)
        )
        self._parts = parts

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        # TensorFlow restores into several devices in a tf.function.
        (value,) = restored_tensors.values()
        whole = tf.ensure_shape(value, self.shape)
        rows: Any = self.shape[0]
        for run in Partition(len(self._parts)).runs(0, rows):
            part = self._parts[run.part]
            with tf.device(part.device):
                part.assign(whole[run.within])
