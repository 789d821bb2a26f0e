"""What the tf.distribute strategy says about where an embedding runs.

No other module asks about strategies.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from absl import logging
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.tpu import tpu_replication

from tpu_embedding import errors, parameter_server, tpu_generations
from tpu_embedding.ops import library

Result = TypeVar("Result")

ENGINE_VARIABLE = "TPU_EMBEDDING_ENGINE"
# Attribute of an input of a software TPU's program: the device that it comes from.
INPUT_DEVICE_ATTRIBUTE = "_software_tpu_input_device"
# Attribute of the `extended` of a TPUStrategy whose TPUs are only described: their
# Generation.
DESCRIBED_GENERATION = "described_generation"
CPU_ENGINES = ("host", "portable")
# By what a generation has for embeddings.
TPU_ENGINES = {"v1": "tpu_v2_v4", "sparse_core": "sparse_core", "none": "none"}
# By public name, which is not always that of the class.
_TPU_STRATEGIES: tuple[Any, ...] = (
    tf.distribute.TPUStrategy,
    tf.distribute.experimental.TPUStrategy,
)
# Strategies without TPUs whose replicas are named by their devices.
_WITH_DEVICES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


def _unwatched(ended: str) -> Callable[[], list[Any]]:
    """No-op `watch` for TPUs that cannot report that they were initialized again."""
    del ended
    return list


# Each replica has a context of its own in each run of strategy.run.
_RUNS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_RUN_NUMBERS = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class TPUSystem:
    """The TPUs of a strategy.

    Attributes:
      generation: What they are. A real TPU does not tell its name, only what it has
        for embeddings.
      devices: For each replica the names of its devices, one for each of its cores.
      hosts: Names of the CPUs beside them, ordered by task.
      assigned: Whether a tf.tpu.experimental.DeviceAssignment has placed the replicas.
      simulated: Whether they are programs on this machine's CPU.
      watch: Takes the text of a tf.errors.FailedPreconditionError and returns a
        function that makes control inputs, which fail with it once the TPUs were
        initialized again. A real TPU cannot report that.
    """

    generation: tpu_generations.Generation
    devices: tuple[tuple[str, ...], ...]
    hosts: tuple[str, ...]
    assigned: bool
    simulated: bool
    watch: Callable[[str], Callable[[], list[Any]]] = _unwatched

    @property
    def cores_per_replica(self) -> int:
        """The cores that work on one replica's part of the batch."""
        return len(self.devices[0])

    def holds(self, device: str) -> bool:
        """Whether a tensor on `device` is in the memory of a TPU.

        The host of a simulated TPU is also the first of its devices; tensors there
        count as being on the host.
        """
        if not self.simulated:
            return tf.DeviceSpec.from_string(device).device_type == "TPU"
        devices = list(itertools.chain.from_iterable(self.devices))
        return _find(device, devices) not in (None, *self.hosts)

    @property
    def system(self) -> str:
        """The device that configures all of them."""
        if self.simulated:
            return self.hosts[0]
        host = tf.DeviceSpec.from_string(self.hosts[0])
        return host.replace(device_type="TPU_SYSTEM").to_string()

    def host_of(self, device: str) -> str:
        """The CPU beside a device."""
        return self.hosts[0] if self.simulated else _host_of(device)

    def host_of_program(self, replica: int) -> str:
        """The CPU that runs the host's part of a replica's program."""
        device = self.devices[replica][0]
        return device if self.simulated else _host_of(device)

    def ordinal(self, device: str) -> int:
        """The number of a device among those of its host."""
        index = tf.DeviceSpec.from_string(device).device_index
        assert index is not None
        return index


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a synchronous job over which tables are divided.

    Attributes:
      rank: Index of this process.
      devices: The CPU of each process, full names.
    """

    rank: int
    devices: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Topology:
    """One embedding's place in the world.

    Attributes:
      engine: "host", "sharded", "portable", "parameter_server", "sparse_core",
        "tpu_v2_v4", or "none" for a TPU that has no hardware for embeddings and for
        tables that need none.
      num_replicas: Replicas of this process that share the tables.
      device: Where the tables live, or for TPUs the first host.
      tpu: The TPUs, or None.
      is_distributed: Whether there is a strategy, whose values may be distributed.
      servers: The devices of the parameter servers, if tables are there.
      processes: The processes over which tables are divided, or None: this one alone.
    """

    strategy: tf.distribute.Strategy
    engine: str
    num_replicas: int
    device: str
    tpu: TPUSystem | None = None
    is_distributed: bool = True
    servers: tuple[str, ...] = ()
    processes: Processes | None = None

    @property
    def all_replicas(self) -> int:
        """Replicas of all processes that share the tables, R."""
        number = 1 if self.processes is None else len(self.processes.devices)
        return self.num_replicas * number

    def replica(self) -> int | None:
        """The replica that is being traced or run, or None outside of replicas.

        0 under TPUStrategy, which traces its function once for all replicas.

        Raises:
          RuntimeError: If a strategy is active that is not the embedding's own.
        """
        context = tf.distribute.get_replica_context()
        active = tf.distribute.get_strategy()
        if active is not self.strategy and tf.distribute.has_strategy():
            own, name = type(self.strategy), type(active).__name__
            other = f"another {name}" if own is type(active) else name
            raise RuntimeError(
                f"The embedding was created under {own.__name__} and is called under "
                f"{other}. Create it inside `strategy.scope()` of the strategy that "
                "runs it."
            )
        if self.num_replicas == 1 and self.tpu is None:
            return 0
        if context is None or active is not self.strategy:
            return None
        if self.tpu is not None and not self.tpu.simulated:
            return 0
        return int(tf.get_static_value(context.replica_id_in_sync_group))

    def run_context(self) -> Any:
        """The context of the replica that calls, or None outside of strategy.run.

        Each strategy.run has contexts of its own.
        """
        if tf.distribute.get_strategy() is not self.strategy:
            return None  # Outside of all scopes TensorFlow has a context, too.
        return tf.distribute.get_replica_context()

    def run_number(self) -> int | None:
        """A number of this run of strategy.run, among several replicas.

        0 outside of strategy.run; None inside where kernels can tell (in graphs), and
        where they need not (one replica).
        """
        if self.num_replicas == 1:
            return None
        context = self.run_context()
        if context is None:
            return 0
        if not tf.executing_eagerly():
            return None
        return _RUNS.setdefault(context, next(_RUN_NUMBERS))

    def can_meet(self) -> bool:
        """Whether `with_all_replicas` can be called in this replica.

        Only MirroredStrategy calls its function once for each replica, and its replicas
        meet in the graph in which strategy.run began: not in a tf.function or a branch
        or loop of a graph inside of it.
        """
        context = self.run_context()
        if self.num_replicas == 1 or self.tpu is not None or context is None:
            return False
        graph = getattr(threading.current_thread(), "graph", None)
        return graph is tf.compat.v1.get_default_graph()

    def with_all_replicas(
        self, function: Callable[[list[Any]], None], value: Any
    ) -> None:
        """Calls `function` once with the tensors that all replicas pass here."""
        context = tf.distribute.get_replica_context()
        assert context is not None
        context.merge_call(
            lambda strategy, values: function(
                list(strategy.experimental_local_results(values))
            ),
            (value,),
        )

    def program(self) -> Any:
        """The graph of the TPU program that is being traced, or None outside of one."""
        if self.tpu is None:
            return None
        return _software_program() if self.tpu.simulated else _tpu_program()

    def has_feature(self, feature: str) -> bool:
        """Whether its TPUs, if it has any, are those of an EmbeddingFeature."""
        kind = tpu_generations.embedding_hardware(feature)
        return self.tpu is None or self.tpu.generation.embedding == kind

    def on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function` so that its ops run on a CPU beside the replica's TPU."""
        if self.tpu is None:
            return function(*arguments)
        if self.replica() is None:
            with tf.device(self.device):
                return function(*arguments)
        if self.tpu.simulated or self.program() is None:
            return function(*arguments)
        return tf.compat.v1.tpu.outside_compilation(function, *arguments)

    def of_replica(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """The one of R resources on hosts that belongs to the calling replica."""
        replica = self.replica()
        assert replica is not None
        if self.tpu is None or self.tpu.simulated:
            return parts[replica]
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

    def barrier(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns control inputs that wait for `tensors` in all replicas of a program.

        A real TPU needs no barrier: it writes variables at the end of a program, and
        none if the program fails. Queues on its hosts are not undone.
        """
        if self.tpu is None or not self.tpu.simulated or self.run_context() is None:
            return list(tensors)
        with tf.control_dependencies(tensors):
            return [self.sum_over_replicas(tf.zeros([], tf.int32))]

    def sum_over_replicas(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of what all replicas pass; only inside of strategy.run.

        `all_reduce` of the context does the same and registers a gradient, which keeps
        the graph of each traced step in memory.
        """
        context = self.run_context()
        assert context is not None
        return context.merge_call(
            lambda strategy, part: strategy.extended.reduce_to(
                tf.distribute.ReduceOp.SUM, part, destinations=part
            ),
            (value,),
        )

    def after(self, value: tf.Tensor, before: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns `value`, which a TPU's program has only when `before` is computed.

        XLA drops control inputs; its optimization barrier is an order that it keeps.
        """
        if self.tpu is not None and not self.tpu.simulated:
            held: Any = gen_xla_ops.xla_optimization_barrier(input=[value, *before])
            return held[0]
        with tf.control_dependencies(before):
            return tf.identity(value)

    def require_arguments(self, paths: Sequence[str], values: Sequence[Any]) -> None:
        """Refuses ids that a TPU program computes.

        Args:
          paths: Paths of the features.
          values: The features as the user passed them.

        Raises:
          ValueError: If a tensor inside strategy.run is none of its arguments.
          RuntimeError: If the caller is in control flow inside strategy.run.
        """
        program = self.program()
        if program is None:
            return
        if program is not tf.compat.v1.get_default_graph():
            raise errors.in_control_flow()
        for path, value in zip(paths, values, strict=True):
            for part in self.strategy.experimental_local_results(value):
                for tensor in tf.nest.flatten(part, expand_composites=True):
                    # Other types are refused later, by their kind.
                    if tf.is_tensor(tensor) and not _is_argument(tensor):
                        raise ValueError(
                            f"Feature {path}: inside strategy.run, enqueue takes only "
                            "tensors that are arguments of the function passed to "
                            f"strategy.run. Received: {tensor}. Compute the features "
                            "before strategy.run, or call enqueue outside of it. If "
                            "the batch size is dynamic, pass tf.distribute.RunOptions("
                            "experimental_enable_dynamic_batch_size=False)."
                        )

    def require_on_host(self, paths: Sequence[str], values: Sequence[Any]) -> None:
        """Refuses ids in the memory of a TPU, before or inside of strategy.run.

        Args:
          paths: Paths of the features.
          values: The features as the user passed them.

        Raises:
          ValueError: If a tensor is on a TPU.
        """
        if self.tpu is None:
            return
        for path, value in zip(paths, values, strict=True):
            for part in self.strategy.experimental_local_results(value):
                for tensor in tf.nest.flatten(part, expand_composites=True):
                    for device in _devices_of(tensor):
                        if self.tpu.holds(device):
                            raise ValueError(
                                f"Feature {path}: ids must be on the host, not on "
                                f"{device}, which is a TPU. Distribute the data set "
                                "with tf.distribute.InputOptions("
                                "experimental_fetch_to_device=False)."
                            )

    def find(self, device: Any) -> str:
        """The full name of the strategy's device that a user named, maybe in part.

        Raises:
          ValueError: If it is none of the strategy's.
        """
        devices = self._devices()
        if not devices:
            raise errors.enqueue_device(device)
        found = _find(device, devices)
        if found is None:
            more = f", ... ({len(devices)} in all)" if len(devices) > 8 else ""
            raise ValueError(
                "Argument `device` of enqueue must name a device of the strategy, with "
                f"its number: {', '.join(devices[:8])}{more}. Received: {device!r}. "
                "Leave it at None to enqueue the batches of all replicas."
            )
        return found

    def replica_of(self, device: str) -> int:
        """The replica of a device that `find` returned, without TPUs."""
        return self._devices().index(device)

    def _devices(self) -> list[str]:
        if self.tpu is not None:
            return list(itertools.chain.from_iterable(self.tpu.devices))
        if not isinstance(self.strategy, _WITH_DEVICES):
            return []  # Replicas have no places of their own.
        return list(self.strategy.extended.worker_devices)

    def split(self, values: Sequence[Any]) -> list[list[Any]]:
        """For each replica its part of each value.

        A value that is not distributed goes to every replica whole.
        """
        parts = [self.strategy.experimental_local_results(value) for value in values]
        return [
            [part[replica] if len(part) > 1 else part[0] for part in parts]
            for replica in range(self.num_replicas)
        ]


def _find(device: Any, known: Sequence[str]) -> str | None:
    """The one of some devices that the user named, maybe in part, or None."""
    try:
        asked = tf.DeviceSpec.from_string(device)
    except (TypeError, ValueError, AttributeError):  # No name of a device.
        return None
    for own in known:
        spec = tf.DeviceSpec.from_string(own)
        if spec.make_merged_spec(asked) == spec and asked.device_index is not None:
            return own
    return None


def current() -> Topology:
    """The topology of the strategy whose scope is active.

    Raises:
      NotImplementedError: For strategies that no engine serves yet.
      ValueError: If the environment variable TPU_EMBEDDING_ENGINE names no engine, or
        not that of the strategy's TPUs.
      RuntimeError: If it asks for the host engine and its library cannot be loaded, or
        if the strategy's TPUs are not initialized.
    """
    strategy = tf.distribute.get_strategy()
    if is_tpu():
        return _of_tpu(strategy)
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return _of_parameter_servers(strategy)
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        processes = _processes(strategy)
        if len(processes.devices) > 1:
            return _of_processes(strategy, processes)
    return _without_tpu(strategy, _choose_engine)


def without_engine() -> Topology:
    """As `current` for tables that are plain variables, under every strategy.

    Raises:
      ValueError, RuntimeError: As `current`, of TPUs.
    """
    strategy = tf.distribute.get_strategy()
    if is_tpu():
        return _of_tpu(strategy)
    return _without_tpu(strategy, lambda device: "none")


def _without_tpu(
    strategy: tf.distribute.Strategy, choose: Callable[[str], str]
) -> Topology:
    device = "/device:CPU:0"
    if tf.distribute.has_strategy():
        device = strategy.extended.worker_devices[0]
    return Topology(
        strategy=strategy,
        engine=choose(device),
        num_replicas=strategy.num_replicas_in_sync,
        device=device,
        is_distributed=tf.distribute.has_strategy(),
    )


def _of_parameter_servers(strategy: Any) -> Topology:
    _check_asked(("host",))
    library.load()
    if strategy.num_replicas_in_sync > 1:
        raise NotImplementedError(
            "Under ParameterServerStrategy a worker must be one replica. Received: "
            f"{strategy.num_replicas_in_sync} replicas, one for each GPU of a worker. "
            "Start a worker for each GPU."
        )
    coordinator = parameter_server.ClusterCoordinator(strategy)
    assert isinstance(coordinator, parameter_server.ClusterCoordinator), coordinator
    # No public property has the number of servers.
    servers = [
        f"/job:ps/replica:0/task:{task}/device:CPU:0"
        for task in range(strategy.extended._num_ps)
    ]
    return Topology(
        strategy=strategy,
        engine="parameter_server",
        num_replicas=1,
        device=servers[0],
        servers=tuple(servers),
        is_distributed=False,
    )


def _processes(strategy: Any) -> Processes:
    """The processes of a MultiWorkerMirroredStrategy, the chief first."""
    resolver = strategy.cluster_resolver
    jobs = resolver.cluster_spec().as_dict() if resolver else {}
    devices = tuple(
        f"/job:{job}/replica:0/task:{task}/device:CPU:0"
        for job in ("chief", "worker")
        for task in range(len(jobs.get(job, ())))
    )
    if len(devices) < 2:
        return Processes(0, ("/device:CPU:0",))
    own = f"/job:{resolver.task_type}/replica:0/task:{resolver.task_id}/device:CPU:0"
    return Processes(devices.index(own), devices)


def _of_processes(strategy: Any, processes: Processes) -> Topology:
    name = "MultiWorkerMirroredStrategy"
    if strategy.num_replicas_in_sync != len(processes.devices):
        raise NotImplementedError(
            f"Under {name} a process must be one replica, on the CPU. Received: "
            f"{strategy.num_replicas_in_sync} replicas in {len(processes.devices)} "
            "processes. Start a process for each replica."
        )
    device = strategy.extended.worker_devices[0]
    if _choose_engine(device) != "host":
        raise NotImplementedError(
            f"{name} over several processes requires the host engine, in each of "
            f"them: {library.unavailable_reason() or f'{device} is no CPU, or '}"
            f"{ENGINE_VARIABLE} asks for another. Unset the variable, and hide GPUs "
            'with tf.config.set_visible_devices([], "GPU").'
        )
    return Topology(
        strategy=strategy,
        engine="sharded",
        num_replicas=1,
        device=device,
        processes=processes,
    )


def is_tpu() -> bool:
    """Whether a TPU strategy's scope is active, or one that stands in for it."""
    strategy = tf.distribute.get_strategy()
    return isinstance(strategy, _TPU_STRATEGIES) or _is_software_tpu(strategy)


def _is_software_tpu(strategy: tf.distribute.Strategy) -> bool:
    return hasattr(strategy.extended, "tpu_hardware")


def _of_tpu(strategy: tf.distribute.Strategy) -> Topology:
    simulated = _is_software_tpu(strategy)
    tpu = _software_system(strategy) if simulated else _tpu_system(strategy)
    engine = TPU_ENGINES[tpu.generation.embedding]
    _check_asked((engine,))
    return Topology(
        strategy=strategy,
        engine=engine,
        num_replicas=strategy.num_replicas_in_sync,
        device=tpu.hosts[0],
        tpu=tpu,
    )


def _software_system(strategy: Any) -> TPUSystem:
    """Every device is a TPU, and the first one their host, too."""
    extended = strategy.extended
    return TPUSystem(
        generation=extended.tpu_hardware,
        devices=extended.replica_devices,
        hosts=(extended.worker_devices[0],),
        assigned=extended.assigned,
        simulated=True,
        watch=extended.watch,
    )


def _tpu_system(strategy: Any) -> TPUSystem:
    extended = strategy.extended
    feature = extended.tpu_hardware_feature
    if feature.tpu_hardware_feature_proto is None:
        raise RuntimeError(
            "The TPU system of this TPUStrategy is not initialized, so its embedding "
            "hardware is unknown. Before you create the strategy, call "
            "tf.tpu.experimental.initialize_tpu_system(resolver) with the resolver of "
            "the strategy."
        )
    # No public property has the devices of all cores.
    devices = tuple(tuple(cores) for cores in extended._tpu_devices)
    # TPUs that are described for the compiler have a name; real ones do not tell it.
    generation = getattr(extended, DESCRIBED_GENERATION, None)
    if generation is None:
        generation = tpu_generations.reported(
            feature.embedding_feature.value, feature.num_embedding_devices_per_chip
        )
    return TPUSystem(
        generation=generation,
        devices=devices,
        hosts=_hosts([cores[0] for cores in devices]),
        assigned=extended._device_assignment is not None,
        simulated=False,
    )


def _is_argument(tensor: Any) -> bool:
    """Whether a tensor comes straight from the arguments of strategy.run."""
    if not tf.is_symbolic_tensor(tensor):
        return False
    if tensor.op.type == "Placeholder":
        return True
    with contextlib.suppress(ValueError):  # The op has no such attribute.
        return tensor.op.get_attr("_tpu_input_identity")
    return False


def _devices_of(tensor: Any) -> list[str]:
    """Returns the known devices of a tensor; outside of strategy.run if passed in."""
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


def _hosts(devices: Sequence[str]) -> tuple[str, ...]:
    """The hosts of TPU devices, in the order in which TensorFlow numbers shards."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    specs.sort(key=lambda spec: (spec.replica or 0, spec.task or 0))
    return tuple(dict.fromkeys(_host_of(spec.to_string()) for spec in specs))


def _host_of(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()


def _software_program() -> Any:
    # The replica context of the software TPU knows its program.
    return getattr(tf.distribute.get_replica_context(), "program", None)


def _tpu_program() -> Any:
    """The graph that is rewritten into a program, or None."""
    found = _tpu_context()
    return None if found is None else found[0]


def _tpu_context() -> tuple[Any, Any] | None:
    """The graph that is rewritten into a program and the context that does so."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if isinstance(context, tpu_replication.TPUReplicateContext):
                return graph, context
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return None


def _choose_engine(device: str) -> str:
    asked = _check_asked(CPU_ENGINES)
    if asked == "portable":
        return asked
    reason = library.unavailable_reason()
    if tf.DeviceSpec.from_string(device).device_type == "GPU":
        reason = f"the tables are on {device}, and the host engine is for the CPU."
    if reason is None:
        return "host"
    if asked == "host":
        raise RuntimeError(
            f"{ENGINE_VARIABLE}=host requires the host engine, which cannot run: "
            f"{reason} Unset the variable to use the portable engine."
        )
    logging.log_first_n(
        logging.WARNING, "tpu_embedding uses its portable engine: %s", 1, reason
    )
    return "portable"


def _check_asked(engines: Sequence[str]) -> str:
    """The engine that the environment asks for, one of `engines`, or ""."""
    asked = os.environ.get(ENGINE_VARIABLE, "")
    if asked and asked not in engines:
        raise ValueError(
            f"The environment variable {ENGINE_VARIABLE} is {asked!r}. Unset it, or "
            f"set it to one of {', '.join(engines)}."
        )
    return asked


def outside_of_replicas(function: Callable[[], Result]) -> Result:
    """Calls `function` eagerly and in cross-replica context, wherever the caller is.

    In another thread: tf.init_scope leaves the graph that is being traced, but neither
    the replica that it is traced for, which cannot make variables of all, nor the
    tf.function, which wants none after its first trace.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function).result()
