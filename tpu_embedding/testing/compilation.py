"""Checks a training step against the TPU's own compiler, without a TPU.

The compiler runs in a process of its own, with the versions of the extra `tpu-check`,
because it uses private interfaces of TensorFlow and jaxlib and may end its process.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from tpu_embedding import tpu_generations
from tpu_embedding.errors import argument_type
from tpu_embedding.tpu_generations import GIB

PYTHON_VARIABLE = "TPU_EMBEDDING_TPU_CHECK_PYTHON"
VERSIONS = {"tensorflow-tpu": "2.20.0", "libtpu": "0.0.30", "jax": "0.8.2"}
# Without these libtpu looks for TPUs, and asks the metadata server of a cloud machine.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TF_ENABLED_DEVICE_TYPES": "CPU",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
UNKNOWN = (
    "the time of a step",
    "the layout of tables that TensorFlow's runtime chooses (assumed: row by row)",
    "transfers between host and TPU (what the host computes is an argument here)",
    "what else is in the memory of the TPU",
)
_PACKAGE = "tpu_embedding"
_LIBTPU = "compile"  # The stage of tpu_compiler.py in which libtpu compiles.
_NO_CHECK = (
    "TPU v2 to v4 have no such check: libtpu compiles their embedding ops only on a "
    "machine with a TPU. `python -m tpu_embedding plan` estimates their memory."
)
_OUTSIDE = (
    "A TPU has no strings, no printing and no Python. Compute this in the data set, or "
    "leave it out of the checked step: with tf.config.set_soft_device_placement(True) "
    "TensorFlow moves it to the host at run time, which this check cannot show."
)
_INSTALL = (
    "Create an environment for it and pass its Python as `python` or in "
    f"{PYTHON_VARIABLE}:\n    python3 -m venv tpu-check\n    tpu-check/bin/pip install "
    + " ".join(f"{name}=={version}" for name, version in VERSIONS.items())
)
_REPLICAS = re.compile(
    r"max_nz_per_row = (\d+), max_unique_nz_per_row = (\d+), feature_width = (\d+), "
    r"sample_count = (\d+).*?fixed_size_allocation_bytes = (\d+).*?"
    r"total_spmem_size_bytes = (\d+)",
    re.DOTALL,
)
_TOO_WIDE = re.compile("Valid window was not found|memref.alloca' op current alloc")
_MEMORY_ERRORS = re.compile(f"RESOURCE_EXHAUSTED|E1000|{_TOO_WIDE.pattern}")
_TENSOR = re.compile(r"only supports 16 GiB of HBM per tensor, got (\d+).*", re.DOTALL)
# An entry of libtpu's list of the largest allocations, or the one that is too large.
_ARRAY = re.compile(
    r'Size: ([\d.]+[KMG])\s+(?:Operator: [^\n]*?op_name="([^"]*)"[^\n]*\s+)?'
    r"Shape: ([a-z]+\d*\[[\d,]*\])"
)
_ALLOCATION = re.compile(
    r"Allocation \(size=(\d+)\).*?shape = '([a-z]+\d*\[[\d,]*\]).*?tag = '([^']*)'"
)
_MEMORY = re.compile(r"(?:Used|\()\s*([\d.]+)G.*?(?:of|HBM \()\s*([\d.]+)G", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class StackReport:
    """Describes one stack on one device.

    Attributes:
      name: The name of the stack.
      tables: Names of its tables.
      features: Paths of the features that look it up.
      table_bytes: Bytes of the parameters, with padding.
      slot_bytes: Bytes of all slots.
      buffer_bytes: Bytes of the ids of a batch.
      max_ids: Limit of the ids of a partition that the preprocessor enforces.
      max_unique_ids: Limit of distinct ids of a partition that it enforces.
    """

    name: str
    tables: tuple[str, ...]
    features: tuple[str, ...]
    table_bytes: int
    slot_bytes: int
    buffer_bytes: int
    max_ids: int
    max_unique_ids: int


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """Holds what the compiler says about a step.

    Attributes:
      topology: The topology.
      compiles: Whether the step compiles.
      problem: Why it does not, in terms of tables and features; "" if it compiles.
      message: The compiler's own words, or "".
      versions: The versions of the packages that were used.
      stacks: The stacks of all embeddings.
      argument_bytes: Bytes of tables, slots, other variables and batches of a device.
      temporary_bytes: Bytes of everything else that the program needs.
      capacity: Bytes that programs can use on a device.
      updated_in_place: Whether the step updates all variables that it assigns in place,
        and copies no stack.
      compiled_limits: The pairs of limits (ids, distinct ids) in the program.
      unknown: What the check cannot know.
      reached_compiler: Whether libtpu saw the step. A step that does not reach it may
        compile once the cause of that is fixed.
    """

    topology: str
    compiles: bool
    problem: str = ""
    message: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    stacks: tuple[StackReport, ...] = ()
    argument_bytes: int = 0
    temporary_bytes: int = 0
    capacity: int = 0
    updated_in_place: bool = False
    compiled_limits: tuple[tuple[int, int], ...] = ()
    unknown: tuple[str, ...] = UNKNOWN
    reached_compiler: bool = False

    @property
    def limits_agree(self) -> bool:
        """Whether some compiled limits are large enough for each stack's batches."""
        return all(
            any(
                ids >= stack.max_ids and unique >= stack.max_unique_ids
                for ids, unique in self.compiled_limits
            )
            for stack in self.stacks
        )

    def to_json(self) -> str:
        """Returns everything as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {v}" for name, v in self.versions.items())
        verdict = "compiles" if self.compiles else "DOES NOT COMPILE"
        if not self.reached_compiler:
            verdict = "NOT CHECKED, libtpu did not see the step"
        lines = [f"{self.topology}: {verdict} ({versions})"]
        if self.problem:
            lines.append(self.problem)
        lines += [
            (
                f"  stack {stack.name}: tables {_mib(stack.table_bytes)}, slots "
                f"{_mib(stack.slot_bytes)}, id buffers {_mib(stack.buffer_bytes)}; at "
                f"most {stack.max_ids} ids, {stack.max_unique_ids} distinct, in a "
                f"partition; features {', '.join(stack.features)}"
            )
            for stack in self.stacks
        ]
        if self.compiles:
            used = self.argument_bytes + self.temporary_bytes
            lines += [
                f"  a device: arguments {_mib(self.argument_bytes)}, temporaries "
                f"{_mib(self.temporary_bytes)}, {used / max(self.capacity, 1):.1%} of "
                f"{self.capacity / GIB:.2f} GiB",
                "  variables are "
                + ("" if self.updated_in_place else "NOT all ")
                + "updated in place",
                "  limits in the program: "
                + (", ".join(f"{a} / {b}" for a, b in self.compiled_limits) or "none")
                + ("" if self.limits_agree else "; NOT those of the preprocessor"),
            ]
        lines.append("not known: " + "; ".join(self.unknown))
        return "\n".join(lines)


def compile_step(
    build: str | Callable[..., Any],
    topology: str = "v6e:2x2",
    *,
    python: str | os.PathLike[str] | None = None,
    timeout: float = 1800.0,
) -> CompileReport:
    """Compiles a training step by libtpu, without a TPU.

    `build` is called as build(strategy), with a TPUStrategy of described TPUs. It makes
    the embedding and everything else in `strategy.scope()`, and returns (step, specs):
    the function for `strategy.run`, and a list of a tf.TensorSpec, tf.RaggedTensorSpec
    or tf.SparseTensorSpec (or a structure of them) for each of its arguments, for one
    replica. Tables take no memory, whatever their size.

    Args:
      build: A function of a module or a file, or its name "MODULE:ATTRIBUTE" or
        "FILE.py:ATTRIBUTE".
      topology: A TPU generation and its chips by axis, e.g. "v5p:2x2x1".
      python: The Python of an environment with the extra `tpu-check`. None means that
        of the variable TPU_EMBEDDING_TPU_CHECK_PYTHON, or this one.
      timeout: Seconds after which the compiler is ended.

    Returns:
      The report. A step that does not compile, a compiler that ends its process, and
      an error of `build` give a report, and raise no exception; `reached_compiler`
      tells them apart.

    Raises:
      ValueError: If the topology is unknown, or `build` cannot be found by its name.
      TypeError: If `build` is neither a string nor a function.
      RuntimeError: If that Python lacks a package of the extra, or has another version.
    """
    target = _target(build)
    generation, _ = tpu_generations.topology(topology)
    if generation.embedding == "v1":
        return CompileReport(topology, False, problem=_NO_CHECK)
    executable = os.fspath(python or os.environ.get(PYTHON_VARIABLE) or sys.executable)
    environment = {**os.environ, **ENVIRONMENT}
    has_package = _check_versions(executable, environment)
    command = [executable, "-m", "tpu_embedding.testing.tpu_compiler", target, topology]
    with tempfile.TemporaryDirectory() as folder:
        if not has_package:
            # The folder of this package may have another TensorFlow beside it.
            package = pathlib.Path(__file__).parents[1]
            (pathlib.Path(folder) / package.name).symlink_to(package)
            paths = [folder, environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        try:
            ended = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            problem = f"The compiler was ended after {timeout} seconds."
            return CompileReport(topology, False, problem)
    facts = {}
    for line in ended.stdout.splitlines():  # The stages, and last the facts.
        facts = json.loads(line)
    if ended.returncode or "tensorflow" not in facts:
        stage = facts.get("stage", "")
        return CompileReport(
            topology,
            False,
            problem=_ended(target, ended.returncode, stage),
            message="\n".join(ended.stderr.strip().splitlines()[-20:]),
            reached_compiler=stage == _LIBTPU,
        )
    return _report(topology, facts)


def _ended(target: str, code: int, stage: str) -> str:
    """Returns why the compiler's process gave no answer."""
    how = f"code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    doing = {
        "": "its packages were imported",
        "build": f"{target} was imported and called",
        "trace": f"the step of {target} was traced",
    }.get(stage, f"TensorFlow and libtpu compiled the step (stage {stage!r})")
    return f"The compiler's process ended with {how} while {doing}."


def _target(build: str | Callable[..., Any]) -> str:
    if isinstance(build, str):
        if not all(build.rpartition(":")[::2]):
            raise ValueError(
                "Pass a module or a file and its function, as in `my_model:build`. "
                f"Received: {build!r}."
            )
        return build
    if not callable(build):
        raise argument_type("build", build, "a function or its name")
    name = getattr(build, "__qualname__", "<locals>")
    if "<" in name:
        raise ValueError(
            f"{build!r} cannot be imported by another process. Pass a function defined "
            "in a module."
        )
    return f"{pathlib.Path(inspect.getfile(build)).resolve()}:{name}"


def _check_versions(executable: str, environment: dict[str, str]) -> bool:
    """Checks the versions of a Python's packages, without importing any of them.

    It returns whether that Python has this package, too.
    """
    asked = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: found[name] = None\n"
        "print(json.dumps(found))"
    )
    try:
        answer = subprocess.run(
            [executable, "-c", asked, *VERSIONS, _PACKAGE],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"Cannot run {executable}: {error}. {_INSTALL}") from error
    found = json.loads(answer.stdout.splitlines()[-1])
    wrong = [
        f"{name} {found[name] or 'is not installed'}, but {version} is needed"
        for name, version in VERSIONS.items()
        if found[name] != version
    ]
    if wrong:
        raise RuntimeError(
            f"{executable} is not an environment for the check of TPU programs: "
            f"{'; '.join(wrong)}. {_INSTALL}"
        )
    return found.get(_PACKAGE) is not None


def _report(topology: str, facts: dict[str, Any]) -> CompileReport:
    generation, devices = tpu_generations.topology(topology)
    stacks = facts["stacks"]
    message = facts.get("error", "")
    problem = ""
    if message:
        problem = _translate(message, facts["stage"], stacks, generation, devices)
        if facts.get("refused_ops"):
            problem += f" They refuse {'; '.join(facts['refused_ops'][:3])}. {_OUTSIDE}"
        if facts.get("library") and facts["stage"] in ("build", "trace"):
            problem += f" That environment lacks the library: {facts['library']}"
    return CompileReport(
        topology=topology,
        compiles=not message,
        problem=problem,
        message=message,
        versions={name: facts[name] for name in ("tensorflow", "libtpu")},
        stacks=tuple(
            StackReport(
                name=s["name"],
                tables=tuple(s["tables"]),
                features=tuple(s["features"]),
                table_bytes=s["array_bytes"],
                slot_bytes=s["array_bytes"] * (s["arrays"] - 1),
                buffer_bytes=s["buffer_bytes"],
                max_ids=s["max_ids"],
                max_unique_ids=s["max_unique_ids"],
            )
            for s in stacks
        ),
        argument_bytes=facts.get("argument_bytes", 0),
        temporary_bytes=facts.get("temp_bytes", 0),
        capacity=generation.hbm_bytes,
        updated_in_place=not facts.get("copied")
        and facts.get("alias_bytes", -1) >= facts.get("updated_bytes", 0),
        compiled_limits=tuple(
            (ids, unique) for ids, unique in facts.get("compiled_limits", ())
        ),
        reached_compiler=facts["stage"] in (_LIBTPU, "done"),
    )


def _translate(
    message: str,
    stage: str,
    stacks: Sequence[dict[str, Any]],
    generation: tpu_generations.Generation,
    num_devices: int,
) -> str:
    """Returns the compiler's message in terms of tables and features."""
    if stage == "build":
        return f"The step cannot be built: {message}."
    if stage == "trace":
        return f"The step cannot be traced: {message}."
    found = _REPLICAS.search(message)
    if found:
        ids, unique, width, samples, needed, spmem = map(int, found.groups())
        sizes = {"width": width, "samples": samples}
        own = [s for s in stacks if all(s[key] == size for key, size in sizes.items())]
        own = [s for s in own if s["max_unique_ids"] == unique] or own
        cores = num_devices * generation.sparse_cores_per_device
        most = generation.max_unique_ids(cores, ids) or generation.max_unique_ids(cores)
        return (
            f"{_names(own)}: {unique} distinct ids ({ids} ids) in a partition need "
            f"{needed} bytes of a SparseCore's memory, which has {spmem}. Set "
            "max_unique_ids_per_table["
            + (repr(own[0]["name"]) if own else "...")
            + f"] in SparseCoreEmbeddingConfig to at most {most}, with "
            "minibatching=True if batches have more; for a CustomOptimizer or "
            "CustomCombiner use a smaller batch."
        )
    found = _TENSOR.search(message)
    if found:
        size = int(found[1])
        own = [s for s in stacks if f"f32[{s['rows']},{s['width']}]" in message]
        own = [s for s in own if s["array_bytes"] == size] or own
        return (
            f"{_names(own)}: {size} bytes ({size / GIB:.2f} GiB) for a table or slot "
            "on a device, and SparseCores support 16 GiB. Use more devices, or a "
            "smaller vocabulary_size or dim."
        )
    if _MEMORY_ERRORS.search(message):
        return _memory_problem(message, stacks, generation)
    if "Only support static input shape" in message:
        return (
            "A TPU compiles only static shapes, but an input of the step has a "
            "dimension None. Set each dimension of the tf.TensorSpecs to a number."
        )
    if stage == "convert":
        return (
            "The step cannot be passed to libtpu: jaxlib, which converts it, does not "
            "support one of its ops. It may compile on a TPU."
        )
    if stage != _LIBTPU:
        return "TensorFlow's passes and kernels for TPUs do not support the step."
    if num_devices & (num_devices - 1):
        return (
            f"The step cannot be compiled for {num_devices} devices, which is not a "
            "power of two: for such a number libtpu 0.0.30 fails with an internal "
            "error in every lookup on SparseCores. Newer versions were not tested."
        )
    return "The step cannot be compiled."


def _memory_problem(
    message: str,
    stacks: Sequence[dict[str, Any]],
    generation: tpu_generations.Generation,
) -> str:
    """Returns what fills a device's memory: the tables, or arrays of the program."""
    if _TOO_WIDE.search(message):
        own = [s for s in stacks if f",{s['width']}]" in message]
        return (
            f"{_names(own)}: the rows that the step needs at one time do not fit into "
            "a SparseCore's memory. Use a smaller dim, or for a CustomCombiner a "
            "smaller max_valency."
        )
    used = _MEMORY.search(message)
    how = f" {used[1]} GiB of {used[2]} GiB." if used else ""
    tables = sum(s["array_bytes"] * s["arrays"] + s["buffer_bytes"] for s in stacks)
    largest = sorted(stacks, key=lambda s: -s["array_bytes"] * s["arrays"])[:3]
    shown = [
        f"{', '.join(s['tables'][:3])}: "
        f"{s['array_bytes'] * s['arrays'] / GIB:.2f} GiB with slots"
        for s in largest
    ]
    text = f"The step needs more memory than a device has:{how} "
    text += (
        f"Tables, slots and ids take {tables / GIB:.2f} GiB; the largest stacks are "
    )
    text += f"{'; '.join(shown)}. "
    found = _ARRAY.findall(message)[:3] or [
        (f"{int(size) / GIB:.2f}G", name, shape)
        for size, shape, name in _ALLOCATION.findall(message)
    ]
    arrays = [
        f"{shape} {size}{' of ' if name else ''}{name}" for size, name, shape in found
    ]
    if arrays:
        text += f"The largest arrays of the program are {'; '.join(arrays)}. "
    if tables < generation.hbm_bytes / 2:
        return text + "Use a smaller batch, or smaller arrays in the dense model."
    return text + (
        "Use more devices, a smaller vocabulary_size or dim, or an optimizer with "
        "fewer slots."
    )


def _names(stacks: Sequence[dict[str, Any]]) -> str:
    if not stacks:
        return "A stack"
    return "; or ".join(
        f"Table {', '.join(map(repr, s['tables']))} in stack {s['name']!r} (features "
        f"{', '.join(s['features'])})"
        for s in stacks
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
