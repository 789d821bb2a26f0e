"""Catches up the rows of a table that have waited since their last gradient.

A `Waiting` belongs to a table and its slots. It counts the steps that an optimizer has
taken with the table (`clock`), knows for each row the step at which it was written last
(`since`), and for each of these steps what waiting from it to now does (`history`; see
`tpu_embedding/optimizers/idle.py`). With these it catches up a row that is read or
updated; a `flush` catches all rows up, after which none waits.

Ops of the library do the work, or those of TensorFlow if it cannot be loaded, under a
strategy and in XLA. Both use the same variables.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context, record
from tensorflow.python.ops import control_flow_util, resource_variable_ops

from tpu_embedding import distribution
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.ops import library
from tpu_embedding.ops.library import idle_record
from tpu_embedding.optimizers.idle import Idle
from tpu_embedding.tables.waiting import (
    TableVariable,
    Waits,
    before_calls,
    gather,
    instead,
    make_waiting,
    outermost_graph,
    scatter,
)

# The most values that TensorFlow's ops catch up at one time, to bound the memory.
_VALUES_AT_ONCE = 1 << 20

# The default device of variables; this process, which owns it, has the ops.
_DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"

_owners = itertools.count(1)
_Variable = resource_variable_ops.ResourceVariable


def new_owner() -> int:
    """Returns a new number for an optimizer; `Waiting.clock` has that of the owner."""
    return next(_owners)


def other_optimizer(name: str) -> str:
    """Returns the error text of a step on a table that now has another optimizer."""
    return (
        f"{name} is no longer trained by the optimizer of this step: another one was "
        "built for it, or te.keras.unconvert changed it back. Train a table with one "
        "RowSparseOptimizer."
    )


def large_decay(name: str) -> str:
    """Returns the error text of a decay that leaves nothing of a table."""
    return (
        f"weight_decay * learning_rate must be below 1 for {name}. Use a smaller "
        "weight_decay, or lazy=True."
    )


def is_in_xla() -> bool:
    """Returns whether XLA compiles what is traced; it leaves assertions out."""
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def kernels_for(variables: Sequence[Any]) -> Any:
    """Returns the ops of the library if they can be run or traced now, else None."""
    possible = (
        all(v.dtype.base_dtype == tf.float32 and v.device == _DEVICE for v in variables)
        and not tf.distribute.has_strategy()
        and tf.compat.v1.executing_eagerly_outside_functions()
        and not is_in_xla()
        and library.unavailable_reason() is None
        and distribution.current().engine == "host"
    )
    return library.load() if possible else None


def _read(variable: Any) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(
        resource=variable.handle, dtype=variable.dtype.base_dtype
    )


class Waiting(Waits):
    """The steps that the rows of one table wait for.

    Attributes:
      idle: What a step does to a row without a gradient.
      variables: The table and its slots, each [V, D].
      owner: The number of the optimizer that trains the table.
      decays: Whether the optimizer applies weight decay to the table.
      is_revoked: Whether the optimizer may take no more steps.
    """

    def __init__(
        self, idle: Idle, variables: Sequence[Any], owner: int, decays: bool
    ) -> None:
        self.idle, self.variables, self.owner = idle, tuple(variables), owner
        self.decays, self.is_revoked = decays, False
        self._quiet_in: int | None = None  # The thread that has caught all rows up.
        self._quadrature = idle.quadrature
        rows = int(variables[0].shape[0])
        self._ages = np.arange(1, idle.horizon + 1)
        self.capacity = idle.history_length(rows)
        with tf.init_scope(), tf.device(variables[0].device):
            # The number of steps, the last at which all rows were caught up, the owner.
            self.clock = make_variable(np.array([0, 0, owner], np.int64))
            self.since = make_variable(np.zeros(rows, np.int32))
            # For each step: the logarithm of all decay factors so far, a number that
            # the rule needs, and the weights of a row that has waited since then.
            self.history = make_variable(np.zeros([self.capacity, 2 + idle.num_terms]))

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments that the ops of the library have in common."""
        return {
            "arrays": [variable.handle for variable in self.variables],
            "clocks": self.clock.handle,
            "sinces": self.since.handle,
            "histories": self.history.handle,
        }

    def has_kernels(self) -> bool:
        """Returns whether ops of the library do the work now, and not TensorFlow's."""
        return kernels_for(self.variables) is not None

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """Reads rows of the table, caught up; their gradient is that of a gather."""
        table, kernels = self.variables[0], kernels_for(self.variables)
        if kernels is not None:
            resource_variable_ops.variable_accessed(table)
            return self._read_by(kernels, rows, outputs=1)[0]
        stored: Any = _Variable.sparse_read(table, rows)
        with record.stop_recording():
            caught_up = self._caught_up(rows, [stored])[0]
        return instead(stored, caught_up)

    def caught_up(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Reads rows of the table and of each slot, caught up.

        Args:
          rows: Integers of any shape.

        Returns:
          The rows of the table and of each slot, [*rows.shape, D].
        """
        with record.stop_recording():
            kernels = kernels_for(self.variables)
            if kernels is not None:
                return self._read_by(kernels, rows, outputs=len(self.variables))
            return self._caught_up(rows, [])

    def _read_by(self, kernels: Any, rows: tf.Tensor, outputs: int) -> list[tf.Tensor]:
        return kernels.tpu_embedding_caught_up_rows(
            **self.arguments(),
            rows=rows,
            num_outputs=outputs,
            dim=int(self.variables[0].shape[1]),
            idle=serialized([self], with_weights=False),
        )

    def _caught_up(
        self, rows: tf.Tensor, stored: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        unread = self.variables[len(stored) :]
        stored = [*stored, *(gather(variable, rows) for variable in unread)]
        return self._idled(stored, gather(self.since, rows))

    def _idled(self, values: list[tf.Tensor], since: tf.Tensor) -> list[tf.Tensor]:
        """Applies the steps after `since` to the values of rows, all at once."""
        idle, dtype = self.idle, values[0].dtype
        now, floor, _ = tf.unstack(_read(self.clock))
        since = tf.maximum(tf.cast(since, tf.int64), floor)
        steps = tf.cast(now - since, tf.float64)[..., tf.newaxis]
        start = gather(self.history, since % self.capacity)
        end = gather(self.history, now % self.capacity)
        row, slots = values[0], values[1:]
        weights, moved = start[..., 2:], tf.zeros([], dtype)
        if idle.move == "sign":  # The history holds sums from the first step on.
            weights = (end[2:] - weights) * tf.exp(start[..., :1])
        terms = self.history.shape[1] - 2
        factors = [tf.cast(w, dtype) for w in tf.split(weights, terms, -1)]
        if idle.move == "follow":
            rate = tf.cast(end[1], dtype)
            row = tf.where(steps > 0, self._followed(slots, rate), row)
        elif idle.move:
            following = gather(self.history, (since + 1) % self.capacity)
            moved = self._moved(slots, factors, following[..., 1:2] - 1.0)
            moved = tf.where(steps > 0, moved, tf.zeros_like(moved))
        if self.decays and idle.move != "follow":
            row = _shrunk(row, moved, tf.exp(end[0] - start[..., :1]))
        elif idle.move != "follow":
            row -= moved
        faded = [
            slot
            if fade == 1.0
            else _shrunk(slot, 0.0, tf.constant(fade, tf.float64) ** steps)
            for slot, fade in zip(slots, idle.fades, strict=True)
        ]
        return [row, *faded]

    def _moved(
        self, slots: list[tf.Tensor], factors: list[tf.Tensor], updates: tf.Tensor
    ) -> tf.Tensor:
        idle, moment = self.idle, slots[self.idle.moment]
        if idle.move == "sign":
            return tf.sign(moment) * factors[0]
        if idle.move == "momentum":
            return moment * factors[0]
        assert self._quadrature is not None
        square, divided = slots[idle.square], tf.zeros([], moment.dtype)
        root = square if idle.epsilon_inside else tf.sqrt(square)
        if self._quadrature.powers:
            return moment * self._over_root(root, factors)
        for node, factor in zip(self._quadrature.nodes, factors, strict=True):
            fade = idle.root_fade**node
            epsilon: Any = tf.constant(idle.epsilon, moment.dtype)
            if idle.epsilon_beta:
                left = 1.0 - tf.cast(idle.epsilon_beta, tf.float64) ** (updates + node)
                epsilon *= tf.cast(tf.sqrt(left), moment.dtype)
            if idle.epsilon_inside:
                divisor = tf.sqrt(root * fade**2 + epsilon**2)
            else:
                divisor = root * fade + epsilon
            divided += factor / divisor
        return moment * divided

    def _over_root(self, root: tf.Tensor, factors: list[tf.Tensor]) -> tf.Tensor:
        """Returns the sum of powers of a share, over a root or its square."""
        assert self._quadrature is not None
        power = 2 if self.idle.epsilon_inside else 1
        fade = (self.idle.root_fade ** self._quadrature.nodes[0]) ** power
        epsilon = tf.constant(self.idle.epsilon, root.dtype) ** power
        inverse = 1.0 / (root * fade + epsilon)
        share, divided = 1.0 - epsilon * inverse, factors[-1]
        for factor in factors[-2::-1]:
            divided = divided * share + factor
        return divided * (tf.sqrt(inverse) if power == 2 else inverse)

    def _followed(self, slots: list[tf.Tensor], rate: tf.Tensor) -> tf.Tensor:
        power, l1, l2, beta = self.idle.follow
        squares, linear = slots
        l2 += beta / (2.0 * rate)
        quadratic = squares**power / rate + 2.0 * l2
        return (tf.clip_by_value(linear, -l1, l1) - linear) / quadratic

    def write(self, rows: tf.Tensor, values: Sequence[tf.Tensor]) -> None:
        """Writes rows of the table and the slots, as they are after the next step.

        A call of `advance` must follow, to end the step.
        """
        # Another thread that then catches up all rows leaves these as they are.
        now = tf.cast(_read(self.clock)[0], tf.int32)
        marked = scatter(self.since, rows, tf.fill(tf.shape(rows), now + 1))
        with tf.control_dependencies([] if marked is None else [marked]):
            for variable, value in zip(self.variables, values, strict=True):
                scatter(variable, rows, value)

    def advance(self, step: tf.Tensor, *, dense: bool = False) -> None:
        """Counts a step.

        Args:
          step: float64 [3]: c_s of `idle.py`, another number of the step that the rule
            needs, and the share of itself that a row loses by weight decay.
          dense: Whether the step has updated all rows, which were caught up before.
        """
        kernels = kernels_for(self.variables)
        if kernels is not None:
            kernels.tpu_embedding_advance(
                **self.arguments(),
                steps=step[tf.newaxis],
                idle=serialized([self]),
                updated_all=dense,
            )
            return
        weight, note, shrinkage = tf.unstack(step)
        now, floor, owner = tf.unstack(_read(self.clock))
        last = gather(self.history, now % self.capacity)
        log = last[0] + (tf.math.log1p(-shrinkage) if self.decays else 0.0)
        own: Any = tf.zeros([self.history.shape[1] - 2], tf.float64)
        if self.idle.move == "sign":
            own = last[2:] + weight * tf.exp(-log)
        elif self._quadrature is not None:
            starts = (now + 1 - self._ages) % self.capacity
            terms = weight * self._quadrature.weights
            if self.decays:
                terms *= tf.exp(gather(self.history, starts)[:, :1] - log)
            added = tf.pad(terms, [[0, 0], [2, 0]])
            tf.raw_ops.ResourceScatterAdd(
                resource=self.history.handle, indices=starts, updates=added
            )
        scatter(
            self.history,
            [(now + 1) % self.capacity],
            tf.concat([[log, note], own], 0)[tf.newaxis],
        )
        floor = now + 1 if dense else floor
        _assign(self.clock, tf.stack([now + 1, floor, owner]))
        # The sums for "sign" grow with the decay, and must not overflow.
        is_full = (now + 2 - floor >= self.capacity) | (log < -300.0)
        _when(is_full, self._catch_up_all)

    def release(self) -> None:
        """Catches all rows up, and refuses steps of functions traced before."""
        self.is_revoked = True
        with tf.init_scope():  # Keras 3 builds optimizers while it traces a step.
            self.flush()
            now = _read(self.clock)[0]
            _assign(self.clock, tf.stack([now, now, tf.zeros_like(now)]))

    def check_step(self, shrinkage: tf.Tensor) -> Any:
        """Returns an op that refuses a wrong step before it changes anything."""
        name = self.variables[0].name
        owned = tf.debugging.assert_equal(
            _read(self.clock)[2],
            tf.constant(self.owner, tf.int64),
            other_optimizer(name),
        )
        shrinks = tf.debugging.assert_less(
            shrinkage, tf.ones([], tf.float64), large_decay(name)
        )
        return tf.group(owned, shrinks)

    def flush(self) -> None:
        """Catches all rows up, if any may be waiting."""
        if self.is_quiet():
            return
        graph = tf.compat.v1.get_default_graph()
        if not tf.executing_eagerly() and not hasattr(graph, "outer_graph"):
            # The writer of SavedModels uses a graph of TensorFlow 1.
            with context.eager_mode():
                self._flush()
        else:
            self._flush()

    def _flush(self) -> None:
        with record.stop_recording():
            kernels = kernels_for(self.variables)
            if kernels is not None:
                kernels.tpu_embedding_catch_up(
                    **self.arguments(), idle=serialized([self], with_weights=False)
                )
                return
            now, floor, _ = tf.unstack(_read(self.clock))
            _when(now > floor, self._catch_up_all)

    def _catch_up_all(self) -> None:
        count, width = (int(n) for n in self.variables[0].shape)
        size = min(count, max(_VALUES_AT_ONCE // width, 1))

        def catch_up(begin: tf.Tensor) -> list[tf.Tensor]:
            # The last slice may begin in the one before; its rows no longer wait.
            rows = tf.range(size) + tf.minimum(begin, count - size)
            values = self._caught_up(rows, [])
            for variable, value in zip(self.variables, values, strict=True):
                scatter(variable, rows, value)
            now = tf.cast(_read(self.clock)[0], tf.int32)
            scatter(self.since, rows, tf.fill([size], now))
            return [begin + size]

        tf.while_loop(lambda begin: begin < count, catch_up, [0], parallel_iterations=1)
        now, _, owner = tf.unstack(_read(self.clock))
        _assign(self.clock, tf.stack([now, now, owner]))
        scatter(self.history, [now % self.capacity], tf.zeros_like(self.history[:1]))

    def record(self, with_weights: bool) -> Any:
        """Describes what a step does to a row, with weights if the op counts steps."""
        return idle_record(
            self.idle,
            name=self.variables[0].name,
            decays=self.decays,
            owner=self.owner,
            with_weights=with_weights,
        )

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Reads and writes the variables as they are stored, in this thread."""
        self._quiet_in = threading.get_ident()
        try:
            yield
        finally:
            self._quiet_in = None

    def is_quiet(self) -> bool:
        """Returns whether this thread reads what is stored."""
        return self._quiet_in == threading.get_ident()


def serialized(tables: Sequence[Waiting], with_weights: bool = True) -> bytes:
    """Returns what the ops of the library take as `idle`."""
    return library.serialize(rules=[each.record(with_weights) for each in tables])


@tf.RegisterGradient("TpuEmbeddingCaughtUpRows")
def _gradient_of_read(op: Any, *gradients: tf.Tensor) -> list[Any]:
    handle, rows = op.inputs[0], op.inputs[-1]
    shape = tf.raw_ops.VariableShape(input=handle, out_type=tf.int64)
    values = tf.reshape(gradients[0], [-1, gradients[0].shape[-1]])
    slices = tf.IndexedSlices(values, tf.reshape(rows, [-1]), shape)
    return [slices, *[None] * (len(op.inputs) - 1)]


def _shrunk(value: tf.Tensor, moved: Any, factor: tf.Tensor) -> tf.Tensor:
    """Returns (value - moved) * factor, rounded once: the factor stays float64."""
    exact = tf.cast(value, tf.float64) - tf.cast(moved, tf.float64)
    return tf.cast(exact * factor, value.dtype)


def make_variable(value: np.ndarray, shape: Any = None) -> Any:
    """Creates a variable, of the shape of the value unless another one is given."""
    # A strategy and a tf.function replace the creators of tf.Variable.
    return _Variable(value, trainable=False, shape=shape)


def _assign(variable: Any, value: tf.Tensor) -> None:
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def _when(condition: Any, do: Any) -> None:
    if tf.executing_eagerly():
        if condition:
            do()
        return

    def done() -> tf.Tensor:
        do()
        return tf.constant(0)

    tf.cond(condition, done, lambda: tf.constant(0))


def components(variable: Any) -> tuple[Any, ...]:
    """Returns the tf.Variables of a weight: one, or one for each replica."""
    value = keras_api.value_of(variable)
    return tuple(getattr(value, "values", (value,)))


def make_table(variable: Any) -> bool:
    """Lets the rows of a weight wait; returns whether they may wait now."""
    made = [make_waiting(part, TableVariable) for part in components(variable)]
    return all(made)


def make_plain(variable: Any) -> None:
    """Makes a weight and its slots plain variables again, with all rows caught up."""
    for component in components(variable):
        waiting = getattr(component, "waiting", None)
        if waiting is not None:
            waiting.release()
            for each in waiting.variables:
                each.waiting = None
                object.__setattr__(each, "__class__", _Variable)
        if isinstance(component, TableVariable):
            object.__setattr__(component, "__class__", _Variable)


def local(variable: Any) -> Any:
    """Returns the tf.Variable of a weight in the replica whose variable is updated."""
    value = keras_api.value_of(variable)
    return value._get() if hasattr(value, "values") else value


def take_over(variable: TableVariable, waiting: Waiting | None) -> None:
    """Gives a table and its slots to an optimizer; None means that no rows wait."""
    before: Any = variable.waiting
    if before is not None:
        before.release()
    for each in waiting.variables if waiting is not None else ():
        each.waiting = waiting


def waiting_of(variable: Any) -> Waiting | None:
    """Returns what the rows of a tf.Variable wait for; None if they do not."""
    waiting = getattr(variable, "waiting", None)
    return None if waiting is None or waiting.is_revoked else waiting


def check_calls(variable: Any, waiting: Waiting | None) -> None:
    """Refuses calls of the traced function once another optimizer has the table.

    If rows wait, an op does this (`Waiting.check_step`), but XLA leaves assertions out.
    """
    graph = outermost_graph()
    if graph is None or not isinstance(variable, TableVariable):
        return

    def check() -> None:
        if waiting_of(variable) is not waiting:
            raise RuntimeError(other_optimizer(variable.name))

    in_xla = control_flow_util.GraphOrParentsInXlaContext(graph)
    if not _is_in_loop(graph) if in_xla else waiting is None:
        before_calls(graph, check)


def _is_in_loop(graph: Any) -> bool:
    """Returns whether control flow calls the graph; XLA then takes no new arguments."""
    while hasattr(graph, "outer_graph"):
        if graph.is_control_flow_graph:
            return True
        graph = graph.outer_graph
    return False
