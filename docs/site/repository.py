"""The repository's other files in the site, so that a link which works on GitHub works here.

README, CONTRIBUTING, CHANGELOG, notebooks and the studies' READMEs become pages, scripts and recipes become
pages with their source, and what was measured (``results/``, and the studies' files) is copied. A relative
link to any of these is turned to where it went.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "results/README.md": "results/index.md",
}
STUDIES = "studies"
PAGES |= {
    path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).with_name("index.md").as_posix()
    for path in sorted((ROOT / STUDIES).glob("*/README.md"))
}
SOURCES = {"examples": "*.py", "benchmarks": "*.py", "recipes": "**/*.toml", STUDIES: "*/*.py"}
TEXTS = ("LICENSE", "CITATION.cff", "Makefile", "mkdocs.yml")
RESULTS = "results"

_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def site_path(path: str) -> str | None:
    """Where a file of the repository is in the site, None if it is not there."""
    if path in PAGES:
        return PAGES[path]
    if path == RESULTS:
        return f"{RESULTS}/index.md"
    if path == STUDIES:
        return f"{STUDIES}.md"
    folder, _, inside = path.partition("/")
    if folder == "docs":
        return inside.removesuffix(".ipynb") + ".md" if inside.endswith(".ipynb") else inside
    if folder in SOURCES and path.endswith((".py", ".toml")):
        return posixpath.splitext(path)[0] + ".md"
    return path if folder in (RESULTS, STUDIES) or path in TEXTS else None


def turned(markdown: str, source: str, page: str) -> str:
    """The text of ``source``, a path in the repository, with its relative links as ``page`` needs them."""

    def link(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if ":" in target:
            return match[0]
        there = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        if there is None:
            return match[0]  # the strict build names it
        return f"{opening}{posixpath.relpath(there, posixpath.dirname(page) or '.')}{anchor or ''}{closing}"

    parts = _CODE.split(markdown)
    return "".join(part if index % 2 else _LINK.sub(link, part) for index, part in enumerate(parts))


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: the files of the site."""
    for source, page in PAGES.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in _results():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path in TEXTS:
        if (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for file in sorted((ROOT / "docs").glob("*.ipynb")):
        page = str(site_path(file.relative_to(ROOT).as_posix()))
        files.append(File.generated(config, page, content=notebook_page(file.read_text(encoding="utf-8"))))
    for folder, pattern in SOURCES.items():
        for file in sorted((ROOT / folder).glob(pattern)):
            path = file.relative_to(ROOT).as_posix()
            files.append(File.generated(config, str(site_path(path)), content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs: the text of a page."""
    path = page.file.src_uri
    source = {page: source for source, page in PAGES.items()}.get(path, f"docs/{path}")
    return turned(markdown, source, path)


def _results() -> Iterator[str]:
    for file in sorted([*(ROOT / RESULTS).rglob("*"), *(ROOT / STUDIES).glob("*/*/*")]):
        if file.is_file() and file.suffix not in (".md", ".pyc"):
            yield file.relative_to(ROOT).as_posix()


def notebook_page(text: str) -> str:
    r"""A notebook as Markdown: its words, its code, and what the code printed.

    >>> cells = [{"cell_type": "markdown", "source": ["# Title"]}]
    >>> cells += [{"cell_type": "code", "source": ["print(1)"], "outputs": [{"text": ["1\n"]}]}]
    >>> print(notebook_page(json.dumps({"cells": cells})))
    # Title
    <BLANKLINE>
    ```python
    print(1)
    ```
    <BLANKLINE>
    ```text
    1
    ```
    <BLANKLINE>
    """
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(each["text"]) for each in cell.get("outputs", ()))
        parts += [f"```text\n{printed.rstrip()}\n```"] if printed else []
    return "\n\n".join(parts) + "\n"


def _source_page(path: str) -> str:
    language = "python" if path.endswith(".py") else "toml"
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"# {path}\n\n```{language}\n{text}```\n"
