"""Loads the software TPU: CPU kernels for TensorFlow's own TPU ops."""

from __future__ import annotations

import functools
import pathlib
import types

import tensorflow as tf

from tpu_embedding.ops import library
from tpu_embedding.testing import errors

PATH = pathlib.Path(__file__).with_name("_software_tpu.so")


@functools.cache
def load() -> types.ModuleType:
    """Registers the kernels, once, and returns the module of the library's own ops.

    An op that has a CPU kernel already, as some have in tensorflow-tpu, keeps it.

    Raises:
      RuntimeError: If the library is missing or belongs to another TensorFlow.
    """
    problem = library.problem_with(PATH, tf.__version__)
    if problem is not None:
        raise errors.library_unusable(problem)
    try:
        return tf.load_op_library(str(PATH))
    except (OSError, tf.errors.OpError) as error:
        raise errors.library_unusable(
            f"TensorFlow could not load {PATH}: {error}"
        ) from error
