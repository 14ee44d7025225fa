"""The command line ``xla-plan``."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from xla_plan.planning import depths, manifest
from xla_plan.planning.chips import chip_of
from xla_plan.planning.plans import Plan, plan
from xla_plan.planning.search import Guess, rank, search
from xla_plan.reports import html_page, tables
from xla_plan.steps.candidate import Candidate, Mesh, is_script, parse_mesh, parse_option, step_home

DESCRIPTION: Final = (
    "Plans a PyTorch training step for TPUs without having them: memory, traffic, time, sharding."
)
EPILOG: Final = """example:
  xla-plan run examples/pods/llama_8b.py:training_step --topology v5e:4x4 --mesh fsdp=16 --html plan.html

A step function takes the mesh and the options of --set, and returns (model, optimizer, step); calling step()
records one training step. docs/plan.md explains each number."""
MSG_MESH_NEEDED: Final = (
    "give a mesh for {step}, such as --mesh fsdp=16; its function is called with the mesh (--mesh none: each "
    "device by itself)"
)
MSG_OPTION: Final = (
    "--set {text}: write a keyword argument and its value, such as --set length=2048"
)
MSG_NO_FOLDER: Final = "{option} {path}: the folder {folder} does not exist"
MSG_NO_FILE: Final = "{step}: the file {home} does not exist"
MSG_INTERRUPTED: Final = "interrupted; the candidates that were compiled are not shown"
_INTERRUPTED: Final = 130  # the status that a shell reports for a command that SIGINT ended
_WIDTH: Final = 160  # of output that does not go to a terminal


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = argparse.ArgumentParser(
        "xla-plan", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run", help="compile a step for candidates, and report what each needs"
    )
    add_step(run)
    run.add_argument(
        "--mesh",
        action="append",
        default=[],
        help="axes and sizes: fsdp=16 or data=2,fsdp=8; may be repeated",
    )
    run.add_argument(
        "--cache", type=Path, help="keep the programs in this folder, for hosts with such chips"
    )
    run.add_argument(
        "--depth",
        help="compile few layers and extrapolate: layers=4,8,32 (two numbers, then the wanted one)",
    )
    run.set_defaults(command=run_command)
    find = commands.add_parser(
        "search", help="find a mesh: rank all by arithmetic, compile the best"
    )
    add_step(find)
    find.add_argument(
        "--axes",
        default="data,fsdp,tensor",
        help="the axes that the step function supports (%(default)s)",
    )
    find.add_argument(
        "--compile",
        type=int,
        default=3,
        help="compile so many kinds of meshes, which differ in more than the batch, two of each (%(default)s)",
    )
    find.add_argument("--cache", type=Path, help="keep the programs in this folder")
    find.set_defaults(command=search_command)
    return top


def add_step(command: argparse.ArgumentParser) -> None:
    """Add the arguments for the step, its topologies and options, and the output."""
    command.add_argument(
        "step",
        help="module:function or file.py:function, called with a mesh; or a script, with its arguments after --",
    )
    command.add_argument(
        "--topology",
        action="append",
        required=True,
        help="v5e:4x4, v5p:2x2x4, v6e:16x16*2; may be repeated",
    )
    command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="options",
                         help="a keyword argument of the step function; NAME=A|B tries both")  # fmt: skip
    command.add_argument("--timeout", type=float, help="the seconds that one compilation may take")
    command.add_argument("--json", type=Path, help="write all figures to this file")
    command.add_argument("--html", type=Path, help="write a page with plots to this file")


def check_given(chosen: argparse.Namespace) -> None:
    """Raise ValueError for mistakes that would otherwise be noticed only after compiling, or in each candidate."""
    for topology in chosen.topology:
        chip_of(topology)
    home = step_home(chosen.step)
    if home.endswith(".py") and not Path(home).is_file():
        raise ValueError(MSG_NO_FILE.format(step=chosen.step, home=home))
    for option in ("json", "html"):
        path = getattr(chosen, option)
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(
                MSG_NO_FOLDER.format(option=f"--{option}", path=path, folder=path.resolve().parent)
            )


def candidates(
    topologies: Sequence[str], meshes: Sequence[Mesh], options: Sequence[str]
) -> list[Candidate]:
    """All combinations; an option ``NAME=A|B`` has two values. Raises ValueError for an option of another form."""
    varied = []
    for text in options:
        name, equals, values = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(MSG_OPTION.format(text=text))
        varied.append([parse_option(f"{name}={value}") for value in values.split("|")])
    return [
        Candidate(topology, mesh, dict(chosen))
        for topology, mesh, chosen in itertools.product(
            topologies, meshes or [()], itertools.product(*varied)
        )
    ]


def run_command(chosen: argparse.Namespace) -> int:
    """Measure the candidates; the exit status is 1 if none fits."""
    script = is_script(chosen.step)
    if not chosen.mesh and not script:
        raise SystemExit(MSG_MESH_NEEDED.format(step=chosen.step))
    meshes = [() if text == "none" else parse_mesh(text) for text in chosen.mesh]
    tried = candidates(chosen.topology, meshes, chosen.options)
    depth = depths.parse_depth(chosen.depth) if chosen.depth else None
    plans = plan(
        chosen.step, tried, cache=chosen.cache, arguments=chosen.arguments, timeout=chosen.timeout,
        depth=depth, tell=tell,
    )  # fmt: skip
    if chosen.cache is not None:
        command = " ".join((chosen.step, *chosen.arguments))
        tell(f"manifest: {manifest.write(chosen.cache, command, plans)}")
    report(plans, chosen)
    return int(not any(p.fits for p in plans))


def search_command(chosen: argparse.Namespace) -> int:
    """Search on each topology; the exit status is 1 if nothing fits."""
    axes = [axis.strip() for axis in chosen.axes.split(",")]
    compiled: list[Plan] = []
    for topology in chosen.topology:
        plans: list[Plan] = []
        for one in candidates([topology], [], chosen.options):
            result = search(
                chosen.step, topology, axes, one.options, compiled=chosen.compile,
                cache=chosen.cache, timeout=chosen.timeout, tell=tell,
            )  # fmt: skip
            for guess in result.guesses:
                out = guess.out or _guessed(guess, result.guesses)
                tell(f"  {guess.candidate.mesh_text}: {out}")
            plans += result.plans
        compiled += sorted(plans, key=rank)
    if chosen.cache is not None:
        tell(f"manifest: {manifest.write(chosen.cache, chosen.step, compiled)}")
    report(compiled, chosen)
    return int(not any(p.fits for p in compiled))


def _guessed(guess: Guess, every: Sequence[Guess]) -> str:
    best = min(g.seconds for g in every if not g.out)
    return f"{guess.held / 2**30:.1f} GiB held, {guess.seconds / best:.2f} times the best guess"


def report(plans: Sequence[Plan], chosen: argparse.Namespace) -> None:
    """Print the tables, and write the files that were asked for."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    tables.show(plans, console)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([p.as_json() for p in plans], indent=1) + "\n")
    if chosen.html is not None:
        chosen.html.write_text(html_page.render(plans, f"xla-plan: {chosen.step}"), "utf-8")
        console.print(f"page: {chosen.html.resolve()}")


def tell(line: str) -> None:
    """Report progress on stderr, apart from the tables."""
    sys.stderr.write(f"xla-plan: {line}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    chosen = parser().parse_args(given[:end])
    chosen.arguments = given[end + 1 :]
    try:
        check_given(chosen)
        status: int = chosen.command(chosen)
    except ValueError as error:
        sys.stderr.write(f"xla-plan: {error}\n")
        return 2
    except KeyboardInterrupt:
        tell(MSG_INTERRUPTED)
        return _INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
