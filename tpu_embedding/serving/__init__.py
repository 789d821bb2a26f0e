"""Lookups for serving, and their export: TensorFlow's ops only."""

from tpu_embedding.serving.export import export
from tpu_embedding.serving.report import Report, TableReport
from tpu_embedding.serving.signatures import Request, Signature

__all__ = ["Report", "Request", "Signature", "TableReport", "export"]


def __dir__() -> list[str]:
    return sorted(__all__)
