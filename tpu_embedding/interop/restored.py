"""Which checkpoint is restored, and whether it fits the graph, asked before."""

from __future__ import annotations

import os

import tensorflow as tf

from tpu_embedding.interop import estimator_errors
from tpu_embedding.interop.estimator_graph import Graph

_v1 = tf.compat.v1


def latest_checkpoint(folder: str) -> str | None:
    """The prefix of the latest checkpoint, or None where none was written.

    Raises:
      tf.errors.DataLossError: If what names it cannot be read.
      tf.errors.NotFoundError: If the one that is named is not there.
    """
    # TensorFlow's own function has None for both, and a model would begin anew.
    state = tf.train.get_checkpoint_state(folder)
    if state is None:
        named = os.path.join(folder, "checkpoint")
        if tf.io.gfile.exists(named):
            raise estimator_errors.unreadable_state(named)
        return None
    path = state.model_checkpoint_path
    if not any(tf.io.gfile.exists(path + end) for end in (".index", "")):
        raise estimator_errors.lost_checkpoint(folder, path)
    return path


def check_restored(graph: Graph, checkpoint: str | None) -> None:
    """Refuses a checkpoint without the tables and slots, or with other shapes.

    Args:
      graph: If another Saver than the trainer's names its variables, all is taken.
      checkpoint: The prefix of what will be restored, or None.

    Raises:
      tf.errors.DataLossError: If it cannot be read.
      tf.errors.NotFoundError: If a table or slot is not in it.
      tf.errors.InvalidArgumentError: If a variable has another shape there, which
        TensorFlow would give to the one here.
    """
    if checkpoint is None or not graph.own_saver:
        return
    if not tf.io.gfile.exists(checkpoint + ".index"):
        return  # TensorFlow says so.
    try:
        stored = tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map()
    except tf.errors.OpError as damage:
        raise estimator_errors.damaged(checkpoint, damage) from damage
    missing = [name for name in graph.table_variables if name not in stored]
    if missing:
        tables = tuple(name for name in graph.table_variables if name in stored)
        found = sorted(name for name in stored if name.startswith(tables or ""))
        raise estimator_errors.lost_variables(checkpoint, missing, found)
    for name, variable in {**_own_variables(graph), **graph.table_variables}.items():
        if not variable.shape.is_compatible_with(stored.get(name)):
            raise estimator_errors.restored_shape(
                checkpoint, name, (tuple(variable.shape), tuple(stored[name]))
            )


def _own_variables(graph: Graph) -> dict[str, tf.Variable]:
    """The model's variables by their names; slices, which are cut anew, left out."""
    tables = {id(variable) for variable in graph.table_variables.values()}
    return {
        variable.op.name: variable
        for variable in _v1.global_variables()
        if id(variable) not in tables and variable._get_save_slice_info() is None
    }
