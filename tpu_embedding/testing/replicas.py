"""Traces one function per replica and runs them together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.distribute import distribute_utils

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

    To be called while a graph is built, in cross-replica context.

    Args:
      strategy: The SoftwareTPUStrategy.
      fn: Returns a nested structure of tensors and None.
      args: Positional arguments; of distributed values each replica gets its own.
      kwargs: Keyword arguments, likewise.
      meeting_timeout: Seconds.

    Returns:
      What `fn` returned, with per-replica values as leaves.
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
    # The host of all devices; the functions run on their own.
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
    """The sum or mean of `value` over all replicas, in a replica context."""
    tensors = [tf.convert_to_tensor(part) for part in tf.nest.flatten(value)]
    if not tensors:
        return value
    totals = library.load().tpu_embedding_software_tpu_all_reduce(values=tensors)
    if reduce_op in (tf.distribute.ReduceOp.MEAN, "MEAN", "mean"):
        totals = [total / tf.cast(num_replicas, total.dtype) for total in totals]
    return tf.nest.pack_sequence_as(value, totals)


class _ReplicaContext(tf.distribute.ReplicaContext):
    """A replica whose program has no part that is shared with others.

    Attributes:
      program: The graph of the program.
    """

    def __init__(self, strategy: tf.distribute.Strategy, replica: int) -> None:
        super().__init__(strategy, replica_id_in_sync_group=replica)
        self.program = tf.compat.v1.get_default_graph()

    def _merge_call(self, merge_fn: Any, args: Any, kwargs: Any) -> Any:
        # TensorFlow asks for it in one place in spite of `_use_merge_call`: a variable
        # that all replicas assign takes the value of the first.
        if not merge_fn.__qualname__.startswith("apply_aggregation_replica_context."):
            raise NotImplementedError(
                "SoftwareTPUStrategy has no merge_call: each replica is a program of "
                "its own. Use tf.distribute.get_replica_context().all_reduce, or do "
                "what needs all replicas outside of strategy.run."
            )
        (value,) = args
        first = tf.get_static_value(self.replica_id_in_sync_group) == 0
        return self.all_reduce("SUM", value if first else tf.zeros_like(value))


def _trace(
    strategy: tf.distribute.Strategy,
    replica: int,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    # Without autograph: it has been applied to `fn`, and is not for this library.
    @tf.function(autograph=False)
    def replica_fn() -> Any:
        context = _ReplicaContext(strategy, replica)
        with context, tf.device(strategy.extended.worker_devices[replica]):
            result = fn(*_taken_in(args), **_taken_in(kwargs))
            settle_modes(context.program)
            return result

    return replica_fn.get_concrete_function()


def _taken_in(arguments: Any) -> Any:
    """The arguments as a TPU's compiler takes them in: told from all other tensors."""

    def take_in(value: Any) -> Any:
        if not isinstance(value, tf.Tensor):
            return value
        taken = tf.identity(value, name="replicated_input")
        taken.op._set_attr("_tpu_input_identity", _AttrValue(b=True))
        device = tf.compat.as_bytes(value.device or "")
        taken.op._set_attr(INPUT_DEVICE_ATTRIBUTE, _AttrValue(s=device))
        return taken

    return tf.nest.map_structure(take_in, arguments, expand_composites=True)


def _pack(function: Any, remaining: Iterator[tf.Tensor]) -> Any:
    """The outputs of one function, taken from those of all functions."""
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


_SEND = "SendTPUEmbeddingGradients"
_ENQUEUE = "EnqueueTPUEmbedding"


def settle_modes(program: Any) -> None:
    """Sets the mode of each enqueue op that has a name.

    Args:
      program: The graph of one replica's program, traced to its end.
    """
    operations = program.get_operations()
    trained = {_name(op) for op in operations if op.type == _SEND}
    for op in operations:
        name = _name(op)
        if _ENQUEUE in op.type and name is not None:
            _set_mode(op, "train" if name in trained else "inference")


def _name(op: tf.Operation) -> bytes | None:
    with contextlib.suppress(ValueError):  # No such attribute.
        return op.get_attr(NAME_ATTRIBUTE)
    return None


def _set_mode(op: Any, mode: str) -> None:
    index = next(i for i, tensor in enumerate(op.inputs) if tensor.dtype == tf.string)
    op._update_input(index, tf.constant(mode))
