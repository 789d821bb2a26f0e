"""`make wheels`: a library for each TensorFlow in one wheel, and which is loaded."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import build_wheel
import tensorflow as tf

from tpu_embedding.ops import library
from tpu_embedding.testing import library as software_tpu

MINOR = ".".join(tf.__version__.split(".")[:2])
OTHER = "2.9"
LOAD = """
import tpu_embedding
from tpu_embedding.ops import library
from tpu_embedding.testing import library as software_tpu
library.load(), software_tpu.load()
print(tpu_embedding.__file__, library.PATH.name, software_tpu.PATH.name)
"""


def test_a_wheel_of_several_libraries_loads_the_fitting_one(tmp_path: pathlib.Path):
    for name, path in zip(
        build_wheel.LIBRARIES, (library.PATH, software_tpu.PATH), strict=True
    ):
        for minor in (MINOR, OTHER):
            target = tmp_path / f"lib{minor}" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    python = pathlib.Path(sys.executable)
    wheel = build_wheel.pack(python, [MINOR, OTHER], tmp_path)
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
    assert sorted(names) == sorted(
        name.replace(".so", f".tf{minor}.so")
        for name in build_wheel.LIBRARIES
        for minor in (MINOR, OTHER)
    )
    # pip would do no more than this with a wheel of files alone.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    printed = subprocess.check_output(
        [sys.executable, "-P", "-c", LOAD],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        text=True,
        timeout=120,
    )
    file, *loaded = printed.split()
    assert pathlib.Path(file).is_relative_to(tmp_path)
    assert loaded == [
        f"_tpu_embedding_ops.tf{MINOR}.so",
        f"_software_tpu.tf{MINOR}.so",
    ]
