"""The HTML page of ``xla-debug run``: plots and tables in one file without references to others."""

from __future__ import annotations

import html
import string
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Final

from xla_core.support import svg
from xla_core.support.counters import render_bytes
from xla_debug.run_report import advice, findings, plots
from xla_debug.run_report.recorder import Recorder
from xla_debug.run_report.records import PARTS, Step, What
from xla_debug.steps.recompile_text import Explanation

LABELS: Final = {
    "tracing": "Python and tracing",
    "sync": "preparing the run",
    "compile": "compiling",
    "execute": "launching and waiting for the device",
    "transfer": "copying to and from the device",
    "data": "waiting for data",
}
# Okabe and Ito's palette, whose colours can be distinguished with every kind of colour vision
_COLOURS: Final = {
    "tracing": "#56B4E9", "sync": "#F0E442", "compile": "#D55E00", "execute": "#009E73",
    "transfer": "#CC79A7", "data": "#E69F00",
}  # fmt: skip
# powers of 1024, as in the tables
_UNITS: Final = (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10))
# With more bars, they would be narrower than a pixel.
_MAX_BARS: Final = 400

# Columns of sentences; on a narrow screen they are below the other columns of their row.
_TEXTS: Final = ("line, and what was different", "line", "why")
_NUMBER: Final = "no."


def render(recorder: Recorder, title: str) -> str:
    """The whole page of a run, with ``title`` as its heading."""
    body = _filled(
        "run.html",
        title=html.escape(title),
        tiles=_tiles(recorder),
        advice=_advice(recorder),
        steps=_steps(recorder) if recorder.steps else "",
    )
    return page(title, body)


def page(title: str, body: str) -> str:
    """A whole page in this package's style; ``title`` is text, ``body`` HTML."""
    return _filled("page.html", title=html.escape(title), plot_style=svg.STYLE, body=body)


def _filled(name: str, **parts: str) -> str:
    """The template ``name``, a file in this folder, with HTML in place of each of its names."""
    # read it now and not at import: most processes write no page
    text = resources.files(__package__).joinpath(name).read_text("utf-8")
    return string.Template(text).substitute(parts)


def _steps(recorder: Recorder) -> str:
    return _filled(
        "steps.html",
        time_plot=_time_plot(recorder.steps),
        cut_off=_cut_off(recorder.steps),
        parts=_parts(recorder),
        causes_plot=_causes_plot(recorder),
        causes=_causes(recorder),
        memory_plot=_memory_plot(recorder.steps),
        spots=_spots(recorder),
        compilations=_compilations(recorder.explanations()),
    )


def _tiles(recorder: Recorder) -> str:
    quiet = advice.steady(recorder)
    explanations = recorder.explanations()
    fallbacks = sum(s.count for s in recorder.spots.values() if s.what is What.FALLBACK)
    tiles = [
        ("steps", str(len(recorder.steps))),
        ("seconds in all", f"{recorder.seconds:.1f}"),
        ("seconds before the device was used", f"{recorder.startup:.1f}"),
        ("ms per step that compiles nothing", f"{sum(quiet.values()):.2f}" if quiet else "none"),
        ("programs made", str(len(explanations))),
        ("seconds compiling", f"{sum(e.seconds for e in explanations):.1f}"),
        ("operators run on the CPU", str(fallbacks)),
    ]
    if recorder.peak:
        tiles.append(("of device memory at most", render_bytes(recorder.peak)))
    return "".join(f'<div class="tile"><b>{v}</b>{html.escape(k)}</div>' for k, v in tiles)


def _advice(recorder: Recorder) -> str:
    changes = advice.advice(recorder)
    note = f'<p class="note">{html.escape(advice.note(recorder))}</p>'
    if not changes:
        return f"<p>Nothing stands out: no change would save 1 % of this run.</p>{note}"
    items = "".join(
        f"<li><strong>{html.escape(a.title)} &mdash; {html.escape(a.cost)}</strong>"
        f"{_place(a.where, a.code)}{html.escape(a.how)}</li>"
        for a in changes
    )
    return f'<ol class="first">{items}</ol>{note}'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int]) -> str:
    """An HTML table. ``columns`` and ``rows`` are HTML; ``numeric`` are the indices of columns with numbers."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{_class(i, numeric, columns)}>{v}</{tag}>" for i, v in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    kind = " class=told" if columns[-1] in _TEXTS else ""
    if columns[0] == _NUMBER:
        kind = ' class="told counted"'
    return f'<div class="wide"><table{kind}><tr>{cells("th", columns)}</tr>{body}</table></div>'


def _class(column: int, numeric: Sequence[int], columns: Sequence[str]) -> str:
    if column in numeric:
        return " class=n"
    if columns[column] in _TEXTS:
        return " class=t"
    return " class=p" if columns[column] in ("program", "what") else ""


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _place(where: str, line: str) -> str:
    """HTML for a place in the script and, below it, the code there."""
    shown = f"<code class=line>{html.escape(line)}</code>" if line else "<br>"
    return _code(where) + shown


def _parts(recorder: Recorder) -> str:
    totals = advice.totals(recorder)
    quiet = advice.steady(recorder)
    whole = sum(totals.values()) or 1.0
    rows = [
        [
            LABELS[p],
            f"{totals[p]:.2f}",
            f"{totals[p] / whole:.0%}",
            f"{quiet[p]:.2f}" if quiet else "",
        ]
        for p in PARTS
    ]
    return table(["part", "seconds", "share", "ms per step that compiles nothing"], rows, (1, 2, 3))


def _causes(recorder: Recorder) -> str:
    rows = [
        [
            html.escape(row.cause.value),
            str(row.count),
            f"{row.seconds:.2f}",
            f"{_place(row.where, row.example.code)}{html.escape(row.example.text)}",
        ]
        for row in findings.causes(recorder)
    ]
    return table(["cause", "programs", "seconds", _TEXTS[0]], rows, (1, 2))


def _spots(recorder: Recorder) -> str:
    spots = sorted(recorder.spots.values(), key=lambda s: -s.nanoseconds)
    if not spots:
        return "<p>Every operator ran on the device, and no value was read.</p>"
    rows = [
        [
            _code(s.label),
            str(s.count),
            advice.seconds_text(s.nanoseconds / 1e9),
            _place(advice.place(s.frame), advice.code(s.frame)),
        ]
        for s in spots
    ]
    return table(["what", "times", "time", _TEXTS[1]], rows, (1, 2))


def _compilations(explanations: Sequence[Explanation]) -> str:
    rows = [
        [
            str(number),
            _code(e.program),
            str(e.operations),
            f"{e.seconds:.2f}" + (" (cache)" if e.from_cache else ""),
            f"<b>{html.escape(e.cause.value)}</b> {_place(e.where(), e.code)}{html.escape(e.text)}",
        ]
        for number, e in enumerate(explanations, 1)
    ]
    return table([_NUMBER, "program", "operations", "seconds", _TEXTS[2]], rows, (0, 2, 3))


# -- plots --------------------------------------------------------------------------------------


def _binned(steps: Sequence[Step]) -> list[list[Step]]:
    width = max(1, -(-len(steps) // _MAX_BARS))
    return [list(steps[i : i + width]) for i in range(0, len(steps), width)]


def _time_plot(steps: Sequence[Step]) -> str:
    bins = _binned(steps)
    series = [
        plots.Series(
            LABELS[part],
            _COLOURS[part],
            [sum(s.parts[part] for s in group) / len(group) / 1e6 for group in bins],
        )
        for part in PARTS
    ]
    per = "" if len(bins) == len(steps) else f", mean of {len(bins[0])} steps"
    return plots.stacked_bars(
        [group[0].number for group in bins], series,
        x_title=f"step{per}", y_title="milliseconds", top=_shown_milliseconds(bins)[0],
    )  # fmt: skip


def _shown_milliseconds(bins: Sequence[Sequence[Step]]) -> tuple[float, float]:
    """The top of the plot of times, and the highest bar, in milliseconds."""
    # A step that compiles may take a hundred times as long as the others, which must stay visible.
    whole = sorted(sum(s.wall for s in group) / len(group) / 1e6 for group in bins)
    return 1.3 * whole[int(0.9 * (len(whole) - 1))], whole[-1]


def _cut_off(steps: Sequence[Step]) -> str:
    shown, highest = _shown_milliseconds(_binned(steps))
    if highest <= shown:
        return ""
    text = f"The highest bar, which is cut off here, is {highest:.0f} ms; point at it to see its parts."
    return f'<p class="note">{text}</p>'


def _causes_plot(recorder: Recorder) -> str:
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for row in findings.causes(recorder):
        label = row.cause.value
        seconds[label] = seconds.get(label, 0.0) + row.seconds
        counts[label] = counts.get(label, 0) + row.count
    rows = [
        (label, took, f"{counts[label]} program{'s' * (counts[label] > 1)}, {took:.2f} s")
        for label, took in seconds.items()
    ]
    return plots.horizontal_bars(rows, _COLOURS["compile"], "seconds")


def _memory_plot(steps: Sequence[Step]) -> str:
    known = [s for s in steps if s.memory is not None]
    most = max((s.memory or 0 for s in known), default=0)
    unit, size = next((u for u in _UNITS if most >= u[1]), _UNITS[-1])
    points = [
        (group[0].number, max(s.memory or 0 for s in group) / size) for group in _binned(known)
    ]
    return plots.line(points, "#0072B2", x_title="step", y_title=unit, unit=unit)
