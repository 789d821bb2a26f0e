"""Traces one function per replica and runs all of them together."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.distribute import distribute_lib, distribute_utils
from tensorflow.python.distribute import values as distributed_values

from tpu_embedding.distribution import INPUT_DEVICE_ATTRIBUTE
from tpu_embedding.testing import library
from tpu_embedding.tpu_generations import NAME_ATTRIBUTE

_AttrValue: Any = vars(attr_value_pb2)["AttrValue"]


def run_together(
    strategy: tf.distribute.Strategy,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    meeting_timeout: float,
) -> Any:
    """Calls `fn` in a replica context for each replica, all at the same time.

    Call it while a graph is built, in cross-replica context. Each replica gets its part
    of distributed values. The leaves of the result are per-replica values.
    """
    devices = strategy.extended.worker_devices
    traced = [
        _trace(
            strategy,
            replica,
            fn,
            distribute_utils.select_replica(replica, args),
            distribute_utils.select_replica(replica, kwargs),
        )
        for replica in range(len(devices))
    ]
    for function in traced:
        function.add_to_graph(tf.compat.v1.get_default_graph())
    # The op is placed on the host; the functions run on their own devices.
    with tf.device(devices[0]):
        outputs = library.load().tpu_embedding_software_tpu_run(
            inputs=[value for function in traced for value in function.captured_inputs],
            Tout=[output.dtype for function in traced for output in function.outputs],
            replicas=traced,
            devices=devices,
            num_inputs=[len(function.captured_inputs) for function in traced],
            num_outputs=[len(function.outputs) for function in traced],
            sparse_cores=strategy.extended.tpu_hardware.sparse_cores_per_device,
            meeting_timeout=meeting_timeout,
        )
    remaining = iter(outputs if traced[0].outputs else ())
    return distribute_utils.regroup(
        tuple(_pack(function, remaining) for function in traced)
    )


def all_reduce(reduce_op: Any, value: Any, num_replicas: int) -> Any:
    """Returns the sum or mean of `value` over all replicas, in a replica context."""
    tensors = [tf.convert_to_tensor(part) for part in tf.nest.flatten(value)]
    if not tensors:
        return value
    totals = library.load().tpu_embedding_software_tpu_all_reduce(values=tensors)
    if reduce_op in (tf.distribute.ReduceOp.MEAN, "MEAN", "mean"):
        totals = [total / tf.cast(num_replicas, total.dtype) for total in totals]
    return tf.nest.pack_sequence_as(value, totals)


class _ReplicaContext(tf.distribute.ReplicaContext):
    """A replica with a program of its own.

    Attributes:
      number: The number of the replica.
      program: The graph of the program.
    """

    def __init__(self, strategy: tf.distribute.Strategy, replica: int) -> None:
        super().__init__(strategy, replica_id_in_sync_group=replica)
        self.number = replica
        self.program = tf.compat.v1.get_default_graph()

    def _merge_call(self, merge_fn: Any, args: Any, kwargs: Any) -> Any:
        """Calls `merge_fn` in cross-replica context, in the program of this replica.

        As under TPUStrategy `merge_fn` gets the values of this replica, and `_Extended`
        joins them with those of the others.
        """
        token = _merging.set(self)
        try:
            return super()._merge_call(merge_fn, args, kwargs)
        finally:
            _merging.reset(token)


_merging: contextvars.ContextVar[_ReplicaContext | None] = contextvars.ContextVar(
    "merging", default=None
)


def merging() -> int | None:
    """Returns the replica whose program is in a merge_call's function, or None."""
    context = _merging.get()
    return None if context is None else context.number


def is_in_program() -> bool:
    """Returns whether the program of a replica is being traced."""
    context = tf.distribute.get_replica_context()
    return merging() is not None or getattr(context, "program", None) is not None


def merge(reduce_op: Any, value: Any, num_replicas: int) -> Any:
    """Reduces what each replica passes, in the function of a merge_call."""
    return all_reduce(reduce_op, _own(value), num_replicas)


def broadcast(value: Any) -> tf.Tensor:
    """Returns what the first replica passes, in the function of a merge_call."""
    own = tf.convert_to_tensor(_own(value))
    return all_reduce("SUM", own if merging() == 0 else tf.zeros_like(own), 1)


def call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `fn` in the replica's context again, in the function of a merge_call."""
    context = _merging.get()
    assert context is not None
    own_args: Any = distribute_utils.select_replica(context.number, args)
    own_kwargs: Any = distribute_utils.select_replica(context.number, kwargs)
    token = _merging.set(None)
    try:
        # The context is new: one that is entered twice does not restore what it found.
        with _ReplicaContext(context.strategy, context.number):
            return fn(*own_args, **own_kwargs)
    finally:
        _merging.reset(token)


def update(
    fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], group: bool
) -> Any:
    """Calls `fn` with a replica's copies of variables, in a merge_call's function.

    Each variable becomes the replica's copy. Unless `group` is set, the result is a
    tuple with an item for each copy.
    """
    # The device is that of the program.
    with distribute_lib.UpdateContext(merging()):
        own_kwargs: dict[str, Any] = _own(kwargs)
        result = fn(*_own(args), **own_kwargs)
    return result if group else (result,)


def _own(structure: Any) -> Any:
    """Takes the part of the merging replica from distributed values."""
    replica = merging()

    def take(part: Any) -> Any:
        kind: Any = distributed_values.DistributedValues
        return part.values[replica] if isinstance(part, kind) else part

    return tf.nest.map_structure(take, structure)


def _trace(
    strategy: tf.distribute.Strategy,
    replica: int,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    # Autograph has been applied to `fn`, and this package does not need it.
    @tf.function(autograph=False)
    def replica_fn() -> Any:
        context = _ReplicaContext(strategy, replica)
        with context, tf.device(strategy.extended.worker_devices[replica]):
            result = fn(*_mark_inputs(args), **_mark_inputs(kwargs))
            _set_modes(context.program)
            return result

    return replica_fn.get_concrete_function()


def _mark_inputs(arguments: Any) -> Any:
    """Marks the arguments like inputs of a TPU program, with their devices."""

    def mark(value: Any) -> Any:
        if not isinstance(value, tf.Tensor):
            return value
        marked = tf.identity(value, name="replicated_input")
        marked.op._set_attr("_tpu_input_identity", _AttrValue(b=True))
        device = tf.compat.as_bytes(value.device or "")
        marked.op._set_attr(INPUT_DEVICE_ATTRIBUTE, _AttrValue(s=device))
        return marked

    return tf.nest.map_structure(mark, arguments, expand_composites=True)


def _pack(function: Any, remaining: Iterator[tf.Tensor]) -> Any:
    """Returns the outputs of one function, taken from those of all functions."""
    structure = function.structured_outputs
    taken = []
    for traced in function.outputs:
        taken.append(next(remaining))
        taken[-1].set_shape(traced.shape)
    given = iter(taken)
    leaves = [
        None if leaf is None else next(given)
        for leaf in tf.nest.flatten(structure, expand_composites=True)
    ]
    return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)


def _set_modes(program: Any) -> None:
    """Sets the mode of each named enqueue op, as a TPU's compiler does.

    A batch that a program enqueues under a name is a training batch if the program
    sends gradients under that name, whatever `training` was passed to enqueue.
    """
    operations = program.get_operations()
    trained = {_name(op) for op in operations if op.type == "SendTPUEmbeddingGradients"}
    for op in operations:
        name = _name(op)
        if "EnqueueTPUEmbedding" in op.type and name is not None:
            dtypes = [tensor.dtype for tensor in op.inputs]
            mode = tf.constant("train" if name in trained else "inference")
            op._update_input(dtypes.index(tf.string), mode)


def _name(op: tf.Operation) -> bytes | None:
    with contextlib.suppress(ValueError):  # The op has no such attribute.
        return op.get_attr(NAME_ATTRIBUTE)
    return None
