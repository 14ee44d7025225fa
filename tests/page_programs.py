"""The Python blocks of the documentation's pages, as programs that can be run.

The blocks of a page are one program, in their order, as the cells of a notebook are. A comment in front of a
block says where that is otherwise; a reader of the page does not see it:

- ``<!-- own program -->`` begins a new one; ``<!-- own program, CPU_NUM_DEVICES=8 -->`` with these variables;
- ``<!-- not run: REASON -->`` for what cannot run here, such as a part of a program;
- ``<!-- needs NAME -->`` begins a new one that is skipped where the module NAME is not installed;
- ``<!-- before: CODE -->`` (CODE on lines of its own) is run in front of the block;
- ``<!-- output -->`` in front of a block of text: what the block before it prints (``...`` for anything).
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from source_tree import ROOT

PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
)
_BLOCK = re.compile(
    r"(?P<comments>(?:^<!-- (?:own program|not run:|needs|before:|output).*?-->\n+)*)"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$",
    re.M | re.S,
)
_COMMENT = re.compile(r"<!-- (own program|not run|needs|before|output)\b(.*?)-->", re.S)


@dataclasses.dataclass
class Block:
    """Lines of Python, where they stand, and what they print where the page says so."""

    line: int  # of the first line, counted from 0
    code: str
    before: str = ""
    output: str | None = None


@dataclasses.dataclass
class Program:
    """Blocks that run one after another in one process."""

    page: Path
    environment: dict[str, str]
    needs: str | None = None
    blocks: list[Block] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.blocks[0].line}"


@dataclasses.dataclass
class Page:
    """What is on one page: its programs, and the blocks that are not run, each with the reason."""

    programs: list[Program]
    not_run: dict[int, str]


def read(path: Path) -> Page:
    """Find a page's blocks. Raises ValueError for a comment that is at no block of its kind."""
    text = path.read_text("utf-8")
    page = Page([], {})
    last: Block | None = None
    for match in _BLOCK.finditer(text):
        said = {kind: rest.strip(" ,:\n") for kind, rest in _COMMENT.findall(match["comments"])}
        line = text.count("\n", 0, match.start("code"))
        if match["language"] == "python":
            last = _add(page, path, said, line, match)
        elif "output" in said:
            if last is None:
                raise ValueError(f"{path}:{line}: output of no block")
            last.output, last = match["code"], None
        elif said:
            raise ValueError(f"{path}:{line}: {said} is for Python blocks")
    return page


def _add(
    page: Page, path: Path, said: dict[str, str], line: int, match: re.Match[str]
) -> Block | None:
    if "not run" in said:
        page.not_run[line] = said["not run"]
        return None
    if not page.programs or said.keys() & {"own program", "needs"}:
        variables = dict(re.findall(r"(\w+)=(\S+)", said.get("own program", "")))
        page.programs.append(Program(path, variables, said.get("needs")))
    indent = len(match["indent"])
    code = "".join(row[indent:] or "\n" for row in match["code"].splitlines(keepends=True))
    block = Block(line, code, said.get("before", ""))
    page.programs[-1].blocks.append(block)
    return block


def source_of(program: Program, separator: str) -> str:
    """The text of a Python program: the blocks, with ``separator`` printed behind each.

    A job's processes are forked, which spares each of them the import of torch. Errors and reports name the
    line of a block in ``example.py``, as the pages show them.
    """
    parts = [(block.before, block.code) for block in program.blocks]
    return f"""
def _run(names):
    import functools, linecache, torch, torch_xla
    torch.set_num_threads(1)
    torch_xla.launch = functools.partial(torch_xla.launch, start_method="fork")
    for before, code in {parts!r}:
        exec(before, names)
        linecache.cache["example.py"] = (len(code), None, code.splitlines(True), "example.py")
        exec(compile(code, "example.py", "exec"), names)
        print({separator!r}, flush=True)
_run(globals())
"""
