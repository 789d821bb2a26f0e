"""Builds the graph of a mode, and runs it for training, evaluation or prediction.

The graph calls input_fn and model_fn, and has the tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging
from keras.src.backend.common import global_state
from keras.src.utils import naming

from tpu_embedding import errors
from tpu_embedding.checkpoint.errors import data_loss
from tpu_embedding.compat.estimator import private_tensorflow
from tpu_embedding.compat.estimator.arguments import (
    EstimatorSpec,
    ModeKeys,
    RunConfig,
    TPUEstimatorSpec,
    WarmStartSettings,
    is_warm_started,
)
from tpu_embedding.compat.estimator.profile import EmbeddingProfiler, observe_batch
from tpu_embedding.compat.estimator.tables import DUMMY_PREFIX, EmbeddingTables

_v1 = tf.compat.v1
LOSS = "loss"
GLOBAL_STEP = "global_step"
# The params that the TPUEstimator adds to the user's own.
_GIVEN = ("batch_size", "context", "use_tpu")
# Options that have an effect only if the tables are TPU embedding tables.
_TPU_OPTIONS = (
    "optimization_parameters",
    "clipping_limit",
    "pipeline_execution_with_tensor_core",
    "experimental_gradient_multiplier_fn",
    "profile_data_directory",
)


@dataclasses.dataclass(frozen=True)
class Mode:
    """The options of one graph to be built.

    Attributes:
      key: One of ModeKeys.
      on_tpu: Whether the spec's tables are TPU embedding tables.
      params: The params of the input_fn and model_fn.
      config: The RunConfig.
      embedding_spec: The EmbeddingConfigSpec, or None.
    """

    key: str
    on_tpu: bool
    params: dict[str, Any]
    config: RunConfig
    embedding_spec: Any


@dataclasses.dataclass(frozen=True)
class Graph:
    """One graph, built from a model_fn.

    Attributes:
      spec: What the model_fn returned; its train_op updates the tables too.
      tables: The TPU embedding tables, or None.
      table_variables: The variables of `tables` by their names in checkpoints.
      own_saver: Whether the trainer's own Saver, which knows these names, restores.
    """

    spec: EstimatorSpec
    tables: EmbeddingTables | None
    table_variables: dict[str, tf.Variable]
    own_saver: bool = False

    def scaffold(self) -> Any:
        """Returns the Scaffold of the session, with a Saver that names the tables."""
        config_saver = self.spec.scaffold is not None and self.spec.scaffold.saver
        if self.tables is not None and config_saver:
            logging.warning(
                "The Scaffold's own Saver is used. It saves the embedding tables under "
                "the names of this process; leave it out to save names that other runs "
                "can restore."
            )
        return self.spec.scaffold or _v1.train.Scaffold()

    def warm_start(self, settings: WarmStartSettings) -> None:
        """Changes the initial values of variables of the default graph."""
        tables = self.table_variables
        previous = dict(settings.var_name_to_prev_var_name or {})
        listed = not isinstance(settings.vars_to_warm_start, str)
        known = {id(variable) for variable in tables.values()}
        candidates = _v1.global_variables() if listed else _v1.trainable_variables()
        others = [
            variable
            for variable in candidates
            if id(variable) not in known
            and DUMMY_PREFIX not in variable.op.name
            and is_warm_started(settings, variable.op.name)
        ]
        slots = {name for name in tables for of in tables if name.startswith(f"{of}/")}
        chosen = {
            previous.pop(name, name): variable
            for name, variable in tables.items()
            if is_warm_started(settings, name) and (listed or name not in slots)
        }
        if chosen:
            _v1.train.init_from_checkpoint(settings.ckpt_to_initialize_from, chosen)
        _v1.train.warm_start(
            settings.ckpt_to_initialize_from,
            others,
            dict(settings.var_name_to_vocab_info or {}),
            previous,
        )


def call_input_fn(input_fn: Callable[..., Any], mode: Mode) -> tuple[Any, Any]:
    """Returns the (features, labels) of the next batch; labels may be None."""
    with tf.device("/cpu:0"):
        found = _call(input_fn, mode, {})
        if isinstance(found, tf.data.Dataset):
            iterator = _v1.data.make_initializable_iterator(found)
            initializers = _v1.GraphKeys.TABLE_INITIALIZERS
            _v1.add_to_collection(initializers, iterator.initializer)
            found = iterator.get_next()
    if isinstance(found, tuple):
        if len(found) != 2:
            raise ValueError(
                "An input_fn must return a tf.data.Dataset of (features, labels) or "
                f"of features, or one such pair of tensors. Received: {found!r}."
            )
        return found
    return found, None


def build(
    model_fn: Callable[..., Any], mode: Mode, features: Any, labels: Any
) -> Graph:
    """Calls the model_fn, with activations in place of ids if `mode.on_tpu`."""
    if mode.embedding_spec is None or not mode.on_tpu:
        spec = _call_model_fn(model_fn, mode, features, labels)
        return _with_saver(Graph(spec, None, {}), mode.config)
    training = mode.key == ModeKeys.TRAIN
    tables = EmbeddingTables(mode.embedding_spec, training=training)
    with private_tensorflow.one_tpu_core() as recorded:
        activations = tables.activations(features)
        spec = _call_model_fn(model_fn, mode, activations, labels)
    named = tables.named_variables(recorded)
    if training:
        tables.hide_dummies()
        spec = dataclasses.replace(spec, train_op=tables.train_op(spec.train_op))
    return _with_saver(Graph(spec, tables, named), mode.config)


def ignored_options(embedding_spec: Any) -> list[str]:
    """Returns the options of a spec that have no effect with use_tpu=False."""
    defaults = (None, False, "")
    return [o for o in _TPU_OPTIONS if getattr(embedding_spec, o) not in defaults]


def _call_model_fn(
    model_fn: Callable[..., Any], mode: Mode, features: Any, labels: Any
) -> EstimatorSpec:
    more = {} if labels is None else {"labels": labels}
    with _fresh_keras_names():
        spec = _call(model_fn, mode, {"features": features, **more})
    allowed = (TPUEstimatorSpec,) if mode.on_tpu else (TPUEstimatorSpec, EstimatorSpec)
    if not isinstance(spec, allowed):
        names = " or ".join(f"a {cls.__name__}" for cls in allowed)
        raise ValueError(
            f"The model_fn must return {names}. Received: {spec!r} of type "
            f"{errors.type_name(spec)}."
        )
    if spec.mode != mode.key:
        raise ValueError(
            f"The model_fn must return a spec of mode {mode.key!r}. Received: "
            f"{spec.mode!r} of type {errors.type_name(spec.mode)}."
        )
    if isinstance(spec, TPUEstimatorSpec):
        steps = mode.config.tpu_config.experimental_host_call_every_n_steps
        return spec.as_estimator_spec(steps)
    return spec


@contextlib.contextmanager
def _fresh_keras_names() -> Iterator[None]:
    """Restarts the numbers of unnamed Keras 3 layers, as each new graph must.

    Keras counts names in a process. Without this the `dense` of training would be
    `dense_1` in evaluation, which no checkpoint has.
    """
    counts = "object_name_uids"
    before = global_state.get_global_attribute(counts)
    naming.reset_uids()
    try:
        yield
    finally:
        global_state.set_global_attribute(counts, before)


def _call(function: Callable[..., Any], mode: Mode, given: Mapping[str, Any]) -> Any:
    """Calls a function with those of mode, params, config and labels that it takes."""
    name = getattr(function, "__name__", repr(function))
    taken = inspect.signature(function).parameters
    everything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    for argument in given:
        if argument == "labels" and argument not in taken and not everything:
            raise ValueError(
                f"{name} must take the argument `{argument}`, which the TPUEstimator "
                "passes."
            )
    own = [key for key in mode.params if key not in _GIVEN]
    if own and "params" not in taken and not everything and given:
        raise ValueError(
            f"{name} must take the argument `params`, which the TPUEstimator passes."
        )
    offered: dict[str, Any] = {
        "mode": mode.key,
        "params": dict(mode.params),
        "config": mode.config,
    }
    if given:
        offered["labels"] = None
    features = [given["features"]] if given else []
    arguments = {**offered, **{k: v for k, v in given.items() if k != "features"}}
    wanted = {k: v for k, v in arguments.items() if k in taken}
    return function(*features, **wanted)


def _with_saver(graph: Graph, config: RunConfig) -> Graph:
    """Returns the graph, after giving it a Saver unless the model_fn made one."""
    keys = _v1.GraphKeys
    if not _v1.get_collection(keys.SAVERS) and not (
        graph.spec.scaffold and graph.spec.scaffold.saver
    ):
        _v1.add_to_collection(keys.SAVERS, _saver(graph.table_variables, config))
        return dataclasses.replace(graph, own_saver=True)
    return graph


def _saver(tables: dict[str, tf.Variable], config: RunConfig) -> Any:
    ours = {id(variable) for variable in tables.values()}
    others = [
        variable
        for variable in (
            *_v1.global_variables(),
            *_v1.get_collection(_v1.GraphKeys.SAVEABLE_OBJECTS),
        )
        if id(variable) not in ours
    ]
    named = [private_tensorflow.saveable(v, name) for name, v in tables.items()]
    return _v1.train.Saver(
        [*others, *named],
        max_to_keep=config.keep_checkpoint_max,
        keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
        save_relative_paths=True,
    )


def train(
    graph: Graph, model_dir: str, config: RunConfig, hooks: Sequence[Any], saving: Any
) -> None:
    """Runs training steps until a hook or the end of the input stops them."""
    check_restored(graph, latest_checkpoint(model_dir))
    spec, scaffold = graph.spec, graph.scaffold()
    hooks = [
        *hooks,
        _v1.train.NanTensorHook(spec.loss),
        *spec.training_hooks,
        *spec.training_chief_hooks,
    ]
    if config.log_step_count_steps:
        logged = {LOSS: spec.loss, "step": _v1.train.get_global_step()}
        every = config.log_step_count_steps
        hooks.append(_v1.train.LoggingTensorHook(logged, every_n_iter=every))
    if _v1.get_collection(_v1.GraphKeys.SUMMARIES) and config.save_summary_steps:
        _v1.summary.scalar(LOSS, spec.loss)
    hooks += _savers(graph, model_dir, config, scaffold, (hooks, saving))
    with _v1.train.MonitoredTrainingSession(
        checkpoint_dir=model_dir,
        scaffold=scaffold,
        hooks=hooks,
        save_checkpoint_secs=None,
        save_checkpoint_steps=None,
        save_summaries_steps=config.save_summary_steps or None,
        save_summaries_secs=None,
        config=config.session_config,
        log_step_count_steps=config.log_step_count_steps,
    ) as session:
        while not session.should_stop():
            session.run([spec.train_op, spec.loss])


def evaluate(
    graph: Graph, checkpoint: str | None, config: RunConfig, hooks: Any, steps: Any
) -> dict[str, Any]:
    """Computes the metrics over `steps` batches, or over all of the input."""
    check_restored(graph, checkpoint)
    spec = graph.spec
    metrics = dict(spec.eval_metric_ops or {})
    metrics.setdefault(LOSS, _v1.metrics.mean(spec.loss))
    values = {name: metric[0] for name, metric in metrics.items()}
    values[GLOBAL_STEP] = _v1.train.get_global_step()
    updates = tf.group(*[metric[1] for metric in metrics.values()])
    final = _v1.train.FinalOpsHook(values)
    stop = [] if steps is None else [_StopAfter(steps)]
    all_hooks = [*(hooks or ()), *spec.evaluation_hooks, *stop, final]
    with _restored(graph, checkpoint, config, all_hooks) as session:
        while not session.should_stop():
            session.run(updates)
    return dict(sorted(final.final_ops_values.items()))


def chosen(predictions: Any, keys: Any) -> Any:
    """Returns the predictions selected by `keys`; None selects all."""
    if keys is None:
        return predictions
    names = [keys] if isinstance(keys, str) else list(keys)
    found = predictions if isinstance(predictions, Mapping) else {}
    if not set(names) & set(found):
        raise ValueError(
            f"`predict_keys` {errors.quoted(names)} are not among the predictions "
            f"{errors.quoted(found)}."
        )
    return {name: value for name, value in found.items() if name in names}


def predict(
    session: Any, predictions: Any, *, yield_single_examples: bool
) -> Iterator[Any]:
    """Yields predictions until the input ends, then closes the session."""
    with session:
        while not session.should_stop():
            batch = session.run(predictions)
            if not yield_single_examples:
                yield batch
            elif isinstance(batch, Mapping):
                for sample in range(_batch_size(batch.values())):
                    yield {name: value[sample] for name, value in batch.items()}
            else:
                yield from batch


def prediction_session(
    graph: Graph, checkpoint: str | None, config: RunConfig, hooks: Any
) -> Any:
    """Makes a session for `predict`; the graph must be the default one."""
    check_restored(graph, checkpoint)
    hooks = [*(hooks or ()), *graph.spec.prediction_hooks]
    return _restored(graph, checkpoint, config, hooks)


def _restored(
    graph: Graph, checkpoint: str | None, config: RunConfig, hooks: Any
) -> Any:
    creator = _v1.train.ChiefSessionCreator(
        graph.scaffold(),
        config=config.session_config,
        checkpoint_filename_with_path=checkpoint,
    )
    return _v1.train.MonitoredSession(creator, hooks)


def write_metrics(folder: str, metrics: Mapping[str, Any]) -> None:
    """Writes scalar metrics for TensorBoard."""
    summary = _v1.Summary()
    for name, value in metrics.items():
        if name != GLOBAL_STEP and np.ndim(value) == 0:
            summary.value.add(tag=name, simple_value=float(value))
    with tf.Graph().as_default():
        writer = _v1.summary.FileWriter(folder)
        writer.add_summary(summary, int(metrics[GLOBAL_STEP]))
        writer.close()


def _savers(
    graph: Graph, model_dir: str, config: RunConfig, scaffold: Any, given: Any
) -> list[Any]:
    """Makes the hooks that save checkpoints, after applying pending updates."""
    hooks, listeners = given
    flush = graph.tables.flush if graph.tables is not None else None
    listeners = [*([_Flush(flush)] if flush is not None else []), *(listeners or ())]
    own = [h for h in hooks if isinstance(h, _v1.train.CheckpointSaverHook)]
    for hook in own:
        hook._listeners.extend(listeners)
    if own:
        return []
    return [
        _v1.train.CheckpointSaverHook(
            model_dir,
            save_secs=config.save_checkpoints_secs,
            save_steps=config.save_checkpoints_steps,
            scaffold=scaffold,
            listeners=listeners,
            save_graph_def=config.checkpoint_save_graph_def,
        )
    ]


class _Flush(_v1.train.CheckpointSaverListener):
    """Before each checkpoint, applies the update that pipelining left pending."""

    def __init__(self, op: tf.Operation) -> None:
        self._op = op

    def before_save(self, session: Any, global_step_value: int) -> None:
        """Runs the op."""
        del global_step_value
        session.run(self._op)


class ProfileHook(_v1.train.SessionRunHook):
    """Passes the ids of each step to a profiler, which writes its files at the end."""

    def __init__(self, spec: Any, ids: Mapping[str, Any]) -> None:
        self._profiler = EmbeddingProfiler(spec)
        self._ids = dict(ids)
        self._lengths = {
            feature: config.max_sequence_length
            for feature, config in spec.feature_to_config().items()
        }

    def before_run(self, run_context: Any) -> Any:
        """Asks the session for the ids of the step."""
        del run_context
        return _v1.train.SessionRunArgs(self._ids)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Passes the ids to the profiler."""
        del run_context
        observe_batch(self._profiler, run_values.results, self._lengths)

    def end(self, session: Any) -> None:
        """Writes the statistics into the profile's files."""
        del session
        self._profiler.flush()


class _StopAfter(_v1.train.SessionRunHook):
    """Stops after a number of batches."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Counts a batch, and stops after the last one."""
        del run_values
        self._left -= 1
        if self._left <= 0:
            run_context.request_stop()


def _batch_size(values: Any) -> int:
    sizes = {np.shape(value)[:1] for value in values}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(
            "The predictions must be tensors with the same first axis, the batch. Pass "
            "`yield_single_examples=False` to get them as they are."
        )
    return sizes.pop()[0]


def latest_checkpoint(folder: str) -> str | None:
    """Returns the prefix of the latest checkpoint, or None where none was written."""
    # TensorFlow's function also returns None for lost files: training would start over.
    state = tf.train.get_checkpoint_state(folder)
    if state is None:
        named = os.path.join(folder, "checkpoint")
        if tf.io.gfile.exists(named):
            raise data_loss(
                f"{named} cannot be read, so the latest checkpoint is unknown. Write "
                "the file again with tf.train.update_checkpoint_state, or remove it to "
                "start from scratch."
            )
        return None
    path = state.model_checkpoint_path
    if not any(tf.io.gfile.exists(path + end) for end in (".index", "")):
        raise tf.errors.NotFoundError(
            None,
            None,
            f"The file `checkpoint` in {folder} names {path}, but {path}.index does "
            "not exist. Restore its files, or name an earlier checkpoint in that file; "
            "remove the file to start from scratch.",
        )
    return path


def check_restored(graph: Graph, checkpoint: str | None) -> None:
    """Refuses a checkpoint without the tables and slots, or with other shapes.

    TensorFlow would restore a variable with a value of another shape. Nothing is
    refused if a Saver that the model_fn made names the variables of the graph.
    """
    if checkpoint is None or not graph.own_saver:
        return
    if not tf.io.gfile.exists(checkpoint + ".index"):
        return  # TensorFlow reports that there is no checkpoint.
    try:
        stored = tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map()
    except tf.errors.OpError as damage:
        raise data_loss(
            f"The checkpoint {checkpoint} cannot be read: {damage}. Remove its files, "
            "and name an earlier checkpoint in the file `checkpoint` next to them."
        ) from damage
    missing = [name for name in graph.table_variables if name not in stored]
    if missing:
        tables = tuple(name for name in graph.table_variables if name in stored)
        found = sorted(name for name in stored if name.startswith(tables or ""))
        raise tf.errors.NotFoundError(
            None,
            None,
            f"The checkpoint {checkpoint} has no {errors.quoted(missing)}, which the "
            "EmbeddingConfigSpec's tables and optimization parameters need. The "
            f"checkpoint has {errors.quoted(found)}. Continue with the columns and "
            "optimization parameters that wrote it, or start in a new `model_dir` with "
            f"`warm_start_from={checkpoint!r}`, which restores the tables and "
            "initializes their slots.",
        )
    for name, variable in {**_own_variables(graph), **graph.table_variables}.items():
        if not variable.shape.is_compatible_with(stored.get(name)):
            raise tf.errors.InvalidArgumentError(
                None,
                None,
                f"{name!r} has shape {tuple(variable.shape)}, but in the checkpoint "
                f"{checkpoint} it has shape {tuple(stored[name])}. Create the column "
                "with the number of ids and the dimension of the checkpoint, or start "
                "in a new `model_dir`.",
            )


def _own_variables(graph: Graph) -> dict[str, tf.Variable]:
    """Returns the model's variables by their names, without partitioned variables."""
    tables = {id(variable) for variable in graph.table_variables.values()}
    return {
        variable.op.name: variable
        for variable in _v1.global_variables()
        if id(variable) not in tables and variable._get_save_slice_info() is None
    }
