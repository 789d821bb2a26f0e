"""Where results go."""

from __future__ import annotations

import argparse
import pathlib
import tempfile

DEFAULT = "build/bench"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds --out, which is tried at once: a run can take hours."""
    parser.add_argument("--out", type=_writable, default=DEFAULT)


def _writable(path: str) -> pathlib.Path:
    folder = pathlib.Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"cannot write into {path}: {error.strerror}"
        raise argparse.ArgumentTypeError(reason) from error
    return folder
