"""Lookups for serving and their export, which need only TensorFlow's ops."""

from tpu_embedding.serving.conversion import Report, TableReport
from tpu_embedding.serving.delta_files import apply_delta, delta_blocks
from tpu_embedding.serving.delta_writer import DeltaWriter
from tpu_embedding.serving.export import export
from tpu_embedding.serving.signatures import Request, Signature

__all__ = [
    "DeltaWriter",
    "Report",
    "Request",
    "Signature",
    "TableReport",
    "apply_delta",
    "delta_blocks",
    "export",
]


def __dir__() -> list[str]:
    return sorted(__all__)
