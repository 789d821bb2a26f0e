"""Why enqueue is the op with a fixed ordinal: TensorFlow's compiler knows that one.

In a program the ordinal is -1. When the compiler takes the op out of the program, one
for each replica, it marks the fixed forms with the replica, from which the ordinal
follows; the dynamic form, whose ordinal is a tensor, it leaves as it is.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

INPUTS = "%s, %i, %w, %m"
TYPES = "tensor<3xi32>, tensor<2xi64>, tensor<0xf32>, tensor<!tf_type.string>"
FIXED = {
    "EnqueueTPUEmbeddingArbitraryTensorBatch": "",
    "EnqueueTPUEmbeddingRaggedTensorBatch": ", table_ids = [0]",
}
PROGRAM = """
func.func @program(%s: tensor<3xi32>, %i: tensor<2xi64>, %w: tensor<0xf32>,
                   %m: tensor<!tf_type.string>) {{
  tf_executor.graph {{
    %c = tf_executor.island {{
      "tf_device.replicate"() ({{
        {op}
        tf_device.return
      }}) {{n = 2 : i32, operandSegmentSizes = array<i32: 0, 0>}} : () -> ()
      tf_executor.yield
    }}
    tf_executor.fetch
  }}
  return
}}
"""


def replicated(op: str) -> str:
    """What the compiler makes of an op in a program of two replicas."""
    return tf.mlir.experimental.run_pass_pipeline(
        PROGRAM.format(op=op), "func.func(tf-replicate-to-island)"
    )


@pytest.mark.parametrize("op", FIXED)
def test_fixed_forms_are_marked_with_their_replica(op: str) -> None:
    made = replicated(
        f'"tf.{op}"({INPUTS}) {{device_ordinal = -1 : i64, combiners = ["sum"]'
        f"{FIXED[op]}}} : ({TYPES}) -> ()"
    )
    assert made.count(f'"tf.{op}"') == 2
    assert "_xla_replica_id = 0" in made
    assert "_xla_replica_id = 1" in made


def test_the_dynamic_form_is_not() -> None:
    made = replicated(
        '%o = "tf.Const"() {value = dense<-1> : tensor<i32>} : () -> tensor<i32>\n'
        f'"tf.DynamicEnqueueTPUEmbeddingArbitraryTensorBatch"({INPUTS}, %o) '
        f'{{combiners = ["sum"]}} : ({TYPES}, tensor<i32>) -> ()'
    )
    assert made.count('"tf.Dynamic') == 2
    assert "_xla_replica_id" not in made
