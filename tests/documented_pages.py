"""Runs the Python code of documentation pages: `python documented_pages.py PAGE...`.

The code blocks of a page are one program. What they need and a reader has already, such
as data and a model, is in comments of the page, `<!-- setup`, and runs where it stands.
A ```text block that follows code is a part of what the program prints.
Each page runs in a process of its own, forked after the imports that take most of the
time: a page may create TensorFlow's devices.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import signal
import sys
import tempfile
import traceback

_CODE = re.compile(
    r"^```python\n(.*?)^```|^<!-- setup\n(.*?)^-->", re.DOTALL | re.MULTILINE
)
_OUTPUT = re.compile(
    r"^```python\n(?:(?!```).*\n)*```\n\n```text\n((?:(?!```).*\n)*)```", re.MULTILINE
)
_INDENTED = re.compile(r"^ *```python\n", re.MULTILINE)


def program(page: pathlib.Path) -> str:
    """The code of a page, each line where it stands in the page."""
    text = page.read_text()
    lines = [""] * (text.count("\n") + 1)
    blocks = 0
    for found in _CODE.finditer(text):
        blocks += found.group(1) is not None
        group = 1 if found.group(1) is not None else 2
        first = text.count("\n", 0, found.start(group))
        code = found.group(group).splitlines()
        lines[first : first + len(code)] = code
    if blocks != len(_INDENTED.findall(text)):
        raise ValueError(f"{page}: a code block is indented or not closed.")
    return "\n".join(lines) if blocks else ""


def run(page: pathlib.Path) -> bool:
    """Runs a page in a child, in a folder of its own; prints its error."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # Servers of a page that failed.
        return status == 0
    os.setsid()
    status = 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            # AutoGraph reads the source of functions.
            source = pathlib.Path(folder, f"{page.stem}.py")
            source.write_text(program(page))
            code = compile(source.read_text(), str(source), "exec")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, {"__name__": "__main__"})  # noqa: S102 - our own pages.
        print(printed.getvalue(), end="")
        for shown in _OUTPUT.findall(page.read_text()):
            if shown not in printed.getvalue():
                raise ValueError(
                    f"{page} shows what its program does not print:\n{shown}"
                )
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(pages: list[str]) -> int:
    """Runs all pages; returns how many failed, and prints the CPU seconds of each."""
    import keras  # noqa: F401 - for all pages at once.
    import tensorflow  # noqa: F401

    import tpu_embedding  # noqa: F401

    failed = 0
    for page in pages:
        before = os.times()
        passed = run(pathlib.Path(page).resolve())
        after = os.times()
        seconds = after.children_user + after.children_system
        seconds -= before.children_user + before.children_system
        print(f"{'ran' if passed else 'FAILED'} {page} {seconds:.1f}", flush=True)
        failed += not passed
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
