"""What mkdocs does beyond its own: pages for linked files outside ``docs/``, and parts taken from them.

Documents link to packages' READMEs and to source files, as readers of the repository need it. The site has each
of them as a page of its own under ``source/``; a link to what is not there fails the build.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
README: Final = ROOT / "README.md"
SHOWN_IN_NAV: Final = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", *(
    path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("packages/*/README.md"))
))  # fmt: skip
"""Pages that the navigation names, whether a document links to them or not."""
LANGUAGES: Final = {".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml"}
TABLE_HERE: Final = "<!-- environment table -->"
MSG_BROKEN: Final = "{page}: the link {target} leads to nothing"

_LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
# What tests/page_programs.py reads, and marks of what tools write.
_COMMENT: Final = re.compile(r"^<!-- .*?-->\n", re.M | re.S)
_FENCE: Final = re.compile(r"^(```.*?^```)$", re.M | re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside ``docs/`` that a page links to, and for those in the navigation."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    waiting += [ROOT / name for name in SHOWN_IN_NAV]
    seen = set(waiting)
    files_added = [_added(path, config) for path in waiting if not path.is_relative_to(DOCS)]
    while waiting:
        page = waiting.pop()
        for target in linked(page):
            if target not in seen and not target.is_relative_to(DOCS):
                seen.add(target)
                files_added.append(_added(target, config))
                if target.suffix == ".md":
                    waiting.append(target)
    for file in files_added:
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_others: Any) -> str:
    """Let links lead to the site's pages; leave out what is for tests."""
    original = original_of(page.file.src_uri)
    if original.suffix != ".md":
        return markdown
    here = posixpath.dirname(page.file.src_uri)
    if TABLE_HERE in markdown:
        markdown = markdown.replace(TABLE_HERE, environment_table())

    def moved(match: re.Match[str]) -> str:
        target = _resolved(original, match[1])
        return posixpath.relpath(site_uri(target), here or ".") + match[2]

    return _outside_of_code(markdown, lambda text: _LINK.sub(moved, _COMMENT.sub("", text)))


def environment_table() -> str:
    """README's table of environment variables, whose links are those of a page in ``docs/`` here.

    It is written from the declarations by ``environment_table.py``, and tests compare it with them.
    """
    _, found, _ = re.split(
        r"<!-- written by tools/environment_table.py -->|<!-- end -->", README.read_text("utf-8")
    )
    return _LINK.sub(
        lambda match: os.path.relpath(README.parent / match[1], DOCS) + match[2], found
    )


def linked(page: Path) -> Iterator[Path]:
    """The files of this repository that a Markdown file links to."""
    for part in _FENCE.split(page.read_text("utf-8"))[::2]:
        for match in _LINK.finditer(part):
            yield _resolved(page, match[1])


def original_of(uri: str) -> Path:
    """The file that a page of the site shows."""
    if not uri.startswith("source/"):
        return DOCS / uri
    path = ROOT / uri.removeprefix("source/")
    return path if path.is_file() else path.with_suffix("")


def site_uri(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"source/{name}" if path.suffix == ".md" else f"source/{name}.md"


def _resolved(page: Path, target: str) -> Path:
    path = Path(os.path.normpath(page.parent / target))
    if path.is_dir() and (path / "README.md").is_file():
        path /= "README.md"
    if not path.exists() or not path.is_relative_to(ROOT):
        raise PluginError(MSG_BROKEN.format(page=page.relative_to(ROOT), target=target))
    return path


def _added(path: Path, config: Any) -> File:
    return File.generated(config, site_uri(path), content=_page(path))


def _page(path: Path) -> str:
    """The Markdown of a page that shows a file or a folder."""
    if path.suffix == ".md":
        return path.read_text("utf-8")
    name = path.relative_to(ROOT).as_posix()
    head = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    if path.is_dir():
        return head + "".join(f"- `{each.name}`\n" for each in sorted(path.iterdir()))
    language = LANGUAGES.get(path.suffix, "text")
    return f"{head}````{language}\n{path.read_text('utf-8')}\n````\n"


def _outside_of_code(markdown: str, change: Any) -> str:
    parts = _FENCE.split(markdown)
    return "".join(part if n % 2 else change(part) for n, part in enumerate(parts))
