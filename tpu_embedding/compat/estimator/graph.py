"""Builds the graph of one mode: calls input_fn and model_fn, and adds tables."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from absl import logging
from keras.src.backend.common import global_state
from keras.src.utils import naming

from tpu_embedding import errors
from tpu_embedding.compat.estimator import private_tensorflow
from tpu_embedding.compat.estimator.arguments import (
    EstimatorSpec,
    ModeKeys,
    RunConfig,
    TPUEstimatorSpec,
    WarmStartSettings,
    is_warm_started,
)
from tpu_embedding.compat.estimator.tables import DUMMY_PREFIX, EmbeddingTables

_v1 = tf.compat.v1
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
