"""Variables of Keras whose readers see the rows of a table caught up."""

from __future__ import annotations

from typing import Any

from tensorflow.python.ops import control_flow_util, resource_variable_ops

from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.keras.rows.waiting import Waiting, other_optimizer
from tpu_embedding.tables.waiting import (
    TableVariable,
    before_calls,
    make_waiting,
    outermost_graph,
)

_Variable = resource_variable_ops.ResourceVariable


def components(variable: Any) -> tuple[Any, ...]:
    """Returns the tf.Variables of a weight: one, or one for each replica."""
    value = keras_api.value_of(variable)
    return tuple(getattr(value, "values", (value,)))


def make_table(variable: Any) -> bool:
    """Makes a weight one whose rows may wait; returns whether it is one now."""
    made = [make_waiting(part, TableVariable) for part in components(variable)]
    return all(made)


def make_plain(variable: Any) -> None:
    """Makes a weight and its slots plain variables again, with all rows caught up."""
    for component in components(variable):
        waiting = getattr(component, "waiting", None)
        if waiting is not None:
            waiting.release()
            for each in waiting.variables:
                each.waiting = None
                object.__setattr__(each, "__class__", _Variable)
        if isinstance(component, TableVariable):
            object.__setattr__(component, "__class__", _Variable)


def local(variable: Any) -> Any:
    """Returns the tf.Variable of a weight in the replica whose variable is updated."""
    value = keras_api.value_of(variable)
    return value._get() if hasattr(value, "values") else value


def take_over(variable: TableVariable, waiting: Waiting | None) -> None:
    """Gives a table and its slots to an optimizer, for which rows may wait or not."""
    before: Any = variable.waiting
    if before is not None:
        before.release()
    for each in waiting.variables if waiting is not None else ():
        each.waiting = waiting


def waiting_of(variable: Any) -> Waiting | None:
    """Returns what the rows of a tf.Variable wait for; None if they do not."""
    waiting = getattr(variable, "waiting", None)
    return None if waiting is None or waiting.is_revoked else waiting


def check_calls(variable: Any, waiting: Waiting | None) -> None:
    """Refuses calls of the traced function once another optimizer has the table.

    If rows wait, an op does this (`Waiting.check_step`), but XLA leaves assertions out.
    """
    graph = outermost_graph()
    if graph is None or not isinstance(variable, TableVariable):
        return

    def check() -> None:
        if waiting_of(variable) is not waiting:
            raise RuntimeError(other_optimizer(variable.name))

    in_xla = control_flow_util.GraphOrParentsInXlaContext(graph)
    if not _is_in_loop(graph) if in_xla else waiting is None:
        before_calls(graph, check)


def _is_in_loop(graph: Any) -> bool:
    """Returns whether control flow calls the graph; XLA then takes no new arguments."""
    while hasattr(graph, "outer_graph"):
        if graph.is_control_flow_graph:
            return True
        graph = graph.outer_graph
    return False
