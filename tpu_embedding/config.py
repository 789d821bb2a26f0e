"""Tables and features as the user describes them: frozen, checked at birth."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpu_embedding import combiners, errors

INVALID_IDS: tuple[str, ...] = ("error", "drop", "mod")

# What tables may be stored as.
DTYPES: tuple[str, ...] = ("float32", "bfloat16")
_MOST_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Simulated quantization of each value looked up, before the combiner.

      x = clip(x, lower, upper);  h = (upper - lower) / (num_buckets - 1)
      x = floor((x - lower) / h + 0.5) * h + lower

    The stored table stays as it is, and gradients pass unchanged.

    Attributes:
      num_buckets: Number of different values that are left, at least 2.
      lower: The smallest of them.
      upper: The largest of them.
    """

    num_buckets: int
    lower: float
    upper: float

    def __post_init__(self) -> None:
        if not _is_int(self.num_buckets):
            raise errors.argument_type("num_buckets", self.num_buckets, "an int")
        if self.num_buckets < 2:
            raise errors.argument_value("num_buckets", self.num_buckets, ">= 2")
        for argument, limit in (("lower", self.lower), ("upper", self.upper)):
            if not isinstance(limit, numbers.Real) or isinstance(limit, bool):
                raise errors.argument_type(argument, limit, "a number")
            if not math.isfinite(limit):
                raise errors.argument_value(argument, limit, "finite")
        if self.lower >= self.upper:
            raise errors.argument_value("upper", self.upper, f"above {self.lower!r}")


@dataclasses.dataclass(frozen=True, eq=False)
class TableConfig:
    """One embedding table of shape [vocabulary_size, dim].

    Tables compare by identity: two equal configurations are two tables, and
    features that hold the same object share one. Arguments, their order and
    defaults are those of tf.tpu.experimental.embedding.TableConfig, and
    `invalid_ids` and `rounding_seed`.

    >>> TableConfig(1000, 16, combiner="sum", name="films").dtype
    'float32'

    Attributes:
      vocabulary_size: Number of rows V.
      dim: Number of columns D.
      initializer: A callable of (shape, dtype) that returns the whole table, or
        None: truncated normal, mean 0, standard deviation 1 / sqrt(dim).
      optimizer: Goes before the optimizer of the whole embedding. Not checked
        here: the Keras layer takes names and Keras optimizers too.
      combiner: "mean", "sum" or "sqrtn", or a CustomCombiner of this package or of
        tf.tpu.experimental.embedding.
      name: A unique name, or None for "table_0", "table_1", ...
      quantization_config: A QuantizationConfig, or None.
      layout: How a TPU stores the table, or None.
      dtype: What the rows are stored as: "float32" or "bfloat16", or a dtype object of
        that name. Slots, sums and activations are float32 with either.
      invalid_ids: What an id below 0 or not below V does: "error" fails the call
        and changes nothing; "drop" treats the entry as absent; "mod" takes the id
        modulo V.
      rounding_seed: Of the random numbers by which the updates of a bfloat16 table are
        rounded, an int from 0 to 2**63 - 1; None takes it from the table's name. See
        docs/semantics.md.

    Raises:
      ValueError: If an argument is not as above.
      NotImplementedError: For the dtype int32.
    """

    vocabulary_size: int
    dim: int
    initializer: Callable[..., Any] | None = None
    optimizer: Any = None
    combiner: Any = "mean"
    name: str | None = None
    quantization_config: QuantizationConfig | None = None
    layout: Any = None
    dtype: str = "float32"
    invalid_ids: str = dataclasses.field(default="error", kw_only=True)
    rounding_seed: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for argument, size in (
            ("vocabulary_size", self.vocabulary_size),
            ("dim", self.dim),
        ):
            if not _is_int(size) or size < 1:
                raise errors.argument_int(argument, size, smallest=1)
        if self.initializer is not None and not callable(self.initializer):
            raise errors.argument_value(
                "initializer", self.initializer, "None or a callable"
            )
        _check_name(self.name)
        check_invalid_ids(self.invalid_ids)
        # Frozen from here on; what may come in several forms is kept in one.
        object.__setattr__(self, "combiner", combiners.adapt(self.combiner))
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        _check_seed(self.rounding_seed, self.dtype)
        object.__setattr__(
            self, "quantization_config", _quantization(self.quantization_config)
        )

    @property
    def custom_combiner(self) -> combiners.CustomCombiner | None:
        """The combiner, where it is a CustomCombiner."""
        custom = isinstance(self.combiner, combiners.CustomCombiner)
        return self.combiner if custom else None

    @property
    def entry_combiner(self) -> str:
        """What makes the gains of entries: "sum" where a CustomCombiner combines."""
        return self.combiner if self.custom_combiner is None else "sum"


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureConfig:
    """One feature: a table to look up, and the shape of the result.

    Features compare by identity. Arguments, their order and defaults are those
    of tf.tpu.experimental.embedding.FeatureConfig.

    >>> table = TableConfig(1000, 16)
    >>> FeatureConfig(table, output_shape=[8, 2]).output_shape
    (8, 2)

    Attributes:
      table: A TableConfig, of this package or of tf.tpu.experimental.embedding.
      max_sequence_length: L > 0 gives activations [B, L, D], one position for each
        entry, cut or padded with zeros. 0 combines the entries.
      validate_weights_and_indices: Kept for TensorFlow's sake; ids are always
        checked and empty samples are zeros.
      output_shape: Shape of the activations without D, for each replica; None
        takes it from build() or from the input. Kept as a tuple whose unknown
        axes are None.
      name: A name for messages and for SparseCore, or None.

    Raises:
      ValueError: If an argument is not as above, or if `max_sequence_length` comes
        together with `output_shape`.
      TypeError: If `output_shape` or `name` is of the wrong type.
    """

    table: Any
    max_sequence_length: int = 0
    validate_weights_and_indices: bool = True
    output_shape: Any = None
    name: str | None = None

    def __post_init__(self) -> None:
        table, length = self.table, self.max_sequence_length
        if not all(hasattr(table, a) for a in ("vocabulary_size", "dim", "combiner")):
            raise errors.feature_table(table)
        if not _is_int(length) or length < 0:
            raise errors.argument_int("max_sequence_length", length, smallest=0)
        if not isinstance(self.validate_weights_and_indices, bool):
            raise errors.argument_value(
                "validate_weights_and_indices",
                self.validate_weights_and_indices,
                "a bool",
            )
        _check_name(self.name)
        shape = _shape(self.output_shape)
        object.__setattr__(self, "output_shape", shape)
        if length and shape is not None:
            raise errors.sequence_with_output_shape(self.name, length, shape)


@dataclasses.dataclass(frozen=True)
class SparseCoreEmbeddingConfig:
    """How TPUEmbeddingV2 lays tables and batches out for SparseCores.

    Fields, their order and defaults are those of
    tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig, and
    `stock_feature_counts` and `minibatching`. The limits concern the buffers of a TPU
    (or of the software TPU); the host engine has no such buffers and keeps every id.

    >>> SparseCoreEmbeddingConfig(max_ids_per_table={"films": 512}).allow_id_dropping
    False

    Attributes:
      disable_table_stacking: Each table is a stack of its own.
      max_ids_per_chip_per_sample: Times the samples of a stack it is the size of a
        device's buffer of ids, a positive int.
      max_ids_per_table: By name of the stack: how many ids one SparseCore may ask
        another for in one step; 256 for stacks that are not named.
      max_unique_ids_per_table: The same of different ids.
      allow_id_dropping: Drop the ids that the buffer has no room for instead of
        failing.
      initialize_tables_on_host: Make the initial values on the host rather than on
        the TPU.
      enable_fast_table_initialization: Fill a whole stack by the initializer of its
        first table, on the TPU. Other numbers than those of docs/semantics.md.
      stock_feature_counts: Count samples as TensorFlow's own TPUEmbeddingV2 does,
        which sees only the first feature of all: for checkpoints that it wrote.
      minibatching: Cut a batch that is beyond the limits of a table into minibatches,
        up to 64, instead of failing. All replicas must be cut alike, so that with
        several of them only lookups inside strategy.run can do it.
      shard_loads: By name of the table how many ids are asked for whose remainder by
        the number of all SparseCores is 0, 1, ..., in any unit, as a profile has it
        (`estimator.EmbeddingProfiler.shard_loads`). The tables of a stack are then
        turned so that no SparseCore has much more to do than the others, which
        TensorFlow's stacker cannot; checkpoints are laid out by it. The host engine
        has no shards.

    Raises:
      TypeError: If a field is of the wrong type.
      ValueError: If a limit is below 1, or a load is negative.
    """

    disable_table_stacking: bool = False
    max_ids_per_chip_per_sample: int = 64
    max_ids_per_table: Mapping[str, int] | None = None
    max_unique_ids_per_table: Mapping[str, int] | None = None
    allow_id_dropping: bool = False
    initialize_tables_on_host: bool = True
    enable_fast_table_initialization: bool = False
    stock_feature_counts: bool = dataclasses.field(default=False, kw_only=True)
    minibatching: bool = dataclasses.field(default=False, kw_only=True)
    shard_loads: Mapping[str, Sequence[float]] | None = dataclasses.field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        for flag in (
            "disable_table_stacking",
            "allow_id_dropping",
            "initialize_tables_on_host",
            "enable_fast_table_initialization",
            "stock_feature_counts",
            "minibatching",
        ):
            if not isinstance(getattr(self, flag), bool):
                raise errors.argument_type(flag, getattr(self, flag), "a bool")
        limit = self.max_ids_per_chip_per_sample
        if not _is_int(limit) or limit < 1:
            raise errors.argument_int("max_ids_per_chip_per_sample", limit, smallest=1)
        for argument in ("max_ids_per_table", "max_unique_ids_per_table"):
            limits = getattr(self, argument)
            if limits is not None:
                object.__setattr__(self, argument, _limits(argument, limits))
        if self.shard_loads is not None:
            object.__setattr__(self, "shard_loads", _loads(self.shard_loads))


def check_invalid_ids(value: object) -> None:
    """Raises ValueError unless `value` is one of `INVALID_IDS`."""
    if value not in INVALID_IDS:
        raise errors.argument_value("invalid_ids", value, f"one of {INVALID_IDS}")


def _is_int(value: object) -> bool:
    # As in TensorFlow, NumPy's integers are refused; a bool is one by mistake.
    return isinstance(value, int) and not isinstance(value, bool)


def _limits(argument: str, limits: object) -> dict[str, int]:
    """A copy: the user may change his own dict later."""
    if not isinstance(limits, Mapping) or not all(isinstance(k, str) for k in limits):
        raise errors.argument_type(argument, limits, "a dict by stack name or None")
    for name, limit in limits.items():
        if not _is_int(limit) or limit < 1:
            raise errors.argument_int(f"{argument}[{name!r}]", limit, smallest=1)
    return dict(limits)


def _loads(loads: object) -> dict[str, tuple[float, ...]]:
    argument, allowed = "shard_loads", "a dict of sequences of numbers by table name"
    if not isinstance(loads, Mapping) or not all(isinstance(k, str) for k in loads):
        raise errors.argument_type(argument, loads, allowed)
    found = {}
    for table, load in loads.items():
        name = f"{argument}[{table!r}]"
        if not isinstance(load, Sequence) or isinstance(load, str):
            raise errors.argument_type(name, load, "a sequence of numbers")
        for number in load:
            if not isinstance(number, numbers.Real) or isinstance(number, bool):
                raise errors.argument_type(name, number, "a sequence of numbers")
            if not 0 <= number < math.inf:
                raise errors.argument_value(name, number, "finite and >= 0")
        found[table] = tuple(float(number) for number in load)
    return found


def _check_name(name: object) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise errors.argument_type("name", name, "a str or None")
    if not name:
        raise errors.argument_value("name", name, "None or not empty")


def _dtype_name(dtype: Any) -> str:
    # tf.float32 and np.dtype have a `name`; np.float32 is a class.
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype)
    if name == "int32":
        raise errors.dtype_of_integers(name)
    if name not in DTYPES:
        raise errors.dtype(dtype)
    return name


def _check_seed(seed: object, dtype: str) -> None:
    if seed is None:
        return
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise errors.argument_type("rounding_seed", seed, "an int or None")
    if not 0 <= seed <= _MOST_SEED:
        raise errors.argument_value("rounding_seed", seed, "from 0 to 2**63 - 1")
    if dtype != "bfloat16":
        raise errors.seed_without_rounding(seed, dtype)


def _quantization(value: Any) -> QuantizationConfig | None:
    """Ours as it is; TensorFlow's, which has the same attributes, as ours."""
    if value is None or isinstance(value, QuantizationConfig):
        return value
    if not all(hasattr(value, a) for a in ("num_buckets", "lower", "upper")):
        raise errors.argument_type(
            "quantization_config", value, "a QuantizationConfig or None"
        )
    return QuantizationConfig(value.num_buckets, value.lower, value.upper)


def _shape(shape: Any) -> tuple[int | None, ...] | None:
    """A shape as a tuple; None, as TensorShape(None), where the rank is unknown."""
    if shape is None or getattr(shape, "rank", 0) is None:
        return None
    if hasattr(shape, "as_list"):
        return tuple(shape.as_list())
    axes = (shape,) if _is_int(shape) else shape
    if not isinstance(axes, (list, tuple)):
        raise errors.argument_type("output_shape", shape, "a sequence of ints or None")
    for axis in axes:
        if axis is not None and not _is_int(axis):
            raise errors.argument_type(
                "output_shape", shape, "a sequence of ints or None"
            )
        if axis is not None and axis < 0:
            raise errors.argument_value("output_shape", shape, "without negative axes")
    return tuple(axes)
