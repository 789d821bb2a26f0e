"""`python -m tpu_embedding report CHECKPOINT`: the tables of a checkpoint as a page.

The page is one HTML file with inline SVG. It has no scripts and refers to nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import html
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint
from tpu_embedding.checkpoint.saving import read
from tpu_embedding.checkpoint.statistics import StoredTableReport, table_reports
from tpu_embedding.commands.files import TextProgress, printable
from tpu_embedding.errors import check_path
from tpu_embedding.tables.rows import PARAMETERS
from tpu_embedding.text import size_text

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #fafaf8; --card: #ffffff; --line: #e3e3de; --text: #1d2126; --soft: #5d6570;
  --main: #2b6cb0; --second: #c4762b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1c2026; --line: #323841; --text: #e7e9ec; --soft: #a0a8b3;
    --main: #6aa9e9; --second: #e0a060;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 2rem 1rem 4rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 68rem; margin: 0 auto; }
h1 { margin: 0 0 .25rem; font-size: 1.6rem; line-height: 1.25; }
h2 { margin: 0; font-size: 1.2rem; overflow-wrap: anywhere; }
h3 { margin: 0 0 .5rem; font-size: .95rem; }
.soft, .note { color: var(--soft); }
.note { margin: .5rem 0 0; font-size: .875rem; }
.path { overflow-wrap: anywhere; }
.card {
  margin: 1.5rem 0 0; padding: 1.25rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px;
}
.facts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr));
  gap: .75rem 1.25rem; margin: 1rem 0 1.5rem;
}
.facts dt { color: var(--soft); font-size: .8125rem; }
.facts dd { margin: 0; font-size: 1.125rem; font-variant-numeric: tabular-nums; }
.columns {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr));
  gap: 1.5rem;
}
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td {
  padding: .3rem .75rem .3rem 0; text-align: left;
  border-bottom: 1px solid var(--line);
}
th { color: var(--soft); font-size: .8125rem; font-weight: 600; }
tr:last-child td { border-bottom: 0; }
td.number, th.number { text-align: right; }
td:last-child, th:last-child { padding-right: 0; }
svg { display: block; width: 100%; height: auto; max-width: 34rem; }
svg text { fill: var(--soft); font-size: 11px; font-family: inherit; }
.bar-main { fill: var(--main); } .bar-second { fill: var(--second); }
.table { margin: .75rem 0 0; overflow-wrap: anywhere; }
.table .soft { font-size: .875rem; }
.table svg { height: .75rem; max-width: none; margin-top: .25rem; }
.axis { stroke: var(--line); }
.key {
  display: inline-block; width: .7em; height: .7em; margin-right: .4em;
  border-radius: 2px;
}
a { color: var(--main); text-decoration: none; } a:hover { text-decoration: underline; }
"""


def run(arguments: argparse.Namespace) -> int:
    """Runs `report`."""
    checkpoint = read(arguments.path, root=arguments.root)
    _require_writable(arguments.output)
    page = page_of(checkpoint, table_reports(checkpoint, TextProgress()))
    with tf.io.gfile.GFile(arguments.output, "w") as file:
        file.write(page)
    print(f"Wrote to {arguments.output}: {', '.join(map(printable, checkpoint))}")
    return 0


def _require_writable(path: str) -> None:
    """Raises ValueError if `path` cannot be written; does not change what is there."""
    check_path(path)
    existed = tf.io.gfile.exists(path)
    try:
        with tf.io.gfile.GFile(path, "a") as file:
            file.write("")
    except tf.errors.OpError as error:
        raise ValueError(
            f"`--output {path}` cannot be written: {error.message}. Pass a file in an "
            "existing folder."
        ) from error
    if not existed:
        tf.io.gfile.remove(path)


def page_of(checkpoint: LogicalCheckpoint, tables: Sequence[StoredTableReport]) -> str:
    """Returns the report page, as HTML.

    Args:
      checkpoint: The checkpoint of the tables.
      tables: The reports of the tables.
    """
    bytes_of_all = sum(sum(table.bytes.values()) for table in tables)
    facts = {
        "tables": f"{len(tables):,}",
        "rows": f"{sum(table.rows for table in tables):,}",
        "bytes": size_text(bytes_of_all),
        "updates": "not stored"
        if checkpoint.updates is None
        else f"{checkpoint.updates:,}",
        "kind of file": checkpoint.format,
    }
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    sections = "\n".join(_section(number, table) for number, table in enumerate(tables))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Embedding tables</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Embedding tables</h1>
<p class="soft path">{_name(checkpoint.path)} · {today}</p>
{_facts(facts)}
<section class="card">
<h2>Memory</h2>
<p class="note"><span class="key" style="background: var(--main)"></span>parameters
&nbsp; <span class="key" style="background: var(--second)"></span>slots of the
optimizer</p>
{_overview(tables)}
</section>
{sections}
</main>
</body>
</html>
"""


def _overview(tables: Sequence[StoredTableReport]) -> str:
    most = max((sum(table.bytes.values()) for table in tables), default=1)
    rows = []
    for number, table in enumerate(tables):
        total = sum(table.bytes.values())
        parameters = 400 * table.bytes[PARAMETERS] / max(most, 1)
        slots = 400 * (total - table.bytes[PARAMETERS]) / max(most, 1)
        own = size_text(table.bytes[PARAMETERS])
        label = f"{own} parameters, {size_text(total)} in all"
        rows.append(
            f'<div class="table"><a href="#table-{number}">{_name(table.name)}'
            f'</a> <span class="soft">{table.rows:,} rows of {table.dim}, '
            f"{size_text(total)}</span>\n"
            f'<svg viewBox="0 0 400 10" preserveAspectRatio="none" role="img" '
            f'aria-label="{label}"><title>{label}</title>'
            f'<rect class="bar-main" width="{parameters:.2f}" height="10"/>'
            f'<rect class="bar-second" x="{parameters:.2f}" width="{slots:.2f}" '
            f'height="10"/></svg></div>'
        )
    return "\n".join(rows)


def _row(row: int | None) -> str:
    return "shared" if row is None else str(row)


def _section(number: int, table: StoredTableReport) -> str:
    dead = table.dead
    slots = [name for name in table.bytes if name != PARAMETERS]
    facts: dict[str, Any] = {
        "rows": f"{table.rows:,}",
        "dim": table.dim,
        "dtype": table.dtype,
        "parameters": size_text(table.bytes[PARAMETERS]),
        "slots": size_text(sum(table.bytes[name] for name in slots)),
        "mean norm": "no finite row"
        if table.mean_norm is None
        else f"{table.mean_norm:.4g}",
        "rows of zeros": _share(table.zero_rows, table.rows),
        "rows never updated": "not known"
        if dead.count is None
        else _share(dead.count, table.rows),
        "rows equal to another": _share(table.equal.count, table.rows),
    }
    if table.not_finite_rows:
        facts["rows with NaN or infinity"] = _share(table.not_finite_rows, table.rows)
    optimizer = " or ".join(table.optimizers) or "of no known optimizer"
    names = ", ".join(map(_name, slots))
    held = f"slots {names}: {html.escape(optimizer)}" if slots else "no slots"
    compared = "All rows were compared."
    if table.equal.sampled > 1:
        compared = f"An estimate: one row of {table.equal.sampled} was compared."
    equal = '<p class="note">None.</p>'
    if table.equal.groups:
        listed = [
            [count, ", ".join(map(_row, rows)) + (", ..." if count > len(rows) else "")]
            for count, rows in table.equal.groups
        ]
        equal = _table(["equal rows", f"{table.key}s"], listed)
    largest = '<p class="note">None.</p>'
    if table.largest:
        listed = [[_row(row), f"{norm:.6g}"] for row, norm in table.largest]
        largest = _table([table.key, "norm"], listed, numbers=(0, 1))
    return f"""<section class="card" id="table-{number}">
<h2>{_name(table.name)}</h2>
<p class="note">{held}</p>
{_facts(facts)}
<div class="columns">
<div><h3>Rows by norm</h3>
{_histogram(table.norms)}
<p class="note">Euclidean norms, on a logarithmic scale, without rows of zeros.
Exact.</p></div>
<div><h3>Largest rows</h3>
{largest}
<p class="note">Exact.</p></div>
<div><h3>Equal rows</h3>
{equal}
<p class="note">Rows with the same values, other than rows of zeros.
{compared}</p></div>
</div>
<p class="note">Never updated: {html.escape(printable(dead.reason))}</p>
</section>"""


def _histogram(buckets: Sequence[tuple[float, float, int]]) -> str:
    """Draws bars of one width, with ticks on both axes."""
    if not buckets:
        return '<p class="note">No row has a finite norm above 0.</p>'
    width, height, left, right, bottom = 360, 190, 44, 20, 24
    most = max(count for _, _, count in buckets)
    inner, top = width - left - right, 12
    step = min(inner / len(buckets), 48)
    tall = height - bottom - top
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Number of rows by norm">'
    ]
    for share in (0.0, 0.5, 1.0):
        y = height - bottom - tall * share
        parts.append(
            f'<line class="axis" x1="{left}" x2="{width - right}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/><text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{_short(most * share)}</text>"
        )
    for i, (low, high, count) in enumerate(buckets):
        size = tall * count / most
        if count:
            size = max(size, 1.0)  # A bucket with a row is visible.
        parts.append(
            f'<rect class="bar-main" x="{left + i * step + 0.5:.2f}" '
            f'y="{height - bottom - size:.2f}" width="{max(step - 1, 0.5):.2f}" '
            f'height="{size:.2f}"><title>{low:.4g} to {high:.4g}: {count:,} rows'
            "</title></rect>"
        )
    edges = [low for low, _, _ in buckets] + [buckets[-1][1]]
    apart = max(1, -(-len(edges) * 58 // max(int(len(buckets) * step), 1)))
    for i in range(0, len(edges), apart):
        x = left + i * step
        parts.append(
            f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">'
            f"{edges[i]:.3g}</text>"
        )
    return "".join([*parts, "</svg>"])


def _table(
    header: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int] = ()
) -> str:
    """Makes an HTML table; ints, and the columns in `numbers`, are aligned right."""
    rows = [list(row) for row in rows]
    right = {i for row in rows for i, cell in enumerate(row) if isinstance(cell, int)}
    right |= set(numbers)

    def cell(tag: str, column: int, value: Any) -> str:
        kind = ' class="number"' if column in right else ""
        text = f"{value:,}" if isinstance(value, int) else str(value)
        return f"<{tag}{kind}>{html.escape(text)}</{tag}>"

    def line(tag: str, cells: Sequence[Any]) -> str:
        return f"<tr>{''.join(cell(tag, i, c) for i, c in enumerate(cells))}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return (
        f'<div class="wide"><table><thead>{line("th", header)}</thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _facts(facts: dict[str, Any]) -> str:
    items = (
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd></div>"
        for name, value in facts.items()
    )
    return f'<dl class="facts">{"".join(items)}</dl>'


def _name(text: str) -> str:
    """Returns a name as HTML; its writing direction does not affect other text."""
    return f"<bdi>{html.escape(printable(text))}</bdi>"


def _share(count: int, total: int) -> str:
    """Formats a count and its share, "12 (1.2 %)"."""
    return f"{count:,} ({100 * count / max(total, 1):.3g} %)" if count else "0"


def _short(count: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g}{letter}"
    return f"{count:.3g}"
