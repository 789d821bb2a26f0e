"""Converts the layer's configuration, once, and optimizers of Keras.

Optimizers of Keras become optimizers of embedding tables:

| Keras    | here      | options converted besides learning_rate and clipvalue     |
|----------|-----------|-----------------------------------------------------------|
| SGD      | `SGD`     |                                                           |
| Adagrad  | `Adagrad` | initial_accumulator_value                                 |
| Adam     | `Adam`    | beta_1, beta_2, epsilon                                   |
| Ftrl     | `FTRL`    | learning_rate_power, initial_accumulator_value, beta, and |
|          |           | l1_ and l2_regularization_strength                        |

Every other option raises ValueError, unless its value has no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding import optimizers, tf_configs
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.layout.plan import FeatureSpec, Plan, feature_specs, make_plan
from tpu_embedding.lookup.feature_structure import FeatureStructure
from tpu_embedding.optimizers import takes_step

_OPTIMIZERS_BY_NAME = {
    "sgd": optimizers.SGD,
    "adagrad": optimizers.Adagrad,
    "adam": optimizers.Adam,
    "ftrl": optimizers.FTRL,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Features:
    """A converted feature configuration.

    Attributes:
      structure: The nesting of the user's configuration.
      plan: The tables and features; `TableSpec.key` is the user's TableConfig.
      optimizer: The optimizer of tables without one of their own, or None.
    """

    structure: FeatureStructure
    plan: Plan
    optimizer: optimizers.Optimizer | None


def convert_features(
    feature_config: Any, optimizer: Any, invalid_ids: str | None
) -> Features:
    """Converts the arguments of the layer."""
    converted = tf_configs.convert_features(
        feature_config, invalid_ids, convert_optimizer
    )
    fallback = convert_optimizer(optimizer, "the whole embedding")
    plan = make_plan(*converted, fallback, growing=True)
    tf_configs.freeze_configs(feature_config)
    return Features(FeatureStructure(feature_config, plan.features), plan, fallback)


def convert_serving(serving_config: Any, layer: Features) -> Features:
    """Converts other features over the tables of a layer."""
    # A TableConfig of the layer may have an optimizer that only the layer converts.
    converted = tf_configs.convert_features(
        serving_config, None, lambda optimizer, where: None
    )
    tables = {spec.key: spec for spec in layer.plan.tables}
    features: list[FeatureSpec] = []
    for path, feature in zip(converted.paths, converted.features, strict=True):
        table = tables.get(converted.keys[feature.table])
        if table is None:
            raise ValueError(
                f"Feature {path} of `serving_config` has a TableConfig that does not "
                "belong to the layer. Use the TableConfig objects that the layer was "
                "created with; for a loaded layer they are the keys of "
                "`layer.embedding_tables`."
            )
        features += feature_specs(
            len(features), path, feature, table.index, table.config
        )
    plan = dataclasses.replace(layer.plan, features=tuple(features))
    return Features(FeatureStructure(serving_config, plan.features), plan, None)


def convert_optimizer(optimizer: Any, where: str) -> optimizers.Optimizer | None:
    """Converts what the layer accepts as an optimizer; errors name `where` it is."""
    if isinstance(optimizer, str):
        if optimizer not in _OPTIMIZERS_BY_NAME:
            names = ", ".join(map(repr, _OPTIMIZERS_BY_NAME))
            raise ValueError(
                f"Unknown optimizer {optimizer!r} for {where}. Known names: {names}. "
                "Pass other optimizers as objects."
            )
        return _OPTIMIZERS_BY_NAME[optimizer]()
    if is_keras_optimizer(optimizer):
        return translate_keras_optimizer(optimizer)
    return tf_configs.convert_optimizer(optimizer, where)


@dataclasses.dataclass(frozen=True)
class _ClassConversion:
    """How to convert one class of Keras.

    Attributes:
      rule: The class of this package.
      converted: Options that `rule` has under the same name.
      neutral: Other options, with the only value that is accepted.
      fixed: Arguments of `rule` that have no option in Keras.
      all_rows: The arguments that make `rule` update all rows; None if it cannot.
    """

    rule: Callable[..., optimizers.Optimizer]
    converted: tuple[str, ...] = ()
    neutral: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    all_rows: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)


# By the name of the class.
CONVERSIONS: dict[str, _ClassConversion] = {
    "SGD": _ClassConversion(
        optimizers.SGD, neutral={"momentum": 0.0, "nesterov": False}
    ),
    "Adagrad": _ClassConversion(
        optimizers.Adagrad,
        converted=("initial_accumulator_value",),
        neutral={"epsilon": 1e-7},
    ),
    "Adam": _ClassConversion(
        optimizers.Adam,
        converted=("beta_1", "beta_2", "epsilon"),
        neutral={"amsgrad": False, "adaptive_epsilon": False},
        fixed={"sum_inside_sqrt": False},  # Keras adds epsilon outside the root.
        all_rows={"lazy_adam": False},
    ),
    "Ftrl": _ClassConversion(
        optimizers.FTRL,
        converted=(
            "learning_rate_power",
            "initial_accumulator_value",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "beta",
        ),
        neutral={"l2_shrinkage_regularization_strength": 0.0},
        all_rows=None,  # All rows depend on the rate; those without gradients are 0.
    ),
}
# Options of all classes, with the only value that is accepted.
_NEUTRAL: dict[str, Any] = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
    "decay": 0.0,  # An option of the legacy optimizers of tf_keras.
}
# Options of all classes that are converted, or that change no number.
_HANDLED = ("learning_rate", "clipvalue", "name", "jit_compile", "is_legacy_optimizer")


def is_keras_optimizer(value: object) -> bool:
    """Returns whether a value is an optimizer of Keras 3 or tf_keras."""
    package, *rest = type(value).__module__.split(".")
    return package in ("keras", "tf_keras") and "optimizers" in rest


def translate_keras_optimizer(
    optimizer: Any, *, bias_correction: bool = True, lazy: bool = True
) -> optimizers.Optimizer:
    """Converts an optimizer of Keras 3 or tf_keras for embedding tables.

    A learning rate held in a variable is read at each update, so callbacks that set
    `optimizer.learning_rate` work. A LearningRateSchedule is evaluated at the number
    of updates that the table has had; `optimizer.iterations` is neither read nor
    written.

    The layer converts optimizers of Keras in this way. The numbers are Keras's, with
    two differences: unless `lazy` is False, rows that do not occur in the batch do not
    change (in Keras the moments of Adam decay in all rows, and all rows move); Adagrad
    has no epsilon in the divisor (in Keras 1e-7, next to an accumulator of at least
    0.1).

    >>> import keras
    >>> translate_keras_optimizer(keras.optimizers.Ftrl(0.5, beta=0.25)).beta
    0.25

    Args:
      optimizer: SGD (without momentum), Adagrad, Adam or Ftrl; not a subclass.
      bias_correction: Whether Adam multiplies the learning rate by
        sqrt(1 - beta_2^t) / (1 - beta_1^t) in the t-th update, as Keras does. False
        gives the rule of TPUs and of `te.Adam`, without this factor.
      lazy: Whether rows that do not occur in the batch stay as they are, as on TPUs.
        False is for CPUs: each update moves all rows of Adam, as in Keras.

    Returns:
      An optimizer of this package.

    Raises:
      ValueError: If the class is not supported, an option cannot be converted, or
        `lazy=False` is used for Ftrl.
    """
    cls = type(optimizer)
    conversion = CONVERSIONS.get(cls.__name__)
    if conversion is None or not is_keras_optimizer(optimizer):
        wraps = hasattr(optimizer, "inner_optimizer")
        hint = (
            " Pass its `inner_optimizer` instead, and this optimizer as `loss_scale`."
        )
        raise ValueError(
            f"translate_keras_optimizer cannot convert {cls.__module__}."
            f"{cls.__qualname__}. It accepts {', '.join(CONVERSIONS)} of Keras 3 and "
            f"of tf_keras, but not their subclasses.{hint if wraps else ''}"
        )
    options = optimizer.get_config()
    # The configuration of tf_keras leaves it out.
    options["adaptive_epsilon"] = getattr(optimizer, "adaptive_epsilon", False)
    _check(cls.__name__, conversion, options)
    all_rows = {} if lazy else conversion.all_rows
    if all_rows is None:
        raise ValueError(
            "translate_keras_optimizer does not support lazy=False for "
            f"{cls.__name__}: with this optimizer embedding tables update only the "
            "rows of a batch. Use lazy=True, or te.keras.Embedding with "
            "te.keras.RowSparseOptimizer."
        )
    rate = _held_rate(optimizer)
    if not callable(rate):
        rate = OptimizerRate(optimizer)
    if bias_correction and conversion.rule is optimizers.Adam:
        rate = BiasCorrectedRate(rate, options["beta_1"], options["beta_2"])
    return conversion.rule(
        learning_rate=rate,
        clipvalue=options.get("clipvalue") or None,  # Keras treats 0 as None.
        **{option: options[option] for option in conversion.converted},
        **conversion.fixed,
        **all_rows,
    )


def _check(name: str, conversion: _ClassConversion, options: Mapping[str, Any]) -> None:
    neutral = {**_NEUTRAL, **conversion.neutral}
    for option, value in options.items():
        if option in _HANDLED or option in conversion.converted:
            continue
        # An option of a newer Keras is accepted while it is unset.
        expected = neutral.get(option)
        if value != expected and (value or expected):
            raise ValueError(
                f"Embedding tables do not support `{option}={value!r}` of the Keras "
                f"optimizer {name}. Leave it at {expected!r}, or use an optimizer of "
                "tpu_embedding."
            )


def _held_rate(optimizer: Any) -> Any:
    """Returns the optimizer's variable, schedule or other callable."""
    held = getattr(optimizer, "_learning_rate", None)
    return optimizer.learning_rate if held is None else held  # Legacy ones lack it.


@keras_api.register
@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerRate:
    """The current learning rate of a Keras optimizer."""

    optimizer: Any

    def __call__(self) -> tf.Tensor:
        """Returns the rate; raises RuntimeError if a schedule replaced the number."""
        held = _held_rate(self.optimizer)
        if callable(held):
            raise RuntimeError(
                "The `learning_rate` of the Keras optimizer "
                f"{type(self.optimizer).__name__} was a number when the layer was "
                f"created, and now is {held!r}. Embedding tables count the steps of a "
                "schedule from their first update: set the schedule before the layer "
                "is created, or assign only numbers."
            )
        return tf.convert_to_tensor(held)

    def get_config(self) -> dict[str, Any]:
        return {"optimizer": keras_api.serialize_optimizer(self.optimizer)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OptimizerRate:
        return cls(keras_api.deserialize_optimizer(config["optimizer"]))


@keras_api.register
@dataclasses.dataclass(frozen=True, eq=False)
class BiasCorrectedRate:
    """A learning rate with the bias correction of Adam.

    Attributes:
      rate: A callable without arguments, or with one: the number of updates.
      beta_1: The decay of Adam's first moment.
      beta_2: The decay of Adam's second moment.
    """

    rate: Any
    beta_1: float
    beta_2: float

    def __call__(self, updates: Any) -> tf.Tensor:
        rate = self.rate(updates) if takes_step(self.rate) else self.rate()
        t = tf.cast(updates, tf.float32) + 1.0
        correction = tf.sqrt(1.0 - self.beta_2**t) / (1.0 - self.beta_1**t)
        return tf.cast(rate, tf.float32) * correction

    def get_config(self) -> dict[str, Any]:
        rate = keras_api.serialize(self.rate)
        return {"rate": rate, "beta_1": self.beta_1, "beta_2": self.beta_2}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BiasCorrectedRate:
        rate = keras_api.deserialize(config["rate"])
        return cls(rate, config["beta_1"], config["beta_2"])
