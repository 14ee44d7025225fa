"""The temporaries of a TPU's program, without counting the gaps between them twice.

libtpu places all temporaries of a program in one block of HBM. Through PJRT, libtpu 0.0.42 reports the size of this
block plus the size of the gaps in it, which the block already contains (up to half of it in large models). The
stored form of the program has both numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from xla_core.support import protobuf_wire

__all__ = [
    "block_of_temporaries",
    "without_gaps",
]

# libtpu 0.0.42: a stored program is several messages with their lengths before them. One of them lists the
# memory that the program requires: spaces, and in each of them blocks by kind.
_REQUIREMENTS: Final = 12
_SPACE: Final = 1
_SPACE_KIND: Final = 1
_HBM: Final = 0
_BLOCK: Final = 3
_BLOCK_KIND: Final = 1
_TEMPORARIES: Final = 3
_BLOCK_SIZE: Final = 2
_BLOCK_GAPS: Final = 3


def without_gaps(reported: int, stored: bytes) -> int:
    """Bytes of temporaries: ``reported`` by PJRT, less what is counted twice according to the ``stored`` program.

    This is ``reported`` itself where the two do not fit together, as in other versions of libtpu.
    """
    block = block_of_temporaries(stored)
    return block[0] if block is not None and sum(block) == reported else reported


def block_of_temporaries(stored: bytes) -> tuple[int, int] | None:
    """Size of the block of temporaries in HBM and of the gaps in it; None if ``stored`` does not say."""
    try:
        blocks = list(_blocks(stored))
    except ValueError:
        return None
    return blocks[0] if len(blocks) == 1 else None


def _blocks(stored: bytes) -> Iterator[tuple[int, int]]:
    for message in protobuf_wire.read_delimited(stored):
        for requirements in _messages(message, _REQUIREMENTS):
            for space in _messages(requirements, _SPACE):
                if _number(space, _SPACE_KIND) == _HBM:
                    for block in _messages(space, _BLOCK):
                        if _number(block, _BLOCK_KIND) == _TEMPORARIES:
                            yield _number(block, _BLOCK_SIZE), _number(block, _BLOCK_GAPS)


def _messages(message: bytes, field: int) -> list[bytes]:
    fields = protobuf_wire.read_fields(message)
    return [value for number, value in fields if number == field and isinstance(value, bytes)]


def _number(message: bytes, field: int) -> int:
    value = protobuf_wire.read_message(message).get(field, 0)
    return value if isinstance(value, int) else 0
