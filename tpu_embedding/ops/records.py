"""Records: named fields that cross to the kernels as one string attribute.

cc/kernels/plan.h reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tpu_embedding.optimizers.idle import Idle

# The module makes its classes when it is imported; type checkers cannot know them.
_AttrValue: Any = vars(attr_value_pb2)["AttrValue"]
_NameAttrList: Any = vars(attr_value_pb2)["NameAttrList"]

# For each class of values the field of an AttrValue and its content; bool before int.
_FIELDS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (bool, "b", bool),
    (int, "i", int),
    (float, "f", float),
    (str, "s", lambda value: value.encode()),
    (tf.TensorShape, "shape", lambda value: value.as_proto()),
    (_NameAttrList, "func", lambda value: value),
    (np.ndarray, "tensor", tf.make_tensor_proto),
)


def record(**fields: Any) -> Any:
    """Encodes named fields: bool, int, float, str, TensorShape, record, array or list.

    >>> record(rows=8, names=["films"]).attr["rows"].i
    8
    """
    return _NameAttrList(attr={name: _encode(value) for name, value in fields.items()})


def serialize(**fields: Any) -> bytes:
    """Serializes a record for the kernels; equal fields give equal bytes."""
    return record(**fields).SerializeToString(deterministic=True)


def _encode(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        field, content = _field(value)
        return _AttrValue(**{field: content(value)})
    if not value:
        return _AttrValue(list=_AttrValue.ListValue())
    field, content = _field(value[0])
    return _AttrValue(
        list=_AttrValue.ListValue(**{field: [content(item) for item in value]})
    )


def _field(value: Any) -> tuple[str, Callable[[Any], Any]]:
    return next((f, content) for kind, f, content in _FIELDS if isinstance(value, kind))


def idle_record(
    idle: Idle, *, name: str, decays: bool, owner: int = 0, with_weights: bool = True
) -> Any:
    """Returns the record that cc/kernels/waiting.cc reads.

    Args:
      idle: What a step with a gradient of zeros does to a row.
      name: The name of the table.
      decays: Whether a step also shrinks rows.
      owner: The number of an optimizer of Keras.
      with_weights: Whether to add the weights of nodes, for ops that count steps.
    """
    quadrature = idle.quadrature
    weights = quadrature.weights if quadrature and with_weights else np.zeros(0)
    options = (idle.epsilon_beta, idle.root_fade, idle.epsilon, *idle.follow)
    return record(
        name=name,
        owner=owner,
        move=idle.move,
        moment=idle.moment,
        square=idle.square,
        epsilon_inside=idle.epsilon_inside,
        decays=decays,
        options=np.array(options, np.float64),
        fades=np.array(idle.fades, np.float64),
        nodes=quadrature.nodes if quadrature else np.ones(1),
        powers=quadrature is not None and quadrature.powers,
        node_weights=weights,
    )
