"""Checks of the arguments of optimizers."""

from __future__ import annotations

import math
import numbers
from typing import Any

from tpu_embedding import errors


def check_number(argument: str, value: object) -> None:
    """Raises unless `value` is a finite real number and no bool.

    Raises:
      TypeError: If it is not a number.
      ValueError: If it is NaN or infinite.
    """
    if not is_number(value):
        raise errors.argument_type(argument, value, "a number")
    if not math.isfinite(value):  # pyright: ignore[reportArgumentType]
        raise errors.argument_value(argument, value, "finite")


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


def check_share(argument: str, value: Any) -> None:
    """Raises unless `value` is a number in [0, 1)."""
    check_number(argument, value)
    if not 0 <= value < 1:
        raise errors.argument_value(argument, value, ">= 0 and < 1")


def check_flag(argument: str, value: object) -> None:
    """Raises TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise errors.argument_type(argument, value, "a bool")


def check_limits(
    arguments: tuple[str, str], limits: tuple[float | None, float | None]
) -> None:
    """Raises unless both limits are None or numbers (infinite ones too), in order."""
    for argument, limit in zip(arguments, limits, strict=True):
        if limit is None:
            continue
        if not is_number(limit):
            raise errors.argument_type(argument, limit, "a number or None")
        if math.isnan(limit):
            raise errors.argument_value(argument, limit, "a number or None, not NaN")
    lower, upper = limits
    if lower is not None and upper is not None and lower > upper:
        raise errors.argument_order(*arguments, limits)


def is_number(value: object) -> bool:
    """Whether `value` is a real number and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
