"""The graph of objects that a TensorFlow checkpoint stores beside its tensors."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf import message
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tpu_embedding.checkpoint import errors
from tpu_embedding.tables.trackable import VALUE_KEY

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
_SUFFIX = "/.ATTRIBUTES/" + VALUE_KEY

_Graph = trackable_object_graph_pb2.TrackableObjectGraph


@dataclasses.dataclass(frozen=True)
class SavedSlot:
    """A slot that an optimizer keeps for a variable.

    Attributes:
      name: Name that the optimizer uses.
      variable: Key of the variable.
      key: Key of the slot.
    """

    name: str
    variable: str
    key: str


@dataclasses.dataclass(frozen=True)
class SavedObject:
    """One object of a checkpoint.

    Attributes:
      path: Names of the children that lead to it from the root, "" for the root.
      values: The keys of the tensors of children that are variables, by child's name.
      slots: The slots of an optimizer.
      parts: For each child with several tensors, such as a growing table, the keys of
        the tensors by name.
    """

    path: str
    values: Mapping[str, str]
    slots: tuple[SavedSlot, ...] = ()
    parts: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)


def read_objects(
    path: str, record: bytes | None, stored: Collection[str]
) -> dict[str, SavedObject]:
    """Returns all objects by their shortest path, the root first.

    A checkpoint without a graph, as tf.compat.v1.train.Saver writes, is one object
    whose children are its tensors.

    Args:
      path: Path of the index, for messages.
      record: The stored graph, or None if there is none.
      stored: Keys of all tensors.

    Raises:
      tf.errors.DataLossError: If the graph cannot be parsed, or names a tensor that is
        not stored.
    """
    if record is None:
        if any(key.endswith(_SUFFIX) for key in stored):
            raise errors.corrupted(path, "it lacks its object graph")
        return {"": SavedObject("", {key: key for key in stored})}
    try:
        graph = _Graph.FromString(record)
    except message.DecodeError as error:
        raise errors.corrupted(path, "its object graph cannot be parsed") from error
    if not graph.nodes:
        raise errors.corrupted(path, "its object graph is empty")
    numbers = {child.node_id for node in graph.nodes for child in node.children}
    for node in graph.nodes:
        for slot in node.slot_variables:
            numbers |= {slot.original_variable_node_id, slot.slot_variable_node_id}
    if not numbers <= {*range(len(graph.nodes))}:
        raise errors.corrupted(path, "its object graph refers to missing objects")
    tensors = [{a.name: a.checkpoint_key for a in n.attributes} for n in graph.nodes]
    keys = [own.get(VALUE_KEY, "") for own in tensors]
    # A growing table has several tensors with other names, such as "ids".
    parts = [own if "ids" in own else {} for own in tensors]
    found = [*keys, *(key for own in parts for key in own.values())]
    lost = [key for key in found if key and key not in stored]
    if lost:
        raise errors.corrupted(path, f"it lacks {lost[0]}")
    return {
        name: SavedObject(
            name,
            {
                child.local_name: keys[child.node_id]
                for child in graph.nodes[number].children
                if keys[child.node_id]
            },
            tuple(
                SavedSlot(
                    name=slot.slot_name,
                    variable=keys[slot.original_variable_node_id],
                    key=keys[slot.slot_variable_node_id],
                )
                for slot in graph.nodes[number].slot_variables
            ),
            {
                child.local_name: parts[child.node_id]
                for child in graph.nodes[number].children
                if parts[child.node_id]
            },
        )
        for number, name in _shortest_paths(graph).items()
    }


def variable_key(path: str, name: str, part: str = VALUE_KEY) -> str:
    """Returns the key of a variable that is the child `name` of the object at `path`.

    Args:
      path: Path of the object.
      name: Name of the child.
      part: The name of one tensor of a child with several tensors, else the default.
    """
    escaped = name.replace(".", "..").replace("/", ".S")
    key = f"{escaped}/.ATTRIBUTES/{part}"
    return f"{path}/{key}" if path else key


def make_graph(
    path: str, keys: Mapping[str, str], parts: Mapping[str, Mapping[str, str]]
) -> bytes:
    """Makes the graph of a checkpoint with one object whose children are variables.

    Args:
      path: Path of the object, e.g. "embedding"; "" is the root.
      keys: Keys of the variables by name.
      parts: For each child with several tensors, their keys by name.
    """
    graph = _Graph()
    node: Any = graph.nodes.add()
    for part in path.split("/") if path else []:
        node.children.add(node_id=len(graph.nodes), local_name=part)
        node = graph.nodes.add()
    variables = {name: {VALUE_KEY: key} for name, key in keys.items()}
    for name, own in (variables | parts).items():
        node.children.add(node_id=len(graph.nodes), local_name=name)
        child: Any = graph.nodes.add()
        for attribute, key in own.items():
            child.attributes.add(name=attribute, full_name=name, checkpoint_key=key)
    return graph.SerializeToString()


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
