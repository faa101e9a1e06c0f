"""The entry points: check the call, cut it into splits, run the device's two stages.

Formulas: `docs/algorithm.md`. What every backend promises: `tests/test_contract.py`.
"""

from __future__ import annotations

import functools
import itertools
from types import ModuleType
from typing import Any

import torch

from flashdecoding import ops, validate
from flashdecoding.checks import (
    Call,
    check_call,
    check_out,
    check_plan,
    refuse_grad,
    refuse_quantised,
)
from flashdecoding.lengths import DeviceSpans, Lengths, Spans, host_lengths
from flashdecoding.plan import CPU_MODEL, LONGEST, Cut, DecodeProblem, HostPlan, SplitPlan, cut_batch, decode_problem
from flashdecoding.state import AttentionState

Scale = float | torch.Tensor


def decode_attention(
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
    """Exact attention of a few queries over a long KV cache (2.1), cut into splits that run in parallel (2.5).

    Axes are (batch, heads, sequence, head_dim) with any strides; a cache stored sequence-first is passed as the view
    ``k_cache.transpose(1, 2)``, without a copy. A key is visible to a query if it is within the length AND not before
    ``kv_begin`` AND allowed by ``causal`` AND by ``window`` AND by ``mask``; what no query sees reaches no result,
    whatever it holds.

    Args:
        q: (B, Hq, Sq, D), float16, bfloat16, float32 or float64. With ``cu_q_lens``: packed (1, Hq, T, D).
        k, v: contiguous (B, Hkv, S, D) and (B, Hkv, S, Dv), or with ``page_table`` pages (pages, Hkv, page_size, D or
            Dv); q's dtype; Hq % Hkv == 0, query head h reads kv head h // (Hq // Hkv). v may alias k (latent
            attention).
        seqlens: valid keys of each sequence, new tokens included: a list, an int for all, or a (B,) integer tensor.
            Default: all S. Required with ``page_table``.
        page_table: (B, max_pages) int32: key j of sequence b is slot j % page_size of page page_table[b, j //
            page_size]. Entries past a sequence's length, or before its window, are not used and may hold anything.
        kv_begin: (B,) first valid key of each sequence (left padding); keys before it are not read.
        cu_q_lens: (B + 1,) int32, where each sequence's queries begin in packed q; ``max_q_len`` goes with it. Tokens
            past the last offset give 0 and -inf.
        max_q_len: at least the longest query count, a host int.
        scale: multiplies q.k; default 1 / sqrt(D).
        causal: query i sees keys up to position i + seqlen - q_len (bottom-right).
        window: number of visible keys up to and including the query's own position; limits the past, also without
            ``causal``.
        softcap: c > 0 replaces a score s by c * tanh(s / c), before masks and bias.
        sinks: (Hq,) logits (natural) that join the softmax denominator once. -inf: none.
        alibi_slopes: (Hq,) or (B, Hq): adds -slope * |query position - key position|.
        mask: bool, True = visible. Dense (B or 1, Hq or 1, Sq, S or max_pages * page_size), or a draft tree
            (B or 1, Sq, Sq) over the last Sq keys, the context before them visible. Sq is ``max_q_len`` when packed.
        k_scale, v_scale, k_zero, v_zero: for quantised caches, which no backend reads yet.
        plan: a :class:`SplitPlan` from :func:`plan_decode` for these lengths and heads; else the call makes its own.
        out: (B, Hq, Sq, Dv) tensor of q's dtype to write into; mutated.
        return_lse: also return the log-sum-exp of the visible scores, sinks not counted.

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype, its axes in memory in the order of q's; with ``return_lse`` also lse
        (B, Hq, Sq), natural log, float32 (float64 for float64). A query that sees no key gets out 0 and lse -inf.
        Packed like q.

    Raises:
        ValueError: arguments that do not fit, all reasons named; or an input requires grad while grad is enabled, or
            has a forward-mode tangent.
        NotImplementedError: a device or cache format without a backend.

    Example:
        >>> q, k, v = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 300, 64), torch.randn(2, 2, 300, 64)
        >>> out = decode_attention(q, k, v, seqlens=[300, 17])
        >>> out.shape
        torch.Size([2, 8, 1, 64])
    """
    caller = "decode_attention"
    refuse_quantised(caller, k_scale, v_scale, k_zero, v_zero)
    refuse_grad(caller, q=q, k=k, v=v, sinks=sinks, alibi_slopes=alibi_slopes)
    if ops.traced(q, k, v):
        if plan is not None:
            check_plan(caller, plan, q, k, v, cu_q_lens, max_q_len, window)
        result = ops.traced_decode(
            q, k, v, out, seqlens=seqlens, page_table=page_table, kv_begin=kv_begin, cu_q_lens=cu_q_lens,
            max_q_len=max_q_len, scale=scale, causal=causal, window=window, softcap=softcap, sinks=sinks,
            alibi_slopes=alibi_slopes, mask=mask, plan=plan,
        )  # fmt: skip
        return result if return_lse else result[0]
    call = check_call(
        caller, q, k, v, seqlens=seqlens, page_table=page_table, kv_begin=kv_begin, cu_q_lens=cu_q_lens,
        max_q_len=max_q_len, scale=scale, causal=causal, window=window, softcap=softcap, sinks=sinks,
        alibi_slopes=alibi_slopes, mask=mask, plan=plan,
    )  # fmt: skip
    if validate.WANTED:
        validate.validate(call, plan)
    given = out is not None
    if out is None:
        out = ops.empty_output(q, call.checked.head_dim_v)
    else:
        check_out(call, out)
    if isinstance(call.spans, DeviceSpans):
        lse = _gpu().decode(call, plan, out, return_lse)
    else:
        lse = _cpu().decode(call, _cut(call, call.spans, plan), out, return_lse)
    if given:
        torch.autograd.graph.increment_version(out)
    return out if lse is None else (out, lse)


def partial_attention(
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
    """Attention over a piece of the keys, as a state (m, l, o) that merges exactly with those of the other pieces
    (2.4).

    Arguments as in :func:`decode_attention`, but ``k``, ``v``, ``seqlens``, ``kv_begin`` and a dense ``mask`` speak of
    the piece's own (local) keys. Local key j stands at position
    ``kv_start + (j // kv_block) * kv_stride + j % kv_block`` of the sequence, so that causal, window and ALiBi stay
    right for prefixes and shards. Sinks belong to the merged state: ``state.finalize(dtype, sinks=sinks)``.

    Args:
        q_start: position of each sequence's first query, an int or (B,). Default: the queries are the piece's last
            positions, ``kv_start + seqlens - q_len``. Required with ``kv_block``.
        kv_start: position of local key 0, an int or (B,).
        kv_block, kv_stride: keys that stand together, and the distance from one such block to the next (round-robin
            shards); default: all keys stand together.

    Returns:
        :class:`AttentionState` with m, l (B, Hq, Sq, 1) and o (B, Hq, Sq, Dv), float32 (float64 for float64).
        m is natural-log scaled, o normalised; a query that sees no key has m = -inf, l = 0, o = 0.

    Raises:
        ValueError, NotImplementedError: as :func:`decode_attention`.

    Example:
        >>> q, k, v = torch.randn(1, 4, 1, 32), torch.randn(1, 4, 90, 32), torch.randn(1, 4, 90, 32)
        >>> head = partial_attention(q, k[:, :, :50], v[:, :, :50], q_start=89)
        >>> tail = partial_attention(q, k[:, :, 50:], v[:, :, 50:], kv_start=50)
        >>> torch.allclose(head.merge(tail).finalize(), decode_attention(q, k, v), atol=1e-6)
        True
    """
    caller = "partial_attention"
    refuse_quantised(caller, k_scale, v_scale, k_zero, v_zero)
    refuse_grad(caller, q=q, k=k, v=v, alibi_slopes=alibi_slopes)
    if ops.traced(q, k, v):
        if plan is not None:
            positioned = q_start is not None or not (isinstance(kv_start, int) and kv_start == 0)
            check_plan(caller, plan, q, k, v, cu_q_lens, max_q_len, None if positioned else window)
        m, l, o = ops.traced_partial(
            q, k, v, seqlens=seqlens, page_table=page_table, kv_begin=kv_begin, cu_q_lens=cu_q_lens,
            max_q_len=max_q_len, scale=scale, causal=causal, window=window, softcap=softcap,
            alibi_slopes=alibi_slopes, mask=mask, plan=plan, q_start=q_start, kv_start=kv_start, kv_block=kv_block,
            kv_stride=kv_stride,
        )  # fmt: skip
        return AttentionState(m, l, o)
    call = check_call(
        caller, q, k, v, seqlens=seqlens, page_table=page_table, kv_begin=kv_begin, cu_q_lens=cu_q_lens,
        max_q_len=max_q_len, scale=scale, causal=causal, window=window, softcap=softcap, sinks=None,
        alibi_slopes=alibi_slopes, mask=mask, plan=plan, q_start=q_start, kv_start=kv_start, kv_block=kv_block,
        kv_stride=kv_stride,
    )  # fmt: skip
    if validate.WANTED:
        validate.validate(call, plan)
    state: AttentionState
    if isinstance(call.spans, DeviceSpans):
        state = _gpu().partial_state(call, plan)
    else:
        state = _cpu().partial_state(call, _cut(call, call.spans, plan))
    return state


def plan_decode(
    seqlens: Lengths,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype,
    q_len: int = 1,
    window: int | None = None,
    max_seqlen: int | None = None,
    batch_invariant: bool = False,
    device: torch.device | str | None = None,
) -> SplitPlan:
    """Cut a batch into splits once, for every layer of a step.

    Args:
        seqlens: valid keys of each sequence, new tokens included: a list, a (B,) integer tensor, or an int for batch 1.
            A tensor on the GPU (int32 or int64) is cut there, without a sync; in a captured graph, too.
        q_heads, kv_heads, head_dim, head_dim_v, dtype: as the calls will have them; ``head_dim_v`` defaults to
            ``head_dim``.
        q_len: queries a sequence (with ragged queries, the ``max_q_len`` of the calls).
        window: as the calls will have it; the plan then covers the keys in reach only.
        max_seqlen: longest length that ``plan.update`` will be given. On a GPU it bounds the launches: give the
            cache's capacity.
        batch_invariant: make a sequence's result bits independent of its batch-mates (always so on the CPU).
        device: where the calls will run; by default the device of ``seqlens``, or the CPU.

    Returns:
        A :class:`SplitPlan`, to be passed as ``plan=`` and rewritten with ``plan.update(seqlens)``.

    Raises:
        ValueError: impossible numbers, all named.
        NotImplementedError: a device without a backend.

    Example:
        >>> plan = plan_decode([3, 1000], q_heads=8, kv_heads=2, head_dim=64, dtype=torch.float32)
        >>> plan.splits_of(1)
        [(0, 512), (512, 1000)]
    """
    where = torch.device(device) if device is not None else torch.device("cpu")
    if device is None and isinstance(seqlens, torch.Tensor):
        where = seqlens.device
    if where.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"plan_decode: no backend for {where.type!r}; the CPU and CUDA GPUs have one")
    problem = decode_problem(
        seqlens, q_heads, kv_heads, head_dim, head_dim_v, dtype, q_len, window, max_seqlen, batch_invariant
    )
    if where.type == "cuda":
        if dtype == torch.float64:
            raise NotImplementedError(f"plan_decode: dtype is float64 on {where}; only the CPU computes in float64")
        if not torch.cuda.is_available():
            raise NotImplementedError(f"plan_decode: device is {where}, and torch finds no GPU here")
        plan: SplitPlan = _gpu_plans().plan_on_device(problem, where, seqlens, max_seqlen, batch_invariant)
        return plan
    lengths = host_lengths(seqlens, problem.batch, LONGEST if max_seqlen is None else max_seqlen, "plan_decode")
    host_plan = HostPlan(problem, CPU_MODEL, max_seqlen=max_seqlen, batch_invariant=batch_invariant)
    host_plan.rewrite(lengths)
    return host_plan


@functools.cache
def _cpu() -> ModuleType:
    """The CPU backend. Numba takes a while to import: the first call does, not ``import flashdecoding``."""
    from flashdecoding.cpu import launch

    return launch


@functools.cache
def _gpu() -> ModuleType:
    """The GPU backend; Triton is imported by the first call too."""
    try:
        from flashdecoding.gpu import launch
    except ImportError as error:
        needed = "Triton 3.6 or newer, which comes with torch 2.11 on Linux"
        raise NotImplementedError(f"the GPU backend needs {needed}: {error}") from error

    return launch


@functools.cache
def _gpu_plans() -> ModuleType:
    _gpu()  # names Triton where it is missing
    from flashdecoding.gpu import plans

    return plans


def _resume_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], memory: torch.Tensor, max_seqlen: int,
    batch_invariant: bool,
) -> SplitPlan:  # fmt: skip
    """The plan that stands behind an operator's arguments; that it fits was checked when the call was traced."""
    positioned = options.get("q_start") is not None or options.get("kv_start") is not None
    batch = q.shape[0] if options["cu_q_lens"] is None else options["cu_q_lens"].shape[0] - 1
    problem = DecodeProblem(
        batch, q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype,
        q.shape[2] if options["max_q_len"] is None else options["max_q_len"], None if positioned else options["window"],
    )  # fmt: skip
    plan: SplitPlan = _gpu_plans().resume(problem, memory, max_seqlen, batch_invariant)
    return plan


def _cut(call: Call, spans: Spans, plan: SplitPlan | None) -> Cut:
    """The plan's splits, or those of this call alone."""
    if plan is not None:
        assert isinstance(plan, HostPlan)
        return plan.cut_for(spans.seqlens)
    checked = call.checked
    window = None if call.positioned else checked.window
    offsets = spans.q_offsets
    if offsets is None:
        q_lens = (checked.q_len,) * checked.batch
    else:
        q_lens = tuple(end - begin for begin, end in itertools.pairwise(offsets))
    return cut_batch(spans.seqlens, q_lens, window, checked.kv_heads, CPU_MODEL)


ops.bind(decode_attention, partial_attention, _resume_plan)
