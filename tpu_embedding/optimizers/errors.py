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


def not_callable(argument: str, value: object) -> TypeError:
    """For what should be a function of the user's."""
    return TypeError(
        f"Argument `{argument}` must be callable. Received: {value!r} of type "
        f"{type_name(value)}."
    )


def one_for_each_slot(argument: str, got: int, wanted: int) -> ValueError:
    """For lists about the slots of a CustomOptimizer that do not fit each other."""
    return ValueError(
        f"CustomOptimizer: `slot_names` has {wanted} names, but `{argument}` has {got} "
        "values. Give one for each slot."
    )


def not_a_list(argument: str, value: object) -> TypeError:
    """For one value where there may be many."""
    return TypeError(
        f"CustomOptimizer: `{argument}` must be a list or tuple. Received: {value!r} "
        f"of type {type_name(value)}. Put it into a list."
    )


def slot_name(names: object) -> TypeError:
    """For a slot that has no name."""
    return TypeError(
        f"CustomOptimizer: `slot_names` is {names!r}. Each must be a string with at "
        "least one character."
    )


def slot_names(names: object) -> ValueError:
    """For names of slots that cannot be told apart."""
    return ValueError(
        f"CustomOptimizer: `slot_names` is {names!r}. Each must be there once, and "
        '"parameters" and "custom_combiner_variables" are taken: the table itself and '
        "the weights of its combiner. Rename one."
    )


def slot_dims(dims: object) -> ValueError:
    """For a slot with another number of axes."""
    return ValueError(
        f"CustomOptimizer: `slot_dims` is {dims!r}. Each must be 2, for a slot as wide "
        "as the table, or 1, for one number for each row."
    )


def computed_number(
    computation: object, got: int, wanted: int, table: str | None
) -> ValueError:
    """For a custom computation that returns too little or too much."""
    where = "" if table is None else f"Table {table!r}: "
    return ValueError(
        f"{where}The custom computation {computation!r} returned {got} tensors; it "
        f"must return {wanted}: the row, then each slot."
    )
