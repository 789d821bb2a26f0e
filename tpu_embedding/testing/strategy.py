"""SoftwareTPUStrategy: a tf.distribute strategy whose TPU is a program on the CPU.

Under MirroredStrategy the replicas of one process cannot wait for one another, because
TensorFlow runs the stateful ops of one replica before those of the next. Here each
replica is a function of its own, and one op runs all of them together.
"""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.tpu import topology_pb2
from tensorflow.python.distribute import mirrored_strategy, values

from tpu_embedding import errors, tpu_generations
from tpu_embedding.testing import library, replicas


class TPUStrategyOfCPUs(tf.distribute.Strategy):
    """A name by which tf_keras recognizes strategies of TPUs.

    It then takes the metrics of the first replica, which are those of all replicas;
    under an unknown strategy it adds them up.
    """


class SoftwareTPUStrategy(TPUStrategyOfCPUs):
    """Runs TPU programs on logical CPU devices, one per TPU core.

    Like TPUStrategy, `run` traces its function once per replica and signature: Python
    side effects happen while tracing. Variables created in `scope()` are mirrored.
    A process has one embedding engine of v2, v3 and v4, which the creation of such a
    strategy resets.

    >>> strategy = SoftwareTPUStrategy("v5p", num_devices=2)
    >>> strategy.num_replicas_in_sync
    2
    """

    # MirroredExtended needs it, although nothing here uses collectives.
    _collective_key_base = 0

    def __init__(
        self,
        generation: str = "v5p",
        num_devices: int = 2,
        *,
        cores_per_replica: int | None = None,
        experimental_device_assignment: Any = None,
        meeting_timeout: float = 60.0,
    ):
        """Uses the first `num_devices` logical CPU devices, and creates them if needed.

        Args:
          generation: "v2", "v3", "v4", "v5e", "v5p", "v6e" or "7x".
          num_devices: Number of devices; each device is a core.
          cores_per_replica: On v2, v3 and v4, the number of adjacent cores that work
            on one replica; its program runs on the first of them. None makes each core
            a replica.
          experimental_device_assignment: Instead of `cores_per_replica`, a
            tf.tpu.experimental.DeviceAssignment with the cores of each replica, as
            for TPUStrategy.
          meeting_timeout: Seconds that an op of one replica waits for those of the
            others before it fails and names the missing replicas.

        Raises:
          ValueError: For an unknown generation and for arguments out of range.
          RuntimeError: If TensorFlow has started with fewer devices, the kernels
            cannot be loaded, or TensorFlow has its own kernels for v2, v3 and v4.
        """
        chosen = tpu_generations.generation(generation)
        errors.check_int("num_devices", num_devices, 1)
        if not (0 < meeting_timeout < math.inf):
            raise ValueError(
                "Argument `meeting_timeout` must be a number of seconds > 0. "
                f"Received: {meeting_timeout!r}."
            )
        if experimental_device_assignment is not None:
            if cores_per_replica is not None:
                raise ValueError(
                    "Pass either `cores_per_replica` or "
                    "`experimental_device_assignment`, not both."
                )
            cores = _assigned_cores(experimental_device_assignment, num_devices)
        else:
            cores = _adjacent_cores(cores_per_replica, num_devices)
        if len(cores[0]) > 1 and chosen.embedding != "v1":
            raise ValueError(
                "Several cores per replica are supported only for v2, v3 and v4. "
                f"Received: generation={generation!r}. Leave `cores_per_replica` at "
                "None."
            )
        library.load()
        if chosen.embedding == "v1":
            library.check_engine()
        create_devices(num_devices, f"SoftwareTPUStrategy(num_devices={num_devices})")
        # Like TPUStrategy, a strategy with one core per replica may be assigned, too.
        assigned = not (cores_per_replica is experimental_device_assignment is None)
        extended = _Extended(self, cores, assigned, chosen, meeting_timeout)
        super().__init__(extended)
        if chosen.embedding == "v1":
            self.initialize_tpu_system()

    def initialize_tpu_system(self) -> None:
        """Resets the embedding engine of v2, v3 and v4, which loses its tables.

        A process has one such engine, as a TPU has. For TPUs, TensorFlow's function of
        this name is called before a strategy is created; here the constructor does it.
        """
        with tf.init_scope():
            library.load().tpu_embedding_software_tpu_initialize(
                meeting_timeout=self.extended.meeting_timeout
            )


class _Extended(mirrored_strategy.MirroredExtended):
    """Variables, datasets and reductions of MirroredStrategy, with another `run`."""

    # The devices of a software TPU belong to this process, as for TPUStrategy.
    num_hosts = 1

    def __init__(
        self,
        strategy: SoftwareTPUStrategy,
        cores: list[list[int]],
        assigned: bool,
        generation: tpu_generations.Generation,
        meeting_timeout: float,
    ):
        super().__init__(
            strategy,
            devices=[f"/device:CPU:{own[0]}" for own in cores],
            # The default, collectives, cannot run inside of one op.
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        self.tpu_hardware = generation
        # Programs ask a TPUStrategy by this name which embedding hardware it has.
        self.tpu_hardware_feature = tf.tpu.experimental.HardwareFeature(
            describe_hardware(generation)
        )
        # The full names of the cores of each replica, as in `worker_devices`.
        name = tf.DeviceSpec.from_string(self.worker_devices[0])
        self.replica_devices = tuple(
            tuple(name.replace(device_index=core).to_string() for core in own)
            for own in cores
        )
        # TPUStrategy has an array of this name, too.
        self._tpu_devices = np.array(self.replica_devices)
        self.assigned = assigned
        self.meeting_timeout = meeting_timeout
        self._programs = weakref.WeakKeyDictionary()

    def watch(self, ended: str) -> Callable[[], list[Any]]:
        """See `distribution.TPUSystem.watch`."""
        check = library.load().tpu_embedding_software_tpu_session
        with tf.init_scope():
            session = int(check())

        def watcher() -> list[Any]:
            checked = check(expected=session, ended=ended)
            return [checked] if tf.is_symbolic_tensor(checked) else []

        return watcher

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        # MirroredStrategy has no parameter for the classes of its variables.
        if type(variable) is values.MirroredVariable:
            variable.__class__ = _MirroredVariable
        elif type(variable) is values.SyncOnReadVariable:
            variable.__class__ = _SyncOnReadVariable
        return variable

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if replicas.merging() is not None:
            return replicas.call(fn, args, kwargs or {})
        if not tf.executing_eagerly():
            return self._trace(fn, args, kwargs or {})
        if not isinstance(
            fn, (tf.types.experimental.PolymorphicFunction, types.MethodType)
        ):
            # tf.distribute has wrapped the function anew for this call. (Methods come
            # as they are if autograph leaves them alone, else as functions.)
            fn = getattr(fn, "__wrapped__", fn)
        return self._program(fn)(args, kwargs or {})

    def _trace(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return replicas.run_together(
            self._container_strategy(), fn, args, kwargs, self.meeting_timeout
        )

    def _program(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the traced program of `fn`, the same for each call with `fn`."""
        method = getattr(fn, "__func__", None)
        programs = self._programs.setdefault(getattr(fn, "__self__", fn), {})
        if method not in programs:
            # This is weak: a strong reference would keep the key of the program alive.
            reference = weakref.WeakMethod(fn) if method else weakref.ref(fn)
            # Autograph is off inside `program`, because this package does not need it.
            status = tf.__internal__.autograph.control_status_ctx()

            @tf.function(autograph=False)
            def program(args: Any, kwargs: Any) -> Any:
                function = tf.__internal__.autograph.tf_convert(reference(), status)
                return self._trace(function, args, kwargs)

            programs[method] = program
        return programs[method]

    # The function of a merge_call is part of the program of each replica, as in a
    # TPUStrategy. It calls the methods below with the values of its replica.

    def _reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any
    ) -> Any:
        if replicas.merging() is None:
            return super()._reduce_to(reduce_op, value, destinations, options)
        return replicas.merge(reduce_op, value, self._num_replicas_in_sync)

    def _batch_reduce_to(self, reduce_op: Any, pairs: Any, options: Any) -> Any:
        if replicas.merging() is None:
            return super()._batch_reduce_to(reduce_op, pairs, options)
        count = self._num_replicas_in_sync
        return [replicas.merge(reduce_op, value, count) for value, _ in pairs]

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        if replicas.merging() is None or isinstance(tensor, (int, float)):
            return super()._broadcast_to(tensor, destinations)
        return replicas.broadcast(tensor)

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        if replicas.merging() is None:
            return super()._gather_to_implementation(value, destinations, axis, options)
        raise NotImplementedError(
            "SoftwareTPUStrategy does not support all_gather inside strategy.run. Use "
            "tf.distribute.get_replica_context().all_reduce, or gather what "
            "strategy.run returned."
        )

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if replicas.merging() is None:
            return super()._update(var, fn, args, kwargs, group)
        return replicas.update(fn, (var, *args), kwargs, group)

    def _update_non_slot(
        self, colocate_with: Any, fn: Any, args: Any, kwargs: Any, group: bool
    ) -> Any:
        if replicas.merging() is None:
            return super()._update_non_slot(colocate_with, fn, args, kwargs, group)
        return replicas.update(fn, args, kwargs, group)


class _CastInPrograms:
    """Casts a variable that is used as another dtype, as TPUStrategy's variables do.

    For example, an int variable can be multiplied with float activations.
    """

    def _dense_var_to_tensor(
        self: Any, dtype: Any = None, name: str | None = None, as_ref: bool = False
    ) -> Any:
        if replicas.is_in_program() and dtype not in (None, self.dtype):
            return tf.cast(self.read_value(), dtype)
        parent: Any = super()
        return parent._dense_var_to_tensor(dtype=dtype, name=name, as_ref=as_ref)


class _MirroredVariable(_CastInPrograms, values.MirroredVariable):
    pass


class _SyncOnReadVariable(_CastInPrograms, values.SyncOnReadVariable):
    pass


def _adjacent_cores(cores_per_replica: int | None, num_devices: int) -> list[list[int]]:
    """Returns the cores of each replica."""
    number = 1 if cores_per_replica is None else cores_per_replica
    if type(number) is not int or number < 1 or num_devices % number:
        raise ValueError(
            "Argument `cores_per_replica` must be None or an integer > 0 that divides "
            f"`num_devices`, {num_devices}. Received: {cores_per_replica!r}."
        )
    return [
        list(range(first, first + number)) for first in range(0, num_devices, number)
    ]


def _assigned_cores(assignment: Any, num_devices: int) -> list[list[int]]:
    """Returns the cores of each replica of a DeviceAssignment."""
    cores = [
        [
            int(assignment.tpu_ordinal(replica=replica, logical_core=core))
            for core in range(assignment.num_cores_per_replica)
        ]
        for replica in range(assignment.num_replicas)
    ]
    used = [core for own in cores for core in own]
    if len(set(used)) < len(used) or max(used) >= num_devices:
        raise ValueError(
            "`experimental_device_assignment` must assign different devices of one "
            f"host, from 0 to {num_devices - 1}. Received: {cores}."
        )
    return cores


def describe_hardware(generation: tpu_generations.Generation) -> Any:
    """Returns what a TPU system reports of its hardware, a TPUHardwareFeature proto.

    >>> feature = describe_hardware(tpu_generations.generation("v6e"))
    >>> tf.tpu.experimental.HardwareFeature(feature).embedding_feature.value
    'V2'
    """
    proto: Any = vars(topology_pb2)["TPUHardwareFeature"]
    feature = tpu_generations.embedding_feature(generation)
    return proto(
        embedding_feature=proto.EmbeddingFeature.Value(feature),
        num_embedding_devices_per_chip=generation.sparse_cores_per_device,
    )


def create_topology(num_devices: int, devices_per_chip: int = 1) -> Any:
    """Describes the devices of a software TPU, for device assignments.

    >>> topology = create_topology(4, devices_per_chip=2)
    >>> topology.mesh_shape.tolist()
    [2, 1, 1, 2]

    Args:
      num_devices: Number of devices, each of which is a core.
      devices_per_chip: Number of devices of a chip.

    Returns:
      A tf.tpu.experimental.Topology of one host, whose chips are in a row.
    """
    if num_devices % devices_per_chip:  # Without whole chips, each device is a chip.
        devices_per_chip = 1
    devices = [divmod(device, devices_per_chip) for device in range(num_devices)]
    return tf.tpu.experimental.Topology(
        mesh_shape=np.array([num_devices // devices_per_chip, 1, 1, devices_per_chip]),
        device_coordinates=np.array([[[chip, 0, 0, core] for chip, core in devices]]),
    )


def create_devices(count: int, what: str) -> None:
    """Makes logical CPU devices for `what`, unless there are enough."""
    physical = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(physical)
    if len(configured or ()) >= count:
        return
    try:
        tf.config.set_logical_device_configuration(
            physical, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError as error:
        found = len(tf.config.list_logical_devices("CPU"))
        if found < count:
            raise RuntimeError(
                f"{what} needs {count} logical "
                f"CPU devices, but TensorFlow has started with {found}, and they "
                "cannot be added later. Create the strategy before anything else "
                "of TensorFlow runs, or put this first:\n"
                "    tf.config.set_logical_device_configuration("
                'tf.config.list_physical_devices("CPU")[0], '
                f"[tf.config.LogicalDeviceConfiguration()] * {count})"
            ) from error
