"""Gets MovieLens-100K and reads its three files.

The ratings were collected by the GroupLens research group of the University of
Minnesota. They are free for research use, need a citation, and may not be
redistributed without permission, so this repository holds none of them. The PyPI
package recbole ships a copy; it is downloaded, its three files are read, and
nothing of it is installed or imported.

F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and
Context. ACM Transactions on Interactive Intelligent Systems 5, 4, Article 19.
https://grouplens.org/datasets/movielens/100k/
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NOTICE = (
    "Data: MovieLens-100K, (c) GroupLens, University of Minnesota; for research use,"
    " not to be redistributed.\n"
    "      Harper and Konstan (2015), The MovieLens Datasets: History and Context,"
    " ACM TiiS 5, 4, 19."
)
PACKAGE = "recbole==1.2.1"
_FOLDER = "recbole/dataset_example/ml-100k"
_STEM = "ml-100k"

Table = dict[str, list[str]]  # a column name -> its values


def download(cache: Path) -> Path:
    """Returns the wheel that holds the data, downloaded into `cache` if not there.

    Raises:
      SystemExit: pip could not get it.
    """
    pattern = PACKAGE.replace("==", "-") + "-*.whl"
    if not any(cache.glob(pattern)):
        cache.mkdir(parents=True, exist_ok=True)
        # pip writes into another folder first, so that no partial file looks complete.
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _pip_download(Path(folder), cache)
            for wheel in Path(folder).glob(pattern):
                wheel.replace(cache / wheel.name)
    return next(cache.glob(pattern))


def _pip_download(folder: Path, cache: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    if subprocess.run([*pip, *options, PACKAGE], check=False).returncode:
        raise SystemExit(
            f"pip could not download {PACKAGE}, whose files hold MovieLens-100K, into"
            f" {cache}; see its message above. Without a network get {_STEM}.inter,"
            f" {_STEM}.item and {_STEM}.user elsewhere, in RecBole's format, and give"
            " their folder with --data DIR."
        )


def read_folder(folder: Path, kind: str) -> Table:
    """Reads ml-100k.<kind> (kind: inter, item or user) from a folder.

    Raises:
      SystemExit: the file is not there.
    """
    path = folder / f"{_STEM}.{kind}"
    if not path.is_file():
        raise SystemExit(
            f"--data: {path} is missing; the folder must hold {_STEM}.inter,"
            f" {_STEM}.item and {_STEM}.user in RecBole's format."
        )
    return parse(path.read_text("utf-8"))


def read_wheel(wheel: Path, kind: str) -> Table:
    """Reads ml-100k.<kind> (kind: inter, item or user) from recbole's wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return parse(archive.read(f"{_FOLDER}/{_STEM}.{kind}").decode("utf-8"))


def parse(text: str) -> Table:
    r"""Turns RecBole's tab-separated text into columns.

    >>> parse("user_id:token\trating:float\n196\t3\n22\t1\n")
    {'user_id': ['196', '22'], 'rating': ['3', '1']}
    """
    header, *lines = text.splitlines()
    names = [field.split(":")[0] for field in header.split("\t")]
    columns = zip(*(line.split("\t") for line in lines), strict=True)
    return {name: list(column) for name, column in zip(names, columns, strict=True)}
