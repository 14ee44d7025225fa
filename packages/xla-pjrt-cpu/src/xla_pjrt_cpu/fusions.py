"""Which operations XLA's CPU compiler may hand to YNNPACK, its library of microkernels.

What YNNPACK computes it sets up when it first runs, 0.3 to 1 ms for each fusion, and jaxlib 0.10.2
hands it every reduction, matrix product and convolution that it can take. Measured with
``benchmarks/`` and single operations on two cores (jaxlib 0.10.2, AVX-512; YNNPACK / without it):

- A convolution, taken from 32 channels on, is slower in YNNPACK at every size: 3.1 / 1.7 ms for 32
  channels of 28 x 28, 44 / 25 ms for 64 of 56 x 56. Left to XLA's other library, a step of a CNN for
  MNIST goes from 42 to 27 ms, of ResNet-50 on small images from 245 to 200 ms.
- Softmax, LayerNorm and products of bfloat16 are faster there from about 2**15 elements on (softmax of
  2**15: 0.04 / 0.08 ms, of 2**21: 1.3 / 2.7 ms; a product of 1024 x 1024: 6 / 12 ms) and as fast below.
- float32 products take as long at any size.

So convolutions never go there, and nothing does in a step of one program that works on small values only:
it is as fast without, and the first one has nothing to set up. A stage is set up once and runs many times
in a step, which pays (a GPT of 24 layers: 20.2 / 21.6 ms).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from xla_core.contract.device_protocol import Program

OPTION: Final = "xla_cpu_experimental_ynn_fusion_type"
"""XLA's own option (jaxlib 0.10.2), which takes a comma-separated list of kinds."""
SMALL: Final = 1 << 15
"""Elements; a program is small whose every value has fewer."""
_WITHOUT_CONVOLUTIONS: Final = "LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
RULE: Final = f"{_WITHOUT_CONVOLUTIONS} from {SMALL} elements on"
"""Part of the persistent cache's key: a program that was compiled by another rule is another program."""


def options_for(program: Program, xla_flags: str) -> Mapping[str, str]:
    """Compiler options for a program; none where ``XLA_FLAGS`` has the option already."""
    if OPTION in xla_flags:
        return {}
    small = program.largest is not None and program.largest < SMALL
    return {OPTION: "" if small else _WITHOUT_CONVOLUTIONS}
