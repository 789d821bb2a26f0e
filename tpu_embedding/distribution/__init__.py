"""Private: finds out from the tf.distribute strategy where an embedding runs.

No other package examines strategies.
"""

from __future__ import annotations

from tpu_embedding.distribution.topology import (
    CPU_ENGINES,
    ENGINE_VARIABLE,
    TPU_ENGINES,
    ProcessTopology,
    ServerTopology,
    Topology,
    TPUTopology,
    current,
    is_tpu,
    outside_of_replicas,
    without_engine,
)
from tpu_embedding.distribution.tpu import (
    DESCRIBED_GENERATION,
    INPUT_DEVICE_ATTRIBUTE,
    SoftwareTPUSystem,
    TPUSystem,
)

__all__ = [
    "CPU_ENGINES",
    "DESCRIBED_GENERATION",
    "ENGINE_VARIABLE",
    "INPUT_DEVICE_ATTRIBUTE",
    "TPU_ENGINES",
    "ProcessTopology",
    "ServerTopology",
    "SoftwareTPUSystem",
    "TPUSystem",
    "TPUTopology",
    "Topology",
    "current",
    "is_tpu",
    "outside_of_replicas",
    "without_engine",
]
