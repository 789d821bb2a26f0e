"""`make wheels`: a library for each TensorFlow in one wheel, and which is loaded."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import build_wheel
import pytest
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


@pytest.mark.parametrize("into_checkout", [True, False])
def test_a_build_into_the_checkout_compiles_each_op_by_itself(
    into_checkout: bool, tmp_path: pathlib.Path
):
    """By a compiler that writes only what it is asked to."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(build_wheel.ROOT / name, tmp_path)
    for name in ("ops/cc", "testing/cc"):
        shutil.copytree(
            build_wheel.ROOT / "tpu_embedding" / name, tmp_path / "tpu_embedding" / name
        )
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        'while [ "$1" != -o ]; do shift; done\ntouch "$2"\n'
    )
    compiler.chmod(0o755)
    subprocess.run(
        [
            *(sys.executable, "setup.py", "--quiet", "build_ext"),
            *(["--inplace"] if into_checkout else []),
        ],
        cwd=tmp_path,
        env={**os.environ, "CXX": str(compiler)},
        capture_output=True,
        check=True,
        timeout=300,
    )
    compiled = re.findall(r" -c (\S+)", log.read_text())
    ops = [source for source in compiled if "/cc/core/" not in source]
    assert (len(ops) > 20) == into_checkout
    assert into_checkout or len(ops) == 2
