"""`testing.compile_step`: the process that it starts, and what it makes of its answer.

The compiler itself runs in `make check-tpu`; here a script stands in for its Python.
"""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import stat
import sys
from typing import Any

import new_process
import pytest
import tensorflow as tf

from tpu_embedding.__main__ import main
from tpu_embedding.testing import compilation, compile_step, tpu_compiler
from tpu_embedding.tpu_generations import GIB

STACK = {
    "name": "films_users",
    "tables": ["films", "users"],
    "features": ["film", "user"],
    "rows": 250_000,
    "width": 64,
    "samples": 256,
    "array_bytes": 64_000_000,
    "arrays": 3,
    "buffer_bytes": 397_312,
    "max_ids": 8192,
    "max_unique_ids": 8192,
}
FACTS = {
    "libtpu": "0.0.30",
    "tensorflow": "2.20.0",
    "stage": "done",
    "stacks": [STACK],
    "compiled_limits": [[8192, 8192]],
    "argument_bytes": 192_397_824,
    "temp_bytes": 622_336,
    "alias_bytes": 192_000_000,
    "updated_bytes": 192_000_000,
}
REPLICAS = (
    "INVALID_ARGUMENT: No viable logical replica count for the embedding table with "
    "metadata: max_nz_per_row = 8192, max_unique_nz_per_row = 8192, feature_width = "
    "64, sample_count = 256 (last tried split factor for vector splitting = 8, "
    "fixed_size_allocation_bytes = 295936, row_dependent_size_allocation_bytes = "
    "98304, total_spmem_size_bytes = 262144)"
)
TENSOR = (
    "INVALID_ARGUMENT: SparseCore only supports 16 GiB of HBM per tensor, got "
    "25600000000 in %tuple.80 = (s32[1024], (f32[250000,64]{1,0:T(8)L(1024)}))"
)
MEMORY = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
    "space hbm. Used 119.22G of 31.25G hbm. Exceeded hbm capacity by 87.97G."
)


# Of libtpu 0.0.30; the list is from the sources of XLA.
ALLOCATION = (
    "RESOURCE_EXHAUSTED: Allocation (size=68719476736) would exceed memory "
    "(size=33822867456) :: #allocation69 [shape = 'f32[131072,131072]{0,1:T(8,128)}', "
    "space=hbm, size = 0xffffffffffffffff, tag = 'output of fusion.21@{1}'] :: "
    "<no-hlo-instruction>"
)
LIST = (
    MEMORY + "\n\n  Largest program allocations in hbm:\n\n  1. Size: 40.00G\n     "
    'Operator: op_type="Reshape" op_name="dense/Reshape"\n     Shape: '
    "f32[1638400,8]{1,0:T(8,128)}\n     Unpadded size: 50.00M\n\n  2. Size: 9.50G\n"
    "     Shape: f32[1024,64]{1,0:T(8,128)}\n"
)


@pytest.fixture
def python(tmp_path: pathlib.Path) -> Any:
    """Makes a stand-in for the Python of the extra, which says `answer`."""

    def make(
        facts: Any = FACTS, code: int = 0, versions: Any = compilation.VERSIONS
    ) -> str:
        path = tmp_path / "python"
        log = tmp_path / "seen.json"
        path.write_text(
            f"#!{sys.executable}\n"
            "import json, os, sys\n"
            f"if sys.argv[1] == '-c': print({json.dumps(versions)!r}); sys.exit()\n"
            "path = os.environ.get('PYTHONPATH', '').split(':')[0]\n"
            "folders = os.listdir(path) if path else []\n"
            "found = {f: os.listdir(os.path.join(path, f)) for f in folders}\n"
            "seen = [sys.argv, dict(os.environ), found]\n"
            f"open({str(log)!r}, 'w').write(json.dumps(seen))\n"
            f"print({json.dumps(facts)!r})\n"
            f"sys.exit({code})\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def test_the_metadata_server_is_never_asked(
    python: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps libtpu off the network is set before the process starts."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "0")
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    report = compile_step("model:build", python=python())
    assert report.compiles
    arguments, environment, _ = json.loads((tmp_path / "seen.json").read_text())
    module = "tpu_embedding.testing.tpu_compiler"
    assert arguments[1:] == ["-m", module, "model:build", "v6e:2x2"]
    assert environment["TPU_SKIP_MDS_QUERY"] == "1"
    assert environment["TPU_ACCELERATOR_TYPE"] == "v6e-4"
    assert environment["TPU_WORKER_HOSTNAMES"] == "localhost"
    assert environment["TPU_WORKER_ID"] == "0"
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["TF_ENABLED_DEVICE_TYPES"] == "CPU"


@pytest.fixture
def installed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Says that this package is installed in the folder, beside a TensorFlow."""
    site = tmp_path / "site-packages"
    for name in ("tpu_embedding/testing/compilation.py", "tensorflow/__init__.py"):
        file = site / name
        file.parent.mkdir(parents=True)
        file.touch()
    path = site / "tpu_embedding/testing/compilation.py"
    monkeypatch.setattr(compilation, "__file__", str(path))
    return site


@pytest.mark.usefixtures("installed")
def test_only_this_package_goes_to_the_other_python(
    python: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the folders of PYTHONPATH, where the user's modules may be."""
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    compile_step("model:build", python=python())
    _, environment, found = json.loads((tmp_path / "seen.json").read_text())
    folder, *others = environment["PYTHONPATH"].split(os.pathsep)
    assert others == ["/of/the/user"]
    assert found == {"tpu_embedding": ["testing"]}
    assert not pathlib.Path(folder).exists()


def test_the_package_of_the_other_python_is_used(
    python: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library fits that TensorFlow; the one here may not."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    versions = {**compilation.VERSIONS, "tpu_embedding": "0.1.0"}
    compile_step("model:build", python=python(versions=versions))
    _, environment, _ = json.loads((tmp_path / "seen.json").read_text())
    assert "PYTHONPATH" not in environment


def test_the_command_does_not_import_the_tensorflow_beside_it(python: Any) -> None:
    """In an environment for the check that would load libtpu, without ENVIRONMENT."""
    program = (
        "import sys\n"
        "sys.modules['tensorflow'] = None\n"
        "from tpu_embedding.__main__ import main\n"
        f"sys.exit(main(['compile', 'model:build', '--python', {python()!r}]))\n"
    )
    ran = new_process.run("-c", program)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("v6e:2x2: compiles")


def test_a_report(python: Any) -> None:
    report = compile_step("model:build", "v6e:2x2", python=python())
    assert report.updated_in_place
    assert report.limits_agree
    assert report.capacity == int(31.25 * GIB)
    (stack,) = report.stacks
    assert (stack.table_bytes, stack.slot_bytes) == (64_000_000, 128_000_000)
    text = str(report)
    assert "v6e:2x2: compiles (tensorflow 2.20.0, libtpu 0.0.30)" in text
    assert "not known: the time of a step" in text
    assert json.loads(report.to_json())["argument_bytes"] == 192_397_824
    facts = {**FACTS, "alias_bytes": 0, "compiled_limits": [[128, 128]]}
    report = compile_step("model:build", python=python(facts))
    assert not report.updated_in_place
    assert not report.limits_agree
    assert "NOT those of the preprocessor" in str(report)
    report = compile_step("model:build", python=python({**FACTS, "copied": ["films"]}))
    assert "NOT all updated in place" in str(report)


def test_copies_of_stacks_are_found_in_the_program() -> None:
    """Lines of programs that libtpu 0.0.30 compiled."""
    layout = "f32[200000,256]{1,0:T(8)L(1024)}"
    call = f"  %get-tuple-element.96 = {layout} get-tuple-element(%call.1), index=0\n"
    copy = f"  %copy.51 = {layout} copy(%get-tuple-element.96), metadata={{}}\n"
    stacks = [{"name": "films", "rows": 200_000, "width": 256}]
    assert tpu_compiler.copied_stacks(call, stacks) == []
    assert tpu_compiler.copied_stacks(call + copy, stacks) == ["films"]
    assert tpu_compiler.copied_stacks(copy, [{**stacks[0], "rows": 20_000}]) == []


@pytest.mark.parametrize(
    ("message", "stage", "text"),
    [
        (
            REPLICAS,
            "compile",
            "Table 'films', 'users' in stack 'films_users' (features film, user): 8192 "
            "distinct ids (8192 ids) in a partition need 295936 bytes of a "
            "SparseCore's memory, which has 262144. Set max_unique_ids_per_table["
            "'films_users'] in SparseCoreEmbeddingConfig to at most 7168, with",
        ),
        (TENSOR, "compile", "'films_users' (features film, user): 25600000000 bytes"),
        (MEMORY, "compile", "119.22 GiB of 31.25 GiB. Tables, slots and ids take 0.18"),
        ("ValueError: Table 'a' is big.", "trace", "cannot be traced: ValueError: Tab"),
        (
            "KeyError: 'a' (m.py, line 3)",
            "build",
            "built: KeyError: 'a' (m.py, line 3).",
        ),
        ("ValueError: Only support static input shape but", "lower", "dimension None."),
        ("what", "lower", "TensorFlow's passes and kernels for TPUs do not support"),
        (
            ALLOCATION,
            "compile",
            "take 0.18 GiB; the largest stacks are films, users: 0.18 GiB with slots. "
            "The largest arrays of the program are f32[131072,131072] 64.00G of output "
            "of fusion.21@{1}. Use a smaller batch, or smaller arrays in the dense",
        ),
        (
            LIST,
            "compile",
            "are f32[1638400,8] 40.00G of dense/Reshape; f32[1024,64] 9.50G. Use a",
        ),
        (
            "RESOURCE_EXHAUSTED: Valid window was not found for %x = (f32[<=16384,64]{",
            "compile",
            "Table 'films', 'users' in stack 'films_users' (features film, user): the "
            "rows that the step needs at one time do not fit into a SparseCore's "
            "memory.",
        ),
        ("MLIRError: unregistered operation", "convert", "It may compile on a TPU."),
        ("INTERNAL: what", "compile", "The step cannot be compiled."),
    ],
    ids=[
        *("ids", "tensor", "memory", "trace", "build", "static", "lower"),
        *("allocation", "list", "width", "convert", "internal"),
    ],
)
def test_what_the_compiler_says_in_terms_of_tables(
    message: str, stage: str, text: str, python: Any
) -> None:
    facts = {**FACTS, "error": message, "stage": stage}
    report = compile_step("model:build", python=python(facts))
    assert not report.compiles
    assert text in report.problem
    assert report.message == message
    # A step that libtpu did not see may compile.
    assert report.reached_compiler == (stage == "compile")
    assert ("DOES NOT COMPILE" in str(report)) == (stage == "compile")
    assert ("NOT CHECKED, libtpu did not see" in str(report)) == (stage != "compile")


@pytest.mark.parametrize(
    ("facts", "code", "text"),
    [
        ({"stage": "compile"}, 3, "ended with code 3 while TensorFlow and libtpu"),
        ({"stage": "build"}, 0, "code 0 while model:build was imported and called"),
        ({"stage": "trace"}, 7, "ended with code 7 while the step of model:build was"),
        ({}, 1, "code 1 while its packages were imported"),
    ],
)
def test_a_process_that_ends_is_a_report(
    facts: Any, code: int, text: str, python: Any
) -> None:
    report = compile_step("model:build", python=python(facts, code))
    assert not report.compiles
    assert text in report.problem
    assert report.reached_compiler == (facts.get("stage") == "compile")


def test_numbers_of_devices_that_are_no_power_of_two(python: Any) -> None:
    facts = {**FACTS, "error": "INTERNAL: what", "stage": "compile"}
    report = compile_step("model:build", "v6e:2x3", python=python(facts))
    assert "cannot be compiled for 6 devices, which is not a power" in report.problem


def test_refused_ops_are_named_with_the_line_of_the_user(python: Any) -> None:
    @tf.function(autograph=False)
    def step(ids: tf.Tensor) -> tf.Tensor:
        return tf.strings.as_string(ids)

    graph = step.get_concrete_function(tf.TensorSpec([4], tf.int64)).graph
    message = (
        "UnknownError: -:39:59: error: 'tf.AsString' op TF/XLA TPU bridge input check: "
        "found invalid op. Can't be both xla and non-xla"
    )
    (op,) = tpu_compiler.refused_ops(graph, message)
    line = inspect.getsourcelines(step.python_function)[1] + 2
    assert op == f"AsString ({__file__}, line {line})"
    facts = {**FACTS, "error": message, "stage": "bridge", "refused_ops": [op]}
    report = compile_step("model:build", python=python(facts))
    assert f"They refuse {op}. A TPU has no strings, no printing" in report.problem


def test_dynamic_reshapes_between_equal_types() -> None:
    """Lines of the gradient of tf.boolean_mask, as jaxlib writes them."""
    shape = "tensor<?x64xf32, #stablehlo.bounds<64, ?>>"
    line = '%78 = "mhlo.unknown"(%71, %75, %77) : ({}, tensor<i32>, tensor<i32>) -> {} '
    kept = line.format(shape, "tensor<?xf32, #stablehlo.bounds<64>>") + "loc(#loc87)"
    assert tpu_compiler.without_dynamic_reshapes(kept) == kept
    found = tpu_compiler.without_dynamic_reshapes(
        line.format(shape, shape) + "loc(#loc87)"
    )
    assert found == f'%78 = "stablehlo.convert"(%71) : ({shape}) -> {shape} loc(#loc87)'


def test_a_library_that_is_missing_is_said(python: Any) -> None:
    """Without it TensorFlow's ops preprocess, which refuse some configurations."""
    facts = {**FACTS, "error": "ValueError: no", "stage": "trace", "library": "Run it."}
    report = compile_step("model:build", python=python(facts))
    assert report.problem == (
        "The step cannot be traced: ValueError: no. That environment lacks the "
        "library: Run it."
    )


def test_other_versions_are_refused(python: Any) -> None:
    versions = {**compilation.VERSIONS, "libtpu": "0.0.52", "jax": None}
    with pytest.raises(
        RuntimeError,
        match=r"(?s)libtpu 0\.0\.52, but 0\.0\.30 is needed; jax is not installed, but "
        r"0\.8\.2 is needed\. Create an environment .*libtpu==0\.0\.30",
    ):
        compile_step("model:build", python=python(versions=versions))
    with pytest.raises(RuntimeError, match="Cannot run /no/python"):
        compile_step("model:build", python="/no/python")


def test_tpus_without_a_check() -> None:
    report = compile_step("model:build", "v4:2x2x1")
    assert not report.compiles
    assert "no such check" in report.problem


def test_arguments(python: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="cannot be imported by another process"):
        compile_step(lambda strategy: None)
    with pytest.raises(ValueError, match="as in `my_model:build`"):
        compile_step("build")
    with pytest.raises(TypeError, match="a function or its name"):
        compile_step(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="for example 'v5p:2x2x1'"):
        compile_step("model:build", "v6e")
    compile_step(test_arguments, python=python())
    arguments, _, _ = json.loads((tmp_path / "seen.json").read_text())
    assert arguments[3] == f"{pathlib.Path(__file__).resolve()}:test_arguments"


def test_the_command(python: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "model:build", "--python", python()]) == 0
    assert "v6e:2x2: compiles" in capsys.readouterr().out
    facts = {**FACTS, "error": MEMORY, "stage": "compile"}
    arguments = ["compile", "model:build", "--topology", "v5p:2x2x1", "--json"]
    assert main([*arguments, "--python", python(facts)]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["problem"].startswith("The step needs more")
    assert MEMORY in captured.err
    facts = {**FACTS, "error": "KeyError: 'a'", "stage": "build"}
    assert main([*arguments, "--python", python(facts)]) == 1
    assert capsys.readouterr().err == ""  # The report has it.
