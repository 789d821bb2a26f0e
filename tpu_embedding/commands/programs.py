"""Runs the programs of users as Python would, and compares two ways to run one.

`python -m tpu_embedding try SCRIPT` compares a Keras script as it is and by rows. The
script runs in two processes, one after the other. A process reports each step of `fit`
as a line of JSON on its standard output; the script prints to standard error.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.metadata
import inspect
import json
import os
import pathlib
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_NEEDS_TF_KERAS = ("tf_keras", "tensorflow_recommenders")
_ONLY_IN_TF_KERAS = ("DenseFeatures", "SequenceFeatures")  # Keras 3 has removed them.
_SETS_TF_KERAS = re.compile(r"os\.environ\['TF_USE_LEGACY_KERAS'\] = '(1|[Tt]rue)'")
_WAYS = {"plain": "as it is", "rows": "by rows"}
_SEED = 1
_BAR = 30
_ROUNDING = 1e-4  # Larger relative differences of a loss are not from rounding.
_LAYER = re.compile(r"layer .* \((\d+) x (\d+)\)")  # A layer whose rows are updated.
_MOST_FILES = 20_000  # The most files that are searched for what the first run wrote.
_REASON = """\
Where ids repeat in a batch, optimizers of Keras 3 square and clip the gradient of each
occurrence; by rows the gradients of a row are summed first, as Keras does with dense
gradients (docs/keras_embedding.md). Compare the validation loss of whole runs: if it is
worse by rows, change the learning rate, or keep the script as it is."""


def prepare(
    target: str,
    arguments: Sequence[str],
    replace: Callable[[], None],
    *,
    module: bool = False,
) -> Callable[[], Any]:
    """Calls `replace`, and returns a function that runs a program as Python does.

    Args:
      target: The path of a script, of a folder or zip file with a `__main__.py`, or
        with `module` the name of a module, as for `python -m`.
      arguments: The arguments of the program.
      replace: Replaces names, once it is known which Keras the program needs.
      module: Whether `target` is a module.
    """
    path = _path_of_module(target) if module else _path_of_script(target)
    folder = pathlib.Path.cwd() if module else path.resolve().parent
    needs = False
    if "TF_USE_LEGACY_KERAS" not in os.environ and path.is_file():
        # Either the program raises this error when it runs, or it is a zip file.
        with contextlib.suppress(SyntaxError, ValueError):
            needs = needs_tf_keras(path, folder)
    if needs:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
        print(
            "tpu_embedding: TF_USE_LEGACY_KERAS=1, because the script needs tf_keras.",
            file=sys.stderr,
        )
    replace()
    sys.argv = [str(path) if module else target, *arguments]
    if sys.flags.safe_path:  # Then Python did not prepend a folder.
        sys.path.insert(0, "")
    sys.path[0] = str(folder)
    if module:
        return lambda: runpy.run_module(target, run_name="__main__", alter_sys=True)
    return lambda: runpy.run_path(target, run_name="__main__")


def _path_of_script(target: str) -> pathlib.Path:
    path = pathlib.Path(target)
    if not path.exists():
        raise FileNotFoundError(
            f"There is no script {target!r}. For a module use `run -m`."
        )
    if path.suffix == ".ipynb":
        raise ValueError(
            f"{target!r} is a notebook. Convert it with `jupyter nbconvert --to "
            "script`, or call `tpu_embedding.install(...)` in its first cell."
        )
    main = path / "__main__.py"
    if path.is_dir() and not main.is_file():
        raise FileNotFoundError(f"{target!r} is a folder without a __main__.py.")
    return main if path.is_dir() else path


def _path_of_module(name: str) -> pathlib.Path:
    """Finds a module without importing its packages, which may import TensorFlow."""
    folders = [str(pathlib.Path.cwd()), *sys.path]
    for part in (*name.split("."), "__main__"):
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return pathlib.Path(str(spec.origin))
        folders = list(spec.submodule_search_locations)
    raise FileNotFoundError(
        f"There is no module {name!r} in the current folder or on Python's path, or it "
        "is a package without a __main__.py."
    )


def status_of(program: Callable[[], Any]) -> int:
    """Runs what `prepare` returned; returns 0, or prints its error and returns 1."""
    try:
        program()
    except Exception as error:
        trace = _of_program(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _of_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback from where the program begins, as Python prints it."""
    found, skipped = trace, (__file__, "<frozen runpy>", "runpy.py")
    while found is not None and found.tb_frame.f_code.co_filename.endswith(skipped):
        found = found.tb_next
    return found or trace


def needs_tf_keras(script: pathlib.Path, folder: pathlib.Path | None = None) -> bool:
    """Returns whether a script imports tf_keras or TFRS, itself or through imports.

    A script also counts if it uses a class that only tf_keras has. The function reads
    the script, the modules in `folder` or beside it, and the requirements of the
    packages that they import, and runs nothing.
    """
    folder = folder or script.resolve().parent
    seen, waiting = set[pathlib.Path](), [script]
    packages = set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError):
            if path == script:
                raise
            continue  # The program may never import it.
        if _names_of_tf_keras(tree):
            return True
        for level, module in _imports(tree):
            if level == 0:
                packages.add(module.partition(".")[0])
            package = path.resolve().parents[level - 1] if level else folder
            local = package.joinpath(*module.split("."))
            candidates = [local.with_suffix(".py"), local / "__init__.py"]
            candidates += [local.parent.with_suffix(".py")]
            waiting += [candidate for candidate in candidates if candidate.is_file()]
    if packages & set(_NEEDS_TF_KERAS):
        return True
    distributions = importlib.metadata.packages_distributions()
    names = {name for package in packages for name in distributions.get(package, ())}
    return any(
        re.match(r"(tf[-_]keras|tensorflow[-_]recommenders)\b", requirement)
        for name in names - {"tensorflow", "tensorflow-cpu", "tpu_embedding"}
        for requirement in importlib.metadata.requires(name) or ()
        if "extra ==" not in requirement
    )


def _names_of_tf_keras(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in _ONLY_IN_TF_KERAS)
        or (
            isinstance(node, ast.Assign) and _SETS_TF_KERAS.fullmatch(ast.unparse(node))
        )
        for node in ast.walk(tree)
    )


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the modules that are imported, with the number of dots before each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if node.module else ""
            if node.module:
                yield node.level, node.module
            yield from ((node.level, f"{prefix}{alias.name}") for alias in node.names)


class _Enough(BaseException):
    """Ends a script after the requested steps; `except Exception` does not stop it."""


@dataclasses.dataclass
class Run:
    """The report of one process.

    Attributes:
      wall: Seconds of each step, without the first, which traces the model.
      cpu: Seconds of CPU of each of these steps.
      losses: The losses that `fit` shows: after each step the mean of the epoch so far.
      total: Seconds of CPU of the whole process.
      peak: The peak of the memory of the process, in bytes.
      notes: Each object that was built, and why it was not converted, or "".
    """

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    total: float = 0.0
    peak: int = 0
    notes: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def compare(plain: Run, rows: Run, wrote: Sequence[str] = ()) -> str:
    """Returns a table of both runs, what was replaced, and why the rest was not.

    `wrote` has the files that the first run wrote.
    """
    lines = [f"{'':28}{'as it is':>14}{'by rows':>14}"]

    def line(name: str, values: Sequence[Any], unit: str = "") -> None:
        lines.append(f"{name:28}" + "".join(f"{v:>14}" for v in values) + unit)

    pair = (plain, rows)
    steps = min(len(run.losses) for run in pair)
    medians = [0.0, 0.0]
    if steps > 1:
        for name, field in (("step, wall", "wall"), ("step, CPU", "cpu")):
            medians = [statistics.median(getattr(run, field)) for run in pair]
            ratio = medians[1] / max(medians[0], 1e-9)
            line(name, [f"{m * 1e3:.1f} ms" for m in medians], f"{ratio:>9.1%}")
    line("whole script, CPU", [f"{run.total:.1f} s" for run in pair])
    line("peak memory", [f"{run.peak / 2**20:.0f} MiB" for run in pair])
    for step in sorted({1, steps // 4, steps // 2, steps} & set(range(1, steps + 1))):
        line(f"loss, step {step}", [f"{run.losses[step - 1]:.6g}" for run in pair])
    if steps:
        pairs = list(zip(plain.losses[:steps], rows.losses[:steps], strict=True))
        apart = max(abs(a - b) for a, b in pairs)
        lines.append(f"largest difference of losses in {steps} steps: {apart:.3g}")
        if any(abs(a - b) > _ROUNDING * abs(a) for a, b in pairs):
            last, by_rows = pairs[-1]
            direction = "higher" if by_rows > last else "lower"
            lines.append(f"The last loss is {direction} by rows.")
            if any(not why for _, why in rows.notes):
                lines.append(_REASON)
    else:
        lines.append(
            "There are no losses and step times: the script does not call `fit`."
        )
    shares = _shares(rows.notes) if steps > 1 else {}
    for what, why in rows.notes:
        lines.append(f"left as it is: {what}: {why}" if why else f"by rows: {what}")
        if what in shares:
            saved = (medians[0] - medians[1]) * shares[what] * 1e3
            pays = "saved" if saved > 0 else "lost, so it does not pay"
            lines[-1] += f": about {abs(saved):.1f} ms of CPU {pays} in a step"
    if wrote:
        more = ", ..." if len(wrote) > 5 else ""
        lines.append(
            f"The first run wrote {', '.join(wrote[:5])}{more}. If the script reads\n"
            "these files, the runs did not start alike. Remove them, and run `try` in\n"
            "a copy of the folder."
        )
    if not rows.notes:
        lines.append(
            "Nothing was replaced: the script built no Embedding and no optimizer."
        )
    return "\n".join(lines)


def _shares(notes: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Returns the share of each replaced layer in the values of all their tables."""
    sizes = {
        what: int(match[1]) * int(match[2])
        for what, why in notes
        if not why and (match := _LAYER.fullmatch(what))
    }
    return {what: size / sum(sizes.values()) for what, size in sizes.items()}


def try_script(script: str, arguments: Sequence[str], steps: int) -> int:
    """Runs a script in both ways and prints the comparison; returns 1 after an error.

    A run ends after `steps` steps; if `steps` is 0, when the script ends.
    """
    if steps < 0:
        raise ValueError(f"--steps must not be negative. Received: {steps}.")
    if not os.path.isfile(script):
        raise FileNotFoundError(f"There is no script {script!r}.")
    before = _files(script)
    plain = _run("plain", steps, script, arguments)
    after = _files(script)
    rows = None if plain is None else _run("rows", steps, script, arguments)
    if plain is None or rows is None:
        return 1
    wrote = [path for path, written in after.items() if before.get(path) != written]
    print(compare(plain, rows, sorted(wrote)))
    return 0


def _files(script: str) -> dict[str, tuple[int, int]]:
    """Returns time and size of files beside a script and in the working directory."""
    found: dict[str, tuple[int, int]] = {}
    for top in {os.path.realpath(os.path.dirname(script) or "."), os.getcwd()}:
        for folder, folders, names in os.walk(top):
            hidden = [f for f in folders if f.startswith(".") or f == "__pycache__"]
            for name in hidden:
                folders.remove(name)
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):  # It is gone.
                    state = os.stat(path)
                    found[os.path.relpath(path)] = state.st_mtime_ns, state.st_size
            if len(found) > _MOST_FILES:
                break
    return found


def _run(way: str, steps: int, script: str, arguments: Sequence[str]) -> Run | None:
    """Runs a script in its own process; prints why and returns None if it failed."""
    command = [sys.executable, "-m", "tpu_embedding.commands.programs"]
    command += [way, str(steps), script]
    found = Run()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as printed,
        subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=printed, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            _take(found, json.loads(line))
            if not found.peak:  # The last line, with the peak, is no step.
                _draw(way, len(found.losses), steps)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        if process.wait() == 0:
            return found
        printed.seek(0)
        tail = "".join(printed.readlines()[-20:])
    print(f"error: {script} failed {_WAYS[way]}:\n{tail}", file=sys.stderr)
    return None


def _take(run: Run, message: dict[str, Any]) -> None:
    if "loss" in message:
        run.losses.append(message["loss"])
        if message["timed"]:
            run.wall.append(message["wall"])
            run.cpu.append(message["cpu"])
    else:
        run.total, run.peak = message["total"], message["peak"]
        run.notes = [tuple(note) for note in message["notes"]]


def _draw(way: str, done: int, steps: int) -> None:
    """Draws the progress of a run on a terminal."""
    if not sys.stderr.isatty():
        return
    filled = min(_BAR, _BAR * done // steps) if steps else 0
    bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] " if steps else ""
    of = f" of {steps}" if steps else ""
    print(f"\r{_WAYS[way]:9} {bar}step {done}{of}", end="", file=sys.stderr, flush=True)


def _child(arguments: Sequence[str]) -> None:
    """Runs a script in one way in this process, and reports."""
    way, steps, script, *rest = arguments
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The script prints to standard error.
    notes: list[tuple[str, str]] = []

    def report(**message: Any) -> None:
        print(json.dumps(message), file=channel, flush=True)

    def replace() -> None:
        from tpu_embedding.keras.keras_api import keras_api
        from tpu_embedding.keras.rows import converting  # Loads Keras.

        if way == "rows":
            converting.convert_process(lambda what, why: notes.append((what, why)))
        keras_api.set_random_seed(_SEED)
        _watch_fit(keras_api, int(steps), report)

    with contextlib.suppress(_Enough):
        prepare(script, rest, replace)()
    import resource  # Not on Windows.

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    report(total=time.process_time(), peak=peak, notes=notes)


def _watch_fit(keras_api: Any, steps: int, report: Callable[..., None]) -> None:
    fit = keras_api.Model.fit
    signature = inspect.signature(fit)
    watcher = _watcher(keras_api.Callback, steps, report)

    @functools.wraps(fit)
    def watched(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments.get("callbacks") or []
        if not isinstance(given, (list, tuple)):
            given = [given]
        bound.arguments["callbacks"] = [*given, watcher()]
        return fit(*bound.args, **bound.kwargs)

    keras_api.Model.fit = watched


def _watcher(base: Any, steps: int, report: Callable[..., None]) -> Any:
    done = 0

    class Watcher(base):
        """Reports the steps of one call of `fit`."""

        _since: tuple[float, float] | None = None  # When the previous step ended.

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal done
            done += 1
            now = time.perf_counter(), time.process_time()
            then = self._since or now
            report(
                loss=float((logs or {}).get("loss", float("nan"))),
                timed=self._since is not None,
                wall=now[0] - then[0],
                cpu=now[1] - then[1],
            )
            self._since = time.perf_counter(), time.process_time()
            if done == steps:
                raise _Enough

    return Watcher


def run_try(arguments: argparse.Namespace) -> int:
    """Runs `try`."""
    return try_script(arguments.script, arguments.arguments, arguments.steps)


if __name__ == "__main__":
    _child(sys.argv[1:])
