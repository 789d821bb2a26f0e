"""The wording of this package's errors: each function returns the exception."""

from __future__ import annotations

from tpu_embedding.errors import type_name


def step_as_rate(value: object) -> ValueError:
    """FrequencyEstimator with a fixed learning rate."""
    return ValueError(
        "FrequencyEstimator takes the global step as its `learning_rate`, so that must "
        f"be a callable. Received: {value!r} of type {type_name(value)}. Leave it out "
        "to count the table's updates, or pass `lambda: tf.cast(step, tf.float32)`."
    )


def unpublished_rule(name: str, where: str = "") -> NotImplementedError:
    """A rule that only TPUs know; `where` is the engine and the table."""
    place = f" by the {where}" if where else " here"
    return NotImplementedError(
        f"{name} cannot be applied{place}: its rule is not published, and only TPUs v2 "
        "to v4 know it. Use it under TPUStrategy, or take another optimizer, such as "
        "Adagrad, with the same slot `accumulators`."
    )


def table_dim(name: str, optimizer: str, dim: int, needed: int) -> ValueError:
    """An optimizer for tables of one width on one of another."""
    return ValueError(
        f"Table {name!r} has dim={dim}, but {optimizer} is for tables of dim={needed} "
        "alone. Give the table that width, or another optimizer."
    )
