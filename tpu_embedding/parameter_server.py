"""The coordinator of a ParameterServerStrategy: servers apply each push once."""

from __future__ import annotations

import itertools
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context, executor

from tpu_embedding.ops import library

_Base: Any = tf.distribute.coordinator.ClusterCoordinator
_TASK = re.compile(r"/job:\w+/replica:\d+/task:\d+")
_T = TypeVar("_T")


class ClusterCoordinator(_Base):
    """Schedules functions as TensorFlow's class does, and applies each push once.

    TensorFlow runs a scheduled function again if its worker is lost, even if its
    gradients were applied already. This class numbers the functions, and parameter
    servers ignore what a function pushes to an embedding a second time. Everything
    else is as in TensorFlow's class.

    A strategy has one coordinator, which `strategy.scope()` creates. Constructing this
    class, or an embedding under the strategy, turns it into an object of this class;
    TensorFlow's constructor then returns the same object.
    """

    def __new__(
        cls, strategy: tf.distribute.Strategy, task_timeout: float | None = None
    ) -> Any:
        """Returns the coordinator of the strategy."""
        del task_timeout
        found = super().__new__(cls, strategy)
        if type(found) is _Base:
            found.__class__ = cls  # Subclasses only add to what it has.
        return found

    def __init__(
        self, strategy: tf.distribute.Strategy, task_timeout: float | None = None
    ) -> None:
        """See TensorFlow's class.

        Args:
          strategy: A tf.distribute.ParameterServerStrategy.
          task_timeout: After how many seconds without an answer `join` and `wait_for`
            consider a task lost, which may be stopped, stuck or out of reach. None
            keeps the last number that was given, 60 at first.

        Raises:
          ValueError: If the strategy is of another class, or the time is not positive.
          RuntimeError: If the library of tpu_embedding cannot be loaded.
        """
        if not hasattr(self, "_numbers"):  # The constructor may run again.
            self._ops = library.load()
            # Servers may outlive a coordinator, so each coordinator has its own number.
            self._source = secrets.randbits(62)
            self._numbers = itertools.count(1)
            self._numbered: weakref.WeakKeyDictionary[Any, Any]
            self._numbered = weakref.WeakKeyDictionary()
            self._timeout = 60.0
            self._watches: list[_Watch] = []
        if task_timeout is not None:
            if not task_timeout > 0:
                raise ValueError(
                    "`task_timeout` must be a number of seconds > 0. Received: "
                    f"{task_timeout!r}."
                )
            self._timeout = float(task_timeout)
        super().__init__(strategy)

    def schedule(self, fn: Any, args: Any = None, kwargs: Any = None) -> Any:
        """Schedules a function; see TensorFlow's class.

        If it runs on several workers, what it pushes to embeddings is applied once.
        The arguments of all runs are equal, except for per-worker values: a data set
        of a worker gives each run another batch, and the first push counts.

        Args:
          fn: A tf.function.
          args: Its positional arguments.
          kwargs: Its keyword arguments.

        Returns:
          A tf.distribute.experimental.coordinator.RemoteValue.

        Raises:
          TypeError: If `fn` is not a tf.function.
          Exception: The error of a function that was scheduled before.
        """
        kinds = tf.types.experimental
        if isinstance(fn, (kinds.PolymorphicFunction, kinds.ConcreteFunction)):
            number = tf.constant([self._source, next(self._numbers)], tf.int64)
            fn, args = self._with_number(fn), (number, *(args or ()))
        try:
            return super().schedule(fn, args, kwargs)
        except tf.errors.OpError as error:
            raise _named(error) from error

    def join(self) -> None:
        """Waits until all scheduled functions have run; see TensorFlow's class.

        Raises:
          tf.errors.UnavailableError: If a parameter server is lost, or a server or
            worker has not answered for `task_timeout`. The text names the task.
          Exception: The error of a scheduled function.
        """
        self._watch()
        try:
            while not self._cluster.closure_queue.wait(timeout=1.0):
                self._require_answers()
        except tf.errors.OpError as error:
            raise _named(error) from error

    def wait_for(self, call: Callable[[], _T]) -> _T:
        """Runs a call that uses the servers, for as long as all servers answer.

        `te.checkpoint.save` and `te.checkpoint.restore` do so by themselves. For other
        calls that read or write tables:

            coordinator.wait_for(lambda: tf.train.Checkpoint(model=model).write(path))

        The call runs eagerly, in a thread of its own: a scope that is open here, e.g.
        `strategy.scope()`, is not open there. The call cannot be ended: after an error
        it goes on if the server does, so end the server first.

        Args:
          call: A function without arguments.

        Returns:
          What the function returns.

        Raises:
          tf.errors.UnavailableError: If a parameter server is lost, or has not answered
            for `task_timeout`. The text names it.
          RuntimeError: In a tf.function.
          Exception: The error of the function.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "wait_for runs its call eagerly, so use it outside of tf.function."
            )
        self._watch()
        result: futures.Future[_T] = futures.Future()

        def run() -> None:
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        try:
            while not futures.wait([result], timeout=1.0).done:
                self._require_answers("/job:ps/")
            return result.result()
        except tf.errors.OpError as error:
            raise _named(error) from error

    def _watch(self) -> None:
        """Starts the threads that ask all tasks whether they are alive, if need be."""
        if self._watches:
            return
        extended = self.strategy.extended
        counts = {"ps": extended._num_ps, "worker": extended._num_workers}
        self._watches = [
            _Watch(f"/job:{job}/replica:0/task:{task}")
            for job, count in counts.items()
            for task in range(count)
        ]

    def _require_answers(self, tasks: str = "") -> None:
        """Raises UnavailableError if a task with the name prefix `tasks` is silent."""
        for watch in self._watches:
            silent = watch.silent_for()
            if silent > self._timeout and watch.task.startswith(tasks):
                raise tf.errors.UnavailableError(
                    None,
                    None,
                    f"{watch.task} has not answered for {silent:.0f} s: its process is "
                    "stopped, stuck or unreachable. End that process. A worker can be "
                    "restarted at once, and its function runs on another worker; for a "
                    f"server, restart the whole job. {_RESTART}",
                )

    def _with_number(self, fn: Any) -> Any:
        numbered = self._numbered.get(fn)
        if numbered is None:
            numbered = tf.function(_numbered(fn, self._ops), autograph=False)
            self._numbered[fn] = numbered
        return numbered


_RESTART = (
    "Start all servers and the coordinator again, and restore the last checkpoint. "
    "Later updates are lost."
)


class _Watch:
    """A thread that asks one task again and again whether it is alive.

    The thread waits as long as the task does not answer, so no task is asked twice at a
    time. A task that is down answers with an error, which TensorFlow handles.
    """

    def __init__(self, task: str) -> None:
        self.task = task
        self._answered = time.monotonic()
        threading.Thread(target=self._ask, daemon=True).start()

    def silent_for(self) -> float:
        """Returns the seconds since the last answer."""
        return time.monotonic() - self._answered

    def _ask(self) -> None:
        # An executor reports an op's error through whichever op runs at that time.
        # If threads shared one, a save would report the error of a worker that is down.
        with context.executor_scope(executor.new_executor(enable_async=False)):
            while True:
                try:
                    with tf.device(f"{self.task}/device:CPU:0"):
                        tf.raw_ops.NoOp()
                except tf.errors.OpError:
                    pass
                self._answered = time.monotonic()
                time.sleep(1.0)


def _named(error: tf.errors.OpError) -> tf.errors.OpError:
    """Rewords an error of TensorFlow so that it names the task to look at."""
    text = error.message
    if _RESTART in text:
        return error
    if isinstance(error, tf.errors.NotFoundError) and "'TpuEmbedding" in text:
        return tf.errors.NotFoundError(
            None,
            None,
            f"{_task_of(text, 'worker')} has not loaded the library of tpu_embedding. "
            "Start every server and worker by `python -m tpu_embedding server`, of the "
            f"same release. TensorFlow says: {text}",
        )
    server = _task_of(text, "ps")
    if isinstance(error, tf.errors.UnavailableError) and server.startswith("/"):
        return tf.errors.UnavailableError(
            None,
            None,
            f"The parameter server {server} is lost, and with it the tables that it "
            f"held. {_RESTART} TensorFlow says: {text}",
        )
    # A server that was started again at its address does not know this job.
    restarted = isinstance(error, tf.errors.AbortedError) and "context_id" in text
    if restarted and server.startswith("/"):
        return tf.errors.UnavailableError(
            None,
            None,
            f"The parameter server {server} was restarted, so the tables that it held "
            f"are lost. {_RESTART} TensorFlow says: {text}",
        )
    return error


def _task_of(text: str, job: str) -> str:
    """Returns the last task of a job that a text names, or "A <job>"."""
    found = [task for task in _TASK.findall(text) if task.startswith(f"/job:{job}/")]
    return found[-1] if found else f"A {job}"


def _numbered(fn: Any, ops: Any) -> Callable[..., Any]:
    """Returns a function that runs `fn` under a push number, its first argument."""
    function: Any = weakref.ref(fn)  # `fn` is alive when this is traced.

    def run(number: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
        begun = ops.tpu_embedding_begin_pushes(number=number)
        with tf.control_dependencies([begun]):
            return function()(*args, **kwargs)

    return run
