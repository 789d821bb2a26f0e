"""What tables that grow are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NoReturn

from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.tables.initial import named_initializer
from tpu_embedding.tables.rows import MutableTableRows

# By class of an initializer of Keras or TensorFlow the kind of first values and the
# options that are its two numbers.
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Constant": ("constant", ("value",)),
    "RandomUniform": ("uniform", ("minval", "maxval")),
    "RandomNormal": ("normal", ("mean", "stddev")),
    "TruncatedNormal": ("truncated_normal", ("mean", "stddev")),
}
_CONSTANTS = {"Zeros": 0.0, "Ones": 1.0}


def first_values(spec: TableSpec) -> tuple[str, float, float]:
    """What rows of a growing table start as: the kind, and its two numbers.

    Raises:
      NotImplementedError: If the initializer is none of those that can make a row of
        a seed and an id.
      ValueError: If Keras has none of its name.
    """
    initializer = spec.config.initializer
    if initializer is None:
        return "truncated_normal", 0.0, 1.0 / math.sqrt(spec.config.dim)
    if isinstance(initializer, str):
        initializer = named_initializer(spec.name, initializer)
    cls = type(initializer)
    name, made_by = cls.__name__, cls.__module__.partition(".")[0]
    if made_by in ("keras", "tf_keras", "tensorflow"):
        if name in _CONSTANTS:
            return "constant", _CONSTANTS[name], 0.0
        if name in _KINDS:
            kind, options = _KINDS[name]
            config = initializer.get_config()
            found = [config[option] for option in options]
            if all(isinstance(number, (int, float)) for number in found):
                first, second = (*map(float, found), 0.0)[:2]
                return kind, first, second
    raise NotImplementedError(
        f"Table {spec.name!r} grows: its rows are made of a seed and an id, which "
        f"{initializer!r} cannot do. Use None, or one of Keras's Constant, Zeros, "
        "Ones, RandomUniform, RandomNormal and TruncatedNormal; the seed is that of "
        "the GrowingVocabulary."
    )


def first_slots(spec: TableSpec) -> list[float]:
    """What rows of the slots of a growing table start as.

    Raises:
      NotImplementedError: If a function of the user's makes a slot.
    """
    optimizer = spec.optimizer
    if optimizer is None:
        return []
    found = [slot.initial_value for slot in optimizer.slots]
    if optimizer.slot_variable_creation_fn is not None or any(map(callable, found)):
        raise NotImplementedError(
            f"Table {spec.name!r} grows, and its slots with it: they cannot be made by "
            "a function. Leave `slot_variable_creation_fn` at None, and give numbers "
            "as initial values."
        )
    return [float(value) for value in found if not callable(value)]


class UnsavedRows(Mapping[str, MutableTableRows]):
    """Stands for the matrices of a growing table, which no file can hold yet."""

    def __init__(self, table: str) -> None:
        self._table = table

    def refuse(self) -> NoReturn:
        """Says why there are no matrices."""
        raise NotImplementedError(
            f"Table {self._table!r} grows, and growing tables cannot be saved "
            "by te.checkpoint or exported yet. Save them with tf.train.Checkpoint."
        )

    def __getitem__(self, key: str) -> MutableTableRows:
        self.refuse()

    def __iter__(self) -> Iterator[str]:
        self.refuse()

    def __len__(self) -> int:
        return 0
