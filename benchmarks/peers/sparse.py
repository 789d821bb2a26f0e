"""Ids as the TensorFlow peers take them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def sparse(ids: np.ndarray) -> tf.SparseTensor:
    """The same ids, [batch, ids per sample], as a SparseTensor without gaps."""
    batch, width = ids.shape
    indices = np.stack(np.divmod(np.arange(batch * width), width), axis=1)
    return tf.SparseTensor(indices, ids.reshape(-1), ids.shape)
