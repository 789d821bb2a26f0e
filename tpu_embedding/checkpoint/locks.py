"""One writer at a time in a folder, whatever process it is in."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # some network file systems


@contextlib.contextmanager
def one_writer(path: str) -> Iterator[None]:
    """Waits until no other process writes into the folder of `path`.

    The system gives the lock back when its process ends, however it ends. Remote
    paths ("gs://...") and file systems without locks have none.
    """
    if "://" in path:
        yield
        return
    parent = os.path.dirname(os.path.abspath(path))
    with contextlib.suppress(FileExistsError):  # To open a file is the clearer error.
        os.makedirs(parent, exist_ok=True)
    folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(folder)
