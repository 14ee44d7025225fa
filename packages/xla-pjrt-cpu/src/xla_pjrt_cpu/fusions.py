"""Chooses the operations that XLA's CPU compiler passes to YNNPACK, its library of microkernels.

YNNPACK sets up each fusion when it first runs, which takes 0.3 to 1 ms. jaxlib 0.10.2 passes it all reductions,
matrix products and convolutions that it supports. Measured with ``benchmarks/`` and single operations on two cores
(jaxlib 0.10.2, AVX-512; with YNNPACK / without it):

- A convolution, which YNNPACK supports from 32 channels on, is slower with it at all sizes: 3.1 / 1.7 ms for 32
  channels of 28 x 28, 44 / 25 ms for 64 of 56 x 56. With XLA's other library, a step of a CNN for
  MNIST takes 27 instead of 42 ms, one of ResNet-50 on small images 200 instead of 245 ms.
- Softmax, LayerNorm and products of bfloat16 are faster with it from about 2**15 elements on (softmax of
  2**15: 0.04 / 0.08 ms, of 2**21: 1.3 / 2.7 ms; a product of 1024 x 1024: 6 / 12 ms), and as fast below.
- Products of float32 take the same time at all sizes.

Therefore YNNPACK gets no convolutions. It gets no operations at all of a step with a single program and only small
values, which is as fast without it, and whose first run then has nothing to set up. A stage is set up once and runs
many times per step, so YNNPACK pays off (a GPT of 24 layers: 20.2 / 21.6 ms).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

from xla_core.contract.device_protocol import Program

OPTION: Final = "xla_cpu_experimental_ynn_fusion_type"
"""XLA's own option (jaxlib 0.10.2), which takes a comma-separated list of kinds."""
SMALL: Final = 1 << 15
"""A program is small if all its values have fewer elements than this."""
_WITHOUT_CONVOLUTIONS: Final = "LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
RULE: Final = f"{_WITHOUT_CONVOLUTIONS} from {SMALL} elements on"
"""A part of the persistent cache's key: programs compiled by another rule are different."""


def options_for(program: Program, of_user: Container[str]) -> Mapping[str, str]:
    """The compiler option for a program; none if it is among the flags ``of_user``."""
    if OPTION in of_user:
        return {}
    small = program.largest is not None and program.largest < SMALL
    return {OPTION: "" if small else _WITHOUT_CONVOLUTIONS}
