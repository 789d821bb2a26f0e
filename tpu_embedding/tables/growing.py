"""The first rows and the memory of growing tables, and static tables made of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.config import TableConfig
from tpu_embedding.hashing import mixed_bits, shifted
from tpu_embedding.initializers import constant_of, named_initializer, stock_class
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.ops import library
from tpu_embedding.tables.codes import first_coded, joined_values
from tpu_embedding.tables.rows import PARAMETERS, SCALE_OFFSET

# The kind of first values of each initializer class of Keras or TensorFlow, and the
# options that are its two numbers.
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "RandomUniform": ("uniform", ("minval", "maxval")),
    "RandomNormal": ("normal", ("mean", "stddev")),
    "TruncatedNormal": ("truncated_normal", ("mean", "stddev")),
}


def first_values(spec: TableSpec) -> tuple[str, float, float]:
    """Returns the kind of first values of a growing table, and their two numbers."""
    initializer = spec.config.initializer
    if initializer is None:
        return "truncated_normal", 0.0, 1.0 / math.sqrt(spec.config.dim)
    if isinstance(initializer, str):
        initializer = named_initializer(spec.name, initializer)
    constant = constant_of(initializer)
    if constant is not None:
        return "constant", constant, 0.0
    name = stock_class(initializer)
    if name in _KINDS:
        kind, options = _KINDS[name]
        config = initializer.get_config()
        first, second = (config[option] for option in options)
        if isinstance(first, (int, float)) and isinstance(second, (int, float)):
            return kind, float(first), float(second)
    raise NotImplementedError(
        f"Table {spec.name!r} grows, so it initializes each row from a seed and an id, "
        f"which {initializer!r} does not support. Use None, or the Keras initializers "
        "Constant, Zeros, Ones, RandomUniform, RandomNormal or TruncatedNormal; the "
        "seed is that of the GrowingVocabulary."
    )


def first_rows(spec: TableSpec, ids: tf.Tensor) -> tf.Tensor:
    """Computes the first values of the rows of ids, by TensorFlow's ops.

    The bits equal those of core/first_values.h, which updates use: both do the same
    float64 arithmetic in the same order.

    Args:
      spec: A growing table.
      ids: int64 [n].

    Returns:
      The rows, [n, dim], of the dtype that initializers are called with; the rows of
      int8 tables are not coded yet.
    """
    kind, *numbers = first_values(spec)
    first, second = (float(np.float32(number)) for number in numbers)
    dim, dtype = spec.config.dim, tf.as_dtype(spec.config.storage.first_dtype)
    if kind == "constant":
        return tf.fill([tf.size(ids), dim], tf.cast(tf.cast(first, tf.float32), dtype))
    seed = mixed_bits(tf.constant(spec.growth.seed, tf.int64))
    rows = mixed_bits(tf.bitwise.bitwise_xor(seed, ids))
    steps = np.arange(dim, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = mixed_bits(rows[:, tf.newaxis] + steps.view(np.int64))
    uniform = (tf.cast(shifted(bits, 11), tf.float64) + 0.5) * 2.0**-53
    if kind == "uniform":
        values = first + (second - first) * uniform
    else:
        if kind == "truncated_normal":
            uniform = 0.022750131948179195 + 0.9544997361036416 * uniform
        # The maximum keeps TensorFlow from joining these constants with others.
        values = first + second * _normal_quantile(tf.maximum(uniform, 0.0))
    return tf.cast(tf.cast(values, tf.float32), dtype)


def first_stored(spec: TableSpec, ids: tf.Tensor) -> dict[str, np.ndarray]:
    """Returns the arrays that store `first_rows`, by name. Runs only eagerly."""
    values = first_rows(spec, ids)
    if not spec.config.storage.is_coded:
        return {PARAMETERS: values.numpy()}
    stored = library.load().tpu_embedding_encode_rows(
        values=values, rows=mixed_bits(ids), seed=spec.rounding_seed
    )
    return {PARAMETERS: stored.codes.numpy(), SCALE_OFFSET: stored.grids.numpy()}


def first_values_read(spec: TableSpec, ids: tf.Tensor) -> tf.Tensor:
    """Computes `first_rows` as lookups read them, float32 [n, dim]; works in graphs."""
    values = tf.cast(first_rows(spec, ids), tf.float32)
    if not spec.config.storage.is_coded:
        return values
    numbers = tf.bitwise.bitwise_and(mixed_bits(ids), tf.constant(2**32 - 1, tf.int64))
    return first_coded(values, numbers, spec.rounding_seed)


# Coefficients of NormalQuantile in core/first_values.cc: numerator and denominator in
# the middle, where a tail begins, and far out.
_MIDDLE = (
    (59.109374720, 159.29113202, 50.434271938, 3.3871327179),
    (67.187563600, 78.757757664, 17.895169469, 1.0),
)
_TAIL = (
    (0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777),
    (0.12021132975, 0.73700164250, 1.0),
)
_FAR_TAIL = (
    (0.017337203997, 0.42868294337, 3.0812263860, 6.6579051150),
    (0.012258202635, 0.24197894225, 1.0),
)


def _normal_quantile(p: tf.Tensor) -> tf.Tensor:
    q = p - 0.5
    square = 0.180625 - q * q
    above, below = (_polynomial(square, terms) for terms in _MIDDLE)
    middle = q * above / below
    root = tf.sqrt(-_log(tf.where(q < 0.0, p, 1.0 - p)))
    tails = []
    for terms, begin in ((_TAIL, 1.6), (_FAR_TAIL, 5.0)):
        above, below = (_polynomial(root - begin, own) for own in terms)
        tails.append(above / below)
    tail = tf.where(root <= 5.0, *tails)
    tail = tf.where(q < 0.0, -tail, tail)
    return tf.where(tf.abs(q) <= 0.425, middle, tail)


def _polynomial(x: tf.Tensor, terms: Sequence[float]) -> tf.Tensor:
    """Returns the polynomial of the coefficients `terms`, the highest first."""
    value: Any = terms[0]
    for term in terms[1:]:
        value = value * x + term
    return value


def _log(x: tf.Tensor) -> tf.Tensor:
    """Returns the logarithm of x in (0, 1), as Log in core/first_values.cc does."""
    bits = tf.bitcast(x, tf.int64)
    exponent = shifted(bits, 52) - 1022
    kept = tf.bitwise.bitwise_and(bits, tf.constant(2**52 - 1, tf.int64))
    half = tf.constant(0x3FE << 52, tf.int64)
    mantissa = tf.bitcast(tf.bitwise.bitwise_or(kept, half), tf.float64)
    small = mantissa < 0.7071067811865476
    mantissa = tf.where(small, mantissa * 2.0, mantissa)
    exponent -= tf.cast(small, tf.int64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    total = _polynomial(s * s, [0.0, *(1.0 / k for k in range(17, 0, -2))])
    return 2.0 * s * total + tf.cast(exponent, tf.float64) * 0.6931471805599453


def check_growth(spec: TableSpec) -> None:
    """Refuses a growing table whose rows or slots cannot be made when ids arrive.

    Raises:
      NotImplementedError: If it is such a table; the text says what is supported.
    """
    first_values(spec)
    first_slots(spec)


def first_slots(spec: TableSpec) -> list[float]:
    """Returns the first value of each slot of a growing table."""
    optimizer = spec.optimizer
    if optimizer is None:
        return []
    found = [slot.initial_value for slot in optimizer.slots]
    if optimizer.slot_variable_creation_fn is not None or any(map(callable, found)):
        raise NotImplementedError(
            f"Table {spec.name!r} grows, and its slots grow with it, so a function "
            "cannot create them. Leave `slot_variable_creation_fn` at None, and pass "
            "numbers as initial values."
        )
    return [float(value) for value in found if not callable(value)]


def vocabulary_records(spec: TableSpec) -> list[Any]:
    """Returns what the kernels read about a growing table; [] for a static one."""
    vocabulary = spec.config.vocabulary
    if vocabulary is None:
        return []
    kind, first, second = first_values(spec)
    return [
        library.record(
            min_rows=vocabulary.least_rows,
            min_count=vocabulary.min_count,
            max_candidates=vocabulary.max_candidates or vocabulary.max_rows,
            eviction=vocabulary.eviction or "",
            max_age=vocabulary.max_age or 0,
            clock=vocabulary.clock,
            unknown=vocabulary.unknown,
            shares_when_full=vocabulary.when_full == "shared_row",
            first_values=kind,
            first=first,
            second=second,
            seed=vocabulary.seed,
            first_slots=first_slots(spec),
        )
    ]


def vocabulary_bytes(spec: TableSpec, rows: int, parts: int) -> int:
    """Returns the bytes that one of `parts` parts of a growing table keeps of its ids.

    core/vocabulary.h keeps numbers of 8 bytes a row, candidates of 16 bytes, and maps.
    """
    vocabulary = spec.config.vocabulary
    if vocabulary is None or not rows:
        return 0
    own = vocabulary.part(parts)
    numbers = 1 + (own.eviction is not None) + own.clock
    size = 8 * numbers * rows + _map_bytes(rows)
    if own.min_count > 1:
        candidates = own.max_candidates or own.max_rows
        size += 16 * candidates + _map_bytes(candidates)
    return size


def _map_bytes(ids: int) -> int:
    """Returns the bytes of an id map (core/id_map.h), and of the one it replaces."""
    capacity = 64
    while ids > capacity // 8 * 5:
        capacity *= 2
    moving = capacity > 64 and ids < capacity // 8 * 3
    return 16 * (capacity + moving * capacity // 2)


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenTable:
    """A growing table as it was at one moment, in the form of a static one.

    Attributes:
      config: A static TableConfig whose first values are the rows of the ids, in their
        order; the last row is what an id without a row looks up.
      ids: int64 [n], ascending.
      slots: The values of each slot by its name, float32 [n + 1, D] or [n + 1, 1];
        the last row has the initial value, or that of the shared row.
    """

    config: TableConfig
    ids: np.ndarray
    slots: Mapping[str, np.ndarray]

    def rows_of(self, ids: Any) -> Any:
        """Returns the rows of ids, by TensorFlow's ops: in tf.data or a served model.

        Args:
          ids: A tf.Tensor, tf.SparseTensor or tf.RaggedTensor of int32 or int64.

        Returns:
          A tensor of the same kind with the int64 row of each id; n for an id
          without a row.
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
    """Returns the static form of a growing table, from `Vocabulary.read`.

    Its dtype holds the values exactly: for an int8 table it is float32.
    """
    config = spec.config
    if spec.growth.unknown == "initializer":
        raise NotImplementedError(
            f"Table {spec.name!r} has unknown='initializer', so each id without a row "
            "has its own initial values, for which a static table has no rows."
        )
    size = len(state["ids"])
    starts = dict(zip(_slot_names(spec), first_slots(spec), strict=True))
    state = joined_values(state)

    def whole(name: str) -> np.ndarray:
        values = np.asarray(state[name], np.float32)
        missing = size + 1 - len(values)  # 1 without a shared row, else 0.
        rest = np.full((missing, values.shape[1]), starts.get(name, 0.0), np.float32)
        return np.concatenate([values, rest])

    initializer = tf.constant_initializer(whole(PARAMETERS))
    static = dataclasses.replace(
        config,
        vocabulary_size=size + 1,
        initializer=initializer,
        name=spec.name,
        string_ids=False,
        dtype=config.storage.first_dtype,
    )
    slots = {name: whole(name) for name in starts}
    return FrozenTable(static, state["ids"], slots)


def _slot_names(spec: TableSpec) -> list[str]:
    return [slot.name for slot in spec.optimizer.slots] if spec.optimizer else []
