"""What all tests share: logical devices, seeds, hypothesis profiles.

Environment variables:
    TPU_EMBEDDING_TEST_SEED       the seed that all seeds are derived from.
    TPU_EMBEDDING_TEST_INSTALLED  1: fail unless the installed package is under test.
    HYPOTHESIS_PROFILE            "quick" (the default) or "thorough".
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import random
import sys
import threading
import zlib
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# oneDNN's kernels round as the CPU at hand likes best, and say so in every process.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import file_times
import hypothesis
import numpy as np
import older_tensorflow
import pytest
import tensorflow as tf
from cpu_engines import EACH_ENGINE

NUM_CPU_DEVICES = 4
BASE_SEED = int(os.environ.get("TPU_EMBEDDING_TEST_SEED", "20260731"))
CHECKOUT = pathlib.Path(__file__).resolve().parents[1]

# Logical devices cannot be made once TensorFlow has started.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * NUM_CPU_DEVICES,
)

# derandomize: a run on CI can be repeated. No deadline: a first call traces graphs.
hypothesis.settings.register_profile(
    "quick", max_examples=25, derandomize=True, deadline=None
)
hypothesis.settings.register_profile(
    "thorough", max_examples=1000, deadline=None, print_blob=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_configure(config: pytest.Config) -> None:
    """Counts times; refuses the checkout where the installed package is meant."""
    config.pluginmanager.register(file_times.FileTimes())
    if os.environ.get("TPU_EMBEDDING_TEST_INSTALLED") != "1":
        return
    spec = importlib.util.find_spec("tpu_embedding")
    found = pathlib.Path(spec.origin or "").resolve() if spec else None
    if found is None or found.is_relative_to(CHECKOUT / "tpu_embedding"):
        raise pytest.UsageError(
            f"The installed package is to be tested, but Python finds {found}. "
            "Call `pytest`, not `python -m pytest`, and unset PYTHONPATH."
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a newer TensorFlow, and starts the longest test first."""
    # Begun last, its minute would leave all other workers idle.
    items.sort(key=lambda item: item.path.name != "test_tf_keras.py")
    for item in items:
        reason = older_tensorflow.reason_to_skip(item.path.as_posix(), item.name)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> list[str]:
    """Says at the top what is needed to repeat the run."""
    return [
        f"TensorFlow {tf.__version__}, {NUM_CPU_DEVICES} logical CPU devices, "
        f"TPU_EMBEDDING_TEST_SEED={BASE_SEED}"
    ]


@pytest.fixture(autouse=True)
def search_path() -> Iterator[None]:
    """Restores `sys.path`: commands put the folder of the user's code first."""
    before = sys.path.copy()
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Lets no thread outlive its test.

    TensorFlow ends a process in which it cannot create a thread.
    """
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(timeout=10)
    assert not [thread for thread in left if thread.is_alive()]


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test, which is set everywhere and shown if the test fails."""
    value = zlib.crc32(f"{BASE_SEED} {request.node.nodeid}".encode())
    print(f"seed {value} (TPU_EMBEDDING_TEST_SEED={BASE_SEED})")
    random.seed(value)
    tf.random.set_seed(value)
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A NumPy generator that starts from the seed of this test."""
    return np.random.default_rng(seed)


@pytest.fixture(params=EACH_ENGINE)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on each engine for CPUs."""
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", request.param)
    return request.param
