"""Variables whose readers see rows caught up with the steps that they waited for."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

_Variable = resource_variable_ops.ResourceVariable
_flushes_before: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "flushes_before", default=False
)


class Waits(Protocol):
    """The steps that the rows of a table and its slots wait for.

    Attributes:
      variables: The table, then its slots.
    """

    variables: Sequence[Any]

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """Reads rows of the table, caught up; their gradient is that of a gather."""
        ...

    def flush(self) -> None:
        """Catches up all rows."""
        ...

    def is_quiet(self) -> bool:
        """Returns whether this thread reads stored values, without catching up."""
        ...


class TableVariable(_Variable):
    """A table, or a slot of one, with rows that an optimizer may leave to catch up.

    A tf.Variable gets this class in place of its own. A read of the whole variable
    catches up all rows and writes them; a read of some rows (`tf.gather`) writes
    nothing. Ops that take its `handle` see the stored values.
    """

    waiting: Waits | None = None  # Set once an optimizer is built.
    counter: Any = None  # The counter of te.Telemetry.

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Reads caught-up rows."""
        waiting = self._reader(by_rows=True)
        if waiting is None:
            return super().sparse_read(indices, name)
        if self is not waiting.variables[0]:  # A slot.
            waiting.flush()
            return super().sparse_read(indices, name)
        return waiting.read(tf.convert_to_tensor(indices))

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """Reads values, after a flush."""
        self._flush()
        return super().gather_nd(indices, name)

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        self._flush()
        return super()._read_variable_op(no_copy)

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        self._flush()  # The table's other variables keep their current values.
        return super()._restore_from_tensors(restored_tensors)

    def _flush(self) -> None:
        waiting = self._reader()
        if waiting is not None:
            waiting.flush()

    def _reader(self, *, by_rows: bool = False) -> Waits | None:
        """Returns what catches this read up; None if values are read as stored.

        A graph also flushes before its calls, for an optimizer that is built after it
        was traced. Under a tape a read by rows does without: the step that follows is
        refused then.
        """
        waiting, graph = self.waiting, outermost_graph()
        if graph is not None and _flushes_before.get():
            waiting = None
        elif waiting is not None and waiting.is_quiet():
            return None
        may_step = by_rows and waiting is not None and is_recording()
        if graph is not None and not may_step:
            self._flush_before_calls(graph, waiting)
        return waiting

    def _flush_before_calls(self, graph: Any, traced: Waits | None) -> None:
        """Flushes before each call of a graph, unless `traced` still has the rows."""

        def flush() -> None:
            if self.waiting is not None and self.waiting is not traced:
                self.waiting.flush()

        before_calls(graph, flush)

    @property
    def _handle(self) -> Any:
        # TensorFlow's eager ops that accept a variable as a tensor read its handle in
        # C++, not by `_read_variable_op`: the caller is then a generated function.
        if self.waiting is not None and _is_called_by_generated_op():
            self.waiting.flush()
        return self.__dict__["_handle"]

    @_handle.setter
    def _handle(self, value: Any) -> None:
        vars(self)["_handle"] = value


def _flushed(name: str) -> Any:
    method = getattr(_Variable, name)

    @functools.wraps(method)
    def flush_and_write(self: TableVariable, *args: Any, **kwargs: Any) -> Any:
        self._flush()
        return method(self, *args, **kwargs)

    return flush_and_write


for _name in (
    *("assign", "assign_add", "assign_sub", "batch_scatter_update"),
    *(f"scatter_{what}" for what in ("add", "sub", "update", "max", "min", "mul")),
    *(f"scatter_{what}" for what in ("div", "nd_add", "nd_sub", "nd_update")),
):
    setattr(TableVariable, _name, _flushed(_name))


class EngineVariable(TableVariable):
    """A table or slot of an engine, whose rows wait for that engine from the start."""

    def _flush_before_calls(self, graph: Any, traced: Waits | None) -> None:
        if traced is None:
            super()._flush_before_calls(graph, traced)


def catch_up(variable: Any) -> None:
    """Catches up all rows of a table, before an op takes a variable's handle."""
    if isinstance(variable, TableVariable):
        variable._flush()


def gather(variable: Any, rows: Any) -> Any:
    """Reads rows as they are stored."""
    return tf.raw_ops.ResourceGather(
        resource=variable.handle, indices=rows, dtype=variable.dtype.base_dtype
    )


def scatter(variable: Any, rows: Any, values: tf.Tensor) -> Any:
    """Writes rows in place, each named once; returns the op that does."""
    return tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=rows, updates=values
    )


def read_rows(variable: Any, rows: Any) -> np.ndarray:
    """Reads rows of a variable, int32 or int64 [n], caught up."""
    with tf.device(variable.device):
        catch_up(variable)
        return gather(variable, rows).numpy()


def make_waiting(variable: Any, cls: type[TableVariable]) -> bool:
    """Lets the rows of a variable wait if that is possible; returns whether it is."""
    own = type(variable)
    reads_as_usual = (
        issubclass(own, resource_variable_ops.BaseResourceVariable)
        and own.sparse_read is _Variable.sparse_read
        and own._read_variable_op is _Variable._read_variable_op
    )
    is_matrix = variable.shape.rank in (2, None)  # On servers it is unknown.
    if reads_as_usual and is_matrix and variable.dtype.is_floating:
        object.__setattr__(variable, "__class__", cls)
    return isinstance(variable, cls)


@tf.custom_gradient
def instead(rows: tf.Tensor, caught_up: tf.Tensor) -> Any:
    """Returns the rows that were caught up, with the gradient of the stored ones."""
    return tf.identity(caught_up), lambda gradient: (gradient, None)


def is_recording() -> bool:
    """Returns whether a gradient of the ops created now may be computed later.

    It is True under a tf.GradientTape, also while tracing a tf.function that is called
    under a tape or opens one. TensorFlow has no public function for this.
    """
    return record.could_possibly_record()


@contextlib.contextmanager
def flush_before() -> Iterator[None]:
    """Makes reads return stored values, and flush before each call of the graph.

    Such a graph contains nothing of the optimizer, so that it can be exported.
    """
    token = _flushes_before.set(True)
    try:
        yield
    finally:
        _flushes_before.reset(token)


def _is_called_by_generated_op() -> bool:
    module = sys._getframe(2).f_globals.get("__name__", "")
    return module.startswith("tensorflow.python.ops.gen_")


def outermost_graph() -> Any:
    """Returns the graph of the tf.function that is traced; None if none is."""
    graph: Any = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not hasattr(graph, "capture_call_time_value"):
        return None  # The second case is a graph of TensorFlow 1.
    while graph.is_control_flow_graph:
        graph = graph.outer_graph
    return graph


# The functions that run before each call of a graph.
_done_before: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = (
    weakref.WeakKeyDictionary()
)


def before_calls(graph: Any, do: Callable[[], None]) -> None:
    """Runs `do` in Python before each call of a graph."""
    if graph in _done_before:
        _done_before[graph].append(do)
        return
    done = _done_before[graph] = [do]

    def do_all() -> tf.Tensor:
        with tf.init_scope():
            for each in done:
                each()
            return tf.constant(0)

    with tf.init_scope():
        saved = tf.constant(0)  # What a SavedModel holds in its place.
    with graph.as_default():
        graph.capture(saved)  # Makes it one of the objects that a SavedModel has.
        graph.capture_call_time_value(
            do_all, tf.TensorSpec([], tf.int32), ("tpu_embedding", id(done)), saved
        )
