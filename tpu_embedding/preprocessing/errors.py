"""The wording of errors about who preprocesses."""

from __future__ import annotations

from collections.abc import Sequence


def unknown_host_ops(where: str, got: str, known: Sequence[str]) -> ValueError:
    """For a choice that there is not."""
    return ValueError(
        f"{where} is {got!r}. It says whose ops preprocess for SparseCores: "
        f"one of {', '.join(map(repr, known))}, or not set."
    )


def no_library(reason: str) -> RuntimeError:
    """For our own ops where they cannot run."""
    return RuntimeError(f"The custom-op library is to preprocess. {reason}")


def no_stock_kernels(library_reason: str | None) -> RuntimeError:
    """For TensorFlow's host ops in a TensorFlow without them."""
    instead = "" if library_reason is None else f" They are needed: {library_reason}"
    return RuntimeError(
        "This TensorFlow has no kernels for its own SparseCore host ops: it is not "
        "built for TPUs. Install tensorflow-tpu, or call "
        f"tpu_embedding.testing.library.load() for the software TPU's.{instead}"
    )


def stock_ops_refuse(table: str, what: str, way_out: str) -> NotImplementedError:
    """For what TensorFlow's own host ops cannot do."""
    return NotImplementedError(
        f"Table {table}: TensorFlow's own host ops, which preprocess here, cannot "
        f"{what}. {way_out}, or let the custom-op library preprocess "
        "(TPU_EMBEDDING_HOST_OPS=library)."
    )
