"""The HTML page of a flight report, as one file: which process waits for which, and the records of each one."""

from __future__ import annotations

import html

from xla_core.contract.foreign_values import JsonObject
from xla_core.support import flight_report
from xla_debug.run_report.html_report import page, table


def render(report: JsonObject) -> str:
    """The whole page of a flight report."""
    processes = report["processes"]
    title = f"Flight report of job {report['job']}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="note">{html.escape(report["occasion"])}: {len(processes)} of {report["count"]} processes</p>',
        *(f"<pre>{html.escape(reason)}</pre>" for reason in flight_report.reasons(report)),
        "<h2>Who waits for whom</h2>",
        _waits(report),
        *(f"<p>{html.escape(line)}</p>" for line in flight_report.headline(report)),
        "<h2>Processes</h2>",
        _processes(processes),
    ]
    for number, one in processes.items():
        body += [f"<h2>Ordinal {html.escape(number)}</h2>", _records(one)]
        body.append(f"<pre>{html.escape(one['stack'])}</pre>")
    return page(title, "".join(body))


def _waits(report: dict[str, object]) -> str:
    rows = [
        [
            str(wait.who),
            ", ".join(map(str, wait.whom)),
            _code(wait.what),
            str(wait.number or ""),
            f"{wait.seconds:.1f}",
            _code(wait.line),
        ]
        for wait in flight_report.waits(report)
    ]
    columns = ["ordinal", "waits for", "in", "collective", "seconds", "line"]
    return table(columns, rows, (0, 3, 4)) if rows else "<p>No process waits for another.</p>"


def _processes(processes: JsonObject) -> str:
    rows = []
    for number, one in processes.items():
        times = one["steps"]
        rows.append(
            [
                number,
                f"{one['pid']} on {html.escape(one['host'])}",
                str(times["ended"]),
                f"{times['since']:.1f}" if times["ended"] else "",
                f"{times['usual'] * 1e3:.1f}" if times["usual"] is not None else "",
                f"{times['own'] * 1e3:.1f}" if times["own"] is not None else "",
                str(one["launched"]["all"]),
                _code(one["place"]) + html.escape(f" {one['doing']}" if one["doing"] else ""),
            ]
        )
    columns = [
        "ordinal", "process", "steps", "s since the last", "usual ms", "own ms", "collectives", "line",
    ]  # fmt: skip
    return table(columns, rows, (0, 2, 3, 4, 5, 6))


def _records(one: JsonObject) -> str:
    rows = [[_code(flight_report.record_line(record))] for record in one["records"][-40:]]
    return table(["what it did last"], rows, ())


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"
