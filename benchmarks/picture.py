"""Pictures of the measurements, if matplotlib is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Bar:
    """A number, and whether it misses its aim."""

    value: float
    missed: bool = False


def can_draw() -> bool:
    """Says whether matplotlib is installed; a run works without it."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        print("  no picture: matplotlib is not installed")
    return found


def bars(
    path: pathlib.Path, title: str, axis: str, rows: Mapping[str, Mapping[str, Bar]]
) -> None:
    """Draws a group of bars for each row, beside a line at 1.

    Args:
      path: The file to write.
      title: The title above the bars.
      axis: The label of the numbers.
      rows: The bars of each group, by the group's label and then the legend's.
    """
    if not can_draw():
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for group in rows.values() for name in group))
    height = 0.8 / max(len(names), 1)
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.3 * len(rows) * len(names)))
    for index, name in enumerate(names):
        there = [(at, row[name]) for at, row in enumerate(rows.values()) if name in row]
        places = [at + height * index for at, _ in there]
        values = [bar.value for _, bar in there]
        drawn = axes.barh(places, values, height=0.95 * height, label=name)
        labels = [f"{b.value:.3g}" + " missed" * b.missed for _, b in there]
        axes.bar_label(drawn, labels, padding=3)
    axes.axvline(1.0, color="black", linewidth=0.8)
    middle = height * (len(names) - 1) / 2
    axes.set_yticks([at + middle for at in range(len(rows))], list(rows))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(axis)
    axes.set_title(title)
    if len(names) > 1:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def curves(
    path: pathlib.Path,
    axes_names: tuple[str, str],
    found: Mapping[str, Mapping[float, float]],
) -> None:
    """Draws a curve for each name over two logarithmic axes, its points in numbers.

    Args:
      path: The file to write.
      axes_names: What x and y are.
      found: The y of each curve by x, by the label of the curve in the legend.
    """
    if not can_draw():
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    # Text stays text, and two runs write the same bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves"}):
        figure, axes = plt.subplots(figsize=(7, 3.2))
        points = {}
        for name, curve in found.items():
            (line,) = axes.plot([*curve], [*curve.values()], marker="o", label=name)
            points |= {(x, y): line.get_color() for x, y in curve.items()}
        axes.set(xscale="log", yscale="log", xlabel=axes_names[0])
        axes.set_ylabel(axes_names[1])
        axes.set_xticks(sorted({x for x, _ in points}), minor=False)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
        axes.margins(x=0.1)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        below = (0.0, 0.0)  # The number drawn last: its x, and its height in points.
        for (x, y), color in sorted(points.items()):
            height = axes.transData.transform((x, y))[1] * 72 / figure.dpi
            place = max(height + 4, below[1] + 11 if below[0] == x else 0)
            offset = (8, place - height)
            number = f"{y:,.0f}"
            text = axes.annotate(number, (x, y), offset, textcoords="offset points")
            text.set(color=color, bbox={"pad": 0.5, "fc": "white", "ec": "none"})
            below = (x, place)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
