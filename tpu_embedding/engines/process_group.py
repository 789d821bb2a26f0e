"""The processes of a synchronous job, and the messages that they exchange."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import json
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding.distribution import ProcessTopology, Topology
from tpu_embedding.ops import library

# A key for TensorFlow's collectives; MultiWorkerMirroredStrategy counts from 1.
_GROUP_KEY = 20_611
_ALIGNMENT = 64  # Messages are padded to multiples of it, in bytes.
_REMINDER_SECONDS = 10.0  # A wait this long logs a reminder.
_INVALID_ARGUMENT = tf.errors.INVALID_ARGUMENT
PHASES = ("construction", "enqueue", "lookup", "update", "checkpoint")
ROLES = ("", "begins", "continues")  # What an exchange does to a step.

_CALL = contextvars.ContextVar("_CALL", default="")


@contextlib.contextmanager
def calling(name: str) -> Iterator[None]:
    """Sets the name of the user's call for exchanges in it that have no name."""
    token = _CALL.set(_CALL.get() or name)
    try:
        yield
    finally:
        _CALL.reset(token)


class Traffic(NamedTuple):
    """What a process has exchanged so far.

    Attributes:
      exchanges: The number of exchanges by phase.
      bytes_sent: The bytes that this process has sent, by phase.
      waited_seconds: How long this process waited for the messages of each process.
    """

    exchanges: dict[str, int]
    bytes_sent: dict[str, int]
    waited_seconds: list[float]


class Channel:
    """Exchanges messages between the processes for one embedding.

    All processes must call `exchange` in the same order. Calls in the lane "enqueue"
    have an order of their own, as a thread may enqueue ahead. A tf.function orders its
    exchanges, so its enqueues are in that lane only if no dequeue follows.

    Attributes:
      rank: Index of this process.
      size: Number of processes.
      queues: The step queue of this process, if there is one.
    """

    def __init__(self, topology: Topology, key: str, timeout_seconds: int) -> None:
        assert isinstance(topology, ProcessTopology)
        self.queues: Sequence[tf.Tensor] = ()
        self.rank = topology.rank
        self.size = len(topology.processes)
        self._topology, self._device = topology, topology.device
        self._ops = library.load()
        with tf.init_scope(), tf.device(self._device):
            self._handle = self._ops.tpu_embedding_channel(
                record=library.serialize(
                    key=key,
                    rank=self.rank,
                    group_key=_GROUP_KEY,
                    devices=list(topology.processes),
                    timeout_seconds=timeout_seconds,
                )
            )
        # The first exchange of each outermost function.
        self._first_places: weakref.WeakKeyDictionary[Any, _Place]
        self._first_places = weakref.WeakKeyDictionary()
        self._newest_place = _Place("enqueue", "step")  # The newest one that enqueues.
        # The exchanges of each graph in the lane "enqueue", by name.
        self._enqueues: weakref.WeakKeyDictionary[Any, dict[str, _Place | None]]
        self._enqueues = weakref.WeakKeyDictionary()
        # The newest exchange of each graph in the lane "step".
        self._newest: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._threads = _Threads()
        self._threads.current().made_channel = True
        self._enqueued: tuple[np.ndarray, threading.Thread] | None = None

    def exchange(
        self,
        phase: str,
        messages: Sequence[tf.Tensor],
        refusal: Any,
        call: str = "",
        role: str = "",
        lane: str = "",
    ) -> list[tf.Tensor]:
        """Sends each process its message and returns the messages to this one.

        Args:
          phase: One of `PHASES`.
          messages: The message to each process, uint8 vectors of multiples of 64 bytes.
            The message to this process comes back unchanged.
          refusal: A string scalar with an error, or "". If any process passes an error,
            the call raises it in all processes.
          call: What the user called; "" for the name of `calling`. If two processes
            pass different calls, all processes raise a
            tf.errors.FailedPreconditionError that contains both.
          role: One of `ROLES`. If some processes begin a step while others are still in
            the previous one, only the latter raise that error.
          lane: "step" or "enqueue", the exchanges among which this one is ordered, or
            "" for the lane of the phase and thread.

        Returns:
          The message from each process, in the same form.
        """
        lane = lane or self._lane(phase)
        with tf.device(self._device):
            runs = self._topology.runs()
            received = self._ops.tpu_embedding_exchange(
                channel=self._handle,
                queues=self.queues,
                runs=self._with_ended_run(runs),
                messages=messages,
                refusal=refusal,
                call=call or _CALL.get(),
                phase=phase,
                lane=lane,
                role=role,
            )
        if not tf.executing_eagerly():
            self._note_traced(received[0].op.name, phase, lane)
        elif phase == "lookup":
            # It has succeeded in all processes, so their lanes stay alike.
            self._threads.current().looks_up = True
            self._enqueued = None
        elif phase == "enqueue":
            self._enqueued = (runs, threading.current_thread())
        return received

    def _lane(self, phase: str) -> str:
        """Returns a call's lane: "step" even for an enqueue, if its thread runs steps.

        Then no other thread of this process is in a step, so calls can be compared. The
        thread that made the embedding runs steps if it enqueues in strategy.run.
        """
        if phase != "enqueue":
            return "step"
        if not tf.executing_eagerly():
            steps = any(graph in self._newest for graph in _open_graphs())
        else:
            thread = self._threads.current()
            steps = thread.looks_up or (
                thread.made_channel and self._topology.run_context() is not None
            )
        return "step" if steps else "enqueue"

    def _note_traced(self, name: str, phase: str, lane: str) -> None:
        """Moves enqueues to the lane of the steps once what follows them is traced.

        It does not move those of complete graphs: of a tf.function, a loop or a branch
        that was traced before.
        """
        graphs = _open_graphs()
        first = None
        if graphs[-1] not in self._first_places:
            first = self._first_places[graphs[-1]] = _Place(phase, lane)
            self._newest_place = first if phase == "enqueue" else self._newest_place
        if lane == "enqueue":
            self._enqueues.setdefault(graphs[0], {})[name] = first
            return
        step = tf.compat.v1.AttrValue(s=b"step")
        for graph in graphs:
            self._newest[graph] = name if graph is graphs[0] else ""
            for enqueue, place in self._enqueues.pop(graph, {}).items():
                graph.get_operation_by_name(enqueue)._set_attr("lane", step)
                if place is not None:
                    place.lane = "step"

    def after_exchange(self) -> contextlib.AbstractContextManager[Any]:
        """Makes ops wait for the newest exchange: a failure during it ends the job."""
        graph: Any = tf.compat.v1.get_default_graph()
        name = "" if tf.executing_eagerly() else self._newest.get(graph, "")
        newest = [graph.get_operation_by_name(name)] if name else []
        return tf.control_dependencies(newest)

    def _with_ended_run(self, runs: np.ndarray) -> np.ndarray:
        """Adds the run of strategy.run that raised an exception after its enqueue."""
        if self._enqueued is None or not tf.executing_eagerly():
            return runs
        run, thread = self._enqueued
        # TensorFlow's threads of replicas set `done` at their end.
        ended = not thread.is_alive() and not getattr(thread, "done", True)
        return np.append(runs, run) if ended else runs

    @contextlib.contextmanager
    def refusing(self, phase: str) -> Iterator[None]:
        """Tells other processes, in their calls of `phase`, what this one raises."""
        try:
            yield
        except Exception as error:
            self.refuse(phase, error)
            raise

    def refuse(self, phase: str, error: Exception) -> None:
        """Takes part in an exchange that fails in all processes, eagerly.

        While a function is traced, it takes part in the function's first exchange, as
        the other processes may run the function already.
        """
        lane = self._lane(phase)
        if not tf.executing_eagerly():
            # What follows the first enqueue of a function is not known yet. It is
            # assumed to be what followed in the previous function.
            place = self._newest_place if phase == "enqueue" else _Place(phase, lane)
            place = self._first_places.get(_open_graphs()[-1], place)
            phase, lane = place.phase, place.lane
        text = f"{_INVALID_ARGUMENT}\n{type(error).__name__}: {error}"
        with tf.init_scope(), contextlib.suppress(tf.errors.OpError):
            nothing = [tf.zeros([0], tf.uint8)] * self.size
            role = "continues" if phase == "update" else "begins"
            self.exchange(phase, nothing, text, role=role, lane=lane)

    def all_gather(self, phase: str, content: bytes, call: str = "") -> list[bytes]:
        """Returns what each process passed, in order of processes; only eagerly."""
        return self.all_to_all(phase, [content] * self.size, call)

    def all_to_all(
        self, phase: str, contents: Sequence[bytes], call: str = ""
    ) -> list[bytes]:
        """Sends contents[p] to process p; returns what each sent to this process."""
        messages = [
            tf.constant(np.frombuffer(_padded(content), np.uint8))
            for content in contents
        ]
        found = []
        for message in self.exchange(phase, messages, "", call):
            whole = message.numpy()
            size = int(whole[:8].view(np.int64)[0])
            found.append(whole[8 : 8 + size].tobytes())
        return found

    def agree(self, phase: str, call: str = "") -> None:
        """Waits until all processes make a call; fails in all if their calls differ."""
        with tf.device(self._device):
            nothing = [tf.zeros([0], tf.uint8)] * self.size
        self.exchange(phase, nothing, "", call)

    def traffic(self) -> Traffic:
        """Returns what this process has exchanged so far."""
        with tf.device(self._device):
            found = self._ops.tpu_embedding_channel_statistics(channel=self._handle)
        return Traffic(
            dict(zip(PHASES, found.exchanges.numpy().tolist(), strict=True)),
            dict(zip(PHASES, found.bytes_sent.numpy().tolist(), strict=True)),
            (found.waited_microseconds.numpy() / 1e6).tolist(),
        )


class _Thread:
    """What one embedding knows of a thread of the user program.

    Attributes:
      looks_up: Whether the thread has looked up, eagerly.
      made_channel: Whether the thread has made the embedding.
    """

    looks_up = False
    made_channel = False


class _Threads(threading.local):
    """Finds the thread of the user program; `strategy.run` starts another one."""

    def __init__(self) -> None:
        self._own, self._of_replica = _Thread(), None

    def current(self) -> _Thread:
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            return self._own
        if self._of_replica is None:
            replica: Any = tf.distribute.get_replica_context()
            self._of_replica = replica.merge_call(lambda _: self._own)
        return self._of_replica


@dataclasses.dataclass
class _Place:
    """The phase and the lane of the first exchange of a tf.function."""

    phase: str
    lane: str


def _open_graphs() -> list[Any]:
    """Returns the graphs being traced, from the caller's to the outermost one."""
    graphs: list[Any] = [tf.compat.v1.get_default_graph()]
    while hasattr(graphs[-1].outer_graph, "outer_graph"):
        graphs.append(graphs[-1].outer_graph)
    return graphs


def _padded(content: bytes) -> bytes:
    message = np.int64(len(content)).tobytes() + content
    return message + bytes(-len(message) % _ALIGNMENT)


@dataclasses.dataclass
class _Job:
    """The channel and the numbers that all embeddings of a strategy share."""

    channel: Channel
    numbers: itertools.count[int]


_JOBS: weakref.WeakKeyDictionary[Any, _Job] = weakref.WeakKeyDictionary()


def connect(
    topology: Topology, description: Mapping[str, Any], timeout_seconds: int
) -> Channel:
    """Makes the channel of one embedding, if all processes configure it alike.

    All processes must call it in the same order. `description` has, by name, the values
    that must be equal in all of them, in types that JSON can hold.
    """
    job = _JOBS.get(topology.strategy)
    if job is None:
        _introduce(topology)
        channel = Channel(topology, "construction", timeout_seconds)
        job = _JOBS[topology.strategy] = _Job(channel, itertools.count())
    content = json.dumps(description, default=str).encode()
    everyone = job.channel.all_gather("construction", content)
    _require_alike([json.loads(text) for text in everyone])
    return Channel(topology, str(next(job.numbers)), timeout_seconds)


def _introduce(topology: Topology) -> None:
    """Tells the processes each other's devices, which only TensorFlow's ops can do."""
    assert isinstance(topology, ProcessTopology)
    others = [str(p) for p in range(len(topology.processes)) if p != topology.rank]
    reminder = threading.Timer(
        _REMINDER_SECONDS,
        logging.warning,
        (
            "tpu_embedding: process %d waits in the constructor of an embedding or "
            "layer for one of the processes %s. All processes must create it.",
            topology.rank,
            ", ".join(others),
        ),
    )
    reminder.daemon = True
    reminder.start()
    with contextlib.ExitStack() as stack, tf.init_scope(), tf.device(topology.device):
        stack.callback(reminder.cancel)
        tf.raw_ops.CollectiveReduceV2(
            input=tf.ones([1]),
            group_size=len(topology.processes),
            group_key=_GROUP_KEY,
            instance_key=1,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )


def _require_alike(descriptions: Sequence[Mapping[str, Any]]) -> None:
    first = descriptions[0]
    for process, other in enumerate(descriptions):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise ValueError(
                    "The processes of this job configure the embedding differently: "
                    f"{name} is {first.get(name)!r} in process 0, but "
                    f"{other.get(name)!r} in process {process}. Run the same program "
                    "with the same arguments in every process."
                )
