"""The environment variables that xla-dist reads, each declared once."""

from __future__ import annotations

from typing import Final

from xla_core.support import flags

WAIT_TIMEOUT: Final = flags.Flag(
    "XLA_DIST_WAIT_TIMEOUT",
    int,
    1800,
    "seconds that a rendezvous or a collective waits for replicas that are alive but do not arrive",
)
WARN_AFTER: Final = flags.Flag(
    "XLA_DIST_WARN_AFTER",
    int,
    10,
    "seconds of waiting for another replica before a warning names it",
)
STUCK_TIMEOUT: Final = flags.Flag(
    "XLA_DIST_STUCK_TIMEOUT",
    int,
    4,
    "seconds before a replica that others wait for is ended if all its threads wait for locks of its own process",
)
STEP_LIMIT: Final = flags.Flag(
    "XLA_DIST_STEP_LIMIT",
    float,
    20.0,
    "a step is reported if it takes more than 5 s and this many times the usual time; `0` reports none",
    see="docs/flight_recorder.md",
)
STEP_LIMIT_ENDS: Final = flags.Flag(
    "XLA_DIST_STEP_LIMIT_ENDS",
    flags.parse_bool,
    False,
    "`1` also ends the job when such a step is found",
    see="docs/flight_recorder.md",
)
FAULT: Final = flags.Flag(
    "XLA_DIST_FAULT",
    str,
    "",
    "injects a fault, for tests: `kill:1:20` kills ordinal 1 at the end of its step 20",
    see="docs/flight_recorder.md#faults-on-purpose",
)
BUCKET_SIZE: Final = flags.Flag(
    "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB",
    int,
    0,
    "MiB of gradients in one collective of `reduce_gradients`; `0` puts all in one",
)
RESTART_COUNT: Final = flags.Flag(
    "XLA_DIST_RESTART_COUNT",
    int,
    0,
    "set by `torch_xla.launch(..., max_restarts=n)` in the processes it starts: the number of earlier restarts",
)
