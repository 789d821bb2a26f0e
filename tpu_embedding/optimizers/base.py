"""The interface that all optimizers share, their common options, and argument checks.

An optimizer is a frozen dataclass. `Optimizer.update` is its update rule as a pure
function; `apply_rule` adds the steps that surround every rule: clipping of the
gradient, weight decay and clipping of the weights.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from tpu_embedding import errors
from tpu_embedding.optimizers.idle import Idle

# A number, a callable without arguments, or a callable of the number of updates
# already applied to the table, such as a Keras LearningRateSchedule.
Rate = float | Callable[[], Any] | Callable[[Any], Any]
ClipValue = float | tuple[float | None, float | None]
# (table, slot names, slot initializers) -> slot variables by name.
SlotVariableCreationFn = Callable[[Any, list[str], list[Any]], dict[str, Any]]

_FLOAT32 = np.finfo(np.float32)

# The names of the engines in errors.
ENGINES = {
    "host": "the host engine",
    "portable": "the portable engine",
    "sharded": "MultiWorkerMirroredStrategy over several processes",
    "parameter_server": "ParameterServerStrategy",
    "tpu_v2_v4": "TPU v2 to v4",
    "sparse_core": "SparseCores",
}
# Hyperparameters that have other names in the messages of TPU v2 to v4.
_MESSAGE_NAMES = {
    "beta_1": "beta1",
    "beta_2": "beta2",
    "l1_regularization_strength": "l1",
    "l2_regularization_strength": "l2",
    "learning_rate_power": "lr_power",
    "multiply_linear_by_learning_rate": "multiply_linear_by_lr",
    "sum_inside_sqrt": "use_sum_inside_sqrt",
}
SEVERAL_MACHINES = ("sharded", "parameter_server")
TPU_V2_V4_ONLY = tuple(engine for engine in ENGINES if engine != "tpu_v2_v4")


class ArrayOps(Protocol):
    """The element-wise functions that update rules use, from NumPy or TensorFlow."""

    def sqrt(self, x: Any, /) -> Any: ...
    def pow(self, x: Any, y: Any, /) -> Any: ...
    def abs(self, x: Any, /) -> Any: ...
    def sign(self, x: Any, /) -> Any: ...
    def where(self, condition: Any, x: Any, y: Any, /) -> Any: ...
    def maximum(self, x: Any, y: Any, /) -> Any: ...
    def minimum(self, x: Any, y: Any, /) -> Any: ...
    def mean_last(self, x: Any, /) -> Any:
        """Returns the mean over the last axis, which is kept with size 1."""
        ...

    def map_rows(
        self, function: Callable[..., Any], arrays: Sequence[Any], /
    ) -> Sequence[Any]:
        """Applies `function` to the first, second, ... row of all arrays."""
        ...


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of an optimizer that some engines lack, or that the kernels read.

    Attributes:
      name: The field of the optimizer.
      off: The value that every engine supports.
      lacking: The engines, of `ENGINES`, that support no other value.
      check: Raises an error unless a value is allowed; it is not called for `off`.
      record: Returns the fields of the struct in core/row_options.h for a value.
    """

    name: str
    off: Any
    lacking: tuple[str, ...] = ()
    check: Callable[[str, Any], None] = lambda argument, value: None
    record: Callable[[Any], Mapping[str, Any]] = lambda value: {}


@dataclasses.dataclass(frozen=True)
class SparseCoreOp:
    """The names by which TensorFlow's SparseCore ops are called for one update rule.

    Attributes:
      name: Part of the op names, XlaSparseDenseMatmulGradWith<name>And...
      slots: The op's inputs for the slots, in the order of `Optimizer.slots`.
      renamed: The names of the op's attributes that differ from those of the
        hyperparameters, keyed by hyperparameter.
    """

    name: str
    slots: tuple[str, ...] = ()
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def attributes(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the attributes of the op with their values for `optimizer`."""
        names = optimizer.hyperparameter_names
        return {
            self.renamed.get(name, name): getattr(optimizer, name) for name in names
        }


@dataclasses.dataclass(frozen=True)
class Slot:
    """A float32 array that an optimizer keeps beside the table.

    Attributes:
      name: The name that TPUs use, such as "accumulators".
      initial_value: A number, or an initializer of (shape, dtype).
      per_row: Whether the shape is [V, 1] instead of [V, D].
    """

    name: str
    initial_value: Any
    per_row: bool = False


@dataclasses.dataclass(frozen=True)
class TpuRule:
    """The names that the TPU v2-v4 engine uses for one update rule.

    Attributes:
      ops: Part of the op names Load- and RetrieveTPUEmbedding<ops>Parameters, whose
        inputs are `parameters` and the slots in the order of `Optimizer.slots`.
      message: The field of TensorFlow's OptimizationParameters proto.
      further: The optimizer's attribute for each field of that message that is not a
        hyperparameter.
    """

    ops: str
    message: str
    further: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def values(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the fields of the message with their values for `optimizer`."""
        sources = {_MESSAGE_NAMES.get(n, n): n for n in optimizer.hyperparameter_names}
        sources |= self.further
        return {field: getattr(optimizer, name) for field, name in sources.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeywordOptions:
    """The keyword options of all classes here, which TensorFlow's classes lack."""

    clipnorm: float | None = None


class Optimizer(KeywordOptions, abc.ABC):
    """Holds the options of every optimizer; each subclass is a frozen dataclass.

    Attributes:
      learning_rate: A number, or a callable that is evaluated once per update. The
        callable takes no argument, or the number of updates already applied.
      use_gradient_accumulation: Sum the gradients of a row before the update rule.
        False is a hint to TPU v2-v4; the other engines always sum them.
      clip_weight_min: Lower limit of touched rows after the update rule, or None.
      clip_weight_max: Upper limit of touched rows after the update rule, or None.
      weight_decay_factor: f in T <- T - f * T before the update rule, at least 0, or
        None.
      multiply_weight_decay_factor_by_learning_rate: Multiply f by the learning rate.
      clipnorm: Limit of the L2 norm of a row's summed gradient, which is scaled down
        to it; or None. Keras's `clipnorm` limits the norm of a whole variable.
      clipvalue: Limit of the summed gradient, per element, after `clipnorm`: c for
        [-c, c], or (min, max), where each may be None.
      low_dimensional_packing_status: How a TPU stores narrow tables.
      slot_variable_creation_fn: Creates the slot variables, or None.
    """

    # Name of the update rule in C++ (`kName` of its header).
    rule: ClassVar[str]
    # Fields that the C++ rule takes, in the order of its header.
    hyperparameter_names: ClassVar[tuple[str, ...]] = ()
    # This is None if the TPU v2-v4 engine does not have the update rule.
    tpu: ClassVar[TpuRule | None] = None
    # This is None if the SparseCore ops do not have the update rule.
    sparse_core_op: ClassVar[SparseCoreOp | None] = None
    # Options of this rule alone; `OPTIONS` has those of all.
    own_options: ClassVar[tuple[Option, ...]] = ()
    # Whether the update rule is the user's function.
    is_custom: ClassVar[bool] = False
    # The only table width that the update rule supports, or None.
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
        """Checks the common options; subclasses call it and check their own."""
        if callable(self.learning_rate):
            takes_step(self.learning_rate)
        elif not is_number(self.learning_rate):
            raise TypeError(
                "Argument `learning_rate` must be a finite number or a callable that "
                f"returns one. Received: {self.learning_rate!r} of type "
                f"{errors.type_name(self.learning_rate)}. For a rate held in a "
                "variable pass `lambda: variable`."
            )
        else:
            check_number("learning_rate", self.learning_rate)
        for option in OPTIONS:
            value = getattr(self, option.name)
            if value is not option.off:
                option.check(option.name, value)
        check_limits(
            ("clip_weight_min", "clip_weight_max"),
            (self.clip_weight_min, self.clip_weight_max),
        )
        for name in ("clipnorm", "clipvalue"):
            value = getattr(self, name)
            if value is not None and not self.use_gradient_accumulation:
                raise ValueError(
                    f"`{name}` clips the summed gradient of a row, so it cannot be "
                    "used with `use_gradient_accumulation=False`. Received: "
                    f"{name}={value!r}. Leave `{name}` at None or "
                    "`use_gradient_accumulation` at True."
                )

    @property
    def options(self) -> tuple[Option, ...]:
        """The options that some engines lack, or that the kernels read."""
        return (*OPTIONS, *self.own_options)

    @property
    def record(self) -> dict[str, Any]:
        """The fields of core/row_options.h."""
        found: dict[str, Any] = {"all_rows": self.touches_all_rows}
        for option in self.options:
            found |= option.record(getattr(self, option.name))
        return found

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
        """Numbers, or callables without arguments, that a user's rule takes."""
        return ()

    def with_hyperparameters(self, values: Sequence[Any]) -> Optimizer:
        """Returns the update rule with these values of `hyperparameters_of_rule`."""
        del values
        return self

    @property
    def touches_all_rows(self) -> bool:
        """Whether rows that no entry names are updated too, with a gradient of 0."""
        return False

    @property
    def idle(self) -> Idle | None:
        """What updates with a gradient of 0 do, if rows can be caught up when read.

        It is None if rows cannot be caught up, or if there are no such updates.
        """
        return None

    @property
    @abc.abstractmethod
    def slots(self) -> tuple[Slot, ...]:
        """The slots, in the order in which `update` takes and returns them."""

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        """The values of `hyperparameter_names`, flags as 0.0 or 1.0."""
        return tuple(float(getattr(self, name)) for name in self.hyperparameter_names)

    @abc.abstractmethod
    def update(
        self, ops: ArrayOps, gradient: Any, row: Any, slots: Sequence[Any], rate: Any
    ) -> tuple[Any, ...]:
        """Applies the update rule as a pure function; subclasses inherit these types.

        Args:
          ops: The array functions to use.
          gradient: The gradients, summed over all entries and clipped, float32 [n, D].
          row: The touched rows, already decayed, float32 [n, D].
          slots: The rows of each of `slots`, float32 [n, D], or [n, 1] if per row.
          rate: The learning rate of this step, a float32 scalar.

        Returns:
          The new row, then the new slots, of the same shapes.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeywordOptimizer(Optimizer):
    """Base of the optimizers that tf.tpu.experimental.embedding does not have.

    TensorFlow gives no order of arguments to keep, so the common options are
    keyword-only and declared here once.
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
    """Updates touched rows: clip the gradient, decay, apply the rule, clip weights.

    The gradient of each row must be the sum over all entries. It takes and returns what
    `Optimizer.update` does.
    """
    if optimizer.clipnorm is not None:
        squares = ops.mean_last(gradient * gradient) * gradient.shape[-1]
        norm = ops.maximum(ops.sqrt(squares), optimizer.clipnorm)
        gradient = gradient * (optimizer.clipnorm / norm)
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
    """Returns whether a callable rate takes the number of updates already applied.

    >>> takes_step(lambda: 0.1), takes_step(lambda step: 0.1 / (step + 1))
    (False, True)
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
        raise TypeError(
            "A callable `learning_rate` takes no argument, or one: the number of "
            f"updates already applied to the table. Received: {rate!r}, which needs "
            f"{len(needed)}. Bind the others with functools.partial or a lambda."
        )
    return bool(needed)


def one_minus(share: float) -> float:
    """Returns 1 - share, formed in float32.

    TensorFlow's TPU kernels compute it in this way, and so does every engine here: for
    0.999 it is 9.99987e-4, not 1e-3.
    """
    return float(np.float32(1) - np.float32(share))


# Checks of arguments. Each raises TypeError for a wrong type and ValueError for a
# value that is not allowed. They are the only place that limits hyperparameters, for
# every engine; numbers are judged as float32, in which every rule computes.


def check_number(argument: str, value: object) -> None:
    """Raises unless `value` is a real number, no bool, and finite in float32."""
    if not is_number(value):
        raise errors.argument_type(argument, value, "a number")
    number = _to_float(argument, value)
    if not math.isfinite(number):
        raise errors.argument_value(argument, value, "finite")
    if abs(number) > float(_FLOAT32.max):
        raise errors.argument_value(argument, value, "finite in float32")


def check_positive(argument: str, value: Any) -> None:
    """Raises unless `value` is a finite number above 0."""
    check_number(argument, value)
    if value <= 0:
        raise errors.argument_value(argument, value, "positive")


def check_not_negative(argument: str, value: Any) -> None:
    """Raises unless `value` is a finite number of at least 0."""
    check_number(argument, value)
    if value < 0:
        raise errors.argument_value(argument, value, ">= 0")


def check_share(argument: str, value: Any, *, closed: bool = False) -> None:
    """Raises unless `value` is a number in [0, 1), or in [0, 1] if `closed`."""
    check_number(argument, value)
    share = np.float32(value)
    if not 0 <= share <= 1 or (share == 1 and not closed):
        allowed = "and <= 1" if closed else "and < 1 in float32"
        raise errors.argument_value(argument, value, f">= 0 {allowed}")


def check_epsilon(argument: str, value: Any, *, squared: bool = False) -> None:
    """Raises unless `value`, or its square if `squared`, is above 0 in float32.

    CPUs flush subnormal numbers to 0 where TensorFlow runs, and 0 / 0 is NaN.
    """
    check_positive(argument, value)
    smallest = float(_FLOAT32.smallest_normal)
    if float(value) ** (2 if squared else 1) < smallest:
        what = "its square is" if squared else "it is"
        limit = math.sqrt(smallest) if squared else smallest
        raise errors.argument_value(
            argument, value, f"at least {limit:.2g}: otherwise {what} 0 in float32"
        )


def check_limits(
    arguments: tuple[str, str], limits: tuple[float | None, float | None]
) -> None:
    """Raises unless both limits are None or numbers (infinity too), in order."""
    for argument, limit in zip(arguments, limits, strict=True):
        if limit is None:
            continue
        if not is_number(limit):
            raise errors.argument_type(argument, limit, "a number or None")
        if math.isnan(_to_float(argument, limit)):
            raise errors.argument_value(argument, limit, "a number or None, not NaN")
    lower, upper = limits
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(
            f"`{arguments[0]}` must not exceed `{arguments[1]}`. Received: "
            f"{lower!r} and {upper!r}."
        )


def is_number(value: object) -> bool:
    """Returns whether `value` is an int or float of Python or NumPy, and no bool."""
    kinds = (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _to_float(argument: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise errors.argument_value(argument, value, "finite in float32") from None


def _check_clipvalue(argument: str, clipvalue: object) -> None:
    if isinstance(clipvalue, tuple):
        if len(clipvalue) != 2:
            raise errors.argument_value(argument, clipvalue, "a tuple (min, max)")
        check_limits((f"{argument}[0]", f"{argument}[1]"), clipvalue)
        return
    if not is_number(clipvalue):
        raise errors.argument_type(
            argument, clipvalue, "None, a number or a tuple (min, max)"
        )
    if not _to_float(argument, clipvalue) >= 0:
        raise errors.argument_value(argument, clipvalue, ">= 0")


def _check_callable(argument: str, value: object) -> None:
    if not callable(value):
        raise errors.argument_value(argument, value, "None or a callable")


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


def _limit(field: str, off: float) -> Callable[[Any], Mapping[str, float]]:
    return lambda value: {field: off if value is None else float(value)}


def _gradient_limits(clipvalue: Any) -> dict[str, float]:
    lower, upper = _clip_limits(clipvalue)
    return {
        **_limit("clip_gradient_min", -math.inf)(lower),
        **_limit("clip_gradient_max", math.inf)(upper),
    }


# The options of all optimizers. An error of every engine, the record of the kernels
# and the check of docs/choose.md come from this list.
OPTIONS = (
    Option("use_gradient_accumulation", True, check=errors.check_flag),
    # These two limits are checked as a pair.
    Option("clip_weight_min", None, record=_limit("clip_weight_min", -math.inf)),
    Option("clip_weight_max", None, record=_limit("clip_weight_max", math.inf)),
    Option(
        "clipnorm",
        None,
        ("tpu_v2_v4", "sparse_core"),
        check_epsilon,
        record=_limit("clip_gradient_norm", math.inf),
    ),
    Option(
        "clipvalue", None, ("sparse_core",), _check_clipvalue, record=_gradient_limits
    ),
    Option(
        "weight_decay_factor",
        None,
        ("sparse_core",),
        check_not_negative,  # A negative factor would make the weights grow.
        record=lambda value: {"weight_decay_factor": float(value or 0.0)},
    ),
    Option(
        "multiply_weight_decay_factor_by_learning_rate",
        None,
        check=errors.check_flag,
        record=lambda value: {"multiply_decay_by_rate": bool(value)},
    ),
    Option("low_dimensional_packing_status", False, TPU_V2_V4_ONLY, errors.check_flag),
    Option(
        "slot_variable_creation_fn",
        None,
        (*SEVERAL_MACHINES, "sparse_core"),
        _check_callable,
    ),
)
