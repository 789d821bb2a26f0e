"""The engine of stock TensorFlow ops: any device, no library of ours."""

from __future__ import annotations

from tpu_embedding.engines.portable.engine import PortableEngine

__all__ = ["PortableEngine"]
