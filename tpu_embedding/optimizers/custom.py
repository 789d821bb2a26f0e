"""A rule of the user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from tpu_embedding.errors import computed
from tpu_embedding.optimizers import base, checks, errors

# The names of the table itself and of a combiner's weights.
_TAKEN = ("parameters", "custom_combiner_variables")


@dataclasses.dataclass(frozen=True)
class CustomOptimizer(base.Optimizer):
    """The rule is a function of one row.

      custom_computation(gradient, embedding_table, slot_variables, learning_rate,
          hyperparameters) -> the new row, or (the new row, *the new slots)

    The gradient and the row are float32 [1, D], a slot [1, D], or [1] where its
    dimension is 1; the rate and the hyperparameters are scalars. It is called for the
    rows that a step touches, for all of them at once where that is faster, so that it
    must be a pure function of TensorFlow ops. For TPUEmbeddingV2 only. Arguments, their
    order and defaults are those of tf.tpu.experimental.embedding.CustomOptimizer.

    >>> def sgd(gradient, embedding_table, slot_variables, learning_rate, _):
    ...     return embedding_table - learning_rate * gradient
    >>> CustomOptimizer(sgd, learning_rate=0.5).slots
    ()

    Attributes:
      custom_computation: The rule.
      learning_rate: As of every optimizer.
      slot_names: The names of its slots.
      slot_initializers: For each of them a callable of (shape, dtype), or a number.
      hyperparameters: Numbers, or callables of nothing, called by apply_gradients.
      slot_dims: For each slot 2, as wide as the table, or 1, one number for each row.
        Kept as a tuple, as are the three above.

    Raises:
      ValueError: If there are not as many initializers, or dimensions, as names; if a
        dimension is another; if a name occurs twice or is taken.
      TypeError: If what is to be called cannot be, a hyperparameter is no number, a
        name no text, or a list no list.
    """

    rule: ClassVar[str] = "custom"
    is_custom: ClassVar[bool] = True

    custom_computation: Callable[..., Any]
    learning_rate: base.Rate = 0.01
    slot_names: Sequence[str] | None = None
    slot_initializers: Sequence[Any] | None = None
    hyperparameters: Any = None
    slot_dims: Sequence[int] | None = None
    use_gradient_accumulation: bool = dataclasses.field(default=False, init=False)
    clip_weight_min: float | None = dataclasses.field(default=None, init=False)
    clip_weight_max: float | None = dataclasses.field(default=None, init=False)
    weight_decay_factor: float | None = dataclasses.field(default=None, init=False)
    multiply_weight_decay_factor_by_learning_rate: bool | None = dataclasses.field(
        default=None, init=False
    )
    clipvalue: base.ClipValue | None = dataclasses.field(default=None, init=False)
    low_dimensional_packing_status: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.custom_computation):
            raise errors.not_callable("custom_computation", self.custom_computation)
        for argument in ("slot_names", "slot_initializers", "hyperparameters"):
            given = getattr(self, argument)
            object.__setattr__(self, argument, _as_tuple(argument, given))
        names, initializers = self.slot_names, self.slot_initializers
        assert names is not None
        assert initializers is not None
        dims = (2,) * len(names)
        if self.slot_dims is not None:
            dims = _as_tuple("slot_dims", self.slot_dims) or dims
        object.__setattr__(self, "slot_dims", dims)
        for argument, values in (
            ("slot_initializers", initializers),
            ("slot_dims", dims),
        ):
            if len(values) != len(names):
                raise errors.one_for_each_slot(argument, len(values), len(names))
        _check_names(names)
        if not all(type(dim) is int and dim in (1, 2) for dim in dims):
            raise errors.slot_dims(dims)
        for value in (*initializers, *self.hyperparameters):
            if not callable(value):
                checks.check_number("slot_initializers and hyperparameters", value)

    @property
    def touches_all_rows(self) -> bool:
        return False

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        assert self.slot_names is not None
        assert self.slot_initializers is not None
        assert self.slot_dims is not None
        return tuple(
            base.Slot(name, start, per_row=dim == 1)
            for name, start, dim in zip(
                self.slot_names, self.slot_initializers, self.slot_dims, strict=True
            )
        )

    @property
    def hyperparameters_of_rule(self) -> tuple[Any, ...]:
        return self.hyperparameters

    def with_hyperparameters(self, values: Sequence[Any]) -> CustomOptimizer:
        """The same rule with hyperparameters that are evaluated already."""
        callables = tuple((lambda value=value: value) for value in values)
        return dataclasses.replace(self, hyperparameters=callables)

    def compute(
        self,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        *numbers: Any,
        table: str | None = None,
    ) -> list[Any]:
        """The user's rule for one row; the new row, then the new slots.

        Args:
          gradient: [1, D].
          row: [1, D].
          slots: [1, D] or [1] each.
          *numbers: The rate, then the hyperparameters.
          table: Whose row it is, for errors.

        Raises:
          ValueError: If the rule returns another number of tensors, or other shapes.
          TypeError: If it returns what is no tensor, or one of another dtype.
        """
        rate, *hyperparameters = numbers
        found = self.custom_computation(
            gradient, row, list(slots), rate, hyperparameters
        )
        values = list(found) if isinstance(found, (list, tuple)) else [found]
        if len(values) != 1 + len(slots):
            raise errors.computed_number(
                self.custom_computation, len(values), 1 + len(slots), table
            )
        for value, old in zip(values, (row, *slots), strict=True):
            error = computed(
                self.custom_computation, value, (old.shape, old.dtype), table
            )
            if error is not None:
                raise error
        return values

    def update(
        self,
        ops: base.ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        numbers = (
            rate,
            *(n() if callable(n) else n for n in self.hyperparameters),
        )

        def one_row(gradient: Any, row: Any, *slots: Any) -> list[Any]:
            wide = [
                slot if spec.per_row else slot[None]
                for spec, slot in zip(self.slots, slots, strict=True)
            ]
            new = self.compute(gradient[None], row[None], wide, *numbers)
            narrow = [spec.per_row for spec in self.slots]
            return [
                value if per_row else value[0]
                for value, per_row in zip(new, (False, *narrow), strict=True)
            ]

        return tuple(ops.map_rows(one_row, (gradient, row, *slots)))


def _check_names(names: Sequence[Any]) -> None:
    """That slots can be told apart, from the table and its combiner's weights too."""
    if not all(isinstance(name, str) and name for name in names):
        raise errors.slot_name(names)
    if len({*_TAKEN, *names}) < len(_TAKEN) + len(names):
        raise errors.slot_names(names)


def _as_tuple(argument: str, values: Any) -> tuple[Any, ...]:
    """The values of an argument that is a list, or None."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise errors.not_a_list(argument, values)
    return tuple(values)
