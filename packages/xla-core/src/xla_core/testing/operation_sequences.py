"""Synthetic sequences of operations, for tests of what is found in them: layers, and copies of random blocks."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable

from xla_core.lowering.repeats.items import Node


class Sequence:
    """Nodes appended one by one; values are numbered by the order in which they are computed, after ``inputs``."""

    def __init__(self, inputs: int = 4) -> None:
        self.nodes: list[Node] = []
        self.values = inputs

    def add(self, key: Hashable, *operands: int) -> int:
        """Append an operation; returns the number of its result."""
        return self.add_several(key, *operands, results=1)[0]

    def add_several(self, key: Hashable, *operands: int, results: int) -> tuple[int, ...]:
        """Append an operation with several results; returns their numbers."""
        numbers = tuple(range(self.values, self.values + results))
        self.values += results
        self.nodes.append(Node(key, operands, numbers))
        return numbers

    def block(self, x: int, parameter: int, keys: Iterable[Hashable] = "abcdefghijklmn") -> int:
        """A chain of operators on ``x``, each of which also reads what the one before it read."""
        former = parameter
        for key in keys:
            x, former = self.add(key, x, former), x
        return x


def layers(count: int, *, inputs: int = 64) -> tuple[Sequence, int]:
    """Equal layers with a parameter each, and the number of the last one's result."""
    sequence = Sequence(inputs)
    x = 0
    for layer in range(count):
        x = sequence.block(x, 1 + layer % (inputs - 1))
    return sequence, x


def halved_layers(count: int) -> tuple[Sequence, list[int], int]:
    """Equal layers of two halves, the numbers of what the first halves give, and of the last layer's result."""
    sequence = Sequence(2 * count)
    x, middles = 0, []
    for layer in range(count):
        middles.append(sequence.block(x, 1 + layer, "abcdefg"))
        x = sequence.block(middles[-1], 1 + layer, "hijklmn")
    return sequence, middles, x


def planted(source: random.Random) -> tuple[Sequence, list[int]]:
    """Random code around copies of random blocks, some with another key or edge; also a few wanted values."""
    sequence = Sequence(3)
    blocks = [_keys(source, 2, 9) for _ in range(source.randint(1, 3))]
    for _ in range(source.randint(2, 14)):
        keys = list(source.choice(blocks))
        if source.random() < 0.5:
            keys[source.randrange(len(keys))] = source.randint(0, 5)
        back = source.randint(1, 6)  # how far back a block's second operand is
        for key in keys:
            far = max(sequence.values - back, 0)
            sequence.add_several(key, sequence.values - 1, far, results=1 + (key == 5))
    return sequence, _wanted(source, 3, sequence.values)


def rows_of_layers(source: random.Random) -> tuple[Sequence, list[int]]:
    """Equal layers in a row between other code; each reads a parameter, and some an older value, too."""
    sequence = Sequence(30)
    x, old = 0, [0, 1]
    for _ in range(source.randint(1, 3)):
        keys, reads = _keys(source, 2, 6), source.random() < 0.5
        order, former = source.choice([1, -1, 2]), list(old)
        for iteration in range(source.randint(2, 7)):
            x = sequence.block(x, 2 + iteration, keys)
            if reads:
                x = sequence.add("reads", x, former[order * iteration % len(former)])
            old.append(x)
        x = sequence.add(object(), x, source.choice(old))
    return sequence, _wanted(source, 30, sequence.values)


def _keys(source: random.Random, fewest: int, most: int) -> list[int]:
    return [source.randint(0, 5) for _ in range(source.randint(fewest, most))]


def _wanted(source: random.Random, begin: int, end: int) -> list[int]:
    return source.sample(range(begin, end), min(source.randint(1, 6), end - begin))
