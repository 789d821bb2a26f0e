"""The engine for CPUs: our own kernels, in place on TensorFlow variables.

Its tables are in this process, divided over the processes of a job, or on servers.
"""

__all__: list[str] = []
