"""What all optimizers share: their options, their checks, their contract.

An optimizer is a frozen value. Its rule is the pure function `update`; what
surrounds every rule (clipping of the gradient, weight decay, clipping of the
weights) is `apply_rule`.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from tpu_embedding import errors
from tpu_embedding.optimizers import checks

# A number; a callable without arguments; or a callable of the number of updates
# already applied to the table, as a Keras LearningRateSchedule is.
Rate = float | Callable[[], Any] | Callable[[Any], Any]
ClipValue = float | tuple[float | None, float | None]
# (table, slot names, slot initializers) -> slot variables by name.
SlotVariableCreationFn = Callable[[Any, list[str], list[Any]], dict[str, Any]]


class ArrayOps(Protocol):
    """The element-wise functions that a rule needs, of NumPy or of TensorFlow."""

    def sqrt(self, x: Any, /) -> Any: ...
    def pow(self, x: Any, y: Any, /) -> Any: ...
    def abs(self, x: Any, /) -> Any: ...
    def sign(self, x: Any, /) -> Any: ...
    def where(self, condition: Any, x: Any, y: Any, /) -> Any: ...
    def maximum(self, x: Any, y: Any, /) -> Any: ...
    def minimum(self, x: Any, y: Any, /) -> Any: ...
    def mean_last(self, x: Any, /) -> Any:
        """The mean over the last axis, which is kept with size 1."""
        ...

    def map_rows(
        self, function: Callable[..., Any], arrays: Sequence[Any], /
    ) -> Sequence[Any]:
        """What `function` returns of the first, second, ... row of all arrays."""
        ...


# The one value of each option that the SparseCore ops can carry.
SPARSE_CORE_VALUES: dict[str, Any] = {
    "weight_decay_factor": None,
    "clipvalue": None,
    "slot_variable_creation_fn": None,
    "low_dimensional_packing_status": False,
}
# And that the engines off a TPU can: how a TPU stores a table means nothing to them.
HOST_VALUES: dict[str, Any] = {"low_dimensional_packing_status": False}


@dataclasses.dataclass(frozen=True)
class SparseCoreOp:
    """How TensorFlow's SparseCore ops are called for one rule.

    Attributes:
      name: As in the names of the ops, XlaSparseDenseMatmulGradWith<name>And...
      slots: The inputs for the slots, in the order of `Optimizer.slots`.
      attributes: By attribute of the op the field of the optimizer.
    """

    name: str
    slots: tuple[str, ...] = ()
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Slot:
    """A value that an optimizer keeps beside the table, float32.

    Attributes:
      name: As the TPU calls it, e.g. "accumulators".
      initial_value: What it is filled with, or an initializer of (shape, dtype).
      per_row: The shape is [V, 1] instead of [V, D].
    """

    name: str
    initial_value: Any
    per_row: bool = False


@dataclasses.dataclass(frozen=True)
class TpuRule:
    """What the embedding engine of TPU v2 to v4 calls a rule.

    Attributes:
      ops: Part of the names of the ops Load- and RetrieveTPUEmbedding<ops>Parameters,
        whose inputs are `parameters` and the slots, in the order of `slots`.
      message: The field of TensorFlow's OptimizationParameters proto.
      fields: For each field of that message the attribute that it takes its value
        from, or a function of the optimizer.
    """

    ops: str
    message: str
    fields: Mapping[str, str | Callable[[Any], Any]] = dataclasses.field(
        default_factory=dict
    )

    def values(self, optimizer: Optimizer) -> dict[str, Any]:
        """The fields of the message with their values for an optimizer of this rule."""
        return {
            field: getattr(optimizer, source)
            if isinstance(source, str)
            else source(optimizer)
            for field, source in self.fields.items()
        }


class Optimizer(abc.ABC):
    """The contract of every optimizer; each subclass is a frozen dataclass.

    Attributes:
      learning_rate: A number, or a callable that is evaluated once per update.
        It takes no argument, or one: the number of updates already applied.
      use_gradient_accumulation: Sum the gradients of a row before the rule. False
        is a hint to TPU v2-v4; elsewhere the gradients are summed all the same.
      clip_weight_min: Lower limit of touched rows after the rule, or None.
      clip_weight_max: Upper limit of touched rows after the rule, or None.
      weight_decay_factor: f in T <- T - f * T before the rule, or None.
      multiply_weight_decay_factor_by_learning_rate: f is multiplied by the rate.
      clipvalue: Limit of the summed gradient, per element: c for [-c, c], or
        (min, max) where each may be None.
      low_dimensional_packing_status: How a TPU stores narrow tables.
      slot_variable_creation_fn: Creates the slot variables, or None.
    """

    rule: ClassVar[str]
    # None: the embedding engine of TPU v2 to v4 does not have the rule.
    tpu: ClassVar[TpuRule | None] = None
    # None: SparseCores have no op for the rule at all.
    sparse_core_op: ClassVar[SparseCoreOp | None] = None
    sparse_core_values: ClassVar[dict[str, Any]] = SPARSE_CORE_VALUES
    # None: the rule is not published, so that only a TPU can apply it.
    host_values: ClassVar[dict[str, Any] | None] = HOST_VALUES
    # The rule is a function of the user's.
    is_custom: ClassVar[bool] = False
    # The one width of table that the rule is for, or None.
    table_dim: ClassVar[int | None] = None

    learning_rate: Rate
    use_gradient_accumulation: bool
    clip_weight_min: float | None
    clip_weight_max: float | None
    weight_decay_factor: float | None
    multiply_weight_decay_factor_by_learning_rate: bool | None
    clipvalue: ClipValue | None
    low_dimensional_packing_status: bool
    slot_variable_creation_fn: SlotVariableCreationFn | None = None

    def __post_init__(self) -> None:
        """Checks what all optimizers share; subclasses call it and add theirs."""
        _check_rate(self.learning_rate)
        checks.check_flag("use_gradient_accumulation", self.use_gradient_accumulation)
        checks.check_flag(
            "low_dimensional_packing_status", self.low_dimensional_packing_status
        )
        multiply = self.multiply_weight_decay_factor_by_learning_rate
        if multiply is not None:
            checks.check_flag("multiply_weight_decay_factor_by_learning_rate", multiply)
        if self.weight_decay_factor is not None:
            checks.check_number("weight_decay_factor", self.weight_decay_factor)
        checks.check_limits(
            ("clip_weight_min", "clip_weight_max"),
            (self.clip_weight_min, self.clip_weight_max),
        )
        _check_clipvalue(self.clipvalue)
        if self.clipvalue is not None and not self.use_gradient_accumulation:
            raise errors.clip_without_accumulation(self.clipvalue)
        creation_fn = self.slot_variable_creation_fn
        if creation_fn is not None and not callable(creation_fn):
            raise errors.argument_value(
                "slot_variable_creation_fn", creation_fn, "None or a callable"
            )

    @property
    def clip_gradient_min(self) -> float | None:
        """Lower limit of the summed gradient, or None."""
        return _clip_limits(self.clipvalue)[0]

    @property
    def clip_gradient_max(self) -> float | None:
        """Upper limit of the summed gradient, or None."""
        return _clip_limits(self.clipvalue)[1]

    @property
    def hyperparameters_of_rule(self) -> tuple[Any, ...]:
        """Numbers, or callables of nothing, that a rule of the user's takes."""
        return ()

    def with_hyperparameters(self, values: Sequence[Any]) -> Optimizer:
        """The same rule with their values."""
        del values
        return self

    @property
    def touches_all_rows(self) -> bool:
        """Whether rows that no entry names are updated too, with a gradient of 0."""
        return False

    @property
    @abc.abstractmethod
    def slots(self) -> tuple[Slot, ...]:
        """The slots, in the order in which `update` takes and returns them."""

    @property
    @abc.abstractmethod
    def hyperparameters(self) -> tuple[float, ...]:
        """The rule's own constants, in the order of the C++ header of `rule`."""

    @abc.abstractmethod
    def update(
        self,
        ops: ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        """The rule as a pure function.

        Args:
          ops: The array functions to use.
          gradient: float32 [n, D], summed over all entries and clipped.
          row: float32 [n, D], the touched rows, already decayed.
          slots: One float32 [n, D] or, where per row, [n, 1] for each of `slots`.
          rate: The learning rate of this step, a scalar.

        Returns:
          The new row, then the new slots, of the same shapes.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeywordOptimizer(Optimizer):
    """An optimizer that tf.tpu.experimental.embedding lacks.

    No order of TensorFlow's has to be kept, so that what all optimizers share comes
    by keyword, and in one place.
    """

    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: SlotVariableCreationFn | None = None
    clipvalue: ClipValue | None = None
    low_dimensional_packing_status: bool = False


def apply_rule(
    optimizer: Optimizer,
    ops: ArrayOps,
    gradient: Any,
    row: Any,
    slots: Sequence[Any],
    rate: Any,
) -> tuple[Any, ...]:
    """One update of touched rows: clip the gradient, decay, rule, clip the weights.

    Args:
      optimizer: Whose rule and options to apply.
      ops: The array functions to use.
      gradient: float32 [n, D], summed over all entries of each row.
      row: float32 [n, D], the touched rows.
      slots: As `Optimizer.update` takes them.
      rate: The learning rate of this step, a scalar.

    Returns:
      The new row, then the new slots, of the same shapes.
    """
    gradient = _clip(
        ops, gradient, optimizer.clip_gradient_min, optimizer.clip_gradient_max
    )
    if optimizer.weight_decay_factor:
        decay: Any = optimizer.weight_decay_factor
        if optimizer.multiply_weight_decay_factor_by_learning_rate:
            decay = decay * rate
        row = row - decay * row
    row, *slots = optimizer.update(ops, gradient, row, slots, rate)
    row = _clip(ops, row, optimizer.clip_weight_min, optimizer.clip_weight_max)
    return (row, *slots)


def takes_step(rate: Callable[..., Any]) -> bool:
    """Whether a callable learning rate wants the number of updates so far.

    >>> takes_step(lambda: 0.1), takes_step(lambda step: 0.1 / (step + 1))
    (False, True)

    Raises:
      TypeError: If it needs more than one argument.
    """
    try:
        parameters = inspect.signature(rate).parameters.values()
    except ValueError:  # Some built-ins have no signature; TensorFlow passes none.
        return False
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if len(needed) > 1:
        raise errors.learning_rate_arguments(rate, len(needed))
    return bool(needed)


def _check_rate(rate: object) -> None:
    if callable(rate):
        takes_step(rate)
    elif not checks.is_number(rate):
        raise errors.learning_rate(rate)
    else:
        checks.check_number("learning_rate", rate)


def _check_clipvalue(clipvalue: object) -> None:
    if clipvalue is None:
        return
    if isinstance(clipvalue, tuple):
        if len(clipvalue) != 2:
            raise errors.argument_value("clipvalue", clipvalue, "a tuple (min, max)")
        checks.check_limits(("clipvalue[0]", "clipvalue[1]"), clipvalue)
        return
    if not checks.is_number(clipvalue):
        raise errors.argument_type(
            "clipvalue", clipvalue, "None, a number or a tuple (min, max)"
        )
    if not clipvalue >= 0:  # pyright: ignore[reportOperatorIssue]
        raise errors.argument_value("clipvalue", clipvalue, ">= 0")


def _clip_limits(clipvalue: ClipValue | None) -> tuple[float | None, float | None]:
    if clipvalue is None:
        return (None, None)
    if isinstance(clipvalue, tuple):
        return clipvalue
    return (-clipvalue, clipvalue)


def _clip(ops: ArrayOps, x: Any, lower: float | None, upper: float | None) -> Any:
    if lower is not None:
        x = ops.maximum(x, lower)
    if upper is not None:
        x = ops.minimum(x, upper)
    return x
