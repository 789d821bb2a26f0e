"""The graph of objects that a TensorFlow checkpoint keeps beside its tensors."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import message
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.bundle import Bundle

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
_ATTRIBUTE = "VARIABLE_VALUE"
_SUFFIX = "/.ATTRIBUTES/" + _ATTRIBUTE

_Graph = trackable_object_graph_pb2.TrackableObjectGraph


@dataclasses.dataclass(frozen=True)
class SavedSlot:
    """A slot that an optimizer keeps for a variable.

    Attributes:
      name: What the optimizer calls it.
      variable: The key of the variable.
      key: The key of the slot.
    """

    name: str
    variable: str
    key: str


@dataclasses.dataclass(frozen=True)
class SavedObject:
    """One object of a checkpoint.

    Attributes:
      path: Names of the children that lead to it from the root, "" for the root.
      values: For each child that is a variable its key among the tensors.
      children: Paths of all children, by name.
      slots: Of an optimizer.
    """

    path: str
    values: Mapping[str, str]
    children: Mapping[str, str]
    slots: tuple[SavedSlot, ...] = ()


def read_objects(bundle: Bundle) -> dict[str, SavedObject]:
    """All objects by their shortest path, the root first.

    A checkpoint without a graph, of tf.compat.v1.train.Saver, is one object whose
    children are its tensors.
    """
    if GRAPH_KEY not in bundle.entries:
        return {"": SavedObject("", {key: key for key in bundle.entries}, {})}
    try:
        graph = _Graph.FromString(bundle.value(GRAPH_KEY))
    except message.DecodeError as error:
        path = bundle.prefix + ".index"
        raise errors.corrupted(path, "its object graph cannot be parsed") from error
    paths = _shortest_paths(graph)
    keys = {i: _value_key(node) for i, node in enumerate(graph.nodes)}
    objects = {}
    for number, path in paths.items():
        node = graph.nodes[number]
        values = {
            child.local_name: keys[child.node_id]
            for child in node.children
            if keys[child.node_id] in bundle.entries
        }
        children = {child.local_name: paths[child.node_id] for child in node.children}
        slots = tuple(
            SavedSlot(
                name=slot.slot_name,
                variable=keys[slot.original_variable_node_id],
                key=keys[slot.slot_variable_node_id],
            )
            for slot in node.slot_variables
        )
        objects[path] = SavedObject(path, values, children, slots)
    return objects


def variable_key(path: str, name: str) -> str:
    """The key of a variable that is the child `name` of the object at `path`."""
    escaped = name.replace(".", "..").replace("/", ".S")
    return "/".join(part for part in (path, escaped) if part) + _SUFFIX


def make_graph(path: str, names: Iterable[str]) -> bytes:
    """The graph of a checkpoint with one object that has variables as children.

    Args:
      path: Where the object stands, e.g. "embedding"; "" is the root.
      names: Of the variables.
    """
    graph = _Graph()
    node: Any = graph.nodes.add()
    for part in path.split("/") if path else []:
        node.children.add(node_id=len(graph.nodes), local_name=part)
        node = graph.nodes.add()
    for name in names:
        node.children.add(node_id=len(graph.nodes), local_name=name)
        graph.nodes.add().attributes.add(
            name=_ATTRIBUTE, full_name=name, checkpoint_key=variable_key(path, name)
        )
    return graph.SerializeToString()


def _value_key(node: Any) -> str:
    for attribute in node.attributes:
        if attribute.name == _ATTRIBUTE:
            return attribute.checkpoint_key
    return ""


def _shortest_paths(graph: _Graph) -> dict[int, str]:
    paths = {0: ""}
    waiting = deque(paths)
    while waiting:
        number = waiting.popleft()
        for child in graph.nodes[number].children:
            if child.node_id not in paths:
                parts = (paths[number], child.local_name)
                paths[child.node_id] = "/".join(part for part in parts if part)
                waiting.append(child.node_id)
    return paths
