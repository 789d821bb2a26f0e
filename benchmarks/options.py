"""Options that all benchmarks share, checked before a long run."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks import machine

DEFAULT_OUT = "build/bench"
_LOCK = ".running"
_held: set[pathlib.Path] = set()


def add_out(parser: argparse.ArgumentParser) -> None:
    """Adds --out, which is checked at once."""
    parser.add_argument("--out", type=_writable, default=DEFAULT_OUT)


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    """Adds --rounds."""
    parser.add_argument("--rounds", type=positive, default=default)


def add_peers(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Adds --peers: any of `benchmarks.peers`, as one may be tried beside any other."""
    folder = pathlib.Path(__file__).parent / "peers"
    known = sorted(path.stem for path in folder.glob("[!_]*.py"))
    parser.add_argument("--peers", nargs="+", choices=known, default=default)


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


@contextlib.contextmanager
def alone(folder: pathlib.Path) -> Iterator[None]:
    """Locks the folder, so that another run cannot overwrite the files.

    A run may start other runs in its process. Only the first prints the machine.
    """
    folder = folder.resolve()
    if folder in _held:
        yield
        return
    with open(folder / _LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"Another benchmark runs and writes into {folder}."
            ) from None
        _held.add(folder)
        print(machine.describe(), flush=True)
        try:
            yield
        finally:
            _held.discard(folder)


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
