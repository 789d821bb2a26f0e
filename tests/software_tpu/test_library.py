"""Tests of `tpu_embedding.testing.library`: which ops get kernels."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from tpu_embedding.testing import SoftwareTPUStrategy, library

# Of TensorFlow's own ops, those of the software TPU that tensorflow-cpu has no
# kernels for.
OPTIMIZERS = ("Sgd", "Adagrad", "AdagradMomentum", "Adam", "Ftrl")
ENGINE_OPTIMIZERS = (
    *("StochasticGradientDescent", "Adagrad", "AdagradMomentum", "ADAM", "FTRL"),
    *("Momentum", "RMSProp", "CenteredRMSProp", "Adadelta", "ProximalAdagrad"),
    *("ProximalYogi", "MDLAdagradLight", "FrequencyEstimator"),
)
OPS = (
    "ConfigureTPUEmbedding",
    "IsTPUEmbeddingInitialized",
    "RecvTPUEmbeddingActivations",
    "SendTPUEmbeddingGradients",
    *(
        f"{dynamic}EnqueueTPUEmbedding{kind}TensorBatch"
        for dynamic in ("", "Dynamic")
        for kind in ("Arbitrary", "Ragged")
    ),
    *(
        f"{direction}TPUEmbedding{name}Parameters"
        for direction in ("Load", "Retrieve")
        for name in ENGINE_OPTIMIZERS
    ),
    "LoadAllTPUEmbeddingParameters",
    "RetrieveAllTPUEmbeddingParameters",
    "TPUCopyWithDynamicShape",
    "TPUAnnotateTensorsWithDynamicShape",
    "XlaSparseDenseMatmulGradWithCsrInput",
    "XlaSparseDenseMatmulCustomCombinerOnTcWithCsrInput",
    "XlaSparseDenseMatmulCustomCombinerOnTcGradWithCsrInput",
    *(
        f"XlaSparseDenseMatmulCustomCombinerOnTcGradWith{name}AndCsrInput"
        for name in OPTIMIZERS
    ),
    *(
        f"XlaSparseDenseMatmul{part}{suffix}"
        for part in ("With", *(f"GradWith{name}And" for name in OPTIMIZERS))
        for suffix in ("StaticBufferSize", "CsrInput")
    ),
)

LOAD_TWICE = """
import sys, tensorflow as tf
from tensorflow.python.framework import kernels
for path in sys.argv[1:3]:
    tf.load_op_library(path)
for op in sys.argv[3:]:
    print(op, len(kernels.get_registered_kernels_for_op(op).kernel))
"""


def test_each_op_has_one_kernel():
    library.load()
    counts = {op: len(kernels.get_registered_kernels_for_op(op).kernel) for op in OPS}
    assert counts == dict.fromkeys(OPS, 1)


def test_it_is_loaded_once():
    assert library.load() is library.load()


@pytest.mark.second_tier
def test_an_op_that_has_a_kernel_keeps_it(tmp_path: pathlib.Path):
    """A second copy of the library finds kernels for all ops and adds none."""
    copy = shutil.copy(library.PATH, tmp_path / "copy.so")
    printed = subprocess.check_output(
        [sys.executable, "-c", LOAD_TWICE, str(library.PATH), str(copy), *OPS],
        text=True,
        timeout=120,
    )
    assert printed.split("\n")[:-1] == [f"{op} 1" for op in OPS]


def test_a_missing_library_says_how_to_mend_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "missing.so"
    monkeypatch.setattr(library, "PATH", path)
    expected = f"The software TPU has no kernels. .* there is no {re.escape(str(path))}"
    with pytest.raises(RuntimeError, match=expected):
        library.load.__wrapped__()


def test_a_file_that_tensorflow_cannot_load_is_a_clear_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "broken.so"
    marker = f"tpu_embedding built for TensorFlow {tf.__version__}"
    path.write_bytes(b"\x7fELF\0" + marker.encode() + b"\0")
    monkeypatch.setattr(library, "PATH", path)
    with pytest.raises(RuntimeError, match=r"no kernels\. TensorFlow could not load"):
        library.load.__wrapped__()


def test_a_copy_keeps_the_size_and_spoils_the_rest():
    library.load()
    ids, gains = tf.raw_ops.TPUCopyWithDynamicShape(
        tensors=[tf.constant([1, 2, 3, 4]), tf.constant([0.5, 1.5, 2.5])],
        unpadded_sizes=[tf.constant(3), tf.constant(2)],
    )
    assert ids.numpy().tolist() == [1, 2, 3, tf.int32.min]
    assert gains.numpy()[:2].tolist() == [0.5, 1.5]
    assert tf.math.is_nan(gains[2])


@pytest.mark.parametrize("size", [-1, 5])
def test_a_copy_checks_its_sizes(size: int):
    library.load()
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=f"Tensor 0 has 4 elements, but its unpadded size is {size}",
    ):
        tf.raw_ops.TPUCopyWithDynamicShape(
            tensors=[tf.constant([1, 2, 3, 4])], unpadded_sizes=[tf.constant(size)]
        )


def test_an_annotation_changes_nothing():
    library.load()
    (output,) = tf.raw_ops.TPUAnnotateTensorsWithDynamicShape(
        tensors=[tf.constant([1, 2])]
    )
    assert output.numpy().tolist() == [1, 2]


def test_an_engine_of_tensorflows_own_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    """Under tensorflow-tpu other kernels would take the batches of a software v4."""
    registered = kernels.get_registered_kernels_for_op("Cast")  # any op with several
    monkeypatch.setattr(
        library.kernels, "get_registered_kernels_for_op", lambda op: registered
    )
    with pytest.raises(RuntimeError, match=r"own kernels for Enqueue.*tensorflow-cpu"):
        SoftwareTPUStrategy("v4", 1)
