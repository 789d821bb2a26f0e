"""The pages link to what exists, and their programs and tables are right."""

from __future__ import annotations

import pathlib
import re
import tomllib
from collections.abc import Iterable, Iterator

import documented_pages
import forked
import pytest
from lint_report import sources

import tpu_embedding as te
from tpu_embedding.optimizers import OPTIMIZERS, base

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted(path for path in DOCS.glob("*.md")),
]
PROGRAMS = [page for page in PAGES if documented_pages.program(page)]
FIRST_TIER = ("README.md", "tutorial.md")
READMES = [*ROOT.glob("tests/**/README.md"), *ROOT.glob("tpu_embedding/**/*.md")]


def prose(page: pathlib.Path) -> str:
    """The text of a page without code blocks and comments."""
    code = r"^```.*?^```|^<!--.*?-->"
    return re.sub(code, "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: pathlib.Path) -> Iterator[str]:
    """The targets of a page's links to files."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"https?:", target):
            yield target


def anchors(page: pathlib.Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path):
    for target in links(page):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_a_page_are_whole(page: pathlib.Path):
    assert re.findall(r"^ +```.*", page.read_text(), re.MULTILINE) == []
    lines = ["", *prose(page).splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("#"):
            assert not before, line
        elif line.startswith("|") and not before.startswith("|"):
            assert after.startswith(("|--", "| --")), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_products_are_code(page: pathlib.Path):
    """Markdown would take the signs of two products for emphasis."""
    text = re.sub(r"(`+).*?\1|\*\*", "", prose(page), flags=re.DOTALL)
    assert re.findall(r".*[\w)]\*[\w(|].*", text) == []


@pytest.mark.parametrize("page", PAGES + READMES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: pathlib.Path):
    names = re.findall(r"(?<![\w*<>{}./-])[\w/]+\.(?:py|cc|h|yml)\b", page.read_text())
    known = [f"/{name}" for name in sources(".py", ".cc", ".h")] + ["/mkdocs.yml"]
    for name in {*names} - {"examples/NN_name.py"}:
        assert any(path.endswith(f"/{name}") for path in known), name


def test_quoted_errors_are_raised():
    rows = (DOCS / "errors.md").read_text().split("|---|---|---|")[1].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| ")]
    quoted = [text for cell in cells for text in re.findall(r'"([^"]+)"', cell)]
    code = [(ROOT / name).read_text() for name in sources(".py", ".cc", ".h")]
    # Literals that stand beside each other are one text.
    text = re.sub(r'"\s*,?\s*f?"', "", "\n".join(code))
    assert len(quoted) > len(cells) > 10
    assert [words for words in quoted if words not in text] == []


def test_each_folder_of_tests_is_described():
    text = (ROOT / "tests" / "README.md").read_text()
    folders = {path.parent for path in ROOT.glob("tests/*/*") if path.is_file()}
    names = {folder.name for folder in folders} - {"__pycache__"}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_every_page_is_reached_from_the_questions():
    assert "docs/index.md" in set(links(ROOT / "README.md"))
    named = {target.partition("#")[0] for target in links(DOCS / "index.md")}
    assert {page.name for page in DOCS.glob("*.md")} - named == {"index.md"}


def test_the_readme_is_short_and_names_every_example():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    examples = [path.name for path in (ROOT / "examples").glob("[0-9][0-9]_*.py")]
    assert examples
    assert [name for name in examples if name not in text] == []


def test_extras_are_named_as_pip_looks_for_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {*project["optional-dependencies"]}
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    text = "".join(
        path.read_text() for path in [*pages, *(ROOT / "tpu_embedding").rglob("*.py")]
    )
    named = re.findall(r"'(?:\.|tpu_embedding)\[([a-z_,-]+)\]'", text)
    assert named
    assert {extra for each in named for extra in each.split(",")} <= known
    assert [extra for extra in known if "_" in extra] == []


def words(pages: Iterable[pathlib.Path]) -> int:
    """The number of words of pages, without code."""
    every = [word for page in pages for word in prose(page).split()]
    return len([word for word in every if re.search(r"\w", word)])


def test_pages_of_users_have_24000_words_and_all_pages_30000():
    pages = {ROOT / "README.md", *DOCS.glob("*.md")}
    navigation = (ROOT / "mkdocs.yml").read_text().partition("- Contribute:")[2]
    for_maintainers = {ROOT / name for name in re.findall(r"docs/\S+", navigation)}
    assert for_maintainers < pages
    assert words(pages - for_maintainers) <= 24_000
    assert words(pages) <= 30_000


def test_figures_of_the_readme_are_those_of_its_page():
    rows = re.findall(r"^\| Ada.*", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) >= 3
    page = (DOCS / "keras_embedding.md").read_text().splitlines()
    assert [row for row in rows if row not in page] == []
    times = re.findall(r"([\d,]+)(?: to (\d+))? ms\b", prose(ROOT / "README.md"))
    figures = re.findall(r"(?<=\| )[\d.]+", (DOCS / "performance.md").read_text())
    rounded = {str(round(float(figure))) for figure in figures}
    shown = {time.replace(",", "") for pair in times for time in pair if time}
    assert len(shown) >= 6
    assert shown <= rounded


def test_the_picture_of_keras_rows_has_the_figures_of_its_page():
    picture = (DOCS / "images" / "keras_rows.svg").read_text()
    rows = re.findall(
        r"^\| Adagrad (\|.*)", (DOCS / "keras_embedding.md").read_text(), re.M
    )
    assert len(rows) >= 3
    for row in rows:
        for figure in re.findall(r"(?<=\| )[\d,]+(?= \|)", row)[:4]:
            assert f">{figure}</text>" in picture, figure


def test_the_picture_of_growing_tables_has_the_words_of_its_example():
    example = (ROOT / "examples" / "09_growing.py").read_text()
    words_of_lines = re.findall(r'\("(\w+)", "[-:]+"\)', example)
    assert len(words_of_lines) == 3
    picture = (DOCS / "images" / "growing.svg").read_text()
    assert [word for word in words_of_lines if f"<!-- {word} -->" not in picture] == []


def test_optimizers_are_listed_with_their_engines():
    text = (DOCS / "choose.md").read_text()
    for name, optimizer in OPTIMIZERS.items():
        v2_v4 = "yes" if optimizer.tpu else "no"
        sparse_core = "yes" if optimizer.sparse_core_op else "no"
        row = rf"\| `{name}` \| yes \| {v2_v4} \| {sparse_core} \|"
        assert re.search(row, text) or {v2_v4, sparse_core} == {"no"}, name
        assert f"| `{name}`" in (DOCS / "semantics.md").read_text()
        assert name in te.__all__
    own_op = [name for name in OPTIMIZERS if OPTIMIZERS[name].sparse_core_op]
    others = f"- optimizers other than {', '.join(own_op[:-1])} and {own_op[-1]}"
    assert others in (DOCS / "sparse_core.md").read_text()


def test_options_of_optimizers_are_listed_with_their_engines():
    text = (DOCS / "choose.md").read_text()
    for option in base.OPTIONS:
        if option.lacking:
            cells = [
                "no" if engine in option.lacking else "yes"
                for engine in ("host", "tpu_v2_v4", "sparse_core")
            ]
            row = rf"\| [^|]*`{option.name}`[^|]* \| " + r"[^|]* \| ".join(cells)
            assert re.search(row, text), option.name


def test_every_layer_is_described():
    text = (DOCS / "architecture.md").read_text()
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (layers,) = [
        contract["layers"]
        for contract in configuration["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    ]
    for name in [name for layer in layers for name in re.split(" [|:] ", layer)]:
        assert f"`{name}/`" in text or f"`{name}.py`" in text or f"`{name}/" in text


def test_each_page_with_code_is_run():
    assert {DOCS / name for name in ("tutorial.md", "preprocessing.md")} <= {*PROGRAMS}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=[pytest.mark.second_tier] * (p.name not in FIRST_TIER))
        for p in PROGRAMS
    ],
    ids=lambda page: page.name,
)
def test_the_program_of_a_page_runs(page: pathlib.Path):
    ran = forked.run(["-W", "ignore", documented_pages.__file__, page])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if page.name == "README.md":  # The first thing that a reader runs.
        assert "WARNING:absl" not in ran.stdout + ran.stderr


def test_the_output_that_a_page_shows_is_that_of_its_program(tmp_path: pathlib.Path):
    pages = [tmp_path / "right.md", tmp_path / "wrong.md"]
    for page, shown in zip(pages, ("5\n", "6\n"), strict=True):
        page.write_text(f"```python\nprint(5)\n```\n\n```text\n{shown}```\n")
    ran = forked.run([documented_pages.__file__, *pages])
    assert ran.returncode == 1
    assert f"ran {pages[0]}" in ran.stdout
    assert "wrong.md shows what its program does not print:\n6\n" in ran.stderr


def test_lines_of_a_program_are_those_of_its_page(tmp_path: pathlib.Path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\na = 1\n```\n<!-- setup\nb = 2\n-->\n")
    assert documented_pages.program(page).splitlines()[2:8] == [
        "",
        "a = 1",
        "",
        "",
        "b = 2",
        "",
    ]
    page.write_text("- item\n\n  ```python\n  a = 1\n  ```\n")
    with pytest.raises(ValueError, match="indented or not closed"):
        documented_pages.program(page)
