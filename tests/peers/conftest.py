"""These tests need a virtual environment of their own: see requirements-tfrs.txt.

tensorflow-recommenders works with tf_keras only, which TensorFlow then takes for its
tf.keras in the whole process.
"""

from __future__ import annotations

import importlib.util
import os

# Read when tf.keras is first used.
os.environ["TF_USE_LEGACY_KERAS"] = "1"

collect_ignore_glob = []
if importlib.util.find_spec("tensorflow_recommenders") is None:
    collect_ignore_glob.append("test_*.py")
