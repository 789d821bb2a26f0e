"""Loads the software TPU: CPU kernels for TensorFlow's TPU ops."""

from __future__ import annotations

import functools
import pathlib
import types

import tensorflow as tf
from tensorflow.python.framework import kernels

from tpu_embedding.ops import library

PATH = library.choose(
    pathlib.Path(__file__).with_name("_software_tpu.so"), tf.__version__
)
# An op of the embedding engine of v2, v3 and v4. In tensorflow-tpu it has one kernel
# for each dtype; the kernel of this library is for all dtypes.
_ENGINE_OP = "EnqueueTPUEmbeddingArbitraryTensorBatch"


@functools.cache
def load() -> types.ModuleType:
    """Registers the kernels once, and returns the module of the library's own ops.

    Ops that already have a CPU kernel keep it, as some do in tensorflow-tpu.
    """
    problem = library.problem_with(PATH, tf.__version__)
    if problem is not None:
        raise RuntimeError(f"The software TPU has no kernels. {problem}")
    try:
        return tf.load_op_library(str(PATH))
    except (OSError, tf.errors.OpError) as error:
        raise RuntimeError(
            "The software TPU has no kernels. TensorFlow could not load "
            f"{PATH}: {error}"
        ) from error


def check_engine() -> None:
    """Refuses a TensorFlow that has its own kernels for the engine's ops."""
    load()
    if len(kernels.get_registered_kernels_for_op(_ENGINE_OP).kernel) != 1:
        raise RuntimeError(
            f"This TensorFlow has its own kernels for {_ENGINE_OP}, like "
            "tensorflow-tpu. They feed the hardware, so a software TPU of v2, v3 or v4 "
            "receives no batches. Use the software TPU with tensorflow-cpu."
        )
