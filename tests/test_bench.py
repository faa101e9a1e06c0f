"""The benchmark: it checks before it times, shares the clock fairly, counts bytes and operations right."""

import itertools
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashdecoding.testing import bench, peers
from flashdecoding.testing.bench import GRID, Caches, Measurement, Report, Settings, measure
from flashdecoding.testing.bench_tables import markdown, to_json
from flashdecoding.testing.comparison import NotTakingPart
from flashdecoding.testing.peers import OURS, PEERS, Contender
from flashdecoding.testing.rows import Row
from flashdecoding.testing.timing import (
    CeilingProbes,
    Ceilings,
    Timing,
    describe_machine,
    fill_random,
    peak_bytes,
    take_turns,
    threads_and_precision,
)

SMALL = Row.parse("1x4/2x64x64", "fp32")
QUICK = Settings(pool_bytes=1 << 20, rounds=2, block_seconds=0.001)


def measured(row: Row, *contenders: Contender) -> Measurement:
    with torch.inference_mode():
        return measure(row, [OURS, *contenders], Caches(QUICK.pool_bytes), CeilingProbes(1 << 16, 32), QUICK)


def contender(name: str, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Contender:
    return Contender(name, name, lambda q, _: lambda k, v: attention(q, k, v))


def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("row", GRID, ids=lambda row: f"{row.shape}-{row.dtype}")
def test_shape_is_parsed_as_it_is_written(row: Row) -> None:
    assert Row.parse(row.shape, row.dtype) == row


def test_bytes_and_operations_are_counted_by_hand() -> None:
    row = Row.parse("2x8/2x16x100", "bf16")
    assert row.nbytes == 2 * (2 * 2 * 100 * 16) * 2  # K and V, elements, 2 bytes each
    assert row.flops == 2 * (2 * 8 * 100 * 16) * 2  # Q K^T and P V, multiply-adds, 2 operations each
    assert row.partial_bytes == 2 * 8 * (16 * 4 + 2 * 8)  # one split a sequence: o, m and l of 8 heads
    assert Row.parse("1x1/1x16x1025", "fp32").partial_bytes == 3 * (16 * 8 + 2 * 8)


@pytest.mark.parametrize("shape", ["", "1x8x64x1K", "1x8/8x64", "0x8/8x64x1K", "1x8/3x64x1K", "1x8/8x64x1M"])
def test_bad_shape_is_refused(shape: str) -> None:
    with pytest.raises(ValueError, match="shape"):
        Row.parse(shape, "bf16")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", ["1x4/2x64x64", "2x3/3x16x65"])
def test_sdpa_peers_are_right_and_timed(shape: str, dtype: str) -> None:
    m = measured(Row.parse(shape, dtype), PEERS["sdpa"], PEERS["sdpa-packed"])
    expected = {OURS.name, "sdpa"} if shape == "2x3/3x16x65" else {OURS.name, "sdpa", "sdpa-packed"}
    assert set(m.timings) == expected
    assert set(m.missing) == {"sdpa-packed"} - expected
    assert m.peak_bytes >= m.row.partial_bytes  # what a call keeps for the next one counts
    assert m.own_bytes < bench.OWN_MEMORY_LIMIT
    assert m.ahead is not None
    assert m.ahead == m.timings[m.best_peer or ""].median / m.timings[OURS.name].median


def test_llama_cpp_is_right_where_it_is_installed() -> None:
    pytest.importorskip("llama_cpp")
    m = measured(SMALL, PEERS["llama.cpp"])
    assert "llama.cpp" in m.timings, m.missing


def test_flex_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda _: None)
    assert measured(SMALL, PEERS["flex"]).missing == {"flex": "no C++ compiler found"}


@pytest.mark.parametrize("fault", ["zeros", "nan", "shape", "raises", "absent"])
def test_a_peer_that_is_wrong_or_absent_is_never_timed(fault: str) -> None:
    calls = []

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(fault)
        if fault == "raises":
            raise RuntimeError("no kernel\nfor this")
        if fault == "absent":
            raise NotTakingPart("it is not installed")
        out = right(q, k, v)
        return {"zeros": out * 0, "nan": out * float("nan"), "shape": out[:, :1]}[fault]

    m = measured(SMALL, contender("peer", attention), contender("right", right))
    assert len(calls) == 1
    assert set(m.timings) == {OURS.name, "right"}
    words = {"raises": "it failed: RuntimeError: no kernel for this", "absent": "not installed"}
    assert words.get(fault, "its result is wrong") in m.missing["peer"]


def test_nothing_is_timed_if_our_own_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "OURS", contender(OURS.name, lambda q, k, v: right(q, k, v) * 1.001))
    monkeypatch.setattr(bench, "take_turns", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(AssertionError, match="miss the bound"):
        measured(SMALL)


def test_no_call_meets_the_cache_of_the_call_before() -> None:
    seen: list[int] = []

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(k.data_ptr())
        return right(q, k, v)

    with torch.inference_mode():
        caches = Caches(8 * SMALL.nbytes)
        assert len(caches.copies(SMALL)) == 8
        everybody = [contender(name, spy) for name in (OURS.name, "first", "second")]
        measure(SMALL, everybody, caches, CeilingProbes(1 << 16, 32), QUICK)
    timed = seen[3:]  # after one check each
    assert len(set(timed)) > 2
    assert all(one != other for one, other in itertools.pairwise(timed))


def test_caches_grow_to_two_copies_and_hold_data() -> None:
    row = Row.parse("1x2/2x64x4K", "fp16")
    caches = Caches(row.nbytes // 2)
    copies = caches.copies(row)
    assert [tuple(x.shape) for pair in copies for x in pair] == [(1, 2, 4096, 64)] * 4
    assert len({x.data_ptr() for pair in copies for x in pair}) == 4
    assert all(x.isfinite().all() and x.std() > 0.9 for pair in copies for x in pair)
    assert caches.copies(SMALL)[0][0].dtype == torch.float32


def test_contenders_take_turns() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = take_turns(calls, rounds=3, block_seconds=10.0, most_calls=2)
    assert "".join(order) == "aabbcc" + 3 * "aaabbbccc"  # two to estimate; then one uncounted and two counted a turn
    assert {name: t.samples for name, t in timings.items()} == dict.fromkeys("abc", 6)


def test_a_slow_contender_takes_three_turns() -> None:
    timings = take_turns({"slow": lambda: None, "other": lambda: None}, rounds=9, block_seconds=0.0)
    assert {t.samples for t in timings.values()} == {3}


def test_median_and_least() -> None:
    assert Timing.of([3.0, 1.0, 2.0, 10.0]) == Timing(median=2.5, minimum=1.0, samples=4)


@pytest.mark.parametrize(("nbytes", "flops", "seconds", "reading"), [(400, 10, 4.0, True), (100, 50, 5.0, False)])
def test_limit_is_the_larger_time(nbytes: int, flops: int, seconds: float, reading: bool) -> None:
    assert Ceilings(bandwidth=100.0, flops=10.0, reader="sum").seconds(nbytes, flops) == (seconds, reading)


def test_ceiling_is_that_of_the_fastest_reader() -> None:
    probes = CeilingProbes(1 << 20, 100)
    slow, fast = Timing(1.0, 1.0, 1), Timing(0.5, 0.1, 1)
    timings = {name: fast if name in ("read: amax", "matmul") else slow for name in probes.calls()}
    assert probes.ceilings(timings) == Ceilings(bandwidth=2 * 2**20, flops=2 * 100**3 / 0.5, reader="amax")
    for call in probes.calls().values():
        call()


def test_random_fill_leaves_no_zero_page() -> None:
    x = torch.zeros(5_000_001, dtype=torch.bfloat16)
    fill_random(x)
    assert x.view(-1)[-1000:].std() > 0.5
    assert x[:4096].std() > 0.5


def test_peak_memory_counts_what_was_freed_in_the_call() -> None:
    def call() -> Tensor:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        del first
        return torch.empty(1 << 10, dtype=torch.uint8).new_empty(3 << 18)

    assert 1 << 20 <= peak_bytes(call) < (1 << 20) + 4096


def test_threads_and_precision_are_restored() -> None:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with threads_and_precision(1):
        assert torch.get_num_threads() == 1
        assert torch.get_float32_matmul_precision() == "highest"
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


def test_report_names_machine_rows_and_whoever_is_missing() -> None:
    absent = Contender("absent", "Absent", lambda *_: (_ for _ in ()).throw(NotTakingPart("it is not installed")))
    report = Report(describe_machine(), QUICK, [OURS, PEERS["sdpa"], absent])
    report.measurements = [measured(SMALL, PEERS["sdpa"], absent)]
    text = markdown(report)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert table[0] == "| shape | type | limit | flashdecoding | SDPA | best peer / ours |"
    assert f"torch {torch.__version__}" in text
    assert "Absent is not measured: it is not installed." in text
    loaded = json.loads(to_json(report))
    assert loaded["measurements"][0]["timings"][OURS.name]["median"] > 0
    assert loaded["measurements"][0]["missing"] == {"absent": "it is not installed"}


def test_too_much_memory_is_reported() -> None:
    m = measured(SMALL)
    m.peak_bytes = 5 << 20
    report = Report(describe_machine(), QUICK, [OURS], [m])
    assert report.too_much_memory == [m]
    assert "TOO MUCH MEMORY at 1x4/2x64x64 fp32" in markdown(report)
