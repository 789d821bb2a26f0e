"""Keras optimizers that update only the rows that a batch names, each of them once.

If the library has the rule of the optimizer, `rules.update_rows` updates all tables of
a step. Otherwise the `update_step` of the Keras class runs, with `TouchedRows`, the
rows of the batch, in place of the variable and its slots.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.errors import type_name
from tpu_embedding.keras.keras_api import keras_api, of_other_keras
from tpu_embedding.keras.rows import rules
from tpu_embedding.keras.rows.counting import counted
from tpu_embedding.keras.rows.rules import RULES, idle_of_keras, rule_of, step_of
from tpu_embedding.keras.rows.waiting import (
    TableVariable,
    Waiting,
    check_calls,
    components,
    is_in_xla,
    large_decay,
    local,
    make_plain,
    make_table,
    new_owner,
    other_optimizer,
    take_over,
    waiting_of,
)
from tpu_embedding.optimizers.idle import Idle
from tpu_embedding.tables.waiting import gather, scatter

_LOSS_SCALE = (
    "Leave it at None and use keras.optimizers.LossScaleOptimizer("
    "te.keras.RowSparseOptimizer(...))."
)
_STRATEGIES = (tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy)


class TouchedRows:
    """Stands in for a variable, with only the rows that a gradient names.

    The class has what an `update_step` of Keras needs. The variable does not change.
    """

    def __init__(self, value: tf.Tensor, key: Any) -> None:
        self.value = value
        self._unique_id = key  # Optimizers find the slots of a variable by it.
        self.dtype = value.dtype

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.value, dtype, name=name)

    def assign(self, value: Any) -> None:
        self.value = tf.cast(value, self.dtype)

    def assign_add(self, value: Any) -> None:
        self.assign(self.value + value)

    def assign_sub(self, value: Any) -> None:
        self.assign(self.value - value)


def _operator(name: str) -> Any:
    return lambda self, *others: getattr(self.value, name)(*others)


_tensor: Any = tf.Tensor
for _name in _tensor.OVERLOADABLE_OPERATORS:
    setattr(TouchedRows, _name, _operator(_name))


class _OnTouchedRows:
    """Shows an optimizer to its `update_step`, with touched rows in place of slots."""

    def __init__(self, optimizer: Any, slots: Mapping[str, Any]) -> None:
        self.__dict__.update(slots, _optimizer=optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)  # Nadam of tf_keras counts.


class _OtherRows(NamedTuple):
    """What a step does to the rows of a table that its gradient does not name.

    Attributes:
      idle: What it does to such a row, if rows may wait for it; else None.
      reads_all: Why each step nevertheless reads all rows; "" if it does not.
    """

    idle: Idle | None
    reads_all: str = ""


class UpdatesRows:
    """Mixin that updates rows; must precede the Keras class in the bases."""

    _keras_class: Any
    lazy: bool = False
    _owner: int | None = None
    _reads_all_rows: frozenset[Any] = frozenset()  # Variables, by `_var_key`.
    _ways: dict[str, str]

    @property
    def updates_rows_by(self: Any) -> dict[str, str]:
        """How the last traced step updates each table: "op", "rows" or "dense"."""
        return dict(self.__dict__.get("_ways", {}))

    def build(self: Any, variables: Any) -> None:
        """Creates the slots, after another check of the options and the strategy."""
        _check_use(self, self._keras_class.__name__)
        had_slots = keras_api.is_built(self)  # tf_keras builds in each step.
        self._keras_class.build(self, variables)
        if self._owner is None or not had_slots:
            self.wait_for(variables)

    @classmethod
    def from_config(cls, config: dict[str, Any], **kwargs: Any) -> Any:
        """Creates the optimizer of a configuration; earlier versions saved `lazy`."""
        config = dict(config)
        lazy = config.pop("lazy", False)
        optimizer = cls._keras_class.from_config.__func__(cls, config, **kwargs)
        optimizer.__dict__["lazy"] = lazy
        return optimizer

    def wait_for(self: Any, variables: Any) -> None:
        """Lets rows of tables wait, if the optimizer has its slots."""
        if keras_api.is_built(self):
            for variable in variables:
                self._wait(variable)

    def _wait(self: Any, variable: Any) -> None:
        """Lets the rows of a table wait, if steps without a gradient change them."""
        parts = components(variable)
        if not all(isinstance(part, TableVariable) for part in parts):
            return
        idle, why = self._other_rows(variable, getattr(variable, "constraint", None))
        if why:
            self._warn_of_all_rows(variable, why)
        else:
            read = self._reads_all_rows - {self._var_key(variable)}
            self.__dict__["_reads_all_rows"] = read
        slots = self._slots(keras_api.index_of(self, variable)).values()
        if idle is None or not all(make_table(slot) for slot in slots):
            for part in parts:
                take_over(part, None)
            return
        owner = self.__dict__.setdefault("_owner", new_owner())
        of_slots = (components(slot) for slot in slots)
        for part, *of_part in zip(parts, *of_slots, strict=True):
            if part.waiting is not None and part.waiting.owner == owner:
                continue
            variables, decays = (part, *of_part), self._decays(variable)
            take_over(part, Waiting(idle, variables, owner, decays))

    def _other_rows(self: Any, variable: Any, constraint: Any = None) -> _OtherRows:
        """Returns what a step with the present options does to the other rows."""
        if self.lazy:
            return _OtherRows(None)
        if getattr(self, "gradient_accumulation_steps", None):
            why = "`gradient_accumulation_steps` accumulates dense gradients"
            return _OtherRows(None, why)
        try:
            idle = idle_of_keras(self, self._keras_class)
        except ValueError as error:
            return _OtherRows(None, str(error))
        if idle.changes_nothing and not self._decays(variable):
            return _OtherRows(None)  # Keras constrains and averages after each step.
        dtype = tf.as_dtype(variable.dtype)
        if dtype.size < 4:
            return _OtherRows(None, f"each step rounds its {dtype.name} values")
        if self.use_ema:
            return _OtherRows(idle, "`use_ema` averages all rows")
        if constraint is not None:
            why = f"its {type(constraint).__name__} constrains all rows"
            return _OtherRows(idle, why)
        return _OtherRows(idle)

    def _decays(self: Any, variable: Any) -> bool:
        # Keras finds excluded variables by the names in TensorFlow, and remembers them.
        variable = keras_api.value_of(variable)
        return self.weight_decay is not None and self._use_weight_decay(variable)

    def update_step(self: Any, gradient: Any, variable: Any, *rate: Any) -> None:
        """Updates a variable, or the rows that an IndexedSlices names."""
        if isinstance(gradient, _Applied):
            return
        waiting = waiting_of(variable)
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        by_rows = self.has_only_rows(gradient, variable)
        if is_sparse and not by_rows and waiting is None:
            why = self._other_rows(variable).reads_all
            if not why and isinstance(variable, TableVariable):
                why = "an option changed after it was built"
            why = why or "it does not belong to a te.keras.Embedding"
            self._warn_of_all_rows(variable, why)
        if not by_rows and (is_sparse or isinstance(variable, TableVariable)):
            self._note(variable, "dense")
        if is_sparse:
            gradient = sum_duplicates(gradient) if by_rows else _dense(gradient)
        if waiting is None:
            if by_rows:
                self._update_touched(gradient, variable, None, *rate)
            else:
                self._decay(variable, variable)
                self._keras_class.update_step(self, gradient, variable, *rate)
            return
        if waiting.decays and is_in_xla():
            with tf.init_scope():  # At the current rate.
                if float(self._shrinkage(waiting)) >= 1.0:
                    raise ValueError(large_decay(variable.name))
        with tf.control_dependencies(
            [waiting.check_step(self._shrinkage(waiting, *rate))]
        ):
            gradient = tf.nest.map_structure(
                tf.identity, gradient, expand_composites=True
            )
        if by_rows:
            self._update_touched(gradient, variable, waiting, *rate)
        else:
            waiting.flush()
            with waiting.quiet():
                self._decay(variable, variable)
                self._keras_class.update_step(self, gradient, variable, *rate)
        waiting.advance(self._step(waiting, *rate), dense=not by_rows)

    def _check_step(self: Any, variable: Any) -> None:
        """Refuses a step with a table of another optimizer, or with other options."""
        waiting = waiting_of(variable)
        last = getattr(variable, "waiting", None)
        is_own = last is not None and last.owner == self._owner
        if is_own is (waiting is None):
            raise RuntimeError(f"RowSparseOptimizer: {other_optimizer(variable.name)}")
        if waiting is not None:
            options = self._other_rows(variable).idle, self._decays(variable)
            if options != (waiting.idle, waiting.decays):
                raise RuntimeError(
                    "RowSparseOptimizer: an option of this "
                    f"{self._keras_class.__name__} changed after it was built for "
                    f"{variable.name}, whose rows may wait for steps with the former "
                    "one. Call te.keras.unconvert(model) before the change and "
                    "te.keras.convert(model) after it, or create another optimizer."
                )
        check_calls(variable, waiting)

    def has_only_rows(self: Any, gradient: Any, variable: Any) -> bool:
        """Returns whether a step updates no rows but those that a gradient names."""
        if not isinstance(gradient, tf.IndexedSlices):
            return False
        waiting = waiting_of(variable)
        if self._var_key(variable) in self._reads_all_rows:
            # After each step Keras reads the whole table, which catches up all rows:
            # one op of the library does that faster than Keras's ops update them.
            return waiting is not None and waiting.has_kernels()
        return waiting is not None or self._other_rows(variable) == _OtherRows(None)

    def _warn_of_all_rows(self: Any, variable: Any, why: str) -> None:
        """Notes that steps read all rows of a table, and warns once."""
        key = self._var_key(variable)
        if key in self._reads_all_rows:
            return
        self.__dict__["_reads_all_rows"] = self._reads_all_rows | {key}
        name = components(variable)[0].name
        warnings.warn(
            f"RowSparseOptimizer updates all rows of {name} in each step, as "
            f"Keras does: {why}. `lazy=True` updates only the rows of the batch, which "
            "gives other results.",
            stacklevel=2,
        )

    def _note(self: Any, variable: Any, way: str) -> None:
        self.__dict__.setdefault("_ways", {})[variable.name] = way

    def _update_touched(
        self: Any, gradient: Any, variable: Any, waiting: Any, *rate: Any
    ) -> None:
        self._note(variable, "rows")
        key, index = self._var_key(variable), keras_api.index_of(self, variable)
        whole = self._slots(index)
        variables = [variable, *(local(slot) for slot in whole.values())]
        if waiting is None:
            stored = [gather(v, gradient.indices) for v in variables]
        else:
            stored = waiting.caught_up(gradient.indices)
        touched = [TouchedRows(value, key) for value in stored]
        slots = {
            name: {index: rows} for name, rows in zip(whole, touched[1:], strict=True)
        }
        self._decay(touched[0], variable)
        self._keras_class.update_step(
            _OnTouchedRows(self, slots), gradient.values, touched[0], *rate
        )
        if waiting is None:
            for each, rows in zip(variables, touched, strict=True):
                scatter(each, gradient.indices, rows.value)
            return
        waiting.write(gradient.indices, [rows.value for rows in touched])

    def _shrinkage(self: Any, waiting: Waiting, *rate: Any) -> tf.Tensor:
        if not waiting.decays:
            return tf.zeros([], tf.float64)
        used = rate[0] if rate else self.learning_rate
        return tf.cast(self.weight_decay, tf.float64) * tf.cast(used, tf.float64)

    def _step(self: Any, waiting: Waiting, *rate: Any) -> tf.Tensor:
        """Returns what `Waiting.advance` takes, after the update of a step."""
        used = rate[0] if rate else self.learning_rate
        dtype = waiting.variables[0].dtype
        numbers = step_of(self, self._keras_class, used, dtype)
        step = (*numbers, self._shrinkage(waiting, *rate))
        return tf.stack([tf.cast(part, tf.float64) for part in step])

    def update_rows(
        self: Any, gradients_and_variables: Any, rate: Any
    ) -> list[tuple[Any, Any]]:
        """Updates in one op what the library can; `update_step` updates the others.

        It leaves a variable that occurs twice to `update_step`, which keeps the order.

        Returns:
          The same pairs, with an `_Applied` in place of each gradient that was applied.
        """
        pairs = list(gradients_and_variables)
        sparse = [
            n for n, (g, _) in enumerate(pairs) if isinstance(g, tf.IndexedSlices)
        ]
        rule = rule_of(self, self._keras_class, rate) if sparse else None
        if rule is None:
            return pairs
        named = collections.Counter(self._var_key(variable) for _, variable in pairs)
        tables: dict[int, rules.TableGradient] = {}
        for n in sparse:
            gradient, variable = pairs[n]
            slots = self._slots(keras_api.index_of(self, variable)).values()
            variable, *slots = (keras_api.value_of(v) for v in (variable, *slots))
            waiting = waiting_of(variable)
            table = rules.TableGradient(gradient, variable, slots, waiting)
            once = named[self._var_key(variable)] == 1
            # The op decays no table whose rows do not wait.
            decays = waiting is None and self._decays(variable)
            if (
                once
                and not decays
                and table.fits(rule)
                and self.has_only_rows(gradient, variable)
            ):
                tables[n] = table
        for waits in (True, False):
            some = [each for each in tables.values() if bool(each.waiting) is waits]
            steps = [self._step(each.waiting, rate) for each in some if waits]
            if some:
                rules.update_rows(rule, some, self.iterations, steps)
        for n, table in tables.items():
            gradient = table.gradient
            applied = _Applied(gradient.values, gradient.indices, gradient.dense_shape)
            pairs[n] = (applied, table.variable)
            self._note(table.variable, "op")
        return pairs

    def _slots(self: Any, index: int) -> dict[str, Any]:
        return slots_at(self, self._keras_class, index)

    def _decay(self: Any, target: Any, variable: Any) -> None:
        if self._decays(variable):
            rate = tf.cast(self.learning_rate, target.dtype)
            decay = tf.cast(self.weight_decay, target.dtype)
            target.assign_sub(target * decay * rate)

    def _apply_weight_decay(self: Any, variables: Any) -> None:
        """Checks a step before it changes anything; `update_step` decays weights.

        Keras calls this for each step, and then `update_all`; Nadam of Keras 3 counts a
        step in between.
        """
        for variable in variables:
            for part in components(variable):
                self._check_step(part)

    def _deduplicate_sparse_grad(self, gradients: Any) -> Any:
        """Does nothing: `update_step` sums the duplicates, not tf_keras."""
        return gradients

    def _clip_gradients(self: Any, gradients: Any) -> list[Any]:
        """Clips as if every gradient were dense: the other rows are zeros."""
        if not (self.clipnorm or self.global_clipnorm or self.clipvalue):
            return gradients
        summed = [
            sum_duplicates(g) if isinstance(g, tf.IndexedSlices) else g
            for g in gradients
        ]
        clipped = self._keras_class._clip_gradients(
            self, [g.values if isinstance(g, tf.IndexedSlices) else g for g in summed]
        )
        return [
            _Summed(values, s.indices, s.dense_shape, g)
            if isinstance(s, tf.IndexedSlices)
            else values
            for g, s, values in zip(gradients, summed, clipped, strict=True)
        ]


def keras_class(optimizer: Any) -> Any:
    """Returns the class of Keras of an optimizer, whether it updates rows or not."""
    is_by_rows = isinstance(optimizer, UpdatesRows)
    return optimizer._keras_class if is_by_rows else type(optimizer)


def slots_at(optimizer: Any, cls: type, index: int) -> dict[str, Any]:
    """Returns the slots of a variable by the attribute that has them."""
    return {
        name: getattr(optimizer, name)[index]
        for name in RULES[cls.__name__].slots
        if getattr(optimizer, name, None)
    }


class _Applied(tf.IndexedSlices):
    """A gradient that was applied, so that its rows are up to date."""


class _Summed(tf.IndexedSlices):
    """A gradient with each row once; XLA's tf.unique must not see its rows again.

    `unclipped` is the gradient before it was summed and then clipped.
    """

    def __init__(self, values: Any, rows: Any, shape: Any, unclipped: Any) -> None:
        super().__init__(values, rows, shape)
        self.unclipped = unclipped


def sum_duplicates(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums the values of equal indices."""
    if isinstance(gradient, _Summed):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return _Summed(values, rows, gradient.dense_shape, gradient)


def _dense(gradient: tf.IndexedSlices) -> tf.Tensor:
    shape: Any = gradient.dense_shape
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])


def _row_sparse_class(keras_class: Any) -> Any:
    name = f"RowSparse{keras_class.__name__}"
    step = keras_api.ALL_VARIABLES_STEP

    def update_all(self: Any, strategy: Any, pairs: Any, *rate: Any) -> Any:
        (used,) = rate or (self.learning_rate,)  # tf_keras evaluates it before.
        pairs = list(pairs)
        with counted(pairs, self.has_only_rows):
            pairs = self.update_rows(pairs, used)
            return getattr(keras_class, step)(self, strategy, pairs, *rate)

    members = {
        "__doc__": f"Updates the rows of a batch as {keras_class.__name__} does.",
        "_keras_class": keras_class,
        step: update_all,
    }
    cls = type(name, (UpdatesRows, keras_class), members)
    keras_api.save_as(cls, keras_class)
    return cls


# The class that updates rows, by the class of Keras.
CLASSES = {
    keras_class: _row_sparse_class(keras_class)
    for keras_class in (getattr(keras_api.optimizers, name) for name in RULES)
}
globals().update({cls.__name__: cls for cls in CLASSES.values()})  # For pickle.


def RowSparseOptimizer(inner: Any, lazy: bool = False) -> Any:  # noqa: N802
    """Makes a Keras optimizer update only the rows of a table that a batch names.

    The gradient of `te.keras.Embedding` names the rows of its batch (it is a
    tf.IndexedSlices). The gradients of equal ids are summed, and the rule of the
    optimizer is applied once to each of these rows and to its slots. Dense gradients,
    such as those of other layers, of tied logits or with a regularizer, are applied as
    by the optimizer itself.

    The numbers are those of Keras with dense gradients, for every optimizer. Momenta
    and weight decay move a row even in steps that do not name it; the row is caught up
    on these steps when it is read or updated next. Whatever reads a whole table or
    slot first catches all rows up.

    `inner` stays the same object but gets a subclass of its class, so slots, learning
    rates, callbacks and files are those of Keras. Clipping sees the summed gradients.
    Steps compute on all rows, as in Keras, with one warning: for tables of layers other
    than `te.keras.Embedding`, with a `beta_2` that is small beside `beta_1` (such as
    0.9 for both), with `gradient_accumulation_steps`, Ftrl's l2 shrinkage or the
    `adaptive_epsilon` of tf_keras, and, if waiting rows move, in tables of 16 bits and
    with `use_ema` or constraints. An option that changes while rows wait is an error.

    >>> import keras
    >>> optimizer = RowSparseOptimizer(keras.optimizers.Adagrad(0.1))
    >>> table = keras.Variable([[1.0], [2.0], [3.0]])
    >>> gradient = tf.IndexedSlices(tf.ones([2, 1]), tf.constant([1, 1]))
    >>> optimizer.apply([gradient], [table])
    >>> table.numpy().ravel().round(3)
    array([1.   , 1.901, 3.   ], dtype=float32)

    Args:
      inner: An Adadelta, Adagrad, Adam, AdamW, Ftrl, Lion, Nadam, RMSprop or SGD of the
        Keras of this process, which may be built and trained already; or a name that
        `compile` accepts, such as "adam".
      lazy: Leaves rows and slots as they are in the steps that do not name them, as
        LazyAdam of TensorFlow Addons does. It is cheaper, and rare rows learn less than
        in Keras. SGD without momentum and Adagrad are the same either way.

    Returns:
      `inner`, or the optimizer with that name.

    Raises:
      TypeError: If `inner` is not an optimizer of Keras.
      ValueError: If its class has no rule for rows, if it updates rows already with
        another value of `lazy`, if Keras does not know the name, or for
        `loss_scale_factor`.
      NotImplementedError: Under a strategy other than MirroredStrategy.
      RuntimeError: If Keras does not run on TensorFlow.
    """
    keras_api.require_tensorflow("RowSparseOptimizer")
    if isinstance(inner, str):
        inner = keras_api.optimizers.get(inner)
    if not isinstance(inner, keras_api.Optimizer):
        raise TypeError(
            "RowSparseOptimizer takes a Keras optimizer, such as "
            f"keras.optimizers.Adagrad(0.1). Received: {inner!r} of type "
            f"{type_name(inner)}.{of_other_keras(inner)}"
        )
    if isinstance(inner, UpdatesRows):
        if inner.lazy == lazy:
            return inner
        raise ValueError(
            f"RowSparseOptimizer: this {inner._keras_class.__name__} is already "
            f"row-sparse, with lazy={inner.lazy}. Create another optimizer for "
            f"lazy={lazy}."
        )
    if type(inner) not in CLASSES:
        wraps = hasattr(inner, "inner_optimizer")
        raise ValueError(
            "RowSparseOptimizer does not support "
            f"{type(inner).__module__}.{type(inner).__qualname__}. It supports "
            f"{', '.join(RULES)} of {keras_api.optimizers.__name__}, but not their "
            "subclasses. "
            + (
                "Wrap the inner optimizer instead: "
                "LossScaleOptimizer(RowSparseOptimizer(...))."
                if wraps
                else "Use one of them, or this optimizer as it is."
            )
        )
    _check_use(inner, type(inner).__name__)
    object.__setattr__(inner, "__class__", CLASSES[type(inner)])
    inner.__dict__["lazy"] = lazy
    inner.wait_for(keras_api.built_for(inner))
    return inner


def _check_use(optimizer: Any, class_name: str) -> None:
    scale = getattr(optimizer, "loss_scale_factor", None)
    if scale is not None:
        raise ValueError(
            f"RowSparseOptimizer: `loss_scale_factor={scale!r}` of {class_name} works "
            f"on all rows. {_LOSS_SCALE}"
        )
    strategy = type(tf.distribute.get_strategy())
    if tf.distribute.has_strategy() and strategy not in _STRATEGIES:
        raise NotImplementedError(
            f"RowSparseOptimizer under {strategy.__name__} is not supported. Use one "
            "device, MirroredStrategy, or te.keras.TPUEmbedding."
        )


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer in those that scale the loss, if there is one."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def plain_optimizer(optimizer: Any) -> Any:
    """Makes a row-sparse optimizer one of Keras again, and returns it."""
    for variable in keras_api.built_for(optimizer):
        make_plain(variable)
    object.__setattr__(optimizer, "__class__", optimizer._keras_class)
    return optimizer
