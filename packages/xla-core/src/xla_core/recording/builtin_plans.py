"""Plans of the operators that the trace itself records, given by the dispatcher when it is loaded."""

from __future__ import annotations

from typing import Final

from xla_core.operators.plan import Plan

ZEROS: Final = "zeros"
AS_STRIDED: Final = "as_strided"
_plans: dict[str, Plan] = {}


def known_plan(name: str) -> Plan:
    """The plan given under ``name``. Raises RuntimeError before there is one."""
    plan = _plans.get(name)
    if plan is None:
        raise RuntimeError("xla_core.dispatch has not been imported")
    return plan


def set_plan(name: str, plan: Plan) -> None:
    """Give a plan that the trace itself needs.

    ``ZEROS``: with ``aten.zeros`` unwritten tensors come to life when read. ``AS_STRIDED``: through
    ``aten.as_strided`` it writes to what no chain of simpler writes reaches.
    """
    _plans[name] = plan
