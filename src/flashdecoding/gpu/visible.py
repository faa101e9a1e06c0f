"""Which keys a row may see, by length, position, window and mask, and the pages that keys stand on."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_up_to(position, kv_start, blocks):
    """Number of local keys at positions <= ``position``."""
    past = position - kv_start
    if blocks is None:
        count = tl.maximum(past + 1, 0)
    else:
        whole = past // blocks.stride * blocks.size + tl.minimum(past % blocks.stride + 1, blocks.size)
        count = tl.where(past < 0, 0, whole)
    return count


@triton.jit
def key_position(key, kv_start, blocks):
    if blocks is None:
        position = kv_start + key
    else:
        position = kv_start + (key // blocks.size).to(tl.int64) * blocks.stride + key % blocks.size
    return position


@triton.jit
def masked(mask, rows, key, column, q_len, sees, TREE: tl.constexpr):
    """``sees`` where the mask allows it: dense by local key, a draft tree by place among the queries."""
    if TREE:
        drafted = (column >= 0) & (column < q_len)
        at = mask.ptr + rows[:, None] + column.to(tl.int64)[None, :] * mask.stride_k
        word = tl.load(at, mask=sees & drafted[None, :], other=1)
    else:
        at = mask.ptr + rows[:, None] + key.to(tl.int64)[None, :] * mask.stride_k
        word = tl.load(at, mask=sees, other=0)
    return sees & (word != 0)


@triton.jit
def visible_range(position, kv_begin, kv_end, kv_start, blocks, window, CAUSAL: tl.constexpr):
    """[low, high) of the keys that may be seen from a position, by length, causal and window."""
    low = position * 0 + kv_begin
    high = position * 0 + kv_end
    if CAUSAL:
        high = tl.minimum(high, keys_up_to(position, kv_start, blocks))
    if window is not None:
        low = tl.maximum(low, keys_up_to(position - window, kv_start, blocks))
    return tl.minimum(low, kv_end).to(tl.int32), high.to(tl.int32)  # high is at most kv_end


@triton.jit
def seen_by(rows, key, mask, blocks, TREE: tl.constexpr):
    """Which keys of a tile each row sees."""
    seq, q_head, i, low, high, kv_start, q_start, queries = rows
    sees = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
    if mask is not None:
        m_rows = seq.to(tl.int64) * mask.stride_b + q_head.to(tl.int64) * mask.stride_h
        m_rows += i.to(tl.int64) * mask.stride_q
        column = key_position(key, kv_start, blocks) - q_start
        sees = masked(mask, m_rows, key, column, queries, sees, TREE)
    return sees


@triton.jit
def locate(pages, page_row, key, inside, PAGE_SIZE: tl.constexpr):
    """Page and slot of keys, and which of them may be loaded: no page that does not exist is."""
    if pages is None:
        page = key
        slot = key
        exists = inside
    else:
        number = key.to(tl.uint32)  # whose quotients take fewer instructions
        page = tl.load(page_row + (number // PAGE_SIZE).to(tl.int64) * pages.stride_p, mask=inside, other=-1)
        slot = (number % PAGE_SIZE).to(tl.int32)
        exists = page.to(tl.uint32) < pages.pages
    return page, slot, exists


@triton.jit
def lacks_pages(pages, page_row, begin, end, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Whether a page that keys [begin, end) stand on does not exist."""
    lost = tl.zeros([BLOCK], tl.int32)
    past = end // PAGE_SIZE + (end % PAGE_SIZE != 0).to(tl.int32)
    past = tl.where(begin < end, past, 0)
    for start in range(begin // PAGE_SIZE, past, BLOCK):
        number = start + tl.arange(0, BLOCK)
        wanted = number < past
        page = tl.load(page_row + number.to(tl.int64) * pages.stride_p, mask=wanted, other=0)
        lost = lost | (wanted & ((page < 0) | (page >= pages.pages))).to(tl.int32)
    return tl.max(lost, 0) != 0


@triton.jit
def lost_rows(
    m, rows, ok, begin, end, pages, page_row, mask, blocks, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    DIFFER: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """m, NaN for the rows that see a key whose page does not exist."""
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        sees = (key < end)[None, :] & ok[:, None]
        if DIFFER:
            sees &= seen_by(rows, key, mask, blocks, TREE)
        page, _, _ = locate(pages, page_row, key, key < end, PAGE_SIZE)
        lost = sees & ((page < 0) | (page >= pages.pages))[None, :]
        m = tl.where(tl.max(lost.to(tl.int32), 1) != 0, float("nan"), m)
    return m
