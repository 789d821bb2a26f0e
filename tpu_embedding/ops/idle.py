"""Writes for the kernels what rows do while they wait for their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_embedding.ops import records
from tpu_embedding.optimizers.idle import Idle


def idle_record(
    idle: Idle,
    *,
    name: str,
    decays: bool,
    owner: int = 0,
    with_weights: bool = True,
) -> Any:
    """Returns the record that cc/kernels/waiting.cc reads.

    Args:
      idle: What a step with a gradient of zeros does to a row.
      name: The name of the table.
      decays: Whether a step also shrinks rows.
      owner: The number of an optimizer of Keras.
      with_weights: Whether the op counts steps.
    """
    quadrature = idle.quadrature
    weights = quadrature.weights if quadrature and with_weights else np.zeros(0)
    options = (idle.epsilon_beta, idle.root_fade, idle.epsilon, *idle.follow)
    return records.record(
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
