"""Whether a checkpoint fits the tables of a graph, asked before it is restored."""

from __future__ import annotations

import tensorflow as tf

from tpu_embedding.interop import estimator_errors
from tpu_embedding.interop.estimator_graph import Graph


def check_tables(graph: Graph, checkpoint: str | None) -> None:
    """Refuses a checkpoint without the tables and slots of the graph.

    Args:
      graph: If another Saver than the trainer's names its variables, all is taken.
      checkpoint: The prefix of what will be restored, or None.

    Raises:
      tf.errors.DataLossError: If it cannot be read.
      tf.errors.NotFoundError: If a table or slot is not in it.
      tf.errors.InvalidArgumentError: If one has another shape there.
    """
    if checkpoint is None or not graph.own_saver or not graph.table_variables:
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
    for name, variable in graph.table_variables.items():
        if variable.shape != stored[name]:
            raise estimator_errors.restored_shape(
                checkpoint, name, (tuple(variable.shape), tuple(stored[name]))
            )
