"""What tables that grow are made of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tpu_embedding.config import TableConfig
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.tables.initial import named_initializer
from tpu_embedding.tables.rows import PARAMETERS, MutableTableRows

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


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenTable:
    """A growing table as it was at one moment, in the form of a static one.

    Attributes:
      config: A static TableConfig whose rows start as those of the ids, in order; the
        last row is what an id without a row looks up.
      ids: int64 [n], ascending.
      slots: By name what the slots are, float32 [n + 1, D] or [n + 1, 1]; the last row
        is at its initial value, or that of the shared row.
    """

    config: TableConfig
    ids: np.ndarray
    slots: Mapping[str, np.ndarray]

    def rows_of(self, ids: Any) -> Any:
        """The rows of ids, by TensorFlow's ops: in tf.data, or in a served model.

        Args:
          ids: A tf.Tensor, tf.SparseTensor or tf.RaggedTensor of int32 or int64.

        Returns:
          The same with int64 rows of the table; n for ids without one.
        """
        if not isinstance(ids, tf.Tensor):
            return ids.with_values(self.rows_of(ids.values))
        size = len(self.ids)
        if size == 0:
            return tf.zeros_like(ids, tf.int64)
        known = tf.constant(self.ids, tf.int64)
        flat = tf.reshape(tf.cast(ids, tf.int64), [-1])
        place = tf.searchsorted(known, flat, out_type=tf.int64)
        found = tf.gather(known, tf.minimum(place, size - 1)) == flat
        rows = tf.where(found, place, tf.constant(size, tf.int64))
        return tf.reshape(rows, tf.shape(ids))


def freeze(spec: TableSpec, state: Mapping[str, np.ndarray]) -> FrozenTable:
    """The static form of a growing table, from `GrowingState.read`.

    Raises:
      NotImplementedError: If each id without a row looks up values of its own.
    """
    config = spec.config
    assert config.vocabulary is not None
    if config.vocabulary.unknown == "initializer":
        raise NotImplementedError(
            f"Table {spec.name!r} has unknown='initializer': each id without a row "
            "looks up values of its own, for which a static table has no rows."
        )
    size = len(state["ids"])
    starts = dict(zip(_slot_names(spec), first_slots(spec), strict=True))

    def whole(name: str) -> np.ndarray:
        values = np.asarray(state[name], np.float32)
        missing = size + 1 - len(values)  # Without a shared row.
        rest = np.full((missing, values.shape[1]), starts.get(name, 0.0), np.float32)
        return np.concatenate([values, rest])

    initializer = tf.constant_initializer(whole(PARAMETERS))
    static = dataclasses.replace(
        config, vocabulary_size=size + 1, initializer=initializer, name=spec.name
    )
    slots = {name: whole(name) for name in starts}
    return FrozenTable(static, state["ids"], slots)


def _slot_names(spec: TableSpec) -> list[str]:
    return [slot.name for slot in spec.optimizer.slots] if spec.optimizer else []


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
