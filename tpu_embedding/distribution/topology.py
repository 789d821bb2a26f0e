"""The replicas and devices of an embedding: one class for each kind of strategy."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding import errors, parameter_server, tpu_generations
from tpu_embedding.distribution.tpu import (
    SoftwareTPUSystem,
    TPUSystem,
    devices_of,
    find,
    is_argument,
)
from tpu_embedding.ops import library

Result = TypeVar("Result")

ENGINE_VARIABLE = "TPU_EMBEDDING_ENGINE"
CPU_ENGINES = ("host", "portable")
# The engine for each kind of embedding hardware of a generation.
TPU_ENGINES = {"v1": "tpu_v2_v4", "sparse_core": "sparse_core", "none": "none"}
# The strategies by public name, which is not always that of the class.
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


# Each replica has a context of its own in each run of strategy.run.
_RUNS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_RUN_NUMBERS = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Topology:
    """No strategy, or one whose replicas are in this process and on no TPU.

    Attributes:
      engine: "host", "sharded", "portable", "parameter_server", "sparse_core",
        "tpu_v2_v4", or "none" for a TPU that has no hardware for embeddings and for
        tables that need none.
      num_replicas: Number of replicas of this process that share the tables.
      device: The device of the tables, or for TPUs the first host.
      is_distributed: Whether there is a strategy, whose values may be distributed.
    """

    strategy: tf.distribute.Strategy
    engine: str
    num_replicas: int
    device: str
    is_distributed: bool = True

    @property
    def tpu(self) -> TPUSystem | None:
        """The TPUs, or None."""
        return None

    @property
    def all_replicas(self) -> int:
        """The number R of replicas in all processes that share the tables."""
        return self.num_replicas

    def replica(self) -> int | None:
        """Returns the replica that is being traced or run, or None outside of replicas.

        Raises:
          RuntimeError: If a strategy is active that is not the embedding's own.
        """
        self._require_own_strategy()
        return 0 if self.num_replicas == 1 else self._replica_of_context()

    def _require_own_strategy(self) -> None:
        active = tf.distribute.get_strategy()
        if active is not self.strategy and tf.distribute.has_strategy():
            own, name = type(self.strategy), type(active).__name__
            other = f"another {name}" if own is type(active) else name
            raise RuntimeError(
                f"The embedding was created under {own.__name__} but is called under "
                f"{other}. Create it inside `strategy.scope()` of the strategy that "
                "runs it."
            )

    def _replica_of_context(self) -> int | None:
        context = self.run_context()
        if context is None:
            return None
        return int(tf.get_static_value(context.replica_id_in_sync_group))

    def run_context(self) -> Any:
        """Returns the context of the calling replica, or None outside of strategy.run.

        Each strategy.run has its own contexts.
        """
        if tf.distribute.get_strategy() is not self.strategy:
            return None  # Outside of all scopes TensorFlow has a context, too.
        return tf.distribute.get_replica_context()

    def runs(self) -> np.ndarray:
        """Returns int64 [1], a number that tells runs of strategy.run apart; 0 outside.

        It is empty with one replica, or in graphs of a run, where kernels know the run.
        """
        if self.num_replicas == 1:
            return library.NO_NUMBER
        context = self.run_context()
        if context is not None and not tf.executing_eagerly():
            return library.NO_NUMBER
        return _run_number(context)

    def can_synchronize(self) -> bool:
        """Returns whether `with_all_replicas` can be called in this replica.

        Only MirroredStrategy calls its function once for each replica, and its replicas
        can wait for each other only in the graph of strategy.run, not in a tf.function,
        branch or loop inside of it.
        """
        context = self.run_context()
        if self.num_replicas == 1 or context is None:
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
        """Returns the graph of the TPU program being traced, or None outside of one."""
        return None

    def has_feature(self, feature: str) -> bool:
        """Returns whether TPUs, if there are any, have this EmbeddingFeature."""
        del feature
        return True

    def on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function` so that its ops run on a CPU beside the replica's TPU."""
        return function(*arguments)

    def require_arguments(self, paths: Sequence[str], values: Sequence[Any]) -> None:
        """Refuses ids that a TPU program computes.

        Args:
          paths: Paths of the features.
          values: The features as the user passed them.

        Raises:
          ValueError: If a tensor inside strategy.run is not one of its arguments.
          RuntimeError: If the caller is in control flow inside strategy.run.
        """
        del paths, values

    def require_queueable(self, paths: Sequence[str], values: Sequence[Any]) -> None:
        """Refuses what `require_arguments` does, and ids in the memory of a TPU.

        Raises:
          ValueError: If a tensor is on a TPU.
        """
        del paths, values

    def _tensors(self, values: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yields the index of each feature and each of its tensors, of all replicas."""
        for index, value in enumerate(values):
            for part in self.strategy.experimental_local_results(value):
                for tensor in tf.nest.flatten(part, expand_composites=True):
                    yield index, tensor

    def find(self, device: Any) -> str:
        """Completes the name of a strategy's device, which a user may give in part.

        Raises:
          ValueError: If it is not a device of the strategy.
        """
        devices = self._devices()
        if not devices:
            raise ValueError(
                "`device` of enqueue must be a TPU core or the device of a replica of "
                f"this strategy. Received: {device!r}. Leave it at None: the engine "
                "chooses the device."
            )
        found = find(device, devices)
        if found is None:
            more = f", ... ({len(devices)} in all)" if len(devices) > 8 else ""
            raise ValueError(
                "Argument `device` of enqueue must name a device of the strategy, with "
                f"its number: {', '.join(devices[:8])}{more}. Received: {device!r}. "
                "Leave it at None to enqueue the batches of all replicas."
            )
        return found

    def replica_of(self, device: str) -> int:
        """Returns the replica of a device that `find` returned, without TPUs."""
        return self._devices().index(device)

    def _devices(self) -> list[str]:
        if not isinstance(self.strategy, _WITH_DEVICES):
            return []  # Replicas have no devices of their own.
        return list(self.strategy.extended.worker_devices)

    def split(self, values: Sequence[Any]) -> list[list[Any]]:
        """Returns for each replica its part of each value.

        Each replica gets the whole of a value that is not distributed.
        """
        parts = [self.strategy.experimental_local_results(value) for value in values]
        return [
            [part[replica] if len(part) > 1 else part[0] for part in parts]
            for replica in range(self.num_replicas)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerTopology(Topology):
    """The topology of a ParameterServerStrategy.

    Attributes:
      servers: The devices of the servers.
    """

    servers: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessTopology(Topology):
    """The topology of a MultiWorkerMirroredStrategy over several processes.

    Attributes:
      rank: Index of this process.
      processes: The full name of the CPU of each process.
    """

    rank: int
    processes: tuple[str, ...]

    @property
    def all_replicas(self) -> int:
        return self.num_replicas * len(self.processes)

    def runs(self) -> np.ndarray:
        """See `Topology.runs`: this process has one replica; empty in graphs."""
        if not tf.executing_eagerly():
            return library.NO_NUMBER
        return _run_number(self.run_context())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPUTopology(Topology):
    """The topology of a TPUStrategy, or of the strategy of the software TPU.

    Attributes:
      system: The TPUs.
    """

    system: TPUSystem

    @property
    def tpu(self) -> TPUSystem:
        return self.system

    def replica(self) -> int | None:
        """See `Topology.replica`; 0 where one program is traced for all replicas."""
        self._require_own_strategy()
        context = self.run_context()
        return None if context is None else self.system.replica(context)

    def can_synchronize(self) -> bool:
        return False

    def program(self) -> Any:
        return self.system.program()

    def has_feature(self, feature: str) -> bool:
        kind = tpu_generations.embedding_hardware(feature)
        return self.system.generation.embedding == kind

    def on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.replica() is None:
            with tf.device(self.device):
                return function(*arguments)
        return self.system.on_host(function, *arguments)

    def of_replica(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the host resource of the calling replica, one of R `parts`."""
        replica = self.replica()
        assert replica is not None
        return self.system.of_replica(parts, replica)

    def barrier(self, tensors: Sequence[Any]) -> list[Any]:
        """Makes control inputs that wait for `tensors` in all replicas of a program."""
        if self.run_context() is None:
            return list(tensors)
        return self.system.barrier(tensors, self.sum_over_replicas)

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

    def require_arguments(self, paths: Sequence[str], values: Sequence[Any]) -> None:
        program = self.program()
        if program is None:
            return
        if program is not tf.compat.v1.get_default_graph():
            raise errors.in_control_flow()
        for index, tensor in self._tensors(values):
            # Other types are refused later, by their kind.
            if tf.is_tensor(tensor) and not is_argument(tensor):
                raise ValueError(
                    f"Feature {paths[index]}: inside strategy.run, enqueue takes only "
                    "tensors that are arguments of the function passed to "
                    f"strategy.run. Received: {tensor}. Compute the features "
                    "before strategy.run, or call enqueue outside of it. If "
                    "the batch size is dynamic, pass tf.distribute.RunOptions("
                    "experimental_enable_dynamic_batch_size=False)."
                )

    def require_queueable(self, paths: Sequence[str], values: Sequence[Any]) -> None:
        self.require_arguments(paths, values)
        for index, tensor in self._tensors(values):
            for device in devices_of(tensor):
                if self.system.holds(device):
                    raise ValueError(
                        f"Feature {paths[index]}: ids must be on the host, not on "
                        f"{device}, which is a TPU. Distribute the data set with "
                        "tf.distribute.InputOptions("
                        "experimental_fetch_to_device=False)."
                    )

    def _devices(self) -> list[str]:
        return self.system.all_devices


def current() -> Topology:
    """Returns the topology of the strategy whose scope is active.

    Raises:
      NotImplementedError: For strategies that no engine serves yet.
      ValueError: If the environment variable TPU_EMBEDDING_ENGINE names no engine, or
        another engine than that of the strategy's TPUs.
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
        if processes is not None:
            return _of_processes(strategy, *processes)
    return _without_tpu(strategy, _choose_engine)


def _run_number(context: Any) -> np.ndarray:
    """Returns the number of the run of a replica context, 0 outside of strategy.run."""
    number = 0 if context is None else _RUNS.setdefault(context, next(_RUN_NUMBERS))
    return np.array([number], np.int64)


def without_engine() -> Topology:
    """Returns the topology for tables that are plain variables, under every strategy.

    Raises:
      ValueError, RuntimeError: As `current` does for TPUs.
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
    return ServerTopology(
        strategy=strategy,
        engine="parameter_server",
        num_replicas=1,
        device=servers[0],
        servers=tuple(servers),
        is_distributed=False,
    )


def _processes(strategy: Any) -> tuple[int, tuple[str, ...]] | None:
    """Returns this process's index and the CPU of each, chief first; None if alone."""
    resolver = strategy.cluster_resolver
    jobs = resolver.cluster_spec().as_dict() if resolver else {}
    devices = tuple(
        f"/job:{job}/replica:0/task:{task}/device:CPU:0"
        for job in ("chief", "worker")
        for task in range(len(jobs.get(job, ())))
    )
    if len(devices) < 2:
        return None
    own = f"/job:{resolver.task_type}/replica:0/task:{resolver.task_id}/device:CPU:0"
    return devices.index(own), devices


def _of_processes(
    strategy: Any, rank: int, processes: tuple[str, ...]
) -> ProcessTopology:
    name = "MultiWorkerMirroredStrategy"
    if strategy.num_replicas_in_sync != len(processes):
        raise NotImplementedError(
            f"Under {name} a process must be one replica, on the CPU. Received: "
            f"{strategy.num_replicas_in_sync} replicas in {len(processes)} "
            "processes. Start a process for each replica."
        )
    device = strategy.extended.worker_devices[0]
    if _choose_engine(device) != "host":
        other = f"{device} is not a CPU, or {ENGINE_VARIABLE} selects another engine."
        raise NotImplementedError(
            f"{name} over several processes requires the host engine in every process: "
            f"{library.unavailable_reason() or other} Unset {ENGINE_VARIABLE}, and "
            'hide GPUs with tf.config.set_visible_devices([], "GPU").'
        )
    return ProcessTopology(
        strategy=strategy,
        engine="sharded",
        num_replicas=1,
        device=device,
        rank=rank,
        processes=processes,
    )


def is_tpu() -> bool:
    """Returns whether the scope of a TPU strategy, or a stand-in for one, is active."""
    strategy = tf.distribute.get_strategy()
    return isinstance(strategy, _TPU_STRATEGIES) or _is_software_tpu(strategy)


def _is_software_tpu(strategy: tf.distribute.Strategy) -> bool:
    return hasattr(strategy.extended, "tpu_hardware")


def _of_tpu(strategy: tf.distribute.Strategy) -> TPUTopology:
    kind = SoftwareTPUSystem if _is_software_tpu(strategy) else TPUSystem
    tpu = kind.of(strategy)
    engine = TPU_ENGINES[tpu.generation.embedding]
    _check_asked((engine,))
    return TPUTopology(
        strategy=strategy,
        engine=engine,
        num_replicas=strategy.num_replicas_in_sync,
        device=tpu.hosts[0],
        system=tpu,
    )


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
    """Returns the engine that the environment asks for, one of `engines`, or ""."""
    asked = os.environ.get(ENGINE_VARIABLE, "")
    if asked and asked not in engines:
        raise ValueError(
            f"The environment variable {ENGINE_VARIABLE} is {asked!r}. Unset it, or "
            f"set it to one of {', '.join(engines)}."
        )
    return asked


def outside_of_replicas(function: Callable[[], Result]) -> Result:
    """Calls `function` eagerly and in cross-replica context, wherever the caller is.

    It uses another thread. tf.init_scope leaves the graph that is being traced, but not
    the replica that it is traced for, which cannot make variables of all replicas, nor
    the tf.function, which allows no new variables after its first trace.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function).result()
