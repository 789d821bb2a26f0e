"""The specs that a model_fn returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors

_v1 = tf.compat.v1
SIGNATURE = _v1.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY


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
    """Runs ops in one of n calls of the session."""

    def __init__(self, ops: Any, steps: int) -> None:
        self._ops = ops
        self._steps = steps
        self._calls = 0

    def before_run(self, run_context: Any) -> Any:
        """Adds the ops to the first of n calls."""
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
