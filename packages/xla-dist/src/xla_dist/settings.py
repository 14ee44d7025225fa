"""The environment variables that xla-dist reads, each declared once."""

from __future__ import annotations

from typing import Final

from xla_core.support import flags

WAIT_TIMEOUT: Final = flags.Flag(
    "XLA_DIST_WAIT_TIMEOUT",
    int,
    1800,
    "seconds that a rendezvous or a collective waits for replicas that live but do not come",
)
WARN_AFTER: Final = flags.Flag(
    "XLA_DIST_WARN_AFTER",
    int,
    10,
    "seconds of waiting for another replica after which a warning names it",
)
STUCK_TIMEOUT: Final = flags.Flag(
    "XLA_DIST_STUCK_TIMEOUT",
    int,
    4,
    "seconds after which an awaited replica ends whose threads all wait for locks of its own",
)
BUCKET_SIZE: Final = flags.Flag(
    "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB",
    int,
    0,
    "MiB of gradients in one collective of reduce_gradients; 0 is all in one",
)
RESTART_COUNT: Final = flags.Flag(
    "XLA_DIST_RESTART_COUNT",
    int,
    0,
    "set by `torch_xla.launch(..., max_restarts=n)` in the processes that it starts: how often it has before",
)
