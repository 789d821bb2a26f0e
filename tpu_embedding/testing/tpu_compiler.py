"""Traces, lowers and compiles a step, and prints JSON, in a process of its own.

`tpu_embedding.testing.compile_step` runs it as `python -m`, with the environment that
keeps libtpu off the network. It uses private interfaces of TensorFlow 2.20 and jaxlib
0.8.2, which is why their versions are pinned, and none of it is imported elsewhere.
"""

# Type checkers do not see the packages of the extra `tpu-check`, which this imports.
# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import compiler_ir
from tensorflow.python.ops import resource_variable_ops

from tpu_embedding import distribution, tpu_generations, user_code
from tpu_embedding.engines.sparse_core import engine as sparse_core_engine
from tpu_embedding.engines.sparse_core import state
from tpu_embedding.layout import limits
from tpu_embedding.layout.csr import make_partitioning
from tpu_embedding.ops import library
from tpu_embedding.testing.strategy import create_topology, describe_hardware

_DEVICE = "/job:localhost/replica:0/task:0/device:TPU:"
# SparseCores read tables row by row.
_ROWS = "{1,0:T(8)}"
_REFUSED = re.compile(r"error: 'tf\.(\w+)' op")
# A dynamic reshape between equal types, which jaxlib cannot write down. The gradients
# of tf.boolean_mask and tf.gather have such reshapes.
_SAME_SHAPE = re.compile(
    r'"mhlo\.unknown"\((%\w+)(?:, %\w+)+\) : \((tensor<.*>)(?:, tensor<i32>)+\) -> \2 '
)
_ARITHMETIC = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
_LIMITS = re.compile(
    r'_xla_max_ids_per_partition = "(\d+)", _xla_max_unique_ids_per_partition = "(\d+)"'
)


class _DescribedTPUs:
    """A cluster resolver of described TPUs that do not exist."""

    def __init__(
        self, generation: tpu_generations.Generation, num_devices: int
    ) -> None:
        self.tpu_hardware_feature = describe_hardware(generation)
        self._num_devices = num_devices

    def get_tpu_system_metadata(self) -> Any:
        @dataclasses.dataclass
        class Device:
            name: str

        count = self._num_devices
        return tf.tpu.experimental.TPUSystemMetadata(
            num_cores=count,
            num_hosts=1,
            num_of_cores_per_host=count,
            topology=create_topology(count),
            devices=[Device(f"{_DEVICE}{i}") for i in range(count)],
        )


@functools.cache
def answer_for_sparse_cores(count: int) -> Any:
    """Tells TensorFlow how many SparseCores a device has, once for a process.

    TensorFlow asks libtpu through a table of functions. Without a topology libtpu
    answers with an error whose layout in memory is not the one that TensorFlow 2.20
    expects, which ends the process. This function replaces that entry of the table.
    What it returns must stay alive as long as TensorFlow may ask.
    """
    import libtpu

    path = os.path.join(os.path.dirname(tf.__file__), "libtensorflow_cc.so.2")
    functions = ctypes.CDLL(path)._ZN15stream_executor3tpu8OpsApiFnEv
    functions.restype = ctypes.c_void_p
    name = "TpuTopology_MaybeAvailableSparseCoresPerLogicalDevice"
    asked = ctypes.cast(
        getattr(ctypes.CDLL(libtpu.get_library_path()), name), ctypes.c_void_p
    ).value
    table = (ctypes.c_void_p * 100).from_address(functions())

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    def answer(result: int, core_type: int) -> int:
        del core_type
        ctypes.c_uint64.from_address(result).value = 1  # The representation of "OK".
        ctypes.c_int32.from_address(result + 8).value = count
        return result

    table[list(table).index(asked)] = ctypes.cast(answer, ctypes.c_void_p).value
    return answer


@dataclasses.dataclass(frozen=True)
class Program:
    """The part of a step that runs on the TPU, as a function of plain tensors.

    Attributes:
      function: A ConcreteFunction.
      arguments: The shapes and dtypes of the arguments.
      updated: For each variable that the step assigns: argument index -> result index.
    """

    function: Any
    arguments: list[tf.TensorSpec]
    updated: dict[int, int]


class _Cut:
    """Cuts the TPU's ops out of a traced graph.

    TensorFlow lowers no function with resources unless there is a TPU, so variables
    become arguments and results, and so does everything that the host computes.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph

    def program(self) -> Program:
        """Returns the part of the graph that runs on the TPU."""
        ops = [op for op in self._graph.get_operations() if self._is_on_tpu(op)]
        kept = [op for op in ops if not self._passes_on(op)]
        arguments: dict[str, Any] = {}
        results: dict[str, Any] = {}
        skipped = {op.name for op in ops} - {op.name for op in kept}
        for op in self._graph.get_operations():
            if op.name in skipped:
                continue
            inside = self._is_on_tpu(op)
            for tensor in map(self._source, op.inputs):
                from_inside = self._is_on_tpu(tensor.op)
                if inside and not from_inside:
                    arguments[tensor.name] = tensor
                elif from_inside and not inside and tensor.op.type != "Const":
                    results[tensor.name] = tensor
        return self._build(kept, arguments, list(results))

    def _is_on_tpu(self, op: tf.Operation) -> bool:
        attributes = op.node_def.attr
        return (
            "_tpu_replicate" in attributes
            and "_xla_outside_compilation" not in attributes
            and op.type != "TPUReplicateMetadata"
        )

    def _passes_on(self, op: tf.Operation) -> bool:
        """Returns whether an op on the TPU only passes on a tensor from outside it."""
        return op.type == "Identity" and not self._is_on_tpu(
            self._source(op.outputs[0]).op
        )

    def _source(self, tensor: Any) -> Any:
        """Skips identities on the TPU that only pass on a tensor from outside of it."""
        found = tensor
        while (
            found.dtype != tf.resource
            and found.op.type == "Identity"
            and self._is_on_tpu(found.op)
        ):
            found = found.op.inputs[0]
        return tensor if self._is_on_tpu(found.op) else found

    def _build(
        self, ops: list[Any], arguments: dict[str, Any], results: list[str]
    ) -> Program:
        own = {name: f"argument_{i}" for i, name in enumerate(arguments)}
        values = {n: own[n] for n, t in arguments.items() if t.dtype == tf.resource}
        starts = dict(values)
        whole = self._graph.as_graph_def()
        found = tf.compat.v1.GraphDef(library=whole.library, versions=whole.versions)

        def reference(tensor: Any) -> str:
            source = self._source(tensor)
            return str(own.get(source.name, source.name))

        for op in ops:  # In the order in which they were traced, as they will run.
            handle = next((t.name for t in op.inputs if t.dtype == tf.resource), None)
            if handle is None:
                node = found.node.add()
                node.CopyFrom(op.node_def)
                del node.input[:]
                node.input.extend(reference(tensor) for tensor in op.inputs)
                node.device = ""
                for key in [key for key in node.attr if key.startswith("_")]:
                    del node.attr[key]
            elif op.type == "AssignVariableOp":
                values[handle] = reference(op.inputs[1])
            elif op.type == "ReadVariableOp" or op.type in _ARITHMETIC:
                node = found.node.add(name=op.name, input=[values[handle]])
                node.op = _ARITHMETIC.get(op.type, "Identity")
                node.attr["T"].CopyFrom(op.node_def.attr["dtype"])
                if op.type in _ARITHMETIC:
                    node.input.append(reference(op.inputs[1]))
                    values[handle] = op.name
            else:
                raise NotImplementedError(
                    f"{op.name} is a {op.type} of a variable, which this check cannot "
                    "compile. Assign the variable with assign, assign_add or "
                    "assign_sub."
                )
        changed = [name for name in values if values[name] != starts[name]]
        names = [values[name] for name in changed]
        wanted = [*results, *(n if ":" in n else f"{n}:0" for n in names)]
        order = list(arguments)
        specs = [_spec(tensor) for tensor in arguments.values()]
        return Program(
            _function(found, list(own.values()), specs, wanted),
            specs,
            {order.index(n): len(results) + i for i, n in enumerate(changed)},
        )


def _spec(tensor: Any) -> tf.TensorSpec:
    if tensor.dtype != tf.resource:
        return tf.TensorSpec(tensor.shape, tensor.dtype)
    data: Any = resource_variable_ops.get_eager_safe_handle_data(tensor)
    data = data.shape_and_type[0]
    return tf.TensorSpec([d.size for d in data.shape.dim], tf.as_dtype(data.dtype))


def _function(
    graph: Any, names: list[str], specs: list[tf.TensorSpec], wanted: list[str]
) -> Any:
    used = {name.split(":")[0] for node in graph.node for name in node.input}

    def body(*values: tf.Tensor) -> list[tf.Tensor]:
        given = {f"{n}:0": value for n, value in zip(names, values, strict=True)}
        feeds = {n: value for n, value in given.items() if n[:-2] in used}
        inside = [name for name in wanted if name not in given]
        outputs = tf.graph_util.import_graph_def(graph, feeds, inside, name="")
        computed = dict(zip(inside, outputs, strict=True))
        return [tf.identity(given.get(n, computed.get(n))) for n in wanted]

    traced = tf.function(body, autograph=False, jit_compile=True)
    return traced.get_concrete_function(*specs)


def trace(strategy: Any, step: Callable[..., Any], specs: Any) -> Any:
    """Returns the ConcreteFunction of strategy.run(step, specs)."""

    def train(*arguments: Any) -> Any:
        return strategy.run(step, arguments)

    return tf.function(train, autograph=False).get_concrete_function(*specs)


def bridge(traced: Any, num_devices: int) -> str:
    """Returns the text of a traced step after TensorFlow's passes for TPUs.

    These passes divide it into parts for hosts and for TPUs.
    """
    text = tf.mlir.experimental.convert_function(
        traced, pass_pipeline="func.func(tf-executor-graph-pruning)"
    )
    (entry, *_) = re.findall(r"func\.func @(\w+)\(", text)
    text = text.replace(f"@{entry}(", "@main(", 1)
    host = _DEVICE.replace("TPU:", "")
    devices = [f"{host}CPU:0", f"{host}TPU_SYSTEM:0"]
    devices += [f"{_DEVICE}{i}" for i in range(num_devices)]
    listed = ", ".join(f'"{device}"' for device in devices)
    head = "module attributes {"
    return tf.mlir.experimental.run_pass_pipeline(
        text.replace(head, f"{head}tf.devices = {{{listed}}}, ", 1),
        "tf-replicated-clustering-bridge-v2,"
        "func.func(tf-extract-tpu-copy-with-dynamic-shape-op)",
    )


def lower(program: Program) -> bytes:
    """Lowers a program with TensorFlow's kernels for TPUs; returns serialized HLO."""
    specs: Any = program.arguments
    return compiler_ir.from_concrete_function(program.function, specs)(
        stage="hlo_serialized", platform_name="TPU"
    )


def without_dynamic_reshapes(module: str) -> str:
    """Replaces dynamic reshapes between equal types by ops that jaxlib knows."""
    return _SAME_SHAPE.sub(r'"stablehlo.convert"(\1) : (\2) -> \2 ', module)


def compile_program(
    topology: str, hlo: bytes, updated: dict[int, int], enter: Callable[[str], None]
) -> Any:
    """Compiles HLO; returns (executable, kind of TPU). Calls `enter` at each stage."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax.experimental import topologies
    from jaxlib._jax import XlaComputation
    from jaxlib.mlir import ir

    # Hosts have 2x2 chips, or fewer where the topology has fewer.
    axes = [int(axis) for axis in topology.rpartition(":")[2].split("x")]
    bounds = [2 - axis % 2 for axis in (*axes, 1, 1)[:2]]
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, chips_per_host_bounds=(*bounds, 1)
    )
    devices = tuple(described.devices)
    enter("convert")
    text = _jax.mlir.xla_computation_to_mlir_module(XlaComputation(hlo))
    text = without_dynamic_reshapes(text)
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        module = ir.Module.parse(text)
        module.operation.attributes["sym_name"] = ir.StringAttr.get("step")
        main = next(
            op for op in module.body if op.attributes["sym_name"].value == "main"
        )
        inputs: list[dict[str, Any]] = [{} for _ in main.type.inputs]
        outputs: list[dict[str, Any]] = [{} for _ in main.type.results]
        index_type = ir.IntegerType.get_signless(32)
        for number, result in updated.items():
            inputs[number]["tf.aliasing_output"] = ir.IntegerAttr.get(
                index_type, result
            )
        for number in set(_sparse_core_arguments(ir, main)):
            inputs[number]["mhlo.layout_mode"] = ir.StringAttr.get(_ROWS)
            if number in updated:
                outputs[updated[number]]["mhlo.layout_mode"] = ir.StringAttr.get(_ROWS)
        for name, attributes in (("arg_attrs", inputs), ("res_attrs", outputs)):
            main.attributes[name] = ir.ArrayAttr.get(
                [ir.DictAttr.get(a) for a in attributes]
            )
        options = compiler.get_compile_options(
            len(devices), 1, device_assignment=np.array([[d.id] for d in devices])
        )
        enter("compile")
        executable = compiler.backend_compile_and_load(
            devices[0].client, module, _jax.DeviceList(devices), options, []
        )
    return executable, devices[0].device_kind


def _sparse_core_arguments(ir: Any, main: Any) -> Iterator[int]:
    """Yields the argument numbers of the tables that SparseCores read or update."""
    pending = [
        value
        for op in main.regions[0].blocks[0]
        if op.operation.name == "stablehlo.custom_call"
        and "SparseDenseMatmul" in str(op.attributes["call_target_name"])
        for value in op.operands
    ]
    while pending:
        value = pending.pop()
        if isinstance(value.owner, ir.Block):
            if len(ir.RankedTensorType(value.type).shape) == 2:
                yield ir.BlockArgument(value).arg_number
        elif value.owner.name in ("stablehlo.tuple", "stablehlo.reshape"):
            pending.extend(value.owner.operands)


def compiled_limits(hlo: bytes) -> list[tuple[int, int]]:
    """Returns the limits of ids and distinct ids of each op in a program."""
    from jax._src.lib import _jax
    from jaxlib._jax import XlaComputation

    text: Any = _jax.mlir.xla_computation_to_mlir_module(XlaComputation(hlo))
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return sorted({(int(a), int(b)) for a, b in _LIMITS.findall(text)})


def copied_stacks(program: str, stacks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the stacks that a compiled program copies, by the text of its HLO.

    A program copies an array if it writes it while something needs the old values.
    """
    return [
        stack["name"]
        for stack in stacks
        if re.search(rf"= f32\[{stack['rows']},{stack['width']}\]\S* copy\(", program)
    ]


def _stacks(options: Any) -> list[dict[str, Any]]:
    """Returns facts about the stacks of one engine."""
    generation = options.topology.tpu.generation
    partitioning = make_partitioning(
        options.plan,
        options.layout,
        sparse_core_engine._stacking_options(options.topology, options.sparse_core),
        options.sparse_core,
    )
    plan = options.plan
    return [
        {
            "name": stack.name,
            "tables": [plan.tables[i].name for i in stack.tables],
            "features": [plan.features[f].path for f in stack.features],
            "rows": stack.rows_per_device,
            "width": stack.width,
            "samples": stack.samples // generation.sparse_cores_per_device,
            "array_bytes": limits.array_bytes(stack),
            "arrays": limits.num_arrays(plan.tables[stack.tables[0]]),
            "buffer_bytes": limits.buffer_bytes(
                partitioning, stack, pipelined=options.pipelined
            ),
            "max_ids": partitioned.max_ids_per_partition,
            "max_unique_ids": partitioned.max_unique_ids_per_partition,
        }
        for stack, partitioned in zip(
            options.layout.stacks, partitioning.stacks, strict=True
        )
    ]


def check(
    build: str | Callable[..., Any],
    topology: str,
    reached: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Traces, lowers and compiles a step; returns facts. Calls `reached` per stage."""
    import libtpu

    generation, num_devices = tpu_generations.topology(topology)
    facts: dict[str, Any] = {
        "libtpu": getattr(libtpu, "__version__", "?"),
        "tensorflow": tf.__version__,
        "library": library.unavailable_reason(),
        "stacks": [],
    }

    def enter(stage: str) -> None:
        facts["stage"] = stage
        reached(stage)

    if generation.sparse_cores_per_device:
        answer_for_sparse_cores(generation.sparse_cores_per_device)
    strategy = tf.distribute.TPUStrategy(_DescribedTPUs(generation, num_devices))
    setattr(strategy.extended, distribution.DESCRIBED_GENERATION, generation)
    try:
        with state.tracing_only() as engines:
            enter("build")
            function = user_code.find(build) if isinstance(build, str) else build
            step, specs = _step_and_specs(function(strategy))
            enter("trace")
            traced = trace(strategy, step, specs)
            program = _Cut(traced.graph).program()
            facts["stacks"] = [s for options in engines for s in _stacks(options)]
        enter("bridge")
        bridge(traced, num_devices)
        enter("lower")
        hlo = lower(program)
        facts["compiled_limits"] = compiled_limits(hlo)
        executable, facts["kind"] = compile_program(
            tpu_generations.libtpu_name(topology), hlo, program.updated, enter
        )
        stats = executable.get_compiled_memory_stats()
        for name in ("argument", "output", "alias", "temp", "generated_code"):
            facts[f"{name}_bytes"] = getattr(stats, f"{name}_size_in_bytes")
        (module,) = executable.hlo_modules()
        facts["copied"] = copied_stacks(module.to_string(), facts["stacks"])
        updated = [program.arguments[i] for i in program.updated]
        facts["updated_bytes"] = sum(
            (spec.shape.num_elements() or 0) * spec.dtype.size for spec in updated
        )
        enter("done")
    except (Exception, SystemExit) as error:
        if facts["stage"] in ("build", "trace"):
            facts["error"] = user_code.description(error)
        else:
            facts["error"] = f"{type(error).__name__}: {error}"
            facts["refused_ops"] = refused_ops(traced.graph, str(error))
    return facts


def refused_ops(graph: tf.Graph, message: str) -> list[str]:
    """Returns the kinds of ops that a message refuses, and the user's lines."""
    found = {}
    kinds = {*_REFUSED.findall(message)}
    for op in graph.get_operations():
        if op.type in kinds:
            found[f"{op.type} ({user_code.last_line(op.traceback)})"] = None
    return list(found)


def _step_and_specs(built: Any) -> tuple[Callable[..., Any], Any]:
    """Checks what a user's function returned."""
    if (
        not isinstance(built, (tuple, list))
        or len(built) != 2
        or not callable(built[0])
        or not isinstance(built[1], (tuple, list))
    ):
        raise TypeError(
            "the function must return (step, specs), a function and a list of the "
            f"specs of its arguments, but it returned {built!r}"
        )
    return built[0], built[1]


def main() -> None:
    """Prints the stages, and the facts as the last line of the output."""
    for name in ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        if name not in os.environ:
            raise SystemExit(f"{name} must be set before anything is imported.")
    # What else prints to the output, Python or C++, prints to stderr.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(found: Any) -> None:
            print(json.dumps(found), file=answers, flush=True)

        answer(check(sys.argv[1], sys.argv[2], lambda stage: answer({"stage": stage})))
    # This does not wait for libtpu's threads, which may fail to end.
    os._exit(0)


if __name__ == "__main__":
    main()
