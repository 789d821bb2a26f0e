"""TPUEstimator: trains, evaluates, predicts and exports a TensorFlow 1 model_fn."""

from __future__ import annotations

import copy
import numbers
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from tpu_embedding import errors
from tpu_embedding.compat.estimator import export, sessions
from tpu_embedding.compat.estimator.arguments import (
    InputPipelineConfig,
    ModeKeys,
    RunConfig,
    WarmStartSettings,
    check_hooks,
    not_supported,
    warm_start_settings,
)
from tpu_embedding.compat.estimator.sessions import Mode, latest_checkpoint
from tpu_embedding.compat.interop import columns
from tpu_embedding.compat.interop.embedding_config_spec import EmbeddingConfigSpec

_v1 = tf.compat.v1
_RESERVED = ("batch_size", "context")
_PER_HOST = (InputPipelineConfig.PER_HOST_V1, InputPipelineConfig.PER_HOST_V2)


class TPUContext:
    """`params["context"]` of a TPUEstimator on TPUs: here one host with one replica.

    >>> TPUContext().current_input_fn_deployment()
    ('/device:CPU:0', 0, 1, 1)
    """

    num_hosts = num_replicas = num_of_replicas_per_host = 1
    current_host = 0

    def current_input_fn_deployment(self) -> tuple[str, int, int, int]:
        """Returns the device, call number, number of calls, and number of replicas."""
        return "/device:CPU:0", self.current_host, self.num_hosts, self.num_replicas

    def __getattr__(self, name: str) -> Any:
        """Refuses other attributes of TensorFlow's TPUContext by name."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"`params['context'].{name}` is not supported: the estimator has one host "
            "with one replica. Use num_hosts, num_replicas, num_of_replicas_per_host, "
            "current_host or current_input_fn_deployment()."
        )


class TPUEstimator:
    """Trains, evaluates and exports a model_fn, as in TensorFlow 1.

    With use_tpu=False embedding columns are variables that the model's optimizer
    trains. With use_tpu=True they are TPU embedding tables that the optimizer of
    `embedding_config_spec` trains, on this machine's CPU. Both read and write the
    checkpoints of TensorFlow 2.15's TPUEstimator (docs/estimator.md).
    """

    def __init__(  # noqa: PLR0913 - TensorFlow's arguments.
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        use_tpu: bool = True,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
        batch_axis: Any = None,
        eval_on_tpu: bool = True,
        export_to_tpu: bool = True,
        export_to_cpu: bool = True,
        warm_start_from: str | WarmStartSettings | None = None,
        embedding_config_spec: EmbeddingConfigSpec | None = None,
        export_saved_model_api_version: Any = None,
    ) -> None:
        """Checks the arguments; nothing is built before it is needed.

        Args:
          model_fn: A function of features and, as far as it accepts them, labels, mode,
            params and config, which returns a TPUEstimatorSpec.
          model_dir: The folder of checkpoints; None means that of the config, or a new
            temporary folder.
          config: A RunConfig.
          params: The params of the input_fn and model_fn, to which "batch_size" and
            "use_tpu" are added, and with use_tpu=True "context", a TPUContext of one
            host. Their own "use_tpu" is overwritten, as in TensorFlow.
          use_tpu: Whether the spec's tables are TPU embedding tables.
          train_batch_size: The params["batch_size"] of training.
          eval_batch_size: The params["batch_size"] of evaluation.
          predict_batch_size: The params["batch_size"] of prediction.
          batch_axis: Must be None: no batch is split.
          eval_on_tpu: Whether evaluation uses the tables; False acts as use_tpu=False.
          export_to_tpu: Has no effect; exports are for CPUs.
          export_to_cpu: Must be True.
          warm_start_from: A checkpoint, or WarmStartSettings, with first values.
          embedding_config_spec: The embeddings.
          export_saved_model_api_version: Has no effect.

        Raises:
          ValueError: If an argument is wrong.
          NotImplementedError: If an argument is not supported.
        """
        del export_to_tpu, export_saved_model_api_version
        if not isinstance(config, RunConfig):
            raise errors.argument_value("config", config, "a RunConfig")
        if not callable(model_fn):
            raise errors.argument_value("model_fn", model_fn, "a callable")
        if not isinstance(params, Mapping | None):
            raise errors.argument_value("params", params, "a dict or None")
        reserved = [name for name in _RESERVED if name in (params or {})]
        if reserved:
            raise ValueError(
                f"`params` must not contain {errors.quoted(reserved)}, which the "
                "TPUEstimator sets."
            )
        for name, value, default in (
            ("batch_axis", batch_axis, None),
            ("export_to_cpu", export_to_cpu, True),
        ):
            if value is not default:
                raise not_supported("TPUEstimator", name, value)
        self._use_tpu = use_tpu
        self._eval_on_tpu = use_tpu and eval_on_tpu
        self._batch_sizes = {
            ModeKeys.TRAIN: train_batch_size,
            ModeKeys.EVAL: eval_batch_size,
            ModeKeys.PREDICT: predict_batch_size,
        }
        self._check_batch_sizes()
        self._embedding_spec = embedding_config_spec
        if embedding_config_spec is not None:
            self._check_embedding_spec(config)
        self._model_fn = model_fn
        self._config = config
        self._params = copy.deepcopy(dict(params or {}))
        self._warm_start = warm_start_settings(warm_start_from)
        self._model_dir = _model_dir(model_dir, config)

    @property
    def model_dir(self) -> str:
        """The folder of checkpoints."""
        return self._model_dir

    @property
    def config(self) -> RunConfig:
        """The RunConfig."""
        return self._config

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the params."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., Any]:
        """The model_fn."""
        return self._model_fn

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the folder of the metrics of an evaluation, for TensorBoard.

        Args:
          name: The `name` that was passed to `evaluate`.
        """
        return os.path.join(self._model_dir, f"eval_{name}" if name else "eval")

    def latest_checkpoint(self) -> str | None:
        """Returns the prefix of the latest checkpoint, or None if none was written.

        Raises:
          tf.errors.NotFoundError: If the checkpoint that the folder names is missing.
          tf.errors.DataLossError: If the file that names it cannot be read.
        """
        return latest_checkpoint(self._model_dir)

    def get_variable_names(self) -> list[str]:
        """Returns the names in the latest checkpoint."""
        return sorted(self._reader().get_variable_to_shape_map())

    def get_variable_value(self, name: str) -> Any:
        """Returns a variable of the latest checkpoint.

        Args:
          name: One of `get_variable_names`.
        """
        return self._reader().get_tensor(name)

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Any = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Any = None,
    ) -> TPUEstimator:
        """Trains, from the latest checkpoint if there is one.

        Args:
          input_fn: A function that returns a Dataset of (features, labels) or such a
            pair of tensors. It may take mode, params and config.
          hooks: SessionRunHooks.
          steps: The number of further steps; None trains to the end of the input.
          max_steps: The global step to stop at, in place of `steps`.
          saving_listeners: CheckpointSaverListeners.

        Returns:
          This estimator.

        Raises:
          ValueError: If both numbers of steps are given, or one is below 1.
          TypeError: If a hook is of another class.
        """
        if steps is not None and max_steps is not None:
            raise ValueError(
                f"train takes `steps` or `max_steps`, not both. Received: {steps!r} "
                f"and {max_steps!r}."
            )
        _check_steps(steps=steps, max_steps=max_steps)
        hooks = list(check_hooks(hooks))
        if max_steps is not None and self._step() >= max_steps:
            logging.info("The global step has reached %d: nothing to do.", max_steps)
            return self
        if steps is not None or max_steps is not None:
            stop = _v1.train.StopAtStepHook(num_steps=steps, last_step=max_steps)
            hooks.append(stop)
        with self._new_graph():
            mode = self._mode(ModeKeys.TRAIN, on_tpu=self._use_tpu)
            features, labels = sessions.call_input_fn(input_fn, mode)
            graph = sessions.build(self._model_fn, mode, features, labels)
            spec = self._embedding_spec
            if graph.tables and spec and spec.profile_data_directory:
                hooks.append(sessions.ProfileHook(spec, graph.tables.ids))
            if self._warm_start is not None:
                graph.warm_start(self._warm_start)
            sessions.train(
                graph, self._model_dir, self._config, hooks, saving_listeners
            )
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates a checkpoint; without one, the initial values.

        Args:
          input_fn: As for train.
          steps: The number of batches; None means all.
          hooks: SessionRunHooks.
          checkpoint_path: The checkpoint; None means the latest one.
          name: The name of the evaluation, for `eval_dir`.

        Returns:
          The metrics by name, with "loss" and "global_step".
        """
        _check_steps(steps=steps)
        hooks = check_hooks(hooks)
        checkpoint = checkpoint_path or self.latest_checkpoint()
        with self._new_graph():
            mode = self._mode(ModeKeys.EVAL, on_tpu=self._eval_on_tpu)
            features, labels = sessions.call_input_fn(input_fn, mode)
            graph = sessions.build(self._model_fn, mode, features, labels)
            metrics = sessions.evaluate(graph, checkpoint, self._config, hooks, steps)
        sessions.write_metrics(self.eval_dir(name), metrics)
        return metrics

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Any = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Predicts with a checkpoint; without one, with the initial values.

        Args:
          input_fn: As for train; labels are left out.
          predict_keys: The keys of the predictions; None means all.
          hooks: SessionRunHooks.
          checkpoint_path: The checkpoint; None means the latest one.
          yield_single_examples: Whether to cut batches into samples.

        Yields:
          The predictions, as NumPy arrays in the structure that the model_fn has.
        """
        hooks = check_hooks(hooks)
        checkpoint = checkpoint_path or self.latest_checkpoint()
        with self._new_graph():
            mode = self._mode(ModeKeys.PREDICT, on_tpu=self._use_tpu)
            features, _ = sessions.call_input_fn(input_fn, mode)
            graph = sessions.build(self._model_fn, mode, features, None)
            predictions = sessions.chosen(graph.spec.predictions, predict_keys)
            session = sessions.prediction_session(
                graph, checkpoint, self._config, hooks
            )
        yield from sessions.predict(
            session, predictions, yield_single_examples=yield_single_examples
        )

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], export.ServingInputReceiver],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
    ) -> str:
        """Writes a SavedModel for CPUs, in which columns look embeddings up.

        Args:
          export_dir_base: The parent of the new folder, whose name is the time.
          serving_input_receiver_fn: Returns the features and the tensors to feed.
          assets_extra: Files to copy, by their new paths below assets.extra.
          as_text: Whether to write saved_model.pbtxt.
          checkpoint_path: The checkpoint; None means the latest one.

        Returns:
          The path of the new folder.

        Raises:
          ValueError: If there is no checkpoint.
          NotImplementedError: If the spec has dicts and no columns.
        """
        self._refuse_dicts("export_saved_model")
        checkpoint = checkpoint_path or self._trained()
        folder = export.new_folder(export_dir_base)
        with self._new_graph():
            mode = self._mode(ModeKeys.PREDICT, on_tpu=False)
            receiver = export.receive(serving_input_receiver_fn)
            graph = sessions.build(self._model_fn, mode, receiver.features, None)
            signatures = export.signatures(receiver, graph.spec)
            options = (self._config.session_config, as_text)
            export.write(folder, graph, checkpoint, signatures, options)
        export.copy_assets(folder, assets_extra or {})
        return folder

    def _new_graph(self) -> Any:
        graph = tf.Graph()
        with graph.as_default():
            _v1.set_random_seed(self._config.tf_random_seed)
            _v1.train.get_or_create_global_step()
        return graph.as_default()

    def _mode(self, key: str, *, on_tpu: bool) -> Mode:
        params = {**self._params, "use_tpu": on_tpu}
        if on_tpu:
            params["context"] = TPUContext()
        if self._batch_sizes[key] is not None:
            params["batch_size"] = self._batch_sizes[key]
        spec = self._embedding_spec
        if spec is not None and not on_tpu:
            self._refuse_dicts("use_tpu=False or eval_on_tpu=False")
            logging.log_first_n(
                logging.WARNING,
                "With use_tpu=False the model's own optimizer trains the embedding "
                "tables. These options of the EmbeddingConfigSpec have no effect: %s.",
                1,
                ", ".join(sessions.ignored_options(spec)),
            )
        return Mode(key, on_tpu, params, self._config, spec)

    def _refuse_dicts(self, where: str) -> None:
        spec = self._embedding_spec
        if spec is not None and spec.feature_columns is None:
            raise NotImplementedError(
                f"{where} looks embeddings up with feature columns, but a spec with "
                "`feature_to_config_dict` has none. Use `feature_columns`."
            )

    def _check_batch_sizes(self) -> None:
        names = dict(zip(self._batch_sizes, ("train", "eval", "predict"), strict=True))
        for mode, size in self._batch_sizes.items():
            required = self._use_tpu and mode == ModeKeys.TRAIN
            if size is None and not required:
                continue
            if not errors.is_int(size) or size < 1:
                raise ValueError(
                    f"Argument `{names[mode]}_batch_size` must be an int >= 1 with "
                    f"use_tpu=True. Received: {size!r}."
                )

    def _check_embedding_spec(self, config: RunConfig) -> None:
        spec = self._embedding_spec
        if not isinstance(spec, EmbeddingConfigSpec):
            raise errors.argument_type(
                "embedding_config_spec", spec, "an EmbeddingConfigSpec or None"
            )
        kind = config.tpu_config.per_host_input_for_training
        if self._use_tpu and kind not in _PER_HOST:
            raise ValueError(
                "With an EmbeddingConfigSpec `per_host_input_for_training` must be "
                f"PER_HOST_V1 or PER_HOST_V2. Received: {kind.name}."
            )
        if not self._eval_on_tpu and spec.partition_strategy == "mod":
            raise ValueError(
                'partition_strategy="mod" is supported only for tables on a TPU. Use '
                '"div" with use_tpu=False or eval_on_tpu=False.'
            )
        if self._use_tpu:
            spec.adapt()  # Raises for options that have no conversion.
            columns.warn_of_changed_ids(spec.embedding_columns())

    def _trained(self) -> str:
        """Returns the latest checkpoint, which must exist."""
        checkpoint = self.latest_checkpoint()
        if checkpoint is None:
            raise ValueError(
                f"There is no checkpoint in {self._model_dir!r} to export. Call "
                "`train` first, or pass `checkpoint_path`."
            )
        return checkpoint

    def _reader(self) -> Any:
        return tf.train.load_checkpoint(self._trained())

    def _step(self) -> int:
        if self.latest_checkpoint() is None:
            return 0
        return int(self.get_variable_value(sessions.GLOBAL_STEP))


def _model_dir(model_dir: Any, config: RunConfig) -> str:
    given = None if model_dir is None else os.fspath(model_dir)
    if given and config.model_dir and given != config.model_dir:
        raise ValueError(
            f"`model_dir` is given twice, as {given!r} and by the RunConfig as "
            f"{config.model_dir!r}."
        )
    return given or config.model_dir or tempfile.mkdtemp()


def _check_steps(**steps: int | None) -> None:
    for name, value in steps.items():
        if value is None:
            continue
        if not isinstance(value, numbers.Integral) or value < 1:
            raise errors.argument_value(name, value, "an int >= 1")
