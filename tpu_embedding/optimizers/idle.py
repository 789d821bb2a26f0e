"""Catches a row up at once on steps in which its gradient was zero.

An optimizer with momenta moves a row in each step, even if the gradient of the row is
0. A step s multiplies a slot by a constant, may shrink the row by a factor keep_s
(weight decay), and moves it by

    row -= c_s * direction(slots),

in which c_s is one number for the whole table, such as the learning rate with its bias
correction. A row that has waited from step t to step n = t + k is therefore

    row_n = K * (row_t - sum_{j=1..k} w_j * f(j) * m),    slot_n = fade^k * slot_t,
    w_j = fade_m^j * c_{t+j} / prod_{i<=j} keep_{t+i},     K = prod_{i<=k} keep_{t+i}.

The weights w_j are the same for all rows with this t. f(j) is 1 for momenta. For Adam
it is 1 / (sqrt(v) * r^j + epsilon) with r = sqrt(beta_2), a smooth function of j that
differs by value. Around an age c, with d = sqrt(v) * r^c + epsilon, it is

    f(j) = 1 / d / (1 - (1 - r^(j-c)) * share),    share = 1 - epsilon / d in [0, 1],

and a polynomial in `share` replaces the last factor, so that the sum needs one root and
one division of a value:

    sum_j w_j * f(j) = sum_i g_i * share^i / d,    g_i = sum_j w_j * a_i(j).

With epsilon inside of the root the same holds for d^2, with a root of each factor. If
many powers would be needed, or epsilon changes with j, a polynomial in j through a few
nodes x_i replaces f(j) (Lagrange's formula), so that the sum needs f at these nodes:

    sum_j w_j * f(j) = sum_i g_i * f(x_i),    g_i = sum_j w_j * L_i(j).

The g_i of each t grow by one term in each step, and are final after `horizon` steps,
when fade_m^j is below 4e-12.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

# What is left of a momentum when it no longer moves a row, and the largest error of the
# sum over the nodes, both relative to the whole move; float32 has 6e-8.
_REST = 4e-12
_LARGEST_ERROR = 1e-8
_MOST_NODES = 16
_MOST_POWERS = 8
_LONGEST_HORIZON = 4096

# A pass over all rows follows when the history is full. The passes add less than one
# row to each step, and the history at most an eighth of the bytes of a table.
_ROWS_FOR_EACH_STEP = 8
_LONGEST_HISTORY = 65_536


@dataclasses.dataclass(frozen=True, eq=False)
class Quadrature:
    """The nodes at which f is evaluated, and each age's weights in the sum over them.

    Attributes:
      nodes: Ages in steps, [n], which need not be whole; with `powers` all are equal.
      weights: L_i(j) * fade^j, or a_i(j) * fade^j, for the ages j = 1 to horizon,
        [horizon, n].
      powers: Whether the sum is a polynomial in `share`.
    """

    nodes: np.ndarray
    weights: np.ndarray
    powers: bool = False

    @property
    def horizon(self) -> int:
        return len(self.weights)


@dataclasses.dataclass(frozen=True)
class Idle:
    """What a step with a gradient of zeros does to a row of an optimizer.

    Attributes:
      fades: The factor of each slot in a step; 0 for a slot that no step reads.
      move: How a row moves: "" (not at all), "momentum" (by a slot), "sign" (by the
        sign of a slot), "root" (by a slot over the root of another plus epsilon) or
        "follow" (the row is a function of the slots and the rate, as in Ftrl).
      moment: The slot that moves the row.
      square: The slot under the root.
      epsilon: The number added to the root; inside of the root if `epsilon_inside`.
      epsilon_inside: Whether epsilon is inside of the root, as on TPUs.
      epsilon_beta: The beta of a bias correction of the root to which epsilon is
        added, as in Nadam; else 0.
      follow: The power, l1, l2 and beta of Ftrl, for the move "follow".
    """

    fades: tuple[float, ...] = ()
    move: str = ""
    moment: int = 0
    square: int = 0
    epsilon: float = 0.0
    epsilon_inside: bool = False
    epsilon_beta: float = 0.0
    follow: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    @property
    def changes_nothing(self) -> bool:
        """Whether a row without weight decay and its slots stay as they are."""
        return not self.move and all(fade in (0.0, 1.0) for fade in self.fades)

    @property
    def root_fade(self) -> float:
        """The factor of the root in a step."""
        return math.sqrt(self.fades[self.square]) if self.move == "root" else 1.0

    @property
    def quadrature(self) -> Quadrature | None:
        """The nodes; None for a move without momenta that fade, which needs none.

        Raises:
          ValueError: If no small number of nodes suffices.
        """
        if self.move not in ("momentum", "root"):
            return None
        inside = self.move == "root" and self.epsilon_inside
        constant = not self.epsilon_beta
        return quadrature(self.fades[self.moment], self.root_fade, inside, constant)

    @property
    def horizon(self) -> int:
        """The number of steps for which momenta move a row that waits."""
        return self.quadrature.horizon if self.quadrature else 1

    @property
    def num_terms(self) -> int:
        """The number of weights that the history has for each step."""
        return len(self.quadrature.nodes) if self.quadrature else 1

    def history_length(self, rows: int) -> int:
        """Returns for how many steps the history of a table is kept."""
        needed = max(rows // _ROWS_FOR_EACH_STEP, 2 * self.horizon + 2, 512)
        return min(needed, _LONGEST_HISTORY)


@functools.cache
def quadrature(
    fade: float, root_fade: float, inside: bool = False, powers: bool = True
) -> Quadrature:
    """Chooses the shortest sum for momenta that fade over a root that fades.

    Args:
      fade: The factor of the momentum in a step, 0 <= fade < 1.
      root_fade: The factor of the root in a step, 0 <= root_fade <= 1.
      inside: Whether epsilon is inside of the root.
      powers: Whether epsilon is a constant, so that the sum may be one of powers.

    Raises:
      ValueError: If momenta fade too slowly, or the roots too fast.
    """
    if fade <= 0.0:
        return Quadrature(np.ones(1), np.zeros([1, 1]))
    ratio = fade / root_fade if root_fade > 0.0 else math.inf
    horizon = math.ceil(math.log(_REST) / math.log(ratio)) if ratio < 1.0 else math.inf
    if horizon > _LONGEST_HORIZON:
        squares = f" and {root_fade**2:.6g} of the averages of squares"
        raise ValueError(
            f"a step keeps {fade:.6g} of the momenta{squares * (root_fade < 1.0)}, so "
            f"without gradients a row moves for more than {_LONGEST_HORIZON} steps"
        )
    ages = np.arange(1.0, max(horizon, 1) + 1.0)
    fading = fade**ages
    if root_fade == 1.0:
        return Quadrature(np.ones(1), fading[:, np.newaxis])
    most = min(_MOST_NODES, len(ages))
    for count in range(1, min(_MOST_POWERS, most) + 1 if powers else 1):
        # This exceeds the mean age: rows that waited for long move the most.
        nodes = np.full(count, (count + 2.0) / 4.0 / (1.0 - fade))
        polynomials = _powers(nodes[0], ages, count, root_fade, inside)
        found = Quadrature(nodes, polynomials, powers=True)
        if _error(found, ages, fading, root_fade, inside) <= _LARGEST_ERROR:
            weights = fading[:, np.newaxis] * polynomials
            return dataclasses.replace(found, weights=weights)
    # This is half as wide as the weights: rows that waited a few steps count as well.
    for count in range(1, most + 1):
        nodes = _gauss_nodes(fading**2, ages, count)
        found = Quadrature(nodes, _lagrange(nodes, ages))
        if _error(found, ages, fading, root_fade, inside) <= _LARGEST_ERROR:
            weights = fading[:, np.newaxis] * found.weights
            return dataclasses.replace(found, weights=weights)
    raise ValueError(
        f"a step keeps {fade:.6g} of the momenta and only {root_fade**2:.6g} of the "
        "averages of squares, so rows without gradients cannot be caught up exactly "
        "later (increase beta_2 or rho)"
    )


def _powers(
    center: float, ages: np.ndarray, count: int, root_fade: float, inside: bool
) -> np.ndarray:
    """Returns polynomials' coefficients, [ages, count], by Chebyshev's points."""
    power = 2 if inside else 1
    lost = 1.0 - root_fade ** (power * (ages - center))
    points = (1.0 - np.cos((np.arange(count) + 0.5) * np.pi / count)) / 2.0
    values = (1.0 - np.outer(points, lost)) ** (-1.0 / power)
    return np.linalg.solve(np.vander(points, increasing=True), values).T


def terms_of_roots(
    rule: Quadrature, roots: np.ndarray, root_fade: float, inside: bool = False
) -> np.ndarray:
    """Returns the factors of the weights, [roots, n], for an epsilon of 1."""
    power = 2 if inside else 1
    squares = (roots[:, np.newaxis] * root_fade**rule.nodes) ** power + 1.0
    terms = squares ** (-1.0 / power)
    if rule.powers:
        terms = terms * (1.0 - 1.0 / squares) ** np.arange(len(rule.nodes))
    return terms


def _gauss_nodes(weights: np.ndarray, ages: np.ndarray, count: int) -> np.ndarray:
    """Returns nodes of Gauss's quadrature: eigenvalues of a Jacobi matrix (Lanczos)."""
    vector = np.sqrt(weights / weights.sum())
    basis, diagonal, beside = [vector], [], []
    for _ in range(count):
        product = ages * basis[-1]
        diagonal.append(basis[-1] @ product)
        for known in (*basis, *basis):  # Once would leave a rounding error.
            product = product - known * (known @ product)
        beside.append(np.linalg.norm(product))
        basis.append(product / (beside[-1] or 1.0))
    matrix = np.diag(diagonal)
    if count > 1:
        matrix += np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1)
    return np.linalg.eigvalsh(matrix)


def _lagrange(nodes: np.ndarray, ages: np.ndarray) -> np.ndarray:
    """Returns polynomials, [ages, nodes], each 1 at its node and 0 at the others."""
    values = np.ones([len(ages), len(nodes)])
    for i, node in enumerate(nodes):
        for other in np.delete(nodes, i):
            values[:, i] *= (ages - other) / (node - other)
    return values


def _error(
    rule: Quadrature,
    ages: np.ndarray,
    fading: np.ndarray,
    root_fade: float,
    inside: bool,
) -> float:
    """Returns the largest relative error of a move, over all waits and roots."""
    roots = 10.0 ** np.arange(-4.0, 9.0, 0.5)  # In units of epsilon.
    power = 2 if inside else 1
    exact = ((roots[:, np.newaxis] * root_fade**ages) ** power + 1.0) ** (-1.0 / power)
    through = terms_of_roots(rule, roots, root_fade, inside) @ rule.weights.T
    moves = np.cumsum(fading * exact, axis=1)
    return float((np.cumsum(fading * np.abs(through - exact), axis=1) / moves).max())
