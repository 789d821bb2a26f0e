"""SoftwareTPUStrategy: a tf.distribute strategy whose TPU is a program on the CPU.

Under MirroredStrategy the replicas of one process cannot meet: TensorFlow orders the
stateful ops of one replica before those of the next, so that the first waits for ever.
Here each replica is a function of its own, and one op runs all of them together.
"""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy

from tpu_embedding import tpu_generations
from tpu_embedding.testing import library, replicas


class SoftwareTPUStrategy(tf.distribute.Strategy):
    """Runs TPU programs on logical CPU devices, one per TPU core.

    `run` traces its function once per replica and signature, as TPUStrategy does:
    Python side effects happen while tracing. Variables made in `scope()` are mirrored.
    A process has one embedding engine of v2, v3 and v4; making such a strategy
    forgets it.

    >>> strategy = SoftwareTPUStrategy("v5p", num_devices=2)
    >>> strategy.num_replicas_in_sync
    2
    """

    # MirroredExtended asks for it, though nothing here uses collectives.
    _collective_key_base = 0

    def __init__(
        self,
        generation: str = "v5p",
        num_devices: int = 2,
        *,
        cores_per_replica: int | None = None,
        meeting_timeout: float = 60.0,
    ):
        """Takes the first `num_devices` logical CPU devices; makes them if it can.

        Args:
          generation: TPU generation, a key of `tpu_generations.GENERATIONS`.
          num_devices: Devices, each of which is a core.
          cores_per_replica: On v2, v3 and v4 the neighbouring cores that work on one
            replica, whose program runs on the first, as with a TPU's device
            assignment. None: each core is a replica.
          meeting_timeout: Seconds that an op of one replica waits for those of the
            others before it fails and names the missing ones.

        Raises:
          ValueError: For an unknown generation and for arguments out of range.
          RuntimeError: If TensorFlow has started with fewer devices, the kernels
            cannot be loaded, or for v2, v3 and v4 TensorFlow has its own.
        """
        chosen = tpu_generations.generation(generation)
        if type(num_devices) is not int or num_devices < 1:
            raise ValueError(
                "Argument `num_devices` must be an integer > 0. Received: "
                f"{num_devices!r}."
            )
        if not (0 < meeting_timeout < math.inf):
            raise ValueError(
                "Argument `meeting_timeout` must be a number of seconds > 0. Received: "
                f"{meeting_timeout!r}."
            )
        if cores_per_replica is not None:
            _check_cores(cores_per_replica, num_devices, chosen)
        library.load()
        if chosen.embedding == "v1":
            library.check_engine()
        devices = _logical_devices(num_devices)
        super().__init__(
            _Extended(self, devices, cores_per_replica, chosen, meeting_timeout)
        )
        if chosen.embedding == "v1":
            self.initialize_tpu_system()

    def initialize_tpu_system(self) -> None:
        """Forgets the embedding engine of v2, v3 and v4, and the tables in it.

        A process has one such engine, as a TPU has. TensorFlow's function of this name
        does it there before a strategy is made; here the constructor does it too.
        """
        with tf.init_scope():
            library.load().tpu_embedding_software_tpu_initialize(
                meeting_timeout=self.extended.meeting_timeout
            )


class _Extended(mirrored_strategy.MirroredExtended):
    """Variables, datasets and reductions of MirroredStrategy, but its own `run`."""

    # As TPUStrategy says it: the devices of a software TPU are all of this process.
    num_hosts = 1

    def __init__(
        self,
        strategy: SoftwareTPUStrategy,
        devices: list[str],
        cores_per_replica: int | None,
        generation: tpu_generations.Generation,
        meeting_timeout: float,
    ):
        # Not the default, collectives: they wait for each other as barriers do.
        super().__init__(
            strategy,
            devices=devices[:: cores_per_replica or 1],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        self.tpu_hardware = generation
        # For each replica its cores, by the full names of `worker_devices`.
        self.replica_devices = _dealt(
            self.worker_devices[0], devices, cores_per_replica
        )
        self.assigned = cores_per_replica is not None
        self.meeting_timeout = meeting_timeout
        self._programs = weakref.WeakKeyDictionary()

    def watch(self, ended: str) -> Callable[[], list[Any]]:
        """See `topology.TPUSystem.watch`."""
        check = library.load().tpu_embedding_software_tpu_session
        with tf.init_scope():
            session = int(check())

        def watcher() -> list[Any]:
            checked = check(expected=session, ended=ended)
            return [checked] if tf.is_symbolic_tensor(checked) else []

        return watcher

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
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
        """The traced program of `fn`; a later call with `fn` gets the same."""
        method = getattr(fn, "__func__", None)
        programs = self._programs.setdefault(getattr(fn, "__self__", fn), {})
        if method not in programs:
            # Weak: else the program would keep alive what it is kept for.
            reference = weakref.WeakMethod(fn) if method else weakref.ref(fn)
            # From here: inside `program` autograph is off, for this library's sake.
            status = tf.__internal__.autograph.control_status_ctx()

            @tf.function(autograph=False)
            def program(args: Any, kwargs: Any) -> Any:
                function = tf.__internal__.autograph.tf_convert(reference(), status)
                return self._trace(function, args, kwargs)

            programs[method] = program
        return programs[method]

    def _use_merge_call(self) -> bool:
        return False

    def _get_cross_device_ops(self, value: Any) -> Any:
        del value  # MirroredStrategy takes collectives where it has no merge_call.
        return self._cross_device_ops

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        del options  # How collectives communicate: there are none.
        return replicas.all_reduce(reduce_op, value, self._num_replicas_in_sync)


def _check_cores(
    cores_per_replica: int, num_devices: int, generation: tpu_generations.Generation
) -> None:
    if generation.embedding != "v1":
        raise ValueError(
            "Argument `cores_per_replica` is for v2, v3 and v4, whose embedding engine "
            "can serve several cores of one replica. Received generation: "
            f"{generation.name!r}. Leave it at None."
        )
    if (
        type(cores_per_replica) is not int
        or cores_per_replica < 1
        or num_devices % cores_per_replica
    ):
        raise ValueError(
            "Argument `cores_per_replica` must be None or an integer > 0 that divides "
            f"`num_devices`, {num_devices}. Received: {cores_per_replica!r}."
        )


def _dealt(
    first: str, devices: list[str], cores_per_replica: int | None
) -> tuple[tuple[str, ...], ...]:
    """The devices of each replica, by their full names, of which `first` is one."""
    spec = tf.DeviceSpec.from_string(first)
    names = [spec.replace(device_index=i).to_string() for i in range(len(devices))]
    cores = cores_per_replica or 1
    return tuple(
        tuple(names[start : start + cores]) for start in range(0, len(names), cores)
    )


def _logical_devices(count: int) -> list[str]:
    physical = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(physical)
    if len(configured or ()) < count:
        try:
            tf.config.set_logical_device_configuration(
                physical, [tf.config.LogicalDeviceConfiguration()] * count
            )
        except RuntimeError as error:
            found = len(tf.config.list_logical_devices("CPU"))
            if found < count:
                raise RuntimeError(
                    f"SoftwareTPUStrategy(num_devices={count}) needs {count} logical "
                    f"CPU devices, but TensorFlow has started with {found}, and they "
                    "cannot be added later. Create the strategy before anything else "
                    "of TensorFlow runs, or put this first:\n"
                    "    tf.config.set_logical_device_configuration("
                    'tf.config.list_physical_devices("CPU")[0], '
                    f"[tf.config.LogicalDeviceConfiguration()] * {count})"
                ) from error
    return [f"/device:CPU:{index}" for index in range(count)]
