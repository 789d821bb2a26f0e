"""Keras optimizers as optimizers of embedding tables.

| Keras    | here      | carried besides learning_rate and clipvalue               |
|----------|-----------|-----------------------------------------------------------|
| SGD      | `SGD`     |                                                           |
| Adagrad  | `Adagrad` | initial_accumulator_value                                 |
| Adam     | `Adam`    | beta_1, beta_2, epsilon                                   |
| Ftrl     | `FTRL`    | learning_rate_power, initial_accumulator_value, beta, and |
|          |           | l1_ and l2_regularization_strength                        |

Every other option is refused by name unless it has the value that changes nothing.
`translate_keras_optimizer` says where the numbers differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding import optimizers as rules
from tpu_embedding.keras import errors
from tpu_embedding.optimizers import takes_step

_PACKAGE = "tpu_embedding"


@dataclasses.dataclass(frozen=True)
class _Translation:
    """What becomes of one class of Keras.

    Attributes:
      rule: Our class.
      carried: Options that ours has under the same name.
      neutral: The only value that an option of the class may have.
      fixed: Arguments of ours that have no option in Keras.
    """

    rule: Callable[..., rules.Optimizer]
    carried: tuple[str, ...] = ()
    neutral: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_TRANSLATIONS: dict[str, _Translation] = {
    "SGD": _Translation(rules.SGD, neutral={"momentum": 0.0, "nesterov": False}),
    "Adagrad": _Translation(
        rules.Adagrad,
        carried=("initial_accumulator_value",),
        neutral={"epsilon": 1e-7},
    ),
    "Adam": _Translation(
        rules.Adam,
        carried=("beta_1", "beta_2", "epsilon"),
        neutral={"amsgrad": False},
        fixed={"sum_inside_sqrt": False},  # Where Keras has its epsilon.
    ),
    "Ftrl": _Translation(
        rules.FTRL,
        carried=(
            "learning_rate_power",
            "initial_accumulator_value",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "beta",
        ),
        neutral={"l2_shrinkage_regularization_strength": 0.0},
    ),
}
# Options of all classes that must be left alone.
_NEUTRAL: dict[str, Any] = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
    "decay": 0.0,  # Of the legacy optimizers of tf_keras.
}
# Options of all classes that are carried, or that change no number.
_HANDLED = ("learning_rate", "clipvalue", "name", "jit_compile", "is_legacy_optimizer")


def is_keras_optimizer(value: object) -> bool:
    """Whether a value comes from the optimizers of Keras 3 or of tf_keras."""
    package, *rest = type(value).__module__.split(".")
    return package in ("keras", "tf_keras") and "optimizers" in rest


def translate_keras_optimizer(
    optimizer: Any, *, bias_correction: bool = False
) -> rules.Optimizer:
    """Turns an optimizer of Keras 3 or tf_keras into one for embedding tables.

    A learning rate held in a variable is read at each update, so callbacks that set
    `optimizer.learning_rate` work. A LearningRateSchedule is evaluated at the number
    of updates that the table has had; `optimizer.iterations` is neither read nor
    written.

    The numbers are those of Keras but for this: rows that no entry names do not
    change (in Keras the moments of Adam decay, and move, in all rows); Adam has no
    bias correction unless `bias_correction` is set; Adagrad has no epsilon in the
    divisor (in Keras 1e-7, beside an accumulator of at least 0.1).

    >>> import keras
    >>> translate_keras_optimizer(keras.optimizers.Ftrl(0.5, beta=0.25)).beta
    0.25

    Args:
      optimizer: SGD (without momentum), Adagrad, Adam or Ftrl, no subclass.
      bias_correction: For Adam: multiply the learning rate by
        sqrt(1 - beta_2^t) / (1 - beta_1^t) in the t-th update.

    Returns:
      An optimizer for TPUEmbedding, of this package.

    Raises:
      ValueError: If the class is another one, or an option cannot be carried.
    """
    name = type(optimizer).__name__
    translation = _TRANSLATIONS.get(name)
    if translation is None or not is_keras_optimizer(optimizer):
        raise errors.untranslatable(optimizer, _TRANSLATIONS)
    if bias_correction and translation.rule is not rules.Adam:
        raise errors.bias_correction(name)
    options = optimizer.get_config()
    _check(name, translation, options)
    rate = _rate(optimizer)
    if bias_correction:
        rate = BiasCorrectedRate(rate, options["beta_1"], options["beta_2"])
    return translation.rule(
        learning_rate=rate,
        clipvalue=options.get("clipvalue") or None,  # In Keras 0 is None.
        **{option: options[option] for option in translation.carried},
        **translation.fixed,
    )


def _check(name: str, translation: _Translation, options: Mapping[str, Any]) -> None:
    neutral = {**_NEUTRAL, **translation.neutral}
    for option, value in options.items():
        if option in _HANDLED or option in translation.carried:
            continue
        # An option that this release has never heard of may stay unset.
        expected = neutral.get(option)
        if value != expected and (value or expected):
            raise errors.refused_option(name, option, value, expected)


def _held_rate(optimizer: Any) -> Any:
    """A variable, a schedule or another callable."""
    held = getattr(optimizer, "_learning_rate", None)
    return optimizer.learning_rate if held is None else held  # None: legacy.


def _rate(optimizer: Any) -> Any:
    held = _held_rate(optimizer)
    return held if callable(held) else OptimizerRate(optimizer)


@keras.saving.register_keras_serializable(_PACKAGE)
@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerRate:
    """The learning rate that a Keras optimizer has at the moment."""

    optimizer: Any

    def __call__(self) -> tf.Tensor:
        """The rate.

        Raises:
          RuntimeError: If a schedule was put in the place of the number.
        """
        held = _held_rate(self.optimizer)
        if callable(held):
            raise errors.late_schedule(type(self.optimizer).__name__, held)
        return tf.convert_to_tensor(held)

    def get_config(self) -> dict[str, Any]:
        return {"optimizer": keras.optimizers.serialize(self.optimizer)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OptimizerRate:
        return cls(keras.optimizers.deserialize(config["optimizer"]))


@keras.saving.register_keras_serializable(_PACKAGE)
@dataclasses.dataclass(frozen=True, eq=False)
class BiasCorrectedRate:
    """A learning rate with the bias correction of Adam.

    Attributes:
      rate: A callable of nothing, or of the number of updates.
      beta_1: Of Adam.
      beta_2: Of Adam.
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
        rate = keras.saving.serialize_keras_object(self.rate)
        return {"rate": rate, "beta_1": self.beta_1, "beta_2": self.beta_2}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BiasCorrectedRate:
        rate = keras.saving.deserialize_keras_object(config["rate"])
        return cls(rate, config["beta_1"], config["beta_2"])
