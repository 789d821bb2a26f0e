"""The engine for CPUs, whose own kernels update TensorFlow variables in place.

Its tables are in this process, divided over the processes of a job, or on servers.
"""

__all__: list[str] = []
