"""Keras optimizers that update the rows of a table that a batch names, once each.

The rule of an optimizer is the `update_step` of its Keras class. It runs here with
`TouchedRows` in place of the variable and the slots, so there is no second copy of it.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding.errors import type_name
from tpu_embedding.keras import fused_rows
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.keras.keras_rules import rule_of

# The attributes of Keras's classes that hold slots, one for each variable. Lion's name
# differs between Keras 3 and tf_keras.
_SLOTS: dict[str, tuple[str, ...]] = {
    "Adadelta": ("_accumulated_grads", "_accumulated_delta_vars"),
    "Adagrad": ("_accumulators",),
    "Adam": ("_momentums", "_velocities", "_velocity_hats"),
    "AdamW": ("_momentums", "_velocities", "_velocity_hats"),
    "Ftrl": ("_accumulators", "_linears"),
    "Lion": ("_momentums", "momentums"),
    "Nadam": ("_momentums", "_velocities"),
    "RMSprop": ("_velocities", "_momentums", "_average_gradients"),
    "SGD": ("momentums",),
}
# Options that Keras carries out on all rows, by the way out.
_REFUSED = {
    "gradient_accumulation_steps": "Leave it at None and use larger batches.",
    "loss_scale_factor": (
        "Leave it at None and use keras.optimizers.LossScaleOptimizer("
        "te.keras.RowSparseOptimizer(...))."
    ),
}
_STRATEGIES = (tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy)


class TouchedRows:
    """The rows of a variable that a gradient names, as the optimizers of Keras use it.

    Has what an `update_step` takes of a variable. Nothing changes in the variable
    before `write`.
    """

    def __init__(self, variable: Any, rows: tf.Tensor, key: Any) -> None:
        self._variable = keras_api.value_of(variable)
        self._rows = rows
        self._value: tf.Tensor = tf.gather(self._variable, rows)
        self._changed = False
        self._unique_id = key  # By which optimizers find the slots of a variable.
        self.dtype = self._value.dtype

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._value, dtype, name=name)

    def assign(self, value: Any) -> None:
        self._value = tf.cast(value, self.dtype)
        self._changed = True

    def assign_add(self, value: Any) -> None:
        self.assign(self._value + value)

    def assign_sub(self, value: Any) -> None:
        self.assign(self._value - value)

    def write(self) -> None:
        """Writes the rows into the variable."""
        if self._changed:
            self._variable.scatter_update(tf.IndexedSlices(self._value, self._rows))


def _operator(name: str) -> Any:
    return lambda self, *others: getattr(self._value, name)(*others)


_tensor: Any = tf.Tensor
for _name in _tensor.OVERLOADABLE_OPERATORS:
    setattr(TouchedRows, _name, _operator(_name))


class _OnTouchedRows:
    """An optimizer, as its `update_step` sees it, whose slots are touched rows."""

    def __init__(self, optimizer: Any, slots: Mapping[str, Any]) -> None:
        self.__dict__.update(slots, _optimizer=optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)  # Nadam of tf_keras counts.


class UpdatesRows:
    """Comes before the class of an optimizer among the bases of a row-sparse one."""

    _rule: Any  # The class of Keras.

    def build(self: Any, variables: Any) -> None:
        """Creates the slots: by now options or the strategy may be others."""
        _check_use(self, self._rule.__name__)
        self._rule.build(self, variables)

    def update_step(self: Any, gradient: Any, variable: Any, *rate: Any) -> None:
        """Updates a variable, or the rows that an IndexedSlices names."""
        if isinstance(gradient, _Applied):
            return
        if not isinstance(gradient, tf.IndexedSlices):
            self._decay(variable, variable)
            self._rule.update_step(self, gradient, variable, *rate)
            return
        gradient = sum_duplicates(gradient)
        key = self._var_key(variable)
        index = keras_api.index_of(self, variable)

        def touched(whole: Any) -> TouchedRows:
            return TouchedRows(whole, gradient.indices, key)

        rows = touched(variable)
        slots = {
            name: {index: touched(slot)} for name, slot in self._slots(index).items()
        }
        self._decay(rows, variable)
        self._rule.update_step(
            _OnTouchedRows(self, slots), gradient.values, rows, *rate
        )
        rows.write()
        for slot in slots.values():
            slot[index].write()

    def update_rows(
        self: Any, gradients_and_variables: Any, rate: Any
    ) -> list[tuple[Any, Any]]:
        """Updates what the library can in one op; `update_step` does the others.

        A variable that is named twice is for `update_step`, which keeps the order.

        Returns:
          The same pairs, in which a gradient that was applied is an `_Applied`.
        """
        pairs = list(gradients_and_variables)
        sparse = [
            n for n, (g, _) in enumerate(pairs) if isinstance(g, tf.IndexedSlices)
        ]
        if not sparse or not fused_rows.is_possible():
            return pairs
        rule = rule_of(self, self._rule, rate)
        if rule is None:
            return pairs
        named = collections.Counter(self._var_key(variable) for _, variable in pairs)
        tables: dict[int, fused_rows.Rows] = {}
        for n in sparse:
            gradient, variable = pairs[n]
            slots = self._slots(keras_api.index_of(self, variable)).values()
            values = [keras_api.value_of(v) for v in (variable, *slots)]
            rows = fused_rows.Rows(gradient, values[0], values[1:])
            if rows.fits(rule) and named[self._var_key(variable)] == 1:
                tables[n] = rows
        if tables:
            fused_rows.update(rule, list(tables.values()), self.iterations)
        for n, (gradient, variable, _) in tables.items():
            applied = _Applied(gradient.values, gradient.indices, gradient.dense_shape)
            pairs[n] = (applied, variable)
        return pairs

    def _slots(self: Any, index: int) -> dict[str, Any]:
        """The slots of a variable by the attribute that has them."""
        return {
            name: getattr(self, name)[index]
            for name in _SLOTS[self._rule.__name__]
            if getattr(self, name, None)
        }

    def _decay(self: Any, target: Any, variable: Any) -> None:
        if self.weight_decay is not None and self._use_weight_decay(variable):
            rate = tf.cast(self.learning_rate, target.dtype)
            decay = tf.cast(self.weight_decay, target.dtype)
            target.assign_sub(target * decay * rate)

    def _apply_weight_decay(self, variables: Any) -> None:
        """Does nothing: `update_step` decays what it updates."""

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
        clipped = self._rule._clip_gradients(
            self, [g.values if isinstance(g, tf.IndexedSlices) else g for g in summed]
        )
        return [
            _Summed(values, g.indices, g.dense_shape)
            if isinstance(g, tf.IndexedSlices)
            else values
            for g, values in zip(summed, clipped, strict=True)
        ]


class _Applied(tf.IndexedSlices):
    """A gradient whose rows are updated."""


class _Summed(tf.IndexedSlices):
    """Names each row once. XLA's tf.unique of what tf.unique returned is wrong."""


def sum_duplicates(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums the values of equal indices."""
    if isinstance(gradient, _Summed):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return _Summed(values, rows, gradient.dense_shape)


def _row_sparse_class(rule: Any) -> Any:
    name = f"RowSparse{rule.__name__}"
    step = keras_api.ALL_VARIABLES_STEP

    def update_all(self: Any, strategy: Any, pairs: Any, *rate: Any) -> Any:
        (used,) = rate or (self.learning_rate,)  # tf_keras evaluates it before.
        return getattr(rule, step)(self, strategy, self.update_rows(pairs, used), *rate)

    members = {
        "__doc__": f"{rule.__name__} of Keras, by rows.",
        "_rule": rule,
        step: update_all,
    }
    return keras_api.register(type(name, (UpdatesRows, rule), members))


_CLASSES = {
    rule: _row_sparse_class(rule)
    for rule in (getattr(keras_api.optimizers, name) for name in _SLOTS)
}
globals().update({cls.__name__: cls for cls in _CLASSES.values()})  # For pickle.


def RowSparseOptimizer(inner: Any) -> Any:  # noqa: N802
    """Makes a Keras optimizer update only the rows of a table that a batch names.

    The gradient of `te.keras.Embedding` names the rows of its batch (it is a
    tf.IndexedSlices). The gradients of equal ids are summed, and the rule of the
    optimizer is applied once to each of these rows and to its slots. Dense gradients,
    such as those of other layers, of tied logits or with a regularizer, are applied as
    by the optimizer itself.

    `inner` stays the same object, of a subclass of its class, so slots, learning rates,
    callbacks and files are those of Keras. Clipping sees the summed gradients.
    Momenta and averages of rows that a batch does not name stay as they are, and
    `weight_decay` decays the rows of the batch only; SGD without momentum and Adagrad
    give the numbers of dense gradients.

    >>> import keras
    >>> optimizer = RowSparseOptimizer(keras.optimizers.Adagrad(0.1))
    >>> table = keras.Variable([[1.0], [2.0], [3.0]])
    >>> gradient = tf.IndexedSlices(tf.ones([2, 1]), tf.constant([1, 1]))
    >>> optimizer.apply([gradient], [table])
    >>> table.numpy().ravel().round(3)
    array([1.   , 1.901, 3.   ], dtype=float32)

    Args:
      inner: An Adadelta, Adagrad, Adam, AdamW, Ftrl, Lion, Nadam, RMSprop or SGD of the
        Keras of this process; it may be built and trained already. Or its name, as
        `compile` takes it: "adam".

    Returns:
      `inner`; of a name the optimizer.

    Raises:
      TypeError: If it is not an optimizer of Keras.
      ValueError: If its class has no rule for rows, or it updates rows already, if
        Keras does not know the name, or for `gradient_accumulation_steps` and
        `loss_scale_factor`.
      NotImplementedError: Under a strategy other than MirroredStrategy.
    """
    if isinstance(inner, str):
        inner = keras_api.optimizers.get(inner)
    if not isinstance(inner, keras_api.Optimizer):
        raise TypeError(
            "RowSparseOptimizer takes an optimizer of Keras, such as "
            f"keras.optimizers.Adagrad(0.1). Received: {inner!r} of type "
            f"{type_name(inner)}."
        )
    if isinstance(inner, UpdatesRows):
        raise ValueError(
            f"RowSparseOptimizer: this {inner._rule.__name__} updates rows already. "
            "Pass it to `compile` as it is."
        )
    if type(inner) not in _CLASSES:
        wraps = hasattr(inner, "inner_optimizer")
        raise ValueError(
            f"RowSparseOptimizer does not know the rule of {type(inner).__module__}."
            f"{type(inner).__qualname__}. It knows {', '.join(_SLOTS)} of "
            f"{keras_api.optimizers.__name__}, but not their subclasses. "
            + (
                "Wrap the inner optimizer: LossScaleOptimizer(RowSparseOptimizer(...))."
                if wraps
                else "Use one of them, or this optimizer as it is."
            )
        )
    _check_use(inner, type(inner).__name__)
    object.__setattr__(inner, "__class__", _CLASSES[type(inner)])
    return inner


def _check_use(optimizer: Any, rule: str) -> None:
    for option, way_out in _REFUSED.items():
        value = getattr(optimizer, option, None)
        if value is not None:
            raise ValueError(
                f"RowSparseOptimizer: `{option}={value!r}` of {rule} "
                f"works on all rows. {way_out}"
            )
    strategy = type(tf.distribute.get_strategy())
    if tf.distribute.has_strategy() and strategy not in _STRATEGIES:
        raise NotImplementedError(
            f"RowSparseOptimizer under {strategy.__name__} is not supported. Use one "
            "device, MirroredStrategy, or te.keras.TPUEmbedding."
        )


def is_lazy(optimizer: Any) -> bool:
    """Whether its numbers are others than those of Keras with dense gradients."""
    rule = optimizer._rule.__name__
    if optimizer.weight_decay is not None:
        return True
    return bool(optimizer.momentum) if rule == "SGD" else rule != "Adagrad"


def plain_optimizer(optimizer: Any) -> Any:
    """Makes a row-sparse optimizer one of Keras again, and returns it."""
    object.__setattr__(optimizer, "__class__", optimizer._rule)
    return optimizer
