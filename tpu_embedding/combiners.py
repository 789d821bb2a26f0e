"""How the rows that one sample names become one activation.

With weights w_1..w_k (1 where none are given), entry j of a sample has the gain
  sum: w_j    mean: w_j / sum(w)    sqrtn: w_j / sqrt(sum(w^2)).
"""

from __future__ import annotations

from tpu_embedding import errors

COMBINERS: tuple[str, ...] = ("sum", "mean", "sqrtn")


def check(combiner: object) -> None:
    """Raises unless `combiner` is one of `COMBINERS`.

    Raises:
      ValueError: If it is another string or another object.
      NotImplementedError: If it is a CustomCombiner of TensorFlow, known by its
        attribute `combiner_computation` because this module imports none.
    """
    if hasattr(combiner, "combiner_computation"):
        raise errors.custom_combiner()
    if not isinstance(combiner, str) or combiner not in COMBINERS:
        raise errors.combiner(combiner)
