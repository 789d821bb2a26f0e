"""These tests need a virtual environment of their own, which `make test-peers` makes.

tensorflow-recommenders works with tf_keras only, which TensorFlow takes for its
tf.keras in a process that has TF_USE_LEGACY_KERAS=1 from its start.
"""

from __future__ import annotations

import importlib.util
import os

collect_ignore_glob = []
if (
    os.environ.get("TF_USE_LEGACY_KERAS") != "1"
    or importlib.util.find_spec("tensorflow_recommenders") is None
):
    collect_ignore_glob += ["test_programs.py", "test_t*.py"]
if importlib.util.find_spec("tensorflow_serving") is None:
    collect_ignore_glob.append("test_serving_api.py")
