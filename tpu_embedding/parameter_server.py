"""The ends of a ParameterServerStrategy: the coordinator and the server process."""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tpu_embedding.ops import library

_Base: Any = tf.distribute.coordinator.ClusterCoordinator


class ClusterCoordinator(_Base):
    """A tf.distribute.coordinator.ClusterCoordinator whose pushes are applied once.

    TensorFlow runs a scheduled function again if its worker is lost, also if its
    gradients were applied already. This class numbers the functions, and parameter
    servers drop what a function pushes to an embedding a second time. Everything
    else is as in TensorFlow's class.

    A strategy has one coordinator, which `strategy.scope()` creates. It becomes one of
    this class when this class is constructed, or an embedding under the strategy;
    TensorFlow's constructor then returns it, too.
    """

    def __new__(cls, strategy: tf.distribute.Strategy) -> Any:
        """The coordinator of the strategy."""
        found = super().__new__(cls, strategy)
        if type(found) is _Base:
            found.__class__ = cls  # Subclasses only add to what it has.
        return found

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        """See TensorFlow's class.

        Args:
          strategy: A tf.distribute.ParameterServerStrategy.

        Raises:
          ValueError: If it is another strategy.
          RuntimeError: If the library of tpu_embedding cannot be loaded.
        """
        if not hasattr(self, "_numbers"):  # It may be constructed again and again.
            self._ops = library.load()
            # Servers may outlive a coordinator: another one has another number.
            self._source = secrets.randbits(62)
            self._numbers = itertools.count(1)
            self._numbered: weakref.WeakKeyDictionary[Any, Any]
            self._numbered = weakref.WeakKeyDictionary()
        super().__init__(strategy)

    def schedule(self, fn: Any, args: Any = None, kwargs: Any = None) -> Any:
        """Schedules a function; see TensorFlow's class.

        Whatever its runs on several workers push to embeddings is applied once. The
        arguments of all runs are equal, except for per-worker values: a data set of
        a worker gives each run another batch, of which the first to push counts.

        Args:
          fn: A tf.function.
          args: Its positional arguments.
          kwargs: Its keyword arguments.

        Returns:
          A tf.distribute.experimental.coordinator.RemoteValue.

        Raises:
          TypeError: If `fn` is no tf.function.
          The errors of functions that were scheduled before.
        """
        kinds = tf.types.experimental
        if isinstance(fn, (kinds.PolymorphicFunction, kinds.ConcreteFunction)):
            number = tf.constant([self._source, next(self._numbers)], tf.int64)
            fn, args = self._with_number(fn), (number, *(args or ()))
        return super().schedule(fn, args, kwargs)

    def _with_number(self, fn: Any) -> Any:
        numbered = self._numbered.get(fn)
        if numbered is None:
            numbered = tf.function(_numbered(fn, self._ops), autograph=False)
            self._numbered[fn] = numbered
        return numbered


def _numbered(fn: Any, ops: Any) -> Callable[..., Any]:
    """A function that says its number, the first argument, and then runs `fn`."""
    function: Any = weakref.ref(fn)  # It is traced while `fn` is being scheduled.

    def run(number: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
        begun = ops.tpu_embedding_begin_pushes(number=number)
        with tf.control_dependencies([begun]):
            return function()(*args, **kwargs)

    return run


def serve() -> None:
    """Runs the parameter server or worker of TF_CONFIG; does not return.

    Raises:
      RuntimeError: If the library of tpu_embedding cannot be loaded.
      ValueError: If TF_CONFIG names no such task.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    kind, index = resolver.task_type, resolver.task_id
    if kind not in ("ps", "worker") or index is None:
        raise ValueError(
            "`python -m tpu_embedding server` runs a task of type 'ps' or 'worker', as "
            'the environment variable TF_CONFIG says in its "task". Received: type '
            f'{kind!r}, index {index!r}. Set TF_CONFIG to {{"cluster": {{...}}, '
            '"task": {"type": "ps", "index": 0}}.'
        )
    library.load()
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=kind,
        task_index=index,
        protocol=resolver.rpc_layer or "grpc",
    )
    server.join()
