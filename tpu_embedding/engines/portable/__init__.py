"""The portable engine: TensorFlow's ops, on any device, without our library."""

from __future__ import annotations

from tpu_embedding.engines.portable.engine import PortableEngine

__all__ = ["PortableEngine"]
