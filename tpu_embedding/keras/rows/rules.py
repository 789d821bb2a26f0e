"""What this package knows of the rules of Keras's optimizers.

`rule_of` returns those that the kernels have, and `idle_of_keras` returns what each
rule does to rows without a gradient. `update_rows` updates the rows of all tables of a
step by one op of the library. It is the op of the host engine, applied to the variables
of Keras: each gradient plays the part of a feature of an embedding.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from tpu_embedding import distribution, optimizers
from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.engines.calls import EngineOptions
from tpu_embedding.engines.host.batches import HostBatches, plan_record
from tpu_embedding.engines.rates import evaluate_rate
from tpu_embedding.inputs import IdBatch, InputKind
from tpu_embedding.keras.conversion import CONVERSIONS, BiasCorrectedRate
from tpu_embedding.keras.rows.waiting import Waiting, kernels_for, serialized
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import make_plan
from tpu_embedding.ops import library
from tpu_embedding.optimizers import Optimizer, base
from tpu_embedding.optimizers.idle import Idle


class _OfKernels(base.KeywordOptimizer):
    """A rule of the kernels; if these do not run, Keras's `update_step` applies it."""

    def update(self, ops, gradient, row, slots, rate):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasAdagrad(_OfKernels):
    """Keras's Adagrad: a += G^2; T -= lr * G / sqrt(a + epsilon)."""

    rule: ClassVar[str] = "keras_adagrad"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ("epsilon",)

    learning_rate: base.Rate
    epsilon: float

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("accumulators", 0.1),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasAdam(_OfKernels):
    """m += (G - m) * take_1; v += (G^2 - v) * take_2; T -= lr * m / (sqrt(v) + eps).

    Attributes:
      learning_rate: The learning rate, with the bias correction.
      take_1: 1 - beta_1 in double precision, as Keras computes it.
      take_2: 1 - beta_2 in double precision.
      epsilon: The epsilon of Keras.
    """

    rule: ClassVar[str] = "keras_adam"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ("take_1", "take_2", "epsilon")

    learning_rate: base.Rate
    take_1: float
    take_2: float
    epsilon: float

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (base.Slot("momenta", 0.0), base.Slot("velocities", 0.0))


def _adagrad(
    rate: base.Rate, initial_accumulator_value: float, epsilon: float
) -> base.Optimizer | None:
    if initial_accumulator_value <= 0 and epsilon <= 0:
        return None  # Keras divides 0 by 0.
    return KerasAdagrad(learning_rate=rate, epsilon=epsilon)


def _adam(
    rate: base.Rate, beta_1: float, beta_2: float, epsilon: float
) -> base.Optimizer:
    return KerasAdam(
        learning_rate=BiasCorrectedRate(rate, beta_1, beta_2),
        take_1=1 - beta_1,
        take_2=1 - beta_2,
        epsilon=epsilon,
    )


def _ftrl(
    rate: base.Rate, initial_accumulator_value: float, beta: float, **options: Any
) -> base.Optimizer | None:
    if initial_accumulator_value <= 0 or beta < 0:
        return None  # Keras divides 0 by 0.
    return optimizers.FTRL(rate, beta=beta, **options)


def _adam_waits(o: Any) -> Idle:
    if getattr(o, "adaptive_epsilon", False):  # Only tf_keras has this option.
        raise ValueError("`adaptive_epsilon` changes epsilon")
    fades = (o.beta_1, o.beta_2, 1.0) if o.amsgrad else (o.beta_1, o.beta_2)
    square = len(fades) - 1  # The largest velocity, which does not fade.
    return Idle(fades, "root", square=square, epsilon=o.epsilon)


def _nadam_waits(o: Any) -> Idle:
    fades = (o.beta_1, o.beta_2)
    return Idle(fades, "root", square=1, epsilon=o.epsilon, epsilon_beta=o.beta_2)


def _rmsprop_waits(o: Any) -> Idle:
    moves = o.momentum > 0
    fades = (o.rho, *([o.momentum] if moves else []), *([o.rho] if o.centered else []))
    return Idle(fades, "momentum", moment=1) if moves else Idle(fades)


def _sgd_waits(o: Any) -> Idle:
    if o.momentum:
        return Idle((o.momentum,), "momentum")
    return Idle((0.0,)) if getattr(o, "momentums", None) else Idle()  # In tf_keras.


def _ftrl_waits(o: Any) -> Idle:
    if o.l2_shrinkage_regularization_strength:
        raise ValueError("l2_shrinkage_regularization_strength changes its slots")
    l1, l2 = o.l1_regularization_strength, o.l2_regularization_strength
    return Idle((1.0, 1.0), "follow", follow=(-o.learning_rate_power, l1, l2, o.beta))


def _powers(optimizer: Any, rate: tf.Tensor, *bases: Any) -> list[tf.Tensor]:
    """Returns powers to the number of this step, in the dtype of the rate."""
    step = tf.cast(optimizer.iterations + 1, rate.dtype)
    return [tf.pow(tf.cast(base, rate.dtype), step) for base in bases]


def _adam_weight(optimizer: Any, rate: tf.Tensor) -> Any:
    power_1, power_2 = _powers(optimizer, rate, optimizer.beta_1, optimizer.beta_2)
    return rate * tf.sqrt(1.0 - power_2) / (1.0 - power_1)


def _nadam_weight(optimizer: Any, rate: tf.Tensor) -> Any:
    power_2, decay = _powers(optimizer, rate, optimizer.beta_2, 0.96)
    decay *= tf.cast(0.96, rate.dtype)
    ahead = tf.cast(optimizer.beta_1, rate.dtype) * (1.0 - 0.5 * decay)
    product = tf.cast(optimizer._u_product, rate.dtype) * ahead
    return rate * ahead / (1.0 - product) * tf.sqrt(1.0 - power_2)


class _KerasRule(NamedTuple):
    """The rule of an optimizer class of Keras.

    Attributes:
      slots: The attributes of the class that hold slots, one for each variable.
      idle: Returns the Idle of an optimizer.
      weight: Returns c_s of `optimizers/idle.py` for an optimizer and a step's rate.
      note: Returns, for the same arguments, another number that the rule needs.
      names: The names of slots in checkpoints, where a class of this package has them.
      make: Makes the rule of the kernels from a callable learning rate and `options`
        by name; None if they lack it.
      options: Options of the class that are numbers.
      unset: Options that the kernels do not have, so that they must not be set.
      casts: Whether tf.cast forms the factors of slots, which rounds them to float32.
    """

    slots: tuple[str, ...]
    idle: Callable[[Any], Idle]
    weight: Callable[[Any, tf.Tensor], Any] = lambda optimizer, rate: 0.0
    note: Callable[[Any, tf.Tensor], Any] = lambda optimizer, rate: 0.0
    names: tuple[str, ...] = ()
    make: Callable[..., base.Optimizer | None] | None = None
    options: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    casts: bool = False


_ADAM = _KerasRule(
    ("_momentums", "_velocities", "_velocity_hats"),
    _adam_waits,
    _adam_weight,
    names=("momenta", "velocities"),
    make=_adam,
    options=CONVERSIONS["Adam"].converted,
    unset=tuple(CONVERSIONS["Adam"].neutral),
)
RULES: dict[str, _KerasRule] = {
    "Adadelta": _KerasRule(
        ("_accumulated_grads", "_accumulated_delta_vars"),
        lambda o: Idle((o.rho, o.rho)),
    ),
    "Adagrad": _KerasRule(
        ("_accumulators",),
        lambda o: Idle((1.0,)),
        names=("accumulators",),
        make=_adagrad,
        options=("initial_accumulator_value", "epsilon"),
    ),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Ftrl": _KerasRule(
        ("_accumulators", "_linears"),
        _ftrl_waits,
        note=lambda optimizer, rate: rate,
        names=("accumulators", "linears"),
        make=_ftrl,
        options=CONVERSIONS["Ftrl"].converted,
        unset=tuple(CONVERSIONS["Ftrl"].neutral),
    ),
    "Lion": _KerasRule(
        ("_momentums", "momentums"),  # Of Keras 3 and of tf_keras.
        lambda o: Idle((o.beta_2,), "sign"),
        lambda optimizer, rate: rate,
        casts=True,
    ),
    "Nadam": _KerasRule(
        ("_momentums", "_velocities"),
        _nadam_waits,
        _nadam_weight,
        lambda optimizer, rate: optimizer.iterations + 1,
        casts=True,
    ),
    "RMSprop": _KerasRule(
        ("_velocities", "_momentums", "_average_gradients"),
        _rmsprop_waits,
        lambda optimizer, rate: 1.0,
    ),
    "SGD": _KerasRule(
        ("momentums",),
        _sgd_waits,
        lambda o, rate: -o.momentum if o.nesterov else -1.0,
        make=optimizers.SGD,
        unset=("momentum",),
        casts=True,
    ),
}


def rule_of(optimizer: Any, cls: type, rate: Any) -> base.Optimizer | None:
    """Returns the rule of a Keras class's `update_step`, with an optimizer's options.

    Keras carries out what comes before and after it, such as clipping.

    Args:
      optimizer: The optimizer with the options.
      cls: The class of Keras with the rule.
      rate: The learning rate of this step, as Keras has evaluated it.

    Returns:
      A rule whose learning rate is a callable; None if the kernels do not have it.
    """
    rule = RULES[cls.__name__]
    if rule.make is None:
        return None
    if any(getattr(optimizer, name, False) for name in rule.unset):
        return None
    options = {name: getattr(optimizer, name) for name in rule.options}
    if not all(isinstance(value, numbers.Real) for value in options.values()):
        return None  # An option is a tensor, for example.
    return rule.make(lambda: rate, **options)


def checkpoint_names(cls: type) -> dict[str, str]:
    """Returns the names of slots in checkpoints by attribute of Keras's class."""
    rule = RULES[cls.__name__]
    names = dict(zip(rule.slots, rule.names, strict=False))
    return {name: names.get(name, name.strip("_")) for name in rule.slots}


def idle_of_keras(optimizer: Any, cls: type) -> Idle:
    """Returns what an optimizer of a class of Keras does to a row without a gradient.

    Raises:
      ValueError: If rows cannot be caught up on such steps; the text says why.
    """
    rule = RULES[cls.__name__]
    idle = rule.idle(optimizer)
    options = (*idle.fades, idle.epsilon, *idle.follow)
    if not all(isinstance(option, numbers.Real) for option in options):
        raise ValueError("its options are tensors")
    if rule.casts:
        *fades, beta = (float(np.float32(x)) for x in (*idle.fades, idle.epsilon_beta))
        idle = dataclasses.replace(idle, fades=tuple(fades), epsilon_beta=beta)
    _ = idle.quadrature
    return idle


def step_of(optimizer: Any, cls: type, rate: Any, dtype: Any) -> tuple[Any, Any]:
    """Returns the weight and the note of a step that begins, for `Waiting.advance`.

    They are computed in the dtype of the table, as Keras does.
    """
    rule, rate = RULES[cls.__name__], tf.cast(rate, dtype)
    return rule.weight(optimizer, rate), rule.note(optimizer, rate)


class TableGradient(NamedTuple):
    """A table, and the gradient of some of its rows.

    Attributes:
      gradient: float32 values [n, D] of the rows `indices` [n], which may repeat.
      variable: The table, float32 [V, D].
      slots: Variables of the same shape, in the order of the rule.
      waiting: The steps that rows wait for, or None if they do not wait.
    """

    gradient: tf.IndexedSlices
    variable: Any
    slots: Sequence[Any]
    waiting: Waiting | None

    def fits(self, rule: Optimizer) -> bool:
        """Returns whether the op can update the rows by a rule."""
        variables, shape = [self.variable, *self.slots], self.variable.shape
        return (
            len(self.slots) == len(rule.slots)
            and shape.rank == 2
            and all(shape)  # Rows and columns are known, and not 0.
            and self.gradient.indices.shape.rank == 1
            and self.gradient.indices.dtype in (tf.int32, tf.int64)
            and kernels_for(variables) is not None
            and self.gradient.dtype == tf.float32
        )


def update_rows(
    rule: Optimizer,
    tables: Sequence[TableGradient],
    updates: Any,
    steps: Sequence[tf.Tensor],
) -> None:
    """Sums the gradients of equal rows, and applies a rule to each row once.

    Args:
      rule: A rule whose learning rate is a callable.
      tables: The tables, which fit the rule; the rows of all or of none of them wait.
      updates: The number of updates before, which the rate may take.
      steps: The `step` of `Waiting.advance` for each table whose rows wait.
    """
    plan = _planned_update(
        dataclasses.replace(rule, learning_rate=0.0),
        tuple((table.variable.name, *table.variable.shape) for table in tables),
    )
    assert callable(rule.learning_rate)
    rate = evaluate_rate(rule.learning_rate, updates)
    plan.update(tables, tf.fill([len(tables)], rate), steps)


class _PlannedUpdate:
    """Updates tables of given names and sizes by one rule, through a plan of them."""

    def __init__(self, rule: Optimizer, tables: Sequence[tuple[str, int, int]]) -> None:
        configs = [TableConfig(rows, dim, combiner="sum") for _, rows, dim in tables]
        features = [FeatureConfig(config) for config in configs]
        paths = [name for name, *_ in tables]
        plan = make_plan(paths, features, {c: c for c in configs}, rule)
        options = EngineOptions(
            plan=plan,
            topology=distribution.current(),
            output_shapes=OutputShapes(plan.features),
            pipelined=False,
            check_numerics=False,
        )
        self._device, self._record = options.topology.device, plan_record(options)
        self._batches = HostBatches(options, self._device, self._record, groups=True)

    def update(
        self,
        tables: Sequence[TableGradient],
        rates: tf.Tensor,
        steps: Sequence[tf.Tensor],
    ) -> None:
        waiting = [table.waiting for table in tables if table.waiting is not None]
        variables = [table.variable for table in tables]
        slots = [slot for table in tables for slot in table.slots]
        ids = [table.gradient.indices for table in tables]
        batch = self._batches.prepare(
            [IdBatch(InputKind.DENSE, i, None, i.shape) for i in ids], training=True
        )
        with tf.device(self._device):
            library.load().tpu_embedding_update_rows(
                batch=batch,
                gradients=[table.gradient.values for table in tables],
                rates=rates,
                arrays=[variable.handle for variable in (*variables, *slots)],
                clocks=[each.clock.handle for each in waiting],
                sinces=[each.since.handle for each in waiting],
                histories=[each.history.handle for each in waiting],
                idle=serialized(waiting),
                steps=tf.stack(steps) if steps else tf.zeros([0, 3], tf.float64),
                plan=self._record,
            )


_planned_update = functools.lru_cache(maxsize=64)(_PlannedUpdate)
