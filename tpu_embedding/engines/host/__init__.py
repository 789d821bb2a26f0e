"""The engine for CPUs: our own kernels, in place on TensorFlow variables.

Its tables are in this process, divided over the processes of a job, or on servers.
"""

from tpu_embedding.engines.host.engine import HostEngine
from tpu_embedding.engines.host.processes import ShardedEngine
from tpu_embedding.engines.host.servers import ParameterServerEngine

__all__ = ["HostEngine", "ParameterServerEngine", "ShardedEngine"]
