"""What a run came to: JSON, a Markdown table and a picture."""

from __future__ import annotations

import json
import pathlib

FUNCTIONS = ("lookup", "step")


def write(folder: pathlib.Path, title: str, ours: str, results: dict[str, dict]) -> str:
    """Writes <title>.json, .md and .png into `folder`; returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    table = markdown(title, ours, results)
    (folder / f"{title}.json").write_text(json.dumps(results, indent=2) + "\n")
    (folder / f"{title}.md").write_text(table)
    _draw(folder / f"{title}.png", title, results)
    return table


def markdown(title: str, ours: str, results: dict[str, dict]) -> str:
    """A row for each peer: median, spread, and how many times faster ours is."""
    lines = [
        f"### {title}",
        "",
        "| peer | lookup ms (min-max) | ours faster | step ms (min-max) "
        "| ours faster | update rule |",
        "|---|---|---|---|---|---|",
    ]
    for peer, result in results.items():
        if result["missing"]:
            lines.append(f"| {peer} | not measured: {result['missing']} | | | | |")
            continue
        cells = [
            cell
            for function in FUNCTIONS
            for cell in (
                _time(result["milliseconds"].get(function)),
                _ratio(results[ours], result, function),
            )
        ]
        lines.append(f"| {peer} | {' | '.join(cells)} | {result['rule']} |")
    return "\n".join(lines) + "\n"


def _time(times: dict[str, float] | None) -> str:
    if times is None:
        return "-"
    return f"{times['median']:.2f} ({times['min']:.2f}-{times['max']:.2f})"


def _ratio(ours: dict, theirs: dict, function: str) -> str:
    if function not in theirs["milliseconds"] or ours["missing"]:
        return "-"
    ratio = (
        theirs["milliseconds"][function]["median"]
        / ours["milliseconds"][function]["median"]
    )
    return f"{ratio:.2f} x"


def _draw(path: pathlib.Path, title: str, results: dict[str, dict]) -> None:
    import matplotlib as mpl  # an extra; a run without it still has its numbers

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = {peer: r for peer, r in results.items() if not r["missing"]}
    figure, axes = plt.subplots(figsize=(8, 1 + 0.6 * len(shown) * len(FUNCTIONS)))
    for offset, function in enumerate(FUNCTIONS):
        medians = [
            r["milliseconds"].get(function, {}).get("median", 0) for r in shown.values()
        ]
        places = [index + 0.4 * offset for index in range(len(shown))]
        bars = axes.barh(places, medians, height=0.38, label=function)
        axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_yticks([index + 0.2 for index in range(len(shown))], list(shown))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, median")
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
