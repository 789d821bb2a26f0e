"""An update rule that the user provides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from tpu_embedding import errors
from tpu_embedding.optimizers import base

# Names of the table itself and of the combiner's weights among the slots.
_RESERVED = ("parameters", "custom_combiner_variables")


@dataclasses.dataclass(frozen=True)
class CustomOptimizer(base.Optimizer):
    """Updates each row by a function of yours.

      custom_computation(gradient, embedding_table, slot_variables, learning_rate,
          hyperparameters) -> the new row, or (the new row, *the new slots)

    The gradient and the row are float32 [1, D]. A slot is [1, D], or [1] if its
    dimension is 1. The learning rate and the hyperparameters are scalars. The function
    must be a pure function of TensorFlow ops: engines may call it once for all touched
    rows (vectorized). Only TPUEmbeddingV2 supports it. Arguments, their order and
    defaults are those of tf.tpu.experimental.embedding.CustomOptimizer.

    >>> def sgd(gradient, embedding_table, slot_variables, learning_rate, _):
    ...     return embedding_table - learning_rate * gradient
    >>> CustomOptimizer(sgd, learning_rate=0.5).slots
    ()

    Attributes:
      custom_computation: The update rule.
      learning_rate: As in every optimizer.
      slot_names: The names of the slots.
      slot_initializers: A callable of (shape, dtype), or a number, for each slot.
      hyperparameters: Numbers, or callables without arguments that apply_gradients
        calls.
      slot_dims: 2 (as wide as the table) or 1 (one number for each row; not on
        SparseCores) for each slot. This and the three attributes above become tuples.

    Raises:
      ValueError: If the number of initializers or dimensions differs from the number
        of names, a dimension is neither 1 nor 2, or a name occurs twice or is reserved.
      TypeError: If a function is not callable, a hyperparameter is not a number, a
        name is not a string, or a list is of another type.
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
    clipnorm: float | None = dataclasses.field(default=None, init=False)
    clipvalue: base.ClipValue | None = dataclasses.field(default=None, init=False)
    low_dimensional_packing_status: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.custom_computation):
            raise errors.argument_type(
                "custom_computation", self.custom_computation, "callable"
            )
        for argument in ("slot_names", "slot_initializers", "hyperparameters"):
            given = getattr(self, argument)
            object.__setattr__(self, argument, _as_tuple(argument, given))
        names, initializers = self.slot_names, self.slot_initializers
        assert names is not None
        assert initializers is not None
        dims = _as_tuple("slot_dims", self.slot_dims) or (2,) * len(names)
        object.__setattr__(self, "slot_dims", dims)
        for argument, values in (
            ("slot_initializers", initializers),
            ("slot_dims", dims),
        ):
            if len(values) != len(names):
                raise ValueError(
                    f"CustomOptimizer: `slot_names` has {len(names)} names, but "
                    f"`{argument}` has {len(values)} values. Pass one for each slot."
                )
        _check_names(names)
        if not all(type(dim) is int and dim in (1, 2) for dim in dims):
            raise ValueError(
                f"CustomOptimizer: `slot_dims` is {dims!r}. Each must be 2 for a slot "
                "as wide as the table, or 1 for one number per row."
            )
        for value in (*initializers, *self.hyperparameters):
            if not callable(value):
                base.check_number("slot_initializers and hyperparameters", value)

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
        """Returns the rule with hyperparameters that are already evaluated."""
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
        """Calls the user's function for one row.

        Args:
          gradient: The summed gradient of the row, [1, D].
          row: The row, [1, D].
          slots: The row's part of each slot, [1, D] or [1].
          *numbers: The learning rate, then the hyperparameters; scalars.
          table: Name of the table, for errors.

        Returns:
          The new row, then the new slots.

        Raises:
          ValueError: If the function returns a wrong number of tensors or wrong shapes.
          TypeError: If it returns a value that is not a tensor of the row's dtype.
        """
        rate, *hyperparameters = numbers
        found = self.custom_computation(
            gradient, row, list(slots), rate, hyperparameters
        )
        values = list(found) if isinstance(found, (list, tuple)) else [found]
        if len(values) != 1 + len(slots):
            where = "" if table is None else f"Table {table!r}: "
            raise ValueError(
                f"{where}The custom computation {self.custom_computation!r} returned "
                f"{len(values)} tensors; it must return {1 + len(slots)}: the row, "
                "then each slot."
            )
        for value, old in zip(values, (row, *slots), strict=True):
            errors.check_returned(
                self.custom_computation, value, (old.shape, old.dtype), table
            )
        return values

    def update(self, ops, gradient, row, slots, rate):
        numbers = (rate, *(n() if callable(n) else n for n in self.hyperparameters))

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
    if not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            f"CustomOptimizer: `slot_names` is {names!r}. Each must be a string with "
            "at least one character."
        )
    if len({*_RESERVED, *names}) < len(_RESERVED) + len(names):
        raise ValueError(
            f"CustomOptimizer: `slot_names` is {names!r}. Each name must be unique, "
            'and "parameters" and "custom_combiner_variables" are reserved for the '
            "table itself and the weights of its combiner. Rename a slot."
        )


def _as_tuple(argument: str, values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(
            f"CustomOptimizer: `{argument}` must be a list or tuple. Received: "
            f"{values!r} of type {errors.type_name(values)}. Put it into a list."
        )
    return tuple(values)
