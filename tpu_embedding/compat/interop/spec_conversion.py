"""Converts an EmbeddingConfigSpec to the classes of this library.

Every option of the spec is converted, or raises an error that names it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding import errors, optimizers
from tpu_embedding.compat.interop import columns
from tpu_embedding.compat.interop import parameters as old
from tpu_embedding.config import FeatureConfig, TableConfig, check_invalid_ids
from tpu_embedding.engines.rates import returned_number
from tpu_embedding.optimizers import Optimizer
from tpu_embedding.optimizers.tpu_v2_v4 import updates_so_far

_MULTIPLIER = "experimental_gradient_multiplier_fn"
_OPTIMIZERS: dict[type, type[Optimizer]] = {
    old.StochasticGradientDescentParameters: optimizers.SGD,
    old.AdagradParameters: optimizers.Adagrad,
    old.AdagradMomentumParameters: optimizers.AdagradMomentum,
    old.AdamParameters: optimizers.Adam,
    old.FtrlParameters: optimizers.FTRL,
    old.MomentumParameters: optimizers.Momentum,
    old.RMSPropParameters: optimizers.RMSProp,
    old.ProximalAdagradParameters: optimizers.ProximalAdagrad,
    old.ProximalYogiParameters: optimizers.ProximalYogi,
    old.FrequencyEstimatorParameters: optimizers.FrequencyEstimator,
}
# Our names of arguments, by the names in *Parameters that our classes lack.
_RENAMED = {
    "beta1": "beta_1",
    "beta2": "beta_2",
    "initial_accumulator": "initial_accumulator_value",
}


@dataclasses.dataclass(frozen=True)
class AdaptedSpec:
    """Holds an EmbeddingConfigSpec, converted into the classes of this library.

    Attributes:
      feature_config: The FeatureConfigs for TPUEmbedding, by feature key.
      optimizer: The optimizer of tables without their own; None if every table has one.
      tables: The TableConfigs by their keys in the spec.
      weight_keys: The key of the weights of each weighted feature.
      gradient_multiplier: A function of the global step, or None.
      pipelined: The `pipeline_execution_with_tensor_core` of TPUEmbedding.
      partition_strategy: "div" or "mod"; only `import_estimator_checkpoint` uses it, as
        one process sees whole tables.
      other_columns: The spec's columns without a TPU table, which the model itself
        must handle.
    """

    feature_config: dict[str, FeatureConfig]
    optimizer: Optimizer | None
    tables: dict[str, TableConfig]
    weight_keys: dict[str, str]
    gradient_multiplier: Callable[[Any], Any] | None
    pipelined: bool
    partition_strategy: str
    other_columns: tuple[Any, ...]

    def weights(self, features: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the weights for TPUEmbedding.enqueue, from all features of a batch.

        Args:
          features: The features of a TensorFlow 1 model, the weights among them.

        Returns:
          The weights or None of each feature of `feature_config`; None if no feature
          is weighted.

        Raises:
          ValueError: If the weights of a feature are not among the features.
        """
        if not self.weight_keys:
            return None
        keys = self.weight_keys
        for feature, key in keys.items():
            if key not in features:
                raise ValueError(
                    f"The weights {key!r} of feature {feature!r} are not among the "
                    f"features, which are {errors.quoted(features)}. Pass all "
                    "of the batch's features."
                )
        return {f: features[keys[f]] if f in keys else None for f in self.features}

    @property
    def features(self) -> list[str]:
        """The keys of `feature_config`."""
        return list(self.feature_config)

    def scale(self, gradients: Mapping[str, Any], step: Any) -> dict[str, Any]:
        """Returns the gradients times `experimental_gradient_multiplier_fn(step)`.

        Args:
          gradients: A tensor or None for each feature.
          step: The global step before the update.

        Raises:
          TypeError: If the function does not return a number.
          ValueError: If it does not return a scalar.
        """
        multiplier = self.gradient_multiplier
        if multiplier is None:
            return dict(gradients)
        factor = returned_number(_MULTIPLIER, multiplier, multiplier(step))
        if factor.shape.rank not in (0, None):  # None: not known in a graph.
            raise ValueError(
                "`experimental_gradient_multiplier_fn` must return a scalar, which "
                f"multiplies all gradients. Received shape {factor.shape}."
            )
        return {
            feature: None if gradient is None else gradient * factor
            for feature, gradient in gradients.items()
        }


@dataclasses.dataclass(frozen=True)
class StepRate:
    """A learning rate that is a function of the global step.

    Attributes:
      function: A function from the step to the rate.
    """

    function: Callable[[Any], Any]

    def __call__(self, step: Any) -> Any:
        """Returns the rate after `step` updates."""
        return self.function(step)


@dataclasses.dataclass(frozen=True)
class VariableRate:
    """A learning rate that is a function of a given step variable.

    Attributes:
      function: A function from the step to the rate.
      step: The step, or a function without arguments that returns it.
    """

    function: Callable[[Any], Any]
    step: Any

    def __call__(self) -> Any:
        """Returns the rate at the present value of the step."""
        step = self.step() if callable(self.step) else self.step
        return self.function(step)


def adapt(
    spec: Any, global_step: Any = None, *, invalid_ids: str = "error"
) -> AdaptedSpec:
    """Turns a spec into this library's configuration.

    - Parameters become the optimizer of the same rule, argument by argument.
      FtrlParameters(initial_accumulator_value=0) gets allow_zero_accumulator=True.
    - clipping_limit becomes clipvalue, for every table.
    - A table's learning_rate or learning_rate_fn, and its own parameters, become an
      optimizer of the table. Tables with the same function object share one rate.
    - combiner None becomes "sum".

    Args:
      spec: An EmbeddingConfigSpec.
      global_step: The argument of learning rate functions, or a function without
        arguments that returns it. None means the number of updates already applied,
        which is what the global step was.
      invalid_ids: The policy of every table, as in `tpu_embedding.TableConfig`:
        "error", "drop" or "mod".

    Raises:
      NotImplementedError: If a column of the tensor core cannot be converted.
      TypeError: If a feature or table has a key that is not a str.
      ValueError: If there is no table, one has no features or no optimizer, a column
        is for serving only, a limit of gradients is given twice, or `invalid_ids`
        or an argument of the parameters has no meaning.
    """
    check_invalid_ids(invalid_ids)
    columns.refuse_tensor_core("EmbeddingConfigSpec", spec.tensor_core_feature_columns)
    serving = [c for c in spec.embedding_columns() if columns.on_cpu(c)]
    if serving:
        raise ValueError(
            f"Columns {errors.quoted(c.name for c in serving)} have "
            'embedding_lookup_device="cpu", which is for serving and not for '
            "training. Make them without `embedding_lookup_device`."
        )
    old_tables, old_features = spec.table_to_config(), spec.feature_to_config()
    if not old_features:
        raise ValueError(
            "No column of the EmbeddingConfigSpec has a TPU embedding table. Add one "
            "of interop.embedding_column or interop.shared_embedding_columns; "
            "numeric and plain embedding columns alone need no spec."
        )
    _check_keys(old_features, old_tables)
    optimizers = _Optimizers(spec, old_tables.values(), global_step)
    tables = {
        key: _table(key, table, optimizers.of_table(key, table), invalid_ids)
        for key, table in sorted(old_tables.items())
    }
    return AdaptedSpec(
        feature_config={
            key: FeatureConfig(
                tables[feature.table_id],
                max_sequence_length=feature.max_sequence_length,
                name=key,
            )
            for key, feature in sorted(old_features.items())
        },
        optimizer=optimizers.common,
        tables=tables,
        weight_keys={
            key: feature.weight_key
            for key, feature in sorted(old_features.items())
            if feature.weight_key is not None
        },
        gradient_multiplier=spec.experimental_gradient_multiplier_fn,
        pipelined=spec.pipeline_execution_with_tensor_core,
        partition_strategy=spec.partition_strategy,
        other_columns=tuple(spec.other_columns()),
    )


class _Optimizers:
    """The optimizers of one spec.

    Attributes:
      common: The optimizer of the spec's own parameters; None if no table needs it.
    """

    def __init__(
        self, spec: Any, tables: Iterable[columns.TableConfig], global_step: Any
    ) -> None:
        self._limit = spec.clipping_limit
        self._step = global_step
        self._rates: dict[int, StepRate | VariableRate] = {}
        self.common: Optimizer | None = None
        shared = spec.optimization_parameters
        # TensorFlow 1 ignores these parameters if every table has its own.
        if shared is not None and any(
            table.optimization_parameters is None for table in tables
        ):
            old.check_parameters(shared)
            self.common = self._convert("EmbeddingConfigSpec", shared)

    def of_table(self, key: str, table: columns.TableConfig) -> Optimizer | None:
        """Returns the table's own optimizer, or None where it has the common one."""
        own = self.common
        if table.optimization_parameters is not None:
            own = self._convert(f"Table {key!r}", table.optimization_parameters)
        if own is None:
            raise ValueError(
                f"Table {key!r} has no `optimization_parameters`. Set them in its "
                "TableConfig or in the EmbeddingConfigSpec."
            )
        if table.learning_rate_fn is not None:
            rate = self._rate(table.learning_rate_fn)
            return _with_rate(f"Table {key!r}", own, rate)
        if table.learning_rate is not None:
            return _with_rate(f"Table {key!r}", own, table.learning_rate)
        return None if own is self.common else own

    def _convert(self, where: str, parameters: Any) -> Optimizer:
        optimizer = _to_optimizer(where, parameters, self._limit)
        if optimizer.learning_rate is updates_so_far and self._step is not None:
            rate = self._rate(updates_so_far)
            return _with_rate(where, optimizer, rate)
        return optimizer

    def _rate(self, function: Callable[[Any], Any]) -> StepRate | VariableRate:
        """Returns one object for each function, which an update then calls once."""
        if id(function) not in self._rates:
            self._rates[id(function)] = (
                StepRate(function)
                if self._step is None
                else VariableRate(function, self._step)
            )
        return self._rates[id(function)]


def _to_optimizer(
    where: str, parameters: old.OptimizationParameters, clipping_limit: float | None
) -> Optimizer:
    """Makes the optimizer of the same rule; errors name `where` its parameters are."""
    cls: Any = _OPTIMIZERS[type(parameters)]
    given: Any = parameters
    known = {field.name for field in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(given):
        # FrequencyEstimatorParameters takes no rate, as its rate is the step.
        if field.init and not field.name.startswith("clip_gradient_"):
            ours = field.name if field.name in known else _RENAMED[field.name]
            arguments[ours] = getattr(parameters, field.name)
    # TensorFlow 1 took an accumulator of 0 for FTRL as it was.
    if arguments.get("allow_zero_accumulator") is False:
        zero = arguments["initial_accumulator_value"] == 0
        arguments["allow_zero_accumulator"] = zero
    clipvalue = _clipvalue(where, parameters, clipping_limit)
    try:
        return cls(clipvalue=clipvalue, **arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}, {type(parameters).__name__}: {error}") from error


def _with_rate(where: str, optimizer: Optimizer, rate: optimizers.Rate) -> Optimizer:
    """Returns the optimizer at a table's own rate; errors say `where` it is."""
    try:
        return dataclasses.replace(optimizer, learning_rate=rate)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}, {type(optimizer).__name__}: {error}") from error


def _clipvalue(
    where: str, parameters: old.OptimizationParameters, limit: float | None
) -> optimizers.ClipValue | None:
    lower, upper = parameters.clip_gradient_min, parameters.clip_gradient_max
    own = None if lower is None and upper is None else (lower, upper)
    if limit is None:
        return own
    if own is not None:
        raise ValueError(
            f"{where}: `clipping_limit` of the spec and clip_gradient_min/max of the "
            "optimization parameters limit the same gradient. Set only one of them."
        )
    if not parameters.use_gradient_accumulation:
        raise ValueError(
            f"{where}: `clipping_limit` limits the summed gradient of a row, so it "
            "needs `use_gradient_accumulation=True` in the optimization parameters."
        )
    return limit


def _check_keys(
    features: Mapping[str, columns.FeatureConfig],
    tables: Mapping[str, columns.TableConfig],
) -> None:
    for key in (*features, *tables):
        if not isinstance(key, str):
            raise TypeError(
                "Features and tables of an EmbeddingConfigSpec must have keys that "
                f"are str. Received: {key!r} of type {errors.type_name(key)}."
            )
    used = {feature.table_id for feature in features.values()}
    for key in tables:
        if key not in used:
            raise ValueError(
                f"Table {key!r} of `table_to_config_dict` is not used by any feature. "
                "Leave it out, or add a feature that looks it up."
            )


def _table(
    key: str, table: columns.TableConfig, optimizer: Optimizer | None, invalid_ids: str
) -> TableConfig:
    return TableConfig(
        vocabulary_size=table.vocabulary_size,
        dim=table.dimension,
        initializer=_initializer(table.initializer),
        optimizer=optimizer,
        combiner=table.combiner or "sum",
        name=key,
        invalid_ids=invalid_ids,
    )


def _initializer(initializer: Callable[..., Any] | None) -> Any:
    """Makes an initializer of (shape, dtype) of one that may take the shape alone."""
    if initializer is None:
        return None
    parameters = inspect.signature(initializer).parameters.values()
    if any(p.name == "dtype" or p.kind is p.VAR_KEYWORD for p in parameters):
        return initializer
    return lambda shape, dtype: tf.cast(initializer(shape), dtype)
