"""The command line: `python -m tpu_embedding COMMAND ...`.

A command is a row in `_COMMANDS`: a name, a line of help, and a function that adds
arguments to a parser and says which function runs it. That function gets the arguments
and returns the exit code. Its module, and TensorFlow with it, is imported when it runs:
the help of a command needs neither.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

_AddArguments = Callable[[argparse.ArgumentParser], None]
_CHECKPOINT_HELP = (
    "a TensorFlow checkpoint or its folder, a .keras or .weights.h5 file, a .npy or "
    ".npz file or a folder of .npy files"
)


def _runs(parser: argparse.ArgumentParser, module: str, function: str) -> None:
    parser.set_defaults(run=(f"tpu_embedding.commands.{module}", function))


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    inspect = commands.add_parser(
        "inspect", help="list tables and slots with shapes, dtypes and norms"
    )
    inspect.add_argument("path", help=_CHECKPOINT_HELP)
    _runs(inspect, "checkpoint", "inspect")
    convert = commands.add_parser("convert", help="write a checkpoint as another kind")
    convert.add_argument("path", help=_CHECKPOINT_HELP)
    convert.add_argument("destination", help="the new checkpoint")
    kinds = ("tensorflow", "sparse-core", "numpy")
    convert.add_argument("--to", choices=kinds, default=kinds[0])
    convert.add_argument(
        "--like", help="for sparse-core: a checkpoint whose layout is used"
    )
    convert.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="give a table another name; may be repeated",
    )
    convert.add_argument("--no-slots", action="store_true", help="leave the slots out")
    convert.add_argument(
        "--new-root", help="name of the object in the new checkpoint (embedding)"
    )
    _runs(convert, "checkpoint", "convert")
    for command in (inspect, convert):
        command.add_argument("--root", help="the object that holds the tables")
        command.add_argument("--json", action="store_true", help="print JSON")


def _add_delta(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    inspect = commands.add_parser(
        "inspect", help="check a delta, and say what it holds"
    )
    inspect.add_argument("path", help="a delta")
    _runs(inspect, "delta", "inspect")
    apply = commands.add_parser("apply", help="write an export with deltas applied")
    apply.add_argument("path", help="an export that takes deltas")
    apply.add_argument("deltas", nargs="+", help="deltas, in their order")
    apply.add_argument("--to", required=True, help="a new folder for the export")
    _runs(apply, "delta", "apply")


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="an export whose tables are mapped")
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="do not compare the files with their checksums, which reads them",
    )
    _runs(parser, "place", "run")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help=_CHECKPOINT_HELP)
    parser.add_argument(
        "--output", default="report.html", help="the page (%(default)s)"
    )
    parser.add_argument("--root", help="the object that holds the tables")
    _runs(parser, "report", "run")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on",
        default="host",
        metavar="PLACE",
        help="host (the default), mirrored:N, v4:N, v6e:N or another TPU generation",
    )
    parser.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the program is a module, as for `python -m`",
    )
    parser.add_argument(
        "--keras",
        action="store_true",
        help="the program is for Keras: its Embedding layers and optimizers work by "
        "rows, as te.keras.Embedding and te.keras.RowSparseOptimizer",
    )
    parser.add_argument("script", help="a Python program for TPUs or for Keras")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    _runs(parser, "run", "run")


def _add_try(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="end each run after so many steps of `fit`; without it the script ends",
    )
    parser.add_argument("script", help="a Python program for Keras")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    _runs(parser, "trial", "run")


def _add_launch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--processes",
        default="1",
        metavar="N[,N...]",
        help="how many processes this host has: the first number at the first start, "
        "the next after each restart (1)",
    )
    add(
        "--servers",
        type=int,
        default=0,
        metavar="K",
        help="parameter servers of this host: then a chief runs the program, and "
        "`--processes` is the number of workers (0)",
    )
    add(
        "--hosts",
        default="1",
        metavar="M[:M]",
        help="how many hosts run this command; the least and the most (1)",
    )
    add("--address", metavar="HOST:PORT", help="where the hosts meet: one of them")
    add(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start the job again after a process failed, at most so often (0)",
    )
    add(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="how long to wait for the other hosts (600)",
    )
    add(
        "--exit-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long processes may run after the first one ended with 0 "
        "(%(default)g)",
    )
    add("--status", metavar="FILE", help="keep one line of JSON about the job there")
    add(
        "--status-interval",
        type=float,
        metavar="SECONDS",
        help="how often to write it (60)",
    )
    add("-m", dest="module", action="store_true", help="the program is a module")
    add("program", help="a Python program that reads TF_CONFIG")
    add("arguments", nargs=argparse.REMAINDER, help="of the program")
    _runs(parser, "launch", "run")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        help="MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE, a feature configuration or a "
        "function without arguments that returns it, alone or with an optimizer; or a "
        ".json file (docs/planning.md)",
    )
    parser.add_argument("--batch-size", type=int, help="samples of a step, in all")
    parser.add_argument(
        "--sample",
        help="MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE of a data set of batches",
    )
    parser.add_argument(
        "--sample-batches", type=int, default=16, help="how many are read (16)"
    )
    parser.add_argument(
        "--topology",
        action="append",
        metavar="NAME",
        help="for example v6e:2x2; may be repeated (the smallest that fits of each). "
        "Then only these, and what --processes and --machine-gib ask for",
    )
    parser.add_argument(
        "--processes",
        type=int,
        action="append",
        metavar="N",
        help="a number of machines; may be repeated (2, 4 and 8)",
    )
    parser.add_argument(
        "--placement",
        choices=("auto", "rows", "whole"),
        default="auto",
        help="of DistributedOptions, for several machines (auto)",
    )
    parser.add_argument(
        "--machine-gib", type=float, help="memory of one machine (this one's)"
    )
    parser.add_argument(
        "--pipelined",
        action="store_true",
        help="with pipeline_execution_with_tensor_core, on SparseCores",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", metavar="FILE", help="write a picture")
    _runs(parser, "plan", "run")


def _add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "build",
        help="MODULE:FUNCTION or FILE.py:FUNCTION of a function of a TPUStrategy that "
        "returns a step and the specs of its arguments (docs/tpu_check.md)",
    )
    parser.add_argument(
        "--topology",
        action="append",
        metavar="NAME",
        help="for example v5p:2x2x1; may be repeated (v6e:2x2)",
    )
    parser.add_argument(
        "--python",
        help="of an environment for it ($TPU_EMBEDDING_TPU_CHECK_PYTHON, or this one)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    _runs(parser, "compile", "run")


_COMMANDS: tuple[tuple[str, str, _AddArguments], ...] = (
    ("checkpoint", "inspect and convert checkpoints", _add_checkpoint),
    ("delta", "inspect deltas, and apply them to an export", _add_delta),
    ("place", "tell an export with mapped tables where it is", _add_place),
    ("report", "draw a page of the tables of a checkpoint", _add_report),
    ("run", "run a program written for TPUs or for Keras, unchanged", _add_run),
    ("try", "run a Keras program as it is and by rows, and compare", _add_try),
    (
        "launch",
        "run a program in several processes, and end them together",
        _add_launch,
    ),
    (
        "server",
        "run the parameter server or worker that TF_CONFIG names",
        lambda parser: _runs(parser, "server", "run"),
    ),
    ("plan", "say where tables fit: memory, limits, traffic and balance", _add_plan),
    ("compile", "compile a training step for a TPU that is not there", _add_compile),
)
# Their log is the user's: that of a program, and of a server.
_LOGGING = ("run", "launch", "server")
# Errors that a user can fix, beside TensorFlow's; others are shown with a traceback.
_EXPECTED = (OSError, ValueError, TypeError, NotImplementedError, RuntimeError)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what TensorFlow writes while it loads, unless loading fails."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(stderr, kept.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _message(error: Exception) -> str | None:
    """What a user reads of an error that they can fix."""
    if isinstance(error, KeyError):
        return str(error.args[0]) if error.args else "KeyError"
    if isinstance(error, _EXPECTED):
        return str(error) or type(error).__name__
    tf = sys.modules.get("tensorflow")
    if tf is not None and isinstance(error, tf.errors.OpError):
        return getattr(error, "message", None)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 2 after an error, printed to stderr."""
    parser = argparse.ArgumentParser(prog="python -m tpu_embedding")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_, add_arguments in _COMMANDS:
        add_arguments(commands.add_parser(name, help=help_))
    parsed = parser.parse_args(arguments)
    module, function = parsed.run
    if "tensorflow" not in sys.modules and parsed.command not in _LOGGING:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _quiet():
        run = getattr(importlib.import_module(module), function)
    try:
        return run(parsed)
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
