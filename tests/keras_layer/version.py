"""The Keras of this process: Keras 3, or tf_keras for tests/tf_keras."""

from __future__ import annotations

import importlib
import os
from typing import Any

_LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
keras: Any = importlib.import_module("tf_keras" if _LEGACY else "keras")
