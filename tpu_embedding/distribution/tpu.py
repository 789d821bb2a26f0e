"""The TPUs of a strategy: real ones, or those of the software TPU."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.tpu import tpu_replication

from tpu_embedding import tpu_generations

# Attribute of an input of a software TPU's program: the device that it comes from.
INPUT_DEVICE_ATTRIBUTE = "_software_tpu_input_device"
# Attribute of the `extended` of a TPUStrategy whose TPUs are only described. It holds
# their Generation.
DESCRIBED_GENERATION = "described_generation"


def _no_watch(ended: str) -> Callable[[], list[Any]]:
    """Returns a watch that never fails: TensorFlow does not report lost TPUs here."""
    del ended
    return list


@dataclasses.dataclass(frozen=True)
class TPUSystem:
    """The TPUs of a TPUStrategy.

    Attributes:
      generation: The generation of the TPUs. A real TPU does not report its name, only
        its hardware for embeddings.
      devices: The names of the devices of each replica, one for each of its cores.
      hosts: The names of the CPUs of their hosts, ordered by task.
      assigned: Whether a tf.tpu.experimental.DeviceAssignment has placed the replicas.
      watch: Takes the text of a tf.errors.FailedPreconditionError and returns a
        function that makes control inputs, which fail with it once the TPUs were
        initialized again. A real TPU cannot report that.
    """

    generation: tpu_generations.Generation
    devices: tuple[tuple[str, ...], ...]
    hosts: tuple[str, ...]
    assigned: bool
    watch: Callable[[str], Callable[[], list[Any]]] = _no_watch

    @classmethod
    def of(cls, strategy: Any) -> TPUSystem:
        """Returns the TPU system of a strategy.

        Raises:
          RuntimeError: If the TPUs are not initialized.
        """
        extended = strategy.extended
        feature = extended.tpu_hardware_feature
        if feature.tpu_hardware_feature_proto is None:
            raise RuntimeError(
                "The TPU system of this TPUStrategy is not initialized, so its "
                "embedding hardware is unknown. Before you create the strategy, call "
                "tf.tpu.experimental.initialize_tpu_system(resolver) with the resolver "
                "of the strategy."
            )
        # No public property has the devices of all cores.
        devices = tuple(tuple(cores) for cores in extended._tpu_devices)
        # TPUs that are described for the compiler have a name, which real ones hide.
        generation = getattr(extended, DESCRIBED_GENERATION, None)
        if generation is None:
            generation = tpu_generations.reported(
                feature.embedding_feature.value, feature.num_embedding_devices_per_chip
            )
        return cls(
            generation=generation,
            devices=devices,
            hosts=_hosts([cores[0] for cores in devices]),
            assigned=extended._device_assignment is not None,
        )

    @property
    def programs_can_fail(self) -> bool:
        """Whether a program can fail because of a value."""
        return False

    @property
    def cores_per_replica(self) -> int:
        """The number of cores that work on one replica's part of the batch."""
        return len(self.devices[0])

    @property
    def all_devices(self) -> list[str]:
        """The devices of all replicas."""
        return list(itertools.chain.from_iterable(self.devices))

    @property
    def system(self) -> str:
        """The device that configures all devices."""
        host = tf.DeviceSpec.from_string(self.hosts[0])
        return host.replace(device_type="TPU_SYSTEM").to_string()

    def holds(self, device: str) -> bool:
        """Returns whether a tensor on `device` is in the memory of a TPU."""
        return tf.DeviceSpec.from_string(device).device_type == "TPU"

    def host_of(self, device: str) -> str:
        """Returns the CPU beside a device."""
        return _host_of(device)

    def host_of_program(self, replica: int) -> str:
        """Returns the CPU that runs the host's part of a replica's program."""
        return _host_of(self.devices[replica][0])

    def ordinal(self, device: str) -> int:
        """Returns the number of a device among those of its host."""
        index = tf.DeviceSpec.from_string(device).device_index
        assert index is not None
        return index

    def replica(self, context: tf.distribute.ReplicaContext) -> int:
        """Returns the replica that is traced: 0, as one program stands for all."""
        del context
        return 0

    def program(self) -> Any:
        """Returns the graph that becomes a program, or None outside of one."""
        found = _tpu_context()
        return None if found is None else found[0]

    def on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function` in a replica so that its ops run on the CPU beside it."""
        if self.program() is None:
            return function(*arguments)
        return tf.compat.v1.tpu.outside_compilation(function, *arguments)

    def call_on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a part of `on_host` as a function that is not inlined.

        TensorFlow's compiler of TPU programs otherwise merges equal constants of all
        parts on the host, and cannot cut the parts out.
        """
        attributes = {"_noinline": True}
        return tf.function(
            function, autograph=False, experimental_attributes=attributes
        )(*arguments)

    def of_replica(self, parts: Sequence[tf.Tensor], replica: int) -> tf.Tensor:
        """Returns the host resource of the calling replica, one of R `parts`."""
        del replica
        found = _tpu_context()
        assert found is not None
        graph, context = found
        # One program stands for all replicas. As for variables of a TPUStrategy, its
        # input is made outside of it.
        with graph.as_default():
            inner = graph._get_control_flow_context()
            graph._set_control_flow_context(context.outer_context)
            chosen = tf.raw_ops.TPUReplicatedInput(inputs=list(parts))
            graph._set_control_flow_context(inner)
        return chosen

    def barrier(self, tensors: Sequence[Any], total: Callable[..., Any]) -> list[Any]:
        """Makes control inputs that wait for `tensors` in all replicas of a program.

        A real TPU needs no barrier: it writes variables at the end of a program, and
        none if the program fails. But changes of queues on its hosts are not undone.
        """
        del total
        return list(tensors)

    def after(self, value: tf.Tensor, before: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns `value`, which a program gets only once `before` is computed.

        XLA drops control inputs, but keeps the order of its optimization barrier.
        """
        held: Any = gen_xla_ops.xla_optimization_barrier(input=[value, *before])
        return held[0]


@dataclasses.dataclass(frozen=True)
class SoftwareTPUSystem(TPUSystem):
    """A TPU in software: each CPU device is a TPU, and the first also is the host."""

    @classmethod
    def of(cls, strategy: Any) -> SoftwareTPUSystem:
        extended = strategy.extended
        return cls(
            generation=extended.tpu_hardware,
            devices=extended.replica_devices,
            hosts=(extended.worker_devices[0],),
            assigned=extended.assigned,
            watch=extended.watch,
        )

    @property
    def programs_can_fail(self) -> bool:
        return True

    @property
    def system(self) -> str:
        return self.hosts[0]

    def holds(self, device: str) -> bool:
        """Returns whether `device` is a TPU, and not the host."""
        return find(device, self.all_devices) not in (None, *self.hosts)

    def host_of(self, device: str) -> str:
        del device
        return self.hosts[0]

    def host_of_program(self, replica: int) -> str:
        return self.devices[replica][0]

    def replica(self, context: tf.distribute.ReplicaContext) -> int:
        """Returns the replica that is traced; each has a program of its own."""
        return int(tf.get_static_value(context.replica_id_in_sync_group))

    def program(self) -> Any:
        # The replica context of the software TPU knows its program.
        return getattr(tf.distribute.get_replica_context(), "program", None)

    def on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def call_on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def of_replica(self, parts: Sequence[tf.Tensor], replica: int) -> tf.Tensor:
        return parts[replica]

    def barrier(self, tensors: Sequence[Any], total: Callable[..., Any]) -> list[Any]:
        with tf.control_dependencies(tensors):
            return [total(tf.zeros([], tf.int32))]

    def after(self, value: tf.Tensor, before: Sequence[tf.Tensor]) -> tf.Tensor:
        with tf.control_dependencies(before):
            return tf.identity(value)


def is_argument(tensor: Any) -> bool:
    """Returns whether a tensor comes straight from the arguments of strategy.run."""
    if not tf.is_symbolic_tensor(tensor):
        return False
    if tensor.op.type == "Placeholder":
        return True
    with contextlib.suppress(ValueError):  # The op has no such attribute.
        return tensor.op.get_attr("_tpu_input_identity")
    return False


def devices_of(tensor: Any) -> list[str]:
    """Returns a tensor's known devices; for a run's argument, those of its source."""
    if not tf.is_tensor(tensor):
        return []
    devices = [tensor.device]
    if tf.is_symbolic_tensor(tensor) and tensor.op.type == "Identity":
        source = tensor.op.inputs[0].op
        if source.type == "TPUReplicatedInput":
            devices = [replica.device for replica in source.inputs]
        with contextlib.suppress(ValueError):  # The op has no such attribute.
            devices = [tf.compat.as_str(tensor.op.get_attr(INPUT_DEVICE_ATTRIBUTE))]
    return [device for device in devices if device]


def find(device: Any, known: Sequence[str]) -> str | None:
    """Returns the known device that the user named, maybe in part, or None."""
    try:
        asked = tf.DeviceSpec.from_string(device)
    except (TypeError, ValueError, AttributeError):  # It is no name of a device.
        return None
    for own in known:
        spec = tf.DeviceSpec.from_string(own)
        if spec.make_merged_spec(asked) == spec and asked.device_index is not None:
            return own
    return None


def _hosts(devices: Sequence[str]) -> tuple[str, ...]:
    """Returns the hosts of TPU devices in the order in which shards are numbered."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    specs.sort(key=lambda spec: (spec.replica or 0, spec.task or 0))
    return tuple(dict.fromkeys(_host_of(spec.to_string()) for spec in specs))


def _host_of(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()


def _tpu_context() -> tuple[Any, Any] | None:
    """Returns the graph that is rewritten into a program, and the rewriting context."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if isinstance(context, tpu_replication.TPUReplicateContext):
                return graph, context
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return None
