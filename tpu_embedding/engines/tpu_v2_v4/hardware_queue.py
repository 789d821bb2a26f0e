"""TPUQueue: the batch queues of TPU v2 to v4, one for each core.

TensorFlow's enqueue op takes row splits for every kind of input:

  sparse sequence, L = 2:  [[7, .], [3, 5]]     ids:     [ 7, 3, 5 ]
                                                splits:  [ 0, 1, 1, 2, 3 ]

Each position of a sequence, and each last axis of a dense input, is a sample. Ids are
checked against the vocabulary on the host, before the op narrows them. Features with
exactly one id per sample and without weights need no splits.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tpu_embedding.distribution import TPUSystem
from tpu_embedding.engines.base import check_device
from tpu_embedding.engines.calls import Call, EngineOptions, Prepared, StepQueue
from tpu_embedding.engines.tpu_v2_v4.configuration import ProgramRates
from tpu_embedding.inputs import IdBatch
from tpu_embedding.lookup.entries import Selection, select
from tpu_embedding.lookup.graph_checks import require
from tpu_embedding.lookup.input_rows import FeatureInput, finite_gradient
from tpu_embedding.tpu_generations import NAME_ATTRIBUTE

_AttrValue: Any = vars(attr_value_pb2)["AttrValue"]


class TPUQueue(StepQueue):
    """The queues of all cores of a strategy.

    The hardware pairs batches with activations and gradients, and applies a pending
    update before anything that needs it. A core is identified by its device name, or
    by a tensor with its ordinal among the devices of the only host.
    """

    def __init__(
        self,
        options: EngineOptions,
        config: bytes,
        output_shapes: Sequence[tuple[int, ...]],
        rates: ProgramRates,
        still_there: Callable[[], list[Any]],
    ) -> None:
        """Takes shapes of activations per replica without the embedding axis.

        `still_there` returns control inputs that fail after the TPU was initialized
        again.
        """
        assert options.topology.tpu is not None
        self._options = options
        self._plan = options.plan
        self._topology = options.topology
        self._tpu: TPUSystem = options.topology.tpu
        self._config = config
        self._output_shapes = output_shapes
        self._rates = rates
        self._still_there = still_there
        self._combiners = [table.config.combiner for table in self._plan.tables]
        # The last op that enqueued in each graph and on each device.
        self._last: weakref.WeakKeyDictionary[tf.Graph, dict[str, Any]]
        self._last = weakref.WeakKeyDictionary()

    def enqueue(self, batches: Sequence[Prepared], call: Call) -> None:
        if call.device is not None:
            (batch,) = batches
            self._enqueue_on(call.device, batch, call)
            return
        cores = self._tpu.cores_per_replica
        if cores > 1 and self._topology.program() is not None:
            raise NotImplementedError(
                "Inside strategy.run a batch goes to one core, but each replica has "
                f"{cores} cores. Call enqueue outside of strategy.run, where the batch "
                "is divided among them. The Keras layer and lookups without a queue "
                "need one core per replica."
            )
        self._topology.on_host(self._put_all, batches, call)

    def _put_all(self, batches: Sequence[Prepared], call: Call) -> None:
        cores = self._tpu.cores_per_replica
        parts = [self._parts(batch, cores) for batch in batches]
        ids = [ids for part in parts for core in part for ids in core.ids]
        # No batch is enqueued before all batches are checked.
        checked = [tensor for tensor in ids if tf.is_symbolic_tensor(tensor)]
        with tf.control_dependencies([*checked, *self._still_there()]):
            mode, replica = self._mode(call.training), call.replica
            replicas = range(len(batches)) if replica is None else (replica,)
            for number, part in zip(replicas, parts, strict=True):
                for core, batch in enumerate(part):
                    device = self._tpu.devices[number][core]
                    _tag(self._put(batch, device, mode), call.name)

    def _enqueue_on(self, device: str | tf.Tensor, batch: Prepared, call: Call) -> None:
        with tf.device(self._topology.device):
            checked = check_device(self._topology, device)
            (part,) = _core_batches(self._select(batch.value, of_core=True), 1)
            with tf.control_dependencies([*checked, *self._still_there()]):
                _tag(self._put(part, device, self._mode(call.training)), call.name)

    def dequeue(self, call: Call) -> list[tf.Tensor]:
        # The program runs on the cores of its replica, configured for one shape.
        with tf.control_dependencies(self._still_there()):
            activations = tf.raw_ops.RecvTPUEmbeddingActivations(
                num_outputs=len(self._plan.features), config=self._config
            )
        _tag(activations[0], call.name)
        return [
            tf.ensure_shape(activation, (*shape, dim))
            for activation, shape, dim in zip(
                activations, self._output_shapes, self._plan.dims, strict=True
            )
        ]

    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        checks, inputs = [], []
        for spec, shape, dim, gradient in zip(
            self._plan.features,
            self._output_shapes,
            self._plan.dims,
            gradients,
            strict=True,
        ):
            inputs.append(tf.zeros((*shape, dim)) if gradient is None else gradient)
            if gradient is not None and self._options.check_numerics:
                checks.append(finite_gradient(spec.path, gradient))
        rates = self._rates.evaluate()
        ready = [*require(checks), *rates, *self._still_there()]
        with tf.control_dependencies(ready):
            sent = tf.raw_ops.SendTPUEmbeddingGradients(
                inputs=inputs, learning_rates=rates, config=self._config
            )
        _tag(sent, call.name)
        with tf.control_dependencies([] if sent is None else [sent]):
            self._rates.count_update()

    def inputs(self, batch: Sequence[IdBatch]) -> tuple[tuple[tf.Tensor, ...], ...]:
        """Checks a batch for one core; returns each feature's splits, ids, weights."""
        (part,) = _core_batches(self._select(batch), 1)
        return tuple(zip(part.splits, part.ids, part.weights, strict=True))

    def _parts(self, batch: Prepared, cores: int) -> list[_CoreBatch]:
        """Returns the batch of each core."""
        if batch.tensors is None:
            return _core_batches(self._select(batch.value), cores)
        assert cores == 1  # Only programs take plain tensors, and only with one core.
        splits, ids, weights = zip(*batch.tensors.inputs, strict=True)
        return [_CoreBatch(list(splits), list(ids), list(weights))]

    def _select(
        self, batch: Sequence[IdBatch], *, of_core: bool = False
    ) -> list[Selection]:
        """Checks the features of a replica or of one core."""
        inputs = []
        for spec, feature in zip(self._plan.features, batch, strict=True):
            declared = self._options.output_shapes.declared(spec.index)
            if declared is not None and of_core:
                shape = self._output_shapes[spec.index]
                cores = self._tpu.cores_per_replica
                declared = dataclasses.replace(
                    declared, shape=core_shape(spec.path, shape, cores)
                )
            inputs.append(
                FeatureInput(
                    spec=spec,
                    table=self._plan.tables[spec.table],
                    batch=feature,
                    declared=declared,
                    check_numerics=self._options.check_numerics,
                )
            )
        return select(inputs)

    def _mode(self, training: bool) -> tf.Tensor:
        if self._topology.program() is None:
            return tf.constant("train" if training else "inference")
        # The compiler of a program replaces the input of this op: a batch is a
        # training batch if the program sends gradients under the same name.
        return tf.where(training, tf.constant("train"), tf.constant("inference"))

    def _put(self, batch: _CoreBatch, device: str | tf.Tensor, mode: tf.Tensor) -> Any:
        """Enqueues one batch; returns the op, or None if executed eagerly."""
        if not isinstance(device, str):
            names, host = self._tpu.all_devices, self._tpu.hosts[0]
            ordinal = tf.cast(device, tf.int32)
        elif self._topology.program() is None:
            names, host = [device], self._tpu.host_of(device)
            ordinal = self._tpu.ordinal(device)
        else:
            names, host, ordinal = [device], None, -1  # The compiler knows the core.
        # TensorFlow does not order these ops, but batches must keep their order.
        last = self._last.setdefault(tf.compat.v1.get_default_graph(), {})
        earlier = [last[name] for name in names if last.get(name) is not None]
        enqueue = (
            tf.raw_ops.DynamicEnqueueTPUEmbeddingArbitraryTensorBatch
            if tf.is_tensor(ordinal)
            else tf.raw_ops.EnqueueTPUEmbeddingArbitraryTensorBatch
        )
        with tf.device(host), tf.control_dependencies(earlier):
            made = enqueue(
                sample_indices_or_row_splits=batch.splits,
                embedding_indices=batch.ids,
                aggregation_weights=batch.weights,
                mode_override=mode,
                device_ordinal=ordinal,
                combiners=self._combiners,
            )
        last.update(dict.fromkeys(names, made))
        return made


def core_shape(path: str, shape: tuple[int, ...], cores: int) -> tuple[int, ...]:
    """Returns the part of `shape` on each of the cores of a replica."""
    samples, *others = shape
    if samples % cores:
        raise ValueError(
            f"Feature {path}: each replica has {cores} cores, so the first axis of the "
            f"output shape must be divisible by {cores}. Received: {shape}."
        )
    return (samples // cores, *others)


@dataclasses.dataclass(frozen=True)
class _CoreBatch:
    """The batch of one core, with one element for each feature.

    Attributes:
      splits: int32 [samples + 1], or [0] if each sample has one id.
      ids: int64 [n].
      weights: float32 [n], or [0] if all are 1.
    """

    splits: list[tf.Tensor]
    ids: list[tf.Tensor]
    weights: list[tf.Tensor]


def _core_batches(selections: Sequence[Selection], cores: int) -> list[_CoreBatch]:
    """Divides the batch of a replica among its cores, along the first axis."""
    parts = [_split(selection, cores) for selection in selections]
    return [
        _CoreBatch(*(list(column) for column in zip(*features, strict=True)))
        for features in zip(*parts, strict=True)
    ]


def _split(
    selection: Selection, cores: int
) -> list[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
    """Returns (splits, ids, weights) of each core."""
    no_weights = tf.zeros([0], tf.float32)
    if selection.one_each and selection.weights is None:
        no_splits = tf.zeros([0], tf.int32)
        ids = tf.split(tf.reshape(selection.rows, [-1]), cores)
        return [(no_splits, part, no_weights) for part in ids]
    count = selection.num_samples
    # This waits for the checks: a sparse shape may claim any number of samples.
    with tf.control_dependencies([selection.samples]):
        ends = tf.range(count + 1)
    splits = tf.searchsorted(selection.samples, ends, side="left", out_type=tf.int32)
    if cores == 1:
        weights = no_weights if selection.weights is None else selection.weights
        return [(splits, selection.rows, weights)]
    parts = []
    for core in range(cores):
        own = splits[count * core // cores : count * (core + 1) // cores + 1]
        begin, end = own[0], own[-1]
        weights = no_weights
        if selection.weights is not None:
            weights = selection.weights[begin:end]
        parts.append((own - begin, selection.rows[begin:end], weights))
    return parts


def _tag(made: Any, name: str | None) -> None:
    """Marks an op with the name that TPU programs pair ops by."""
    if name is None or tf.executing_eagerly():
        return
    op = made.op if isinstance(made, tf.Tensor) else made
    op._set_attr(NAME_ATTRIBUTE, _AttrValue(s=tf.compat.as_bytes(name)))
