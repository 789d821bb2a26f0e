"""EmbeddingConfigSpec: which features are embeddings, and how they are trained."""

from __future__ import annotations

import collections
import copy
import numbers
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from tpu_embedding import errors
from tpu_embedding.compat.interop import columns, spec_conversion
from tpu_embedding.compat.interop.columns import FeatureConfig, TableConfig
from tpu_embedding.compat.interop.parameters import check_parameters
from tpu_embedding.embedding import TPUEmbedding

PARTITION_STRATEGIES = ("div", "mod")
_DICTS = ("feature_to_config_dict", "table_to_config_dict")
_DERIVED = "tensor_core_feature_columns"
# The fields in TensorFlow's order, in which the derived field is the second.
_FIELDS = (
    "feature_columns",
    _DERIVED,
    "optimization_parameters",
    "clipping_limit",
    "pipeline_execution_with_tensor_core",
    "experimental_gradient_multiplier_fn",
    "feature_to_config_dict",
    "table_to_config_dict",
    "partition_strategy",
    "profile_data_directory",
)

_COLUMNS = (
    "an embedding column of tf.compat.v1.tpu.experimental (embedding_column or "
    "shared_embedding_columns), or a numeric or embedding column of tf.feature_column"
)


class EmbeddingConfigSpec(collections.namedtuple("EmbeddingConfigSpec", _FIELDS)):
    """Describes the embeddings of a TPUEstimator, or of `to_tpu_embedding`.

    Arguments, their order, defaults and checks are those of
    tf.estimator.tpu.experimental.EmbeddingConfigSpec of TensorFlow 2.15. Unlike
    there, everything acts on CPUs too, and copy, deepcopy and pickle work:

    >>> import tensorflow as tf
    >>> from tpu_embedding import interop
    >>> film = tf.feature_column.categorical_column_with_identity("film", 8)
    >>> spec = interop.EmbeddingConfigSpec(
    ...     feature_columns=[interop.embedding_column(film, 4)],
    ...     optimization_parameters=interop.AdagradParameters(0.1),
    ... )
    >>> sorted(spec.table_to_config())
    ['tbl_film']
    >>> embedding = spec.to_tpu_embedding()

    Attributes:
      feature_columns: A new list of columns of tf.compat.v1.tpu.experimental
        (embedding_column, shared_embedding_columns), and numeric or plain embedding
        columns, which have no TPU table.
      tensor_core_feature_columns: The columns that are looked up on the tensor core,
        which were taken out of `feature_columns`; not an argument.
      optimization_parameters: One of the *Parameters, for tables without their own.
      clipping_limit: c > 0 limits each element of a row's summed gradient to
        [-c, c]. (TensorFlow 1 keeps it and never reads it.)
      pipeline_execution_with_tensor_core: Whether a step's lookups come before the
        update of the previous step.
      experimental_gradient_multiplier_fn: A function of the global step whose
        value multiplies the gradients of all tables, before clipping.
      feature_to_config_dict: FeatureConfigs by feature, instead of the columns.
      table_to_config_dict: TableConfigs by table, given with `feature_to_config_dict`.
      partition_strategy: "div" or "mod": how checkpoints of several hosts are cut.
      profile_data_directory: The folder of statistics of the features, or None.

    Raises:
      ValueError: If neither or both ways of describing the features are given, or an
        argument has a wrong value.
      TypeError: If a column, a config or an argument is of the wrong class.
    """

    __slots__ = ()

    def __new__(
        cls,
        feature_columns: Iterable[Any] | None = None,
        optimization_parameters: Any = None,
        clipping_limit: float | None = None,
        pipeline_execution_with_tensor_core: bool = False,
        experimental_gradient_multiplier_fn: Any = None,
        feature_to_config_dict: dict[str, FeatureConfig] | None = None,
        table_to_config_dict: dict[str, TableConfig] | None = None,
        partition_strategy: str = "div",
        profile_data_directory: str | None = None,
        *,
        column: Iterable[Any] | None = None,
    ) -> EmbeddingConfigSpec:
        """Checks everything; `column` is an old name of `feature_columns`."""
        if column is not None:
            feature_columns = _from_alias(feature_columns, column)
        if isinstance(feature_columns, Iterable) and not _is_single(feature_columns):
            feature_columns = list(feature_columns)
        dicts = (feature_to_config_dict, table_to_config_dict)
        _check_exactly_one(feature_columns, dicts)
        if partition_strategy not in PARTITION_STRATEGIES:
            raise ValueError(
                'Argument `partition_strategy` must be "div" or "mod". Received: '
                f"{partition_strategy!r}."
            )
        tensor_core = None
        if feature_columns:
            feature_columns, tensor_core = _check_columns(feature_columns)
            check_parameters(optimization_parameters)
            for name, value in zip(_DICTS, dicts, strict=True):
                if value:
                    columns.warn_of_ignored_dict(name)
        else:
            feature_columns = None
            _check_dicts(feature_to_config_dict or {}, table_to_config_dict or {})
        _check_clipping_limit(clipping_limit)
        _check_options(
            pipeline_execution_with_tensor_core,
            experimental_gradient_multiplier_fn,
            profile_data_directory,
        )
        return cls._make(
            (
                feature_columns,
                tensor_core,
                optimization_parameters,
                clipping_limit,
                pipeline_execution_with_tensor_core,
                experimental_gradient_multiplier_fn,
                feature_to_config_dict,
                table_to_config_dict,
                partition_strategy,
                profile_data_directory,
            )
        )

    def __reduce__(self) -> Any:
        return (_unpickle, (type(self), tuple(self), columns.lost_fields(self[0])))

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingConfigSpec:
        # Columns are values. Copying TensorFlow's shared ones would lose their
        # use_safe_embedding_lookup, and part them from the columns of the model.
        kept = {_FIELDS[0], _DERIVED}
        return type(self)._make(
            copy.copy(value) if field in kept else copy.deepcopy(value, memo)
            for field, value in zip(_FIELDS, self, strict=True)
        )

    def _replace(self, /, **changes: Any) -> EmbeddingConfigSpec:
        """Makes a spec with other fields, checked like a new one.

        Raises:
          TypeError: For `tensor_core_feature_columns`, which is derived.
          ValueError: For names that are not fields.
        """
        if _DERIVED in changes:
            raise TypeError(
                f"`{_DERIVED}` follows from `feature_columns` and cannot be replaced. "
                "Replace `feature_columns`."
            )
        unknown = set(changes) - set(_FIELDS)
        if unknown:
            raise ValueError(
                f"EmbeddingConfigSpec has no field {errors.quoted(sorted(unknown))}."
            )
        arguments = self._asdict()
        tensor_core = arguments.pop(_DERIVED)
        if arguments["feature_columns"] is not None:
            arguments["feature_columns"] = [*arguments["feature_columns"], *tensor_core]
        return type(self)(**{**arguments, **changes})

    def table_to_config(self) -> dict[str, TableConfig]:
        """Returns the tables by their keys; those of columns are "tbl_<variable>".

        Columns without a TPU table are left out.
        """
        return self._configs()[0]

    def feature_to_config(self) -> dict[str, FeatureConfig]:
        """Returns the features by the keys of their ids."""
        return self._configs()[1]

    def adapt(
        self, global_step: Any = None, *, invalid_ids: str = "error"
    ) -> spec_conversion.AdaptedSpec:
        """Converts the spec into the classes of this package.

        Args:
          global_step: What the learning rate functions get: a variable, or None for
            the number of updates already applied.
          invalid_ids: The policy of all of the spec's tables.

        Returns:
          The configuration, and how to scale gradients.

        Raises:
          NotImplementedError: If a column of the tensor core cannot be converted.
          TypeError: If a feature or table has a key that is not a str.
          ValueError: If the spec has no tables, or an argument contradicts it.
        """
        return spec_conversion.adapt(self, global_step, invalid_ids=invalid_ids)

    def to_tpu_embedding(
        self, global_step: Any = None, *, invalid_ids: str | None = None, **options: Any
    ) -> TPUEmbedding:
        """Returns a `tpu_embedding.TPUEmbedding` of the spec.

        Weights are a second argument of its `enqueue`: see `AdaptedSpec.weights`.

        Args:
          global_step: What the learning rate functions get: a variable, or None for
            the number of updates already applied.
          invalid_ids: The policy of all of the spec's tables, which have none of their
            own. None means "error".
          **options: Keyword arguments of TPUEmbedding.

        Raises:
          NotImplementedError: If TPUEmbedding does not support a column or option.
          TypeError: As `adapt` does.
          ValueError: As `adapt` does.
        """
        rule = "error" if invalid_ids is None else invalid_ids
        adapted = self.adapt(global_step, invalid_ids=rule)
        if adapted.other_columns:
            raise NotImplementedError(
                f"Columns {errors.quoted(c.name for c in adapted.other_columns)} have "
                "no TPU embedding table and cannot be converted into a TPUEmbedding. "
                "Pass their features to the model itself and leave the columns out of "
                "the spec, or take the parts with `spec.adapt()`."
            )
        if adapted.gradient_multiplier is not None:
            raise NotImplementedError(
                "`experimental_gradient_multiplier_fn` cannot be converted into a "
                "TPUEmbedding. Take the parts with `spec.adapt()` and pass "
                "`adapted.scale(gradients, step)` to apply_gradients."
            )
        if self.profile_data_directory:  # An empty path counts as none.
            raise NotImplementedError(
                "`profile_data_directory` cannot be converted into a TPUEmbedding. "
                "Pass batches to an estimator.EmbeddingProfiler(spec), or leave the "
                "option at None, which changes no results."
            )
        return TPUEmbedding(
            adapted.feature_config, adapted.optimizer, adapted.pipelined, **options
        )

    def embedding_columns(self) -> list[columns.EmbeddingColumn]:
        """Returns the columns that have TPU embedding tables."""
        return [c for c in self.feature_columns or [] if columns.is_embedding_column(c)]

    def other_columns(self) -> list[Any]:
        """Returns columns without TPU tables: numeric, and plain embedding columns."""
        own = self.feature_columns or []
        return [c for c in own if not columns.is_embedding_column(c)]

    def _configs(self) -> tuple[dict[str, TableConfig], dict[str, FeatureConfig]]:
        if self.feature_columns is None:
            return dict(self.table_to_config_dict), dict(self.feature_to_config_dict)
        return columns.get_configs_from_feature_columns(self.embedding_columns())


def _unpickle(
    cls: type[EmbeddingConfigSpec], fields: tuple[Any, ...], lost: list[Any]
) -> EmbeddingConfigSpec:
    """Makes a spec for `pickle`, of fields that were checked before."""
    return cls._make((columns.with_lost_fields(fields[0], lost), *fields[1:]))


def _from_alias(feature_columns: Any, column: Any) -> Any:
    if feature_columns is not None:
        raise errors.argument_type("column", column, "left out with `feature_columns`")
    warnings.warn(
        "`column` of EmbeddingConfigSpec is called `feature_columns`.",
        DeprecationWarning,
        stacklevel=3,
    )
    return column


def _is_single(feature_columns: Any) -> bool:
    """Returns whether it is one column; columns are tuples, so iterable themselves."""
    return isinstance(feature_columns, str) or hasattr(feature_columns, "name")


def _check_exactly_one(feature_columns: Any, dicts: tuple[Any, Any]) -> None:
    if bool(feature_columns) == all(dicts):
        arguments = zip(
            ("feature_columns", *_DICTS), (feature_columns, *dicts), strict=True
        )
        given = [name for name, value in arguments if value]
        raise ValueError(
            "An EmbeddingConfigSpec takes exactly one of these: `feature_columns`, or "
            "both `feature_to_config_dict` and `table_to_config_dict`. Received: "
            f"{', '.join(given) or 'none of them'} (an empty argument counts as "
            "missing)."
        )


def _check_columns(feature_columns: Any) -> tuple[list[Any], list[Any]]:
    """Returns (columns looked up as TPU embeddings, columns of the tensor core)."""
    if not isinstance(feature_columns, list):
        raise TypeError(
            f"Argument `feature_columns` must be a list; each element is {_COLUMNS}. "
            f"Received: {feature_columns!r} of type "
            f"{errors.type_name(feature_columns)}. Wrap a single column in a list."
        )
    split: tuple[list[Any], list[Any]] = ([], [])
    for column in feature_columns:
        if not columns.is_accepted(column):
            raise TypeError(
                f"Each of `feature_columns` must be {_COLUMNS}. Received: {column!r} "
                f"of type {errors.type_name(column)}."
            )
        split[columns.on_tensor_core(column)].append(column)
    return split


def _check_dicts(features: dict[str, Any], tables: dict[str, Any]) -> None:
    for argument, value in zip(_DICTS, (features, tables), strict=True):
        if not isinstance(value, Mapping):
            raise errors.argument_type(argument, value, "a dict of configs by name")
    for feature, config in features.items():
        if not isinstance(config, FeatureConfig):
            raise TypeError(
                f"feature_to_config_dict[{feature!r}] must be a FeatureConfig of "
                f"tpu_embedding.interop. Received: {config!r} of type "
                f"{errors.type_name(config)}."
            )
        if config.table_id not in tables:
            raise ValueError(
                f"Feature {feature!r} refers to table {config.table_id!r}, which is "
                "not in `table_to_config_dict`. Its tables are "
                f"{errors.quoted(sorted(tables))}."
            )
    for table, config in tables.items():
        if not isinstance(config, TableConfig):
            raise TypeError(
                f"table_to_config_dict[{table!r}] must be a TableConfig of "
                f"tpu_embedding.interop. Received: {config!r} of type "
                f"{errors.type_name(config)}."
            )


def _check_clipping_limit(limit: Any) -> None:
    if limit is None:
        return
    if not isinstance(limit, numbers.Real) or isinstance(limit, bool):
        raise errors.argument_type("clipping_limit", limit, "a number or None")
    if not limit > 0:  # NaN is not, either.
        raise errors.argument_value("clipping_limit", limit, "above 0, or None")


def _check_options(pipelined: Any, multiplier: Any, directory: Any) -> None:
    errors.check_flag("pipeline_execution_with_tensor_core", pipelined)
    if multiplier is not None and not callable(multiplier):
        raise errors.argument_type(
            "experimental_gradient_multiplier_fn", multiplier, "a callable or None"
        )
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise errors.argument_type(
            "profile_data_directory", directory, "a path or None"
        )


def require_spec(spec: object) -> None:
    """Raises TypeError unless an argument `spec` is an EmbeddingConfigSpec."""
    if not isinstance(spec, EmbeddingConfigSpec):
        raise errors.argument_type("spec", spec, "an EmbeddingConfigSpec")
