"""The entry points: check the call, cut it into splits, run the device's two stages, finalise.

Formulas: `docs/algorithm.md`. The contract that every backend keeps: the tests in `tests/test_contract.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashdecoding.checks import Call, Lengths, check_call, check_out, refuse_grad, refuse_quantised
from flashdecoding.plan import CPU_MODEL, DecodeProblem, SplitPlan
from flashdecoding.state import AttentionState

Scale = float | torch.Tensor


def decode_attention(  # noqa: PLR0913
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seqlens: Lengths | None = None,
    page_table: torch.Tensor | None = None,
    kv_begin: Lengths | None = None,
    cu_q_lens: torch.Tensor | None = None,
    max_q_len: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    k_zero: Scale | None = None,
    v_zero: Scale | None = None,
    plan: SplitPlan | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of a few queries over a long KV cache."""
    refuse_quantised("decode_attention", k_scale=k_scale, v_scale=v_scale, k_zero=k_zero, v_zero=v_zero)
    refuse_grad("decode_attention", q, k, v, sinks, alibi_slopes)
    call = check_call(
        "decode_attention", q, k, v, seqlens=seqlens, page_table=page_table, kv_begin=kv_begin, cu_q_lens=cu_q_lens,
        max_q_len=max_q_len, scale=scale, causal=causal, window=window, softcap=softcap, sinks=sinks,
        alibi_slopes=alibi_slopes, mask=mask, plan=plan,
    )  # fmt: skip
    shape = (*q.shape[:3], call.head_dim_v)
    if out is None:
        out = _empty_like(q, call.head_dim_v)
    else:
        check_out("decode_attention", out, shape, q)
    from flashdecoding.cpu.launch import decode

    lse = decode(call, plan or _plan(call), out, return_lse)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def partial_attention(  # noqa: PLR0913
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seqlens: Lengths | None = None,
    page_table: torch.Tensor | None = None,
    kv_begin: Lengths | None = None,
    cu_q_lens: torch.Tensor | None = None,
    max_q_len: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    k_zero: Scale | None = None,
    v_zero: Scale | None = None,
    plan: SplitPlan | None = None,
    q_start: Lengths | None = None,
    kv_start: Lengths = 0,
    kv_block: int | None = None,
    kv_stride: int | None = None,
) -> AttentionState:
    """The state (m, l, o) of attention over a piece of the keys; states merge to the whole."""
    refuse_quantised("partial_attention", k_scale=k_scale, v_scale=v_scale, k_zero=k_zero, v_zero=v_zero)
    refuse_grad("partial_attention", q, k, v, alibi_slopes)
    call = check_call(
        "partial_attention", q, k, v, seqlens=seqlens, page_table=page_table, kv_begin=kv_begin, cu_q_lens=cu_q_lens,
        max_q_len=max_q_len, scale=scale, causal=causal, window=window, softcap=softcap, sinks=None,
        alibi_slopes=alibi_slopes, mask=mask, plan=plan, q_start=q_start, kv_start=kv_start, kv_block=kv_block,
        kv_stride=kv_stride,
    )  # fmt: skip
    from flashdecoding.cpu.launch import partial_state

    return partial_state(call, plan or _plan(call))


def _plan(call: Call) -> SplitPlan:
    """A plan for this call alone."""
    positioned = call.q_start is not None or call.kv_start is not None
    problem = DecodeProblem(
        call.batch, call.q_heads, call.kv_heads, call.head_dim, call.head_dim_v, call.q.dtype, call.q_len,
        None if positioned else call.window,
    )  # fmt: skip
    plan = SplitPlan(problem, CPU_MODEL)
    plan.rewrite(call.seqlens)
    return plan


def _empty_like(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """An output (batch, heads, q_len, head_dim_v) whose axes lie in memory in q's order."""
    if q.is_contiguous():
        return q.new_empty((*q.shape[:3], head_dim_v))
    order = sorted(range(4), key=lambda axis: q.stride(axis), reverse=True)
    shape = (*q.shape[:3], head_dim_v)
    packed = q.new_empty([shape[axis] for axis in order])
    return packed.permute([order.index(axis) for axis in range(4)])
