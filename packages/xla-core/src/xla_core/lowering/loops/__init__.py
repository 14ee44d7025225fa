"""Repeats in a row as loops: what a loop reads and keeps, found by a pure algorithm, and its lowering to a scan."""
