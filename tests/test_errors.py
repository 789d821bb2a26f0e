"""The exact text and type of errors, by the call that raises them (error_calls.py).

SAID has those functions of `errors` whose calls take more than a line; other tests make
those calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from error_calls import CALLS, THING, Case, Thing

from tpu_embedding import errors
from tpu_embedding.config import QuantizationConfig

SAID: list[tuple[str, tuple, type[Exception], str]] = [
    (
        "refused_by_engine",
        ("host", "table films", "layout", 3),
        NotImplementedError,
        "The host engine cannot carry `layout=3` of table films: it is for TPUs alone. "
        "Leave it at its default here.",
    ),
    (
        "batch_size_conflict",
        (4, 2),
        ValueError,
        "A batch size of 4 per replica was given before, so build() cannot fix 2. Give "
        "one of them, or the same twice.",
    ),
    (
        "rate_shape",
        (THING, [2]),
        ValueError,
        "A callable `learning_rate` must return a scalar. Thing() returned shape [2].",
    ),
    (
        "unsupported_strategy",
        ("Thing",),
        NotImplementedError,
        "Thing is not supported by this release. Supported are the default strategy, "
        "OneDeviceStrategy and MirroredStrategy on CPU or GPU, TPUStrategy and "
        "testing.SoftwareTPUStrategy; under every strategy there is TPUEmbeddingV0, "
        "whose tables are ordinary weights.",
    ),
    (
        "no_profiles",
        ("host", "/profile"),
        NotImplementedError,
        "The host engine cannot carry `profile_data_directory='/profile'`: only TPU v2 "
        "to v4 write profiles. Leave it at None here.",
    ),
    (
        "tpu_not_initialized",
        (),
        RuntimeError,
        "The TPU system of this TPUStrategy is not initialized, so that its hardware "
        "for embeddings is not known. Before you create the strategy call "
        "tf.tpu.experimental.initialize_tpu_system(resolver), with the resolver that "
        "the strategy gets.",
    ),
    (
        "other_strategy",
        (THING, 3),
        RuntimeError,
        "The embedding was created under Thing and is called under int. Create it "
        "inside `strategy.scope()` of the strategy that runs it.",
    ),
    (
        "other_strategy",
        (2, 3),
        RuntimeError,
        "The embedding was created under int and is called under another int. Create "
        "it inside `strategy.scope()` of the strategy that runs it.",
    ),
    (
        "outside_of_replica",
        ("dequeue", 2),
        RuntimeError,
        "dequeue belongs to one replica, of 2. Call it in the function that you give "
        "to `strategy.run`.",
    ),
    (
        "outside_of_replica",
        ("dequeue", 1),
        RuntimeError,
        "dequeue belongs to one replica. Call it in the function that you give to "
        "`strategy.run`.",
    ),
    (
        "unknown_engine",
        ("TPU_EMBEDDING_ENGINE", "gpu", ("host", "portable")),
        ValueError,
        "The environment variable TPU_EMBEDDING_ENGINE is 'gpu'. Unset it, or set it "
        "to one of host, portable.",
    ),
    (
        "host_engine_unavailable",
        ("TPU_EMBEDDING_ENGINE", "it was not built."),
        RuntimeError,
        "TPU_EMBEDDING_ENGINE=host asks for the host engine, which cannot run: it was "
        "not built. Unset the variable to use the portable engine.",
    ),
    (
        "sequence_rank",
        ("a", 3, 1),
        ValueError,
        "Feature a has `max_sequence_length=3`, so its input must be of rank 2. "
        "Received: rank 1. Reshape the input, or leave `max_sequence_length` at 0.",
    ),
    (
        "output_shape_mismatch",
        ("a", ((8, 2), "FeatureConfig.output_shape"), ((4,), "the input")),
        ValueError,
        "Feature a: the output shape (8, 2) given by FeatureConfig.output_shape does "
        "not match (4,) given by the input.",
    ),
    (
        "batch_size_mismatch",
        ("a", 8, 5),
        ValueError,
        "Feature a has a batch of 5 where 8 was expected: every batch must have the "
        "size given as `batch_size` or to build(). Pad the last batch of a data set, "
        "or drop it with `drop_remainder=True`.",
    ),
    (
        "batch_size_not_divisible",
        (7, 2),
        ValueError,
        "`batch_size` is global and must be divisible by the number of replicas. "
        "Received: 7 for 2 replicas.",
    ),
    (
        "gradient_kind",
        ("a", THING),
        ValueError,
        "The gradient of feature a must be a floating point tf.Tensor or None. "
        f"Received: Thing() of type {Thing.__module__}.Thing. Turn "
        "tf.IndexedSlices into a tensor with tf.convert_to_tensor.",
    ),
    (
        "gradient_shape",
        ("a", (8, 4), (8, 5)),
        ValueError,
        "The gradient of feature a must have the shape of its activation, (8, 4). "
        "Received: (8, 5).",
    ),
    (
        "slot_variable",
        ("films", "momenta", (8, 4), None),
        ValueError,
        "Table films: `slot_variable_creation_fn` must return a dict with a float32 "
        "variable of shape (8, 4) under 'momenta'. Received: None.",
    ),
    (
        "initial_value",
        ("films", (8, 4), (8, 1)),
        ValueError,
        "The initializer of films must return the shape that it is given, (8, 4). "
        "Received: (8, 1).",
    ),
    (
        "not_built",
        ("dequeue",),
        RuntimeError,
        "dequeue was called before the embedding was built. Call build() or enqueue() "
        "first.",
    ),
    (
        "training_without_optimizer",
        ("apply_gradients", ("films", "users")),
        RuntimeError,
        "apply_gradients cannot train the tables films, users: they have no optimizer. "
        "Pass `optimizer` to the constructor or to each TableConfig, or use "
        "`training=False`.",
    ),
    (
        "enqueue_device",
        ("/cpu:0",),
        ValueError,
        "Argument `device` of enqueue must name a TPU device. Received: '/cpu:0'. "
        "Leave it at None: the engine on this machine places the batch itself.",
    ),
    (
        "unknown_device",
        ("/CPU:7", ["/device:CPU:0", "/device:CPU:1"]),
        ValueError,
        "Argument `device` of enqueue must name a TPU device of the strategy, with its "
        "number: /device:CPU:0, /device:CPU:1. Received: '/CPU:7'. Leave it at None to "
        "enqueue the batches of all replicas.",
    ),
    (
        "unknown_device",
        ("TPU:9", [f"TPU:{i}" for i in range(9)]),
        ValueError,
        "Argument `device` of enqueue must name a TPU device of the strategy, with its "
        "number: TPU:0, TPU:1, TPU:2, TPU:3, TPU:4, TPU:5, TPU:6, TPU:7, ... (9 in "
        "all). Received: 'TPU:9'. Leave it at None to enqueue the batches of all "
        "replicas.",
    ),
]


def _said(function: str, *arguments: Any) -> Callable[[], Any]:
    def call() -> None:
        raise getattr(errors, function)(*arguments)

    return call


CASES = [
    *CALLS,
    *(Case(_said(f, *args), error, text) for f, args, error, text in SAID),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text[:40])
def test_bad_call(case: Case) -> None:
    with pytest.raises(case.error) as raised:
        case.call()
    assert type(raised.value) is case.error
    assert str(raised.value) == case.text
    assert case.text.endswith(".")
    assert "  " not in case.text


def test_quantization_limits_have_texts_too() -> None:
    with pytest.raises(ValueError, match=r"^Argument `upper` must be above 1\.0\. "):
        QuantizationConfig(4, 1.0, 0.0)
