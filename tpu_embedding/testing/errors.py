"""The wording of this package's errors: each function returns the exception."""

from __future__ import annotations


def library_unusable(problem: str) -> RuntimeError:
    """The library of kernels is missing, or another TensorFlow's."""
    return RuntimeError(f"The software TPU has no kernels. {problem}")
