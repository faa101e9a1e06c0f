"""Contract line 7: any stride, 0 and past 2^31 too, and pages so far into a pool that 32-bit offsets wrap."""

import mmap
from dataclasses import replace

import pytest
import torch
from backends import decode, on_every_backend, skip_unless_supported
from torch import Tensor

from flashdecoding.testing import (
    GRID,
    Case,
    Problem,
    arrange,
    assert_same_bits,
    assert_within_bound,
    expect,
)

FP32 = (torch.float32, 64, 64)
BF16 = (torch.bfloat16, 128, 128)
BF16_64 = (torch.bfloat16, 64, 64)
LATENT = (torch.bfloat16, 576, 512)


def _expanded(name: str, problem: Problem) -> Problem:
    q, k, v = problem.q, problem.k, problem.v
    if name == "one-cache-for-the-batch":
        return problem.with_caches(k[:1].expand_as(k), v[:1].expand_as(v))
    if name == "one-kv-head-for-all":
        return problem.with_caches(k[:, :1].expand_as(k), v[:, :1].expand_as(v))
    if name == "one-key-for-all-slots":
        return problem.with_caches(k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v))
    if name == "one-column":
        return problem.with_caches(k[..., :1].expand_as(k), v[..., :1].expand_as(v))
    return replace(problem, q=q[:, :1, :1, :1].expand_as(q))


@on_every_backend
@pytest.mark.parametrize(
    "name", ["one-cache-for-the-batch", "one-kv-head-for-all", "one-key-for-all-slots", "one-column", "one-query"]
)
@pytest.mark.parametrize(
    "case", [Case(*FP32, 8, 2, (65, 1, 130), q_len=5), Case(*BF16, 4, 4, (65, 1, 130))], ids=lambda case: case.id
)
def test_stride_0(case: Case, name: str, backend: str) -> None:
    problem = _expanded(name, case.build(backend))
    assert_within_bound(*decode(problem), expect(problem))


def _spread_out(x: Tensor) -> Tensor:
    """The same values in a view whose strides are those of no contiguous tensor; between them lies other data."""
    axes = list(range(x.ndim))[::-1]
    holder = x.new_ones([2 * x.shape[axis] + 1 for axis in axes])  # a length of 1, a mask of True, a slope of 1
    view = holder[(slice(1, None, 2),) * x.ndim].permute(axes)
    return view.copy_(x)


@on_every_backend
@pytest.mark.parametrize("layout", ["contiguous", "paged-16"])
@pytest.mark.parametrize("case", GRID[30::3], ids=lambda case: case.id)
def test_other_arguments_may_be_views(case: Case, layout: str, backend: str) -> None:
    skip_unless_supported(case, backend)
    problem = arrange(case.build(backend), layout)
    wanted = decode(problem)
    spread = {name: _spread_out(x) if isinstance(x, Tensor) else x for name, x in problem.options.items()}
    actual = decode(replace(problem, options=spread))
    assert_same_bits(actual[0], wanted[0])
    assert_same_bits(actual[1], wanted[1])


@on_every_backend
@pytest.mark.parametrize("shape", [(3, 8, 5, 133), (3, 5, 5)], ids=str)
def test_mask_may_be_expanded(shape: tuple[int, ...], backend: str) -> None:
    problem = Case(*FP32, 8, 2, (65, 1, 130), q_len=5).build(backend)
    row = torch.arange(shape[-1], device=backend) % 3 != 1
    for mask in (row.expand(shape), torch.tensor(False, device=backend).expand(shape)):
        expanded, own = decode(problem.with_options(mask=mask)), decode(problem.with_options(mask=mask.contiguous()))
        assert_same_bits(expanded[0], own[0])
        assert_same_bits(expanded[1], own[1])
        assert not torch.equal(expanded[1], decode(problem)[1])


def _sparse(count: int, like: Tensor, device: str) -> Tensor:
    """``count`` elements, on the CPU reserved address space of which only what is written takes memory."""
    size = count * like.element_size()
    if device == "cuda":
        if size > 0.4 * torch.cuda.mem_get_info()[0]:
            pytest.skip(f"needs {2 * size / 1e9:.0f} GB of GPU memory")
        return torch.empty(count, dtype=like.dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=like.dtype)


def _far_apart(x: Tensor, gap: int, dim: int, device: str) -> Tensor:
    """A copy of ``x`` whose stride along ``dim`` is ``gap`` elements, the memory between them never touched."""
    strides = list(x.contiguous().stride())
    strides[dim] = gap
    count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    return _sparse(count, x, device).as_strided(x.shape, strides).copy_(x)


@on_every_backend
@pytest.mark.parametrize("dim", [0, 1, 2, 3], ids=["batch-or-page", "head", "sequence", "column"])
@pytest.mark.parametrize("gap", [2**30 + 8, 2**31 + 16], ids=["3-gaps-pass-2^31", "1-gap-passes-2^31"])
@pytest.mark.parametrize("layout", ["contiguous", "paged-2"])
def test_strides_past_2_to_31(layout: str, gap: int, dim: int, backend: str) -> None:
    case = Case(*BF16, 8, 4, (5, 3, 4, 5), spare=1, q_len=2)
    problem = arrange(case.build(backend), layout)
    gap = gap // 32 if dim == 3 else gap  # the last of 128 columns passes it
    far = problem.with_caches(*(_far_apart(x, gap, dim, backend) for x in (problem.k, problem.v)))
    actual = decode(far)
    assert_within_bound(*actual, expect(case.build()), f"stride {far.k.stride()}")
    for result, wanted in zip(actual, decode(problem), strict=True):
        assert_same_bits(result, wanted)


FAR_PAGES: dict[str, tuple[Case, int, int, tuple[int, ...]]] = {
    "B27-latent-page-index-near-a-million": (
        Case(*LATENT, 16, 1, (70,), latent=True, spare=26),
        32,
        32 * 576,
        (1_000_003, 2**31 // (32 * 576) + 1, 2**32 // (32 * 576) + 1),
    ),
    "B29-page-offset-at-2^31": (Case(*BF16_64, 8, 8, (40,), spare=8), 16, 32768, (65535, 65536, 65537)),
    "B30-page-65536-of-32768-elements": (Case(*BF16_64, 64, 8, (150,), spare=42), 64, 32768, (65536, 65537, 131072)),
    "B31-packed-records": (Case(*BF16_64, 8, 4, (40,), spare=8), 16, 1_077_120 // 2, (1994, 3988, 7977)),
}


@on_every_backend
@pytest.mark.parametrize("name", FAR_PAGES)
def test_far_pages(name: str, backend: str) -> None:
    """Pages so far into the pool that 32-bit offsets of elements, or of bytes, wrap."""
    case, page_size, page_stride, pages = FAR_PAGES[name]
    problem = case.build()
    kv_heads, dim = case.kv_heads, case.head_dim

    def pool(x: Tensor) -> Tensor:
        flat = _sparse((max(pages) + 1) * page_stride, x, backend)
        strides = (page_stride, page_size * dim, dim, 1)
        view = flat.as_strided((max(pages) + 1, kv_heads, page_size, dim), strides)
        for number, page in enumerate(pages):
            view[page] = x[0, :, number * page_size : (number + 1) * page_size]
        return view

    k = pool(problem.k)
    table = torch.tensor([pages], dtype=torch.int32)
    far = problem.with_caches(k, None if case.latent else pool(problem.v)).with_options(page_table=table)
    far = replace(far, q=far.q.to(backend), options={key: x.to(backend) for key, x in far.options.items()})
    actual = decode(far)
    assert_within_bound(*actual, expect(problem), name)
    for result, wanted in zip(actual, decode(problem.to(backend)), strict=True):
        assert_same_bits(result, wanted)
