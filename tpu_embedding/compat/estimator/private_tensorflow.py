"""The private TensorFlow names that the estimator uses, checked at import.

TensorFlow 2.21 has them, but they are not part of its API. CONTRIBUTING.md lists
what other modules of this package import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

_USED = {
    "tensorflow.python.feature_column.feature_column_v2": (
        "FeatureTransformationCache",
        "StateManager",
    ),
    "tensorflow.python.tpu.feature_column": (
        "_TPU_FC_TO_SCOPE",
        "_record_variable_scope_and_name",
    ),
    "tensorflow.python.tpu.feature_column_v2": ("_record_variable_scope_and_name",),
    "tensorflow.python.tpu.tpu_function": ("tpu_shard_context",),
    "tensorflow.python.tpu.tpu_optimizer": ("tpu_ops",),
    "tensorflow.python.training.saving.saveable_object_util": (
        "ResourceVariableSaveable",
    ),
}


def require(used: Mapping[str, tuple[str, ...]]) -> None:
    """Checks that this TensorFlow has the names of `used`, given by module."""
    absent = []
    for module, names in used.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            absent.append(module)
            continue
        absent += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    if absent:
        raise ImportError(
            f"tpu_embedding.estimator needs {', '.join(absent)}, which TensorFlow "
            f"{tf.__version__} does not have. Install TensorFlow 2.21. "
            "tpu_embedding.interop works without them."
        )


require(_USED)

(
    _feature_column,
    _tpu_columns,
    _tpu_columns_v2,
    _tpu_function,
    _tpu_optimizer,
    _saving,
) = (importlib.import_module(module) for module in _USED)

StateManager: Any = _feature_column.StateManager


def feature_cache(features: Mapping[str, Any]) -> Any:
    """Makes the cache from which columns read their inputs."""
    return _feature_column.FeatureTransformationCache(features)


@dataclasses.dataclass(frozen=True)
class RecordedVariable:
    """The variable that a column would make on a CPU.

    Attributes:
      name: The name of the variable in its scope.
      variable_scope: The variable scope, maybe "".
      name_scope: The name scope, maybe "".
    """

    name: str
    variable_scope: str
    name_scope: str


@contextlib.contextmanager
def one_tpu_core() -> Iterator[dict[str, RecordedVariable]]:
    """Makes TensorFlow believe that one TPU core's computation is being built.

    Embedding columns then take their activations from the features, and
    CrossShardOptimizer sums over this one core. It yields what columns record in the
    default graph, by their get_embedding_var_name.
    """
    recorded: dict[str, RecordedVariable] = {}
    record = _tpu_columns._record_variable_scope_and_name

    def also_record(name: str, variable: str, *more: Any, **options: Any) -> None:
        record(name, variable, *more, **options)
        scope = tf.compat.v1.get_variable_scope().name
        found = RecordedVariable(variable, scope, tf.get_current_name_scope())
        recorded.setdefault(name, found)

    function = "_record_variable_scope_and_name"
    with (
        _tpu_function.tpu_shard_context(1),
        _replaced(_tpu_optimizer.tpu_ops, "cross_replica_sum", _only_replica),
        _replaced(_tpu_columns, function, also_record),
        _replaced(_tpu_columns_v2, function, also_record),
    ):
        yield recorded
    # TensorFlow's record cannot be saved with the graph, and would log a warning.
    tf.compat.v1.get_collection_ref(_tpu_columns._TPU_FC_TO_SCOPE).clear()


def saveable(variable: tf.Variable, name: str) -> Any:
    """Makes a saveable that stores the variable under another name."""
    return _saving.ResourceVariableSaveable(variable, "", name)


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Gives `module` another attribute for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _only_replica(x: Any, group_assignment: Any = None, name: Any = None) -> Any:
    """Returns the sum over the replicas, of which there is one."""
    del group_assignment
    return tf.identity(x, name=name)
