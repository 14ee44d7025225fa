"""``torch_xla.debug.metrics_compare_utils``: reads metrics reports, and compares a report with earlier ones.

It reads the texts of ``metrics_report()`` of this project and of torch_xla's releases, the oldest of which write
``Counter:`` instead of ``Accumulator:``.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

_UNITS: Final = {
    "d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9,
}  # fmt: skip
_SIZES: Final = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40, "PB": 1 << 50}
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|us|ns|d|h|m|s)")
_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?)(B|KB|MB|GB|TB|PB)")
_PERCENTILE: Final = re.compile(r"([\d.]+)%=([^;\s]+)")

Point = dict[str, float]


def parse_value(text: str) -> float:
    """The number in a report's ``text``: seconds for a time, bytes for a size. Raises ValueError for others."""
    text = text.strip().removesuffix("/ second").strip()
    if size := _BYTES.fullmatch(text):
        return float(size[1]) * _SIZES[size[2]]
    parts = _TIME.findall(text)
    if parts and "".join(f"{n}{u}" for n, u in parts) == text:
        return sum(float(number) * _UNITS[unit] for number, unit in parts)
    return float(text)


def parse_metrics_report(report: str) -> Point:
    """The data points of one report, by ``Name__Field``, for example ``CompileTime__TotalSamples``.

    The names of times end with ``_sec`` and those of sizes with ``_mb`` (1024 * 1024 bytes), for example
    ``CompileTime__Percentile_50_sec``.
    """
    points: Point = {}
    name = ""
    for line in report.splitlines():
        field, _, value = line.partition(":")
        if line.startswith(("Metric:", "Counter:")):
            name = value.strip()
        elif field.strip() == "Percentiles":
            for percent, text in _PERCENTILE.findall(value):
                points[f"{name}__Percentile_{percent}{_unit(text)}"] = _scaled(text)
        elif field.startswith("  ") and name:
            field = field.strip()
            field = "Accumulator" if field == "Counter" else field
            points[f"{name}__{field}{_unit(value)}"] = _scaled(value)
    return points


def _unit(text: str) -> str:
    text = text.strip().removesuffix("/ second").strip()
    if _BYTES.fullmatch(text):
        return "_mb"
    return "_sec" if _TIME.match(text) else ""


def _scaled(text: str) -> float:
    value = parse_value(text)
    return value / (1 << 20) if _unit(text) == "_mb" else value


def get_data_points_from_metrics_reports(reports: Iterable[str]) -> dict[str, list[float]]:
    """The data points of several reports, by name: a list of values in the order of the reports."""
    series: dict[str, list[float]] = {}
    for report in reports:
        for name, value in parse_metrics_report(report).items():
            series.setdefault(name, []).append(value)
    return series


def compare_metrics(
    data_points: Mapping[str, Sequence[float]],
    metrics_report: str,
    config: Mapping[str, object] | None = None,
) -> str:
    """The values in ``metrics_report`` that are too high compared with earlier ``data_points``, one per line.

    Empty if there are none. ``config`` may have ``base_expression``, the condition that values must meet (default:
    ``v <= v_mean + (v_stddev * 2.0)``; other conditions must have the same form, with another factor or without
    ``v_stddev``), and ``base_blacklist``, a list of regular expressions of names that are not compared. Raises
    ValueError for another form of ``base_expression``.
    """
    settings = dict(config or {})
    factor = _factor(str(settings.get("base_expression", "v <= v_mean + (v_stddev * 2.0)")))
    skipped = [re.compile(str(p)) for p in _as_list(settings.get("base_blacklist"))]
    lines = []
    for name, value in parse_metrics_report(metrics_report).items():
        earlier = data_points.get(name)
        if earlier is None or any(p.search(name) for p in skipped):
            continue
        mean = statistics.fmean(earlier)
        deviation = statistics.pstdev(earlier)
        bound = mean + deviation * factor
        if value > bound:
            lines.append(
                f"{name}: {value:g} is above {bound:g} (mean {mean:g}, standard deviation "
                f"{deviation:g} of {len(earlier)} reports)"
            )
    return "\n".join(lines) + ("\n" if lines else "")


_EXPRESSION: Final = re.compile(
    r"v\s*<=?\s*v_mean\s*(?:\+\s*\(?\s*v_stddev\s*\*\s*(?P<factor>\d+(?:\.\d+)?)\s*\)?)?"
)
MSG_EXPRESSION: Final = (
    "cannot read base_expression {text!r}; its form must be 'v <= v_mean + (v_stddev * 2.0)'"
)


def _factor(expression: str) -> float:
    """The factor of ``v_stddev`` in a condition, 0 if it is not there."""
    match = _EXPRESSION.fullmatch(expression.strip())
    if match is None:
        raise ValueError(MSG_EXPRESSION.format(text=expression))
    return float(match["factor"] or 0.0)


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else []
