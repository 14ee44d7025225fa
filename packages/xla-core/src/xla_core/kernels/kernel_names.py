"""Further names of torch_xla's kernel module: functions for ``xla`` tensors, and shapes for meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

import torch

from xla_core.kernels.paged_attention import ragged_paged_attention

MSG_ELSEWHERE: Final = (
    "{name}: there is no such kernel for tensors on {device}; move them: .to('xla'). For tensors on 'meta' the "
    "result has the right shape"
)
MSG_REPEATS: Final = (
    "repeats has the shape {repeats}, input {input}; give one number per row of the input"
)


def repeat_with_fixed_output_size(
    input: torch.Tensor, repeats: torch.Tensor, total_repeat_length: int
) -> torch.Tensor:
    """``torch.repeat_interleave(input, repeats, 0)`` with ``total_repeat_length`` rows; ``repeats`` is not read.

    ``input`` is (rows, ...), ``repeats`` integers (rows,). Excess rows are cut off, and missing ones repeat the
    last row. Raises ValueError unless there is a number for each row.
    """
    if repeats.shape != input.shape[:1]:
        raise ValueError(MSG_REPEATS.format(repeats=tuple(repeats.shape), input=tuple(input.shape)))
    ends = torch.cumsum(repeats, 0)
    rows = torch.arange(total_repeat_length, device=ends.device, dtype=ends.dtype)
    # a row of the result comes from the first row of the input whose end is larger than its number
    numbers = (rows[:, None] >= ends[None, :]).sum(1)
    return input[numbers.clamp(max=input.shape[0] - 1)]


def safe_empty_like(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """``torch.empty_like(tensor)``, None for None."""
    return None if tensor is None else torch.empty_like(tensor)


def generate_ctx_need_grad(*args: object) -> list[bool]:
    """For each argument, whether it is a tensor that requires a gradient."""
    return [isinstance(a, torch.Tensor) and a.requires_grad for a in args]


def _refuse(name: str, tensor: torch.Tensor) -> NoReturn:
    raise ValueError(MSG_ELSEWHERE.format(name=name, device=tensor.device))


def non_xla_attetion(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_type: str
) -> torch.Tensor:
    """A meta tensor like the result of an attention of ``q``. Raises ValueError for tensors on other devices."""
    del k, v
    if q.device.type != "meta":
        _refuse(attention_type, q)
    return torch.empty_like(q)


def non_xla_ragged_paged_attention(
    q: torch.Tensor, kv: torch.Tensor, attention_type: str
) -> torch.Tensor:
    """``non_xla_attetion`` for keys and values in one tensor."""
    return non_xla_attetion(q, kv, kv, attention_type)


def ragged_paged_attention_xla(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    use_kernel: bool = True,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> torch.Tensor:
    """``ragged_paged_attention``, whose options may be positional here."""
    return ragged_paged_attention(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs,
        sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap, mask_value=mask_value,
        k_scale=k_scale, v_scale=v_scale, use_kernel=use_kernel,
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block, vmem_limit_bytes=vmem_limit_bytes,
    )  # fmt: skip


def _attention(name: str) -> Callable[..., torch.Tensor]:
    def shaped(q: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        del args, kwargs
        return non_xla_attetion(q, q, q, name)

    shaped.__name__ = shaped.__qualname__ = f"{name}_non_xla"
    shaped.__doc__ = (
        f"The shape of ``{name}``'s result for meta tensors. Raises ValueError for others."
    )
    return shaped


flash_attention_non_xla: Final = _attention("flash_attention")
paged_attention_non_xla: Final = _attention("paged_attention")
multi_queries_paged_attention_non_xla: Final = _attention("multi_queries_paged_attention")
ragged_paged_attention_non_xla: Final = _attention("ragged_paged_attention")


def gmm_non_xla(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: list[int] | None = None,
    group_offset: torch.Tensor | None = None,
    transpose_rhs: bool = False,
) -> torch.Tensor:
    """The shape of ``gmm``'s result for meta tensors. Raises ValueError for others."""
    del group_sizes, tiling, group_offset
    if lhs.device.type != "meta":
        _refuse("gmm", lhs)
    return lhs.new_empty(lhs.shape[0], rhs.shape[1 if transpose_rhs else 2])


def quantized_matmul_int8_non_xla(
    x: torch.Tensor, w: torch.Tensor, scalar: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    """The shape of ``quantized_matmul_int8``'s result for meta tensors. Raises ValueError for others."""
    del scalar, args, kwargs
    if x.device.type != "meta":
        _refuse("quantized_matmul_int8", x)
    return x.new_empty(x.shape[0], w.shape[0])
