"""What users give a TPUEstimator: configurations, and the specs of a model_fn."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors

_v1 = tf.compat.v1


class InputPipelineConfig(enum.Enum):
    """Says how the input_fn is called; here it is called once."""

    PER_SHARD_V1 = 1
    PER_HOST_V1 = 2
    PER_HOST_V2 = 3
    BROADCAST = 4
    SLICED = 5


@dataclasses.dataclass(frozen=True)
class TPUConfig:
    """Holds options of the TPU. The estimator runs the program of one core on a CPU.

    Attributes:
      iterations_per_loop: A hint; every step is a call of the session here.
      num_shards: A hint; the whole batch goes through one core.
      num_cores_per_replica: Must be None: no model is split.
      per_host_input_for_training: An InputPipelineConfig, or a bool for PER_HOST_V1
        and PER_SHARD_V1.
      tpu_job_name: Has no effect without a cluster.
      initial_infeed_sleep_secs: Has no effect: there is no infeed.
      input_partition_dims: Must be None: no input is split.
      eval_training_input_configuration: A hint.
      experimental_host_call_every_n_steps: How often the host_call runs.
      experimental_allow_per_host_v2_parallel_get_next: A hint.
      experimental_feed_hook: Must be None: there is no infeed.
    """

    iterations_per_loop: int = 2
    num_shards: int | None = None
    num_cores_per_replica: int | None = None
    per_host_input_for_training: Any = True
    tpu_job_name: str | None = None
    initial_infeed_sleep_secs: int | None = None
    input_partition_dims: Any = None
    eval_training_input_configuration: Any = InputPipelineConfig.PER_HOST_V1
    experimental_host_call_every_n_steps: int = 1
    experimental_allow_per_host_v2_parallel_get_next: bool = False
    experimental_feed_hook: Any = None

    def __post_init__(self) -> None:
        for argument in ("iterations_per_loop", "experimental_host_call_every_n_steps"):
            errors.check_int(argument, getattr(self, argument), 1)
        if self.num_shards is not None:
            errors.check_int("num_shards", self.num_shards, 1)
        _refuse(
            self,
            "TPUConfig",
            ("num_cores_per_replica", "input_partition_dims", "experimental_feed_hook"),
        )
        kind = self.per_host_input_for_training
        if isinstance(kind, bool):
            named = InputPipelineConfig.PER_HOST_V1
            kind = named if kind else InputPipelineConfig.PER_SHARD_V1
            object.__setattr__(self, "per_host_input_for_training", kind)
        if not isinstance(kind, InputPipelineConfig):
            raise errors.argument_type(
                "per_host_input_for_training", kind, "an InputPipelineConfig or a bool"
            )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Says how a TPUEstimator runs; the arguments are those of TensorFlow 2.15.

    Attributes:
      tpu_config: A TPUConfig.
      evaluation_master: Must be None: sessions are of this process.
      master: Must be None or "".
      cluster: Must be None.
      model_dir: The folder of checkpoints; the TPUEstimator's must not differ from it.
      tf_random_seed: The graph's seed, or None.
      save_summary_steps: Steps between summaries; None or 0 for none.
      save_checkpoints_steps: Steps between checkpoints, or None.
      save_checkpoints_secs: Seconds between checkpoints; 600 if neither is given.
      session_config: A ConfigProto, or None.
      keep_checkpoint_max: How many of the latest checkpoints are kept.
      keep_checkpoint_every_n_hours: Hours after which one more checkpoint is kept.
      log_step_count_steps: Steps between lines with the loss; None for none.
      train_distribute: Must be None.
      device_fn: Must be None.
      protocol: Must be None.
      eval_distribute: Must be None.
      experimental_distribute: Must be None.
      experimental_max_worker_delay_secs: Must be None.
      session_creation_timeout_secs: Has no effect: nothing is waited for.
      checkpoint_save_graph_def: Whether graph.pbtxt and meta graphs are written.
    """

    tpu_config: TPUConfig = dataclasses.field(default_factory=TPUConfig)
    evaluation_master: str | None = None
    master: str | None = None
    cluster: Any = None
    _: dataclasses.KW_ONLY
    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    session_config: Any = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float = 10000
    log_step_count_steps: int | None = 100
    train_distribute: Any = None
    device_fn: Any = None
    protocol: str | None = None
    eval_distribute: Any = None
    experimental_distribute: Any = None
    experimental_max_worker_delay_secs: int | None = None
    session_creation_timeout_secs: int = 7200
    checkpoint_save_graph_def: bool = True

    def __post_init__(self) -> None:
        if self.tpu_config is None:
            object.__setattr__(self, "tpu_config", TPUConfig())
        if not isinstance(self.tpu_config, TPUConfig):
            raise errors.argument_type("tpu_config", self.tpu_config, "a TPUConfig")
        _refuse(
            self,
            "RunConfig",
            (
                "evaluation_master",
                "master",
                "cluster",
                "train_distribute",
                "device_fn",
                "protocol",
                "eval_distribute",
                "experimental_distribute",
                "experimental_max_worker_delay_secs",
            ),
        )
        steps, seconds = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps is not None and seconds is not None:
            raise ValueError(
                "RunConfig takes `save_checkpoints_steps` or "
                f"`save_checkpoints_secs`, not both. Received: {steps!r} and "
                f"{seconds!r}."
            )
        if steps is None and seconds is None:
            object.__setattr__(self, "save_checkpoints_secs", 600)


def _refuse(config: Any, cls: str, arguments: tuple[str, ...]) -> None:
    for argument in arguments:
        if getattr(config, argument) not in (None, ""):
            raise not_supported(cls, argument, getattr(config, argument))


def not_supported(cls: str, argument: str, value: object) -> NotImplementedError:
    """Makes the error for an argument that would need more than one core."""
    return NotImplementedError(
        f"{cls}: `{argument}={value!r}` is not supported: the estimator runs in one "
        "process, on one core. Leave the default."
    )


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Says which variables begin with which values of a checkpoint.

    Attributes:
      ckpt_to_initialize_from: The checkpoint, or a folder.
      vars_to_warm_start: A regular expression for the names of trainable variables and
        embedding tables; or a list of them, for the names of all variables.
      var_name_to_vocab_info: As in tf.compat.v1.train.warm_start; not for tables.
      var_name_to_prev_var_name: Names in the checkpoint that differ.
    """

    ckpt_to_initialize_from: str
    vars_to_warm_start: Any = ".*"
    var_name_to_vocab_info: Mapping[str, Any] | None = None
    var_name_to_prev_var_name: Mapping[str, str] | None = None


def warm_start_settings(value: Any) -> WarmStartSettings | None:
    """Returns the settings of `warm_start_from`, which may be a path."""
    if value is None or isinstance(value, WarmStartSettings):
        return value
    if not isinstance(value, str):
        raise errors.argument_type(
            "warm_start_from", value, "a path or WarmStartSettings"
        )
    return WarmStartSettings(value)


def is_warm_started(settings: WarmStartSettings, name: str) -> bool:
    """Returns whether `settings` name a variable."""
    wanted = settings.vars_to_warm_start
    patterns = [wanted] if isinstance(wanted, str) else wanted or []
    return any(re.match(pattern, name) for pattern in patterns)


class ModeKeys:
    """Names the modes in which a model_fn is called."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


_MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
_NEEDED = {
    ModeKeys.TRAIN: ("loss", "train_op"),
    ModeKeys.EVAL: ("loss",),
    ModeKeys.PREDICT: ("predictions",),
}


@dataclasses.dataclass(frozen=True)
class EstimatorSpec:
    """Holds the ops of one mode.

    Attributes:
      mode: One of ModeKeys.
      predictions: A tensor or a dict of tensors, for PREDICT.
      loss: A scalar (or one element), for TRAIN and EVAL.
      train_op: The op of a training step, for TRAIN.
      eval_metric_ops: (value, update op) by name.
      export_outputs: A PredictOutput, ClassificationOutput or RegressionOutput by
        signature name; None exports the predictions.
      training_chief_hooks: SessionRunHooks of TRAIN.
      training_hooks: SessionRunHooks of TRAIN.
      scaffold: A Scaffold, or None.
      evaluation_hooks: SessionRunHooks of EVAL.
      prediction_hooks: SessionRunHooks of PREDICT.

    Raises:
      ValueError: If the mode is unknown or something that it needs is missing.
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Mapping[str, tuple[Any, Any]] | None = None
    export_outputs: Mapping[str, Any] | None = None
    training_chief_hooks: Sequence[Any] = ()
    training_hooks: Sequence[Any] = ()
    scaffold: Any = None
    evaluation_hooks: Sequence[Any] = ()
    prediction_hooks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        _check_mode(self)
        for hooks in (
            "training_chief_hooks",
            "training_hooks",
            "evaluation_hooks",
            "prediction_hooks",
        ):
            object.__setattr__(self, hooks, check_hooks(getattr(self, hooks)))
        if self.loss is not None:
            object.__setattr__(self, "loss", tf.reshape(self.loss, []))


@dataclasses.dataclass(frozen=True)
class TPUEstimatorSpec:
    """Holds the ops of one mode, as a model_fn for TPUs gives them.

    Attributes:
      mode: One of ModeKeys.
      predictions: A tensor or a dict of tensors, for PREDICT.
      loss: A scalar, for TRAIN and EVAL.
      train_op: The op of a training step, for TRAIN.
      eval_metrics: (metric_fn, tensors): metric_fn takes the tensors, in a list or
        by keyword, and returns (value, update op) by name.
      export_outputs: As in EstimatorSpec.
      scaffold_fn: A function without arguments that returns a Scaffold, or None.
      host_call: (function, tensors), run beside the training steps, or None.
      training_hooks: SessionRunHooks of TRAIN.
      evaluation_hooks: SessionRunHooks of EVAL.
      prediction_hooks: SessionRunHooks of PREDICT.

    Raises:
      ValueError: If the mode is unknown or something that it needs is missing.
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metrics: tuple[Callable[..., Any], Any] | None = None
    export_outputs: Mapping[str, Any] | None = None
    scaffold_fn: Callable[[], Any] | None = None
    host_call: tuple[Callable[..., Any], Any] | None = None
    training_hooks: Sequence[Any] | None = None
    evaluation_hooks: Sequence[Any] | None = None
    prediction_hooks: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        _check_mode(self)
        for name in ("eval_metrics", "host_call"):
            _check_call(name, getattr(self, name))

    def as_estimator_spec(self, host_call_steps: int = 1) -> EstimatorSpec:
        """Converts to an EstimatorSpec: calls metric, scaffold and host functions.

        Args:
          host_call_steps: The number of steps from one host_call to the next.
        """
        metrics = _call(self.eval_metrics) if self.eval_metrics else None
        hooks = list(self.training_hooks or ())
        if self.host_call is not None and self.mode == ModeKeys.TRAIN:
            hooks.append(_EveryNSteps(_call(self.host_call), host_call_steps))
        return EstimatorSpec(
            mode=self.mode,
            predictions=self.predictions,
            loss=self.loss,
            train_op=self.train_op,
            eval_metric_ops=metrics,
            export_outputs=self.export_outputs,
            training_hooks=hooks,
            scaffold=self.scaffold_fn() if self.scaffold_fn else None,
            evaluation_hooks=self.evaluation_hooks or (),
            prediction_hooks=self.prediction_hooks or (),
        )


def check_hooks(hooks: Any) -> tuple[Any, ...]:
    """Checks the hooks, and returns them as a tuple."""
    hooks = tuple(hooks or ())
    for hook in hooks:
        if not isinstance(hook, _v1.train.SessionRunHook):
            raise errors.argument_type("hooks", hook, "SessionRunHooks")
    return hooks


class _EveryNSteps(_v1.train.SessionRunHook):
    """Runs ops in the first of every n calls of the session."""

    def __init__(self, ops: Any, steps: int) -> None:
        self._ops = ops
        self._steps = steps
        self._calls = 0

    def before_run(self, run_context: Any) -> Any:
        """Adds the ops to the first of every n calls."""
        del run_context
        self._calls += 1
        if self._ops is not None and (self._calls - 1) % self._steps == 0:
            return _v1.train.SessionRunArgs(self._ops)
        return None


def _check_mode(spec: Any) -> None:
    if spec.mode not in _MODES:
        raise errors.argument_value("mode", spec.mode, f"one of {_MODES}")
    for name in _NEEDED[spec.mode]:
        if getattr(spec, name) is None:
            raise ValueError(
                f"The spec that a model_fn returns for mode {spec.mode!r} must have `"
                f"{name}`."
            )


def _check_call(name: str, value: Any) -> None:
    if value is None:
        return
    pair = isinstance(value, tuple) and len(value) == 2
    if not pair or not callable(value[0]) or not isinstance(value[1], (list, dict)):
        raise errors.argument_value(
            name, value, "None or a tuple (function, list or dict of tensors)"
        )


def _call(function_and_tensors: tuple[Callable[..., Any], Any]) -> Any:
    function, tensors = function_and_tensors
    if isinstance(tensors, dict):
        return function(**tensors)
    return function(*tensors)
