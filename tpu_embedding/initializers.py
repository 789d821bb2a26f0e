"""Initial values of tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_PHILOX = tf.random.Algorithm.PHILOX.value  # The algorithm of tf.random's ops.
# TensorFlow's kernel of a truncated normal makes 4 numbers at a time, and reserves 256
# values of Philox's counter for them.
_GROUP, _COUNTERS = 4, 256

# Returns rows [start, stop) of a table, [stop - start, D].
ReadRows = Callable[[int, int], tf.Tensor]


def default_initializer(dim: int) -> Callable[..., tf.Tensor]:
    """Returns the initializer of tables that have none of their own.

    It draws from a normal distribution of mean 0 and standard deviation 1 / sqrt(dim),
    truncated at two standard deviations, so that a row has length about 1.
    """
    return _TruncatedNormal(1.0 / math.sqrt(dim))


def named_initializer(table: str, name: str) -> Any:
    """Returns the initializer of Keras of that name."""
    try:
        return tf.keras.initializers.get(name)
    except ValueError as error:
        raise ValueError(
            f"Table {table}: Keras has no initializer called {name!r}."
        ) from error


def stock_class(initializer: Any) -> str:
    """Returns the class name of an initializer of Keras or TensorFlow, else ""."""
    cls = type(initializer)
    made_by = cls.__module__.partition(".")[0]
    return cls.__name__ if made_by in ("keras", "tf_keras", "tensorflow") else ""


def constant_of(initializer: Any) -> float | None:
    """Returns the number of a constant Keras or TensorFlow initializer, else None."""
    name = stock_class(initializer)
    known = {"Zeros": 0.0, "Ones": 1.0}.get(name)
    if name == "Constant":
        known = initializer.get_config()["value"]
    return float(known) if isinstance(known, (int, float)) else None


@dataclasses.dataclass(frozen=True)
class _TruncatedNormal:
    """Makes the numbers of tf.random.truncated_normal, for a whole table or any rows.

    Attributes:
      stddev: The standard deviation.
    """

    stddev: float

    def __call__(self, shape: Any, dtype: tf.DType = tf.float32) -> tf.Tensor:
        sizes = tf.convert_to_tensor(shape, tf.int32)
        numbers = _truncated_normal_function(sizes.shape, dtype)(
            sizes,
            _philox_words(),
            tf.constant(0, tf.uint64),
            tf.cast(self.stddev, dtype),
        )
        return tf.ensure_shape(numbers, shape)

    def by_rows(self, shape: Any, dtype: tf.DType = tf.float32) -> ReadRows:
        """See `RowIdInitializer.by_rows`."""
        seeds = _philox_words()
        dim = int(shape[1])
        function = _truncated_normal_function([1], dtype)

        def read(start: int, stop: int) -> tf.Tensor:
            group, before = divmod(start * dim, _GROUP)
            size = (stop - start) * dim
            numbers = function(
                tf.constant([before + size]),
                seeds,
                tf.constant(group * _COUNTERS, tf.uint64),
                tf.cast(self.stddev, dtype),
            )
            return tf.reshape(numbers[before:], [stop - start, dim])

        return read


def _philox_words() -> tf.Tensor:
    """Returns the next tf.random op's seeds, uint64 [2]; random if none is set."""
    seeds = tf.compat.v1.get_seed(None)
    if seeds == (None, None):
        return tf.bitcast(
            tf.random.uniform([2], tf.int64.min, tf.int64.max, tf.int64), tf.uint64
        )
    return tf.constant(seeds, tf.uint64)


def _truncated_normal_function(shape_of_shape: Any, dtype: tf.DType) -> Any:
    """Makes a new function for one table: TensorFlow forgets those of earlier clusters.

    It is concrete: TensorFlow warns if one tf.function is traced for many tables.
    """
    function = tf.function(_scaled_truncated_normal, autograph=False)
    return function.get_concrete_function(
        tf.TensorSpec(shape_of_shape, tf.int32),
        tf.TensorSpec([2], tf.uint64),
        tf.TensorSpec([], tf.uint64),
        tf.TensorSpec([], dtype),
    )


def _scaled_truncated_normal(
    shape: tf.Tensor, seeds: tf.Tensor, counter: tf.Tensor, stddev: tf.Tensor
) -> tf.Tensor:
    """Returns values of tf.random.truncated_normal for two seeds, of `stddev`'s dtype.

    The values begin at `counter`, which is 0 at the start of the sequence.

    Within a function the numbers are scaled in place. tf.random runs op by op, and each
    op allocates memory of the table's size, which TensorFlow's allocator keeps.
    """
    numbers = tf.raw_ops.StatelessTruncatedNormalV2(
        shape=shape,
        key=seeds[:1],
        counter=tf.stack([counter, seeds[1]]),
        alg=_PHILOX,
        dtype=stddev.dtype,
    )
    return numbers * stddev


@dataclasses.dataclass(frozen=True)
class RowIdInitializer:
    """Fills row r with the value r + offset, so that tests can tell rows apart.

    Attributes:
      offset: The value of row 0.
    """

    offset: int = 0

    def __call__(
        self, shape: Sequence[int] | tf.TensorShape, dtype: tf.DType = tf.float32
    ) -> tf.Tensor:
        """Returns a tensor of `shape`, [V, D]."""
        rows: Any = shape[0]
        return self.by_rows(shape, dtype)(0, rows)

    def by_rows(
        self, shape: Sequence[int] | tf.TensorShape, dtype: tf.DType = tf.float32
    ) -> ReadRows:
        """Prepares to make a table by rows, so that a process makes only its own.

        An initializer of your own may have this method, too. It is called instead of
        the initializer where the rows of a table are divided over processes or
        servers, once for each table in each process. Draw random seeds in this method,
        not in the callable that it returns.

        >>> read = RowIdInitializer().by_rows((1000, 2))
        >>> read(500, 502).numpy().tolist()
        [[500.0, 500.0], [501.0, 501.0]]

        Args:
          shape: Shape of the whole table, [V, D].
          dtype: Dtype of the table.

        Returns:
          A callable of (start, stop) that returns rows [start, stop) of the table, of
          `dtype` [stop - start, D]. It is called with any rows in any order.
        """
        dim = shape[1]

        def read(start: int, stop: int) -> tf.Tensor:
            # The rows are counted in integers, because bfloat16 is not exact above 256.
            rows = tf.range(start, stop, dtype=tf.int64) + self.offset
            column = tf.cast(rows, dtype)[:, tf.newaxis]
            return tf.broadcast_to(column, [stop - start, dim])

        return read
