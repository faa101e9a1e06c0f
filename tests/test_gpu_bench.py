"""The GPU's benchmark, as far as a machine without one can say: rows, inputs, every contender's arguments, the report.

Peers that are not installed are played by stand-ins with the same interfaces, which compute what they are asked for.
On a machine with a GPU the last test runs the real thing on small rows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashdecoding import reference_attention
from flashdecoding.commands import gpu_bench as command
from flashdecoding.commands.inputs import BadInput
from flashdecoding.testing import flashinfer_peer, gpu_bench, gpu_peers, gpu_timing
from flashdecoding.testing.comparison import NotTakingPart
from flashdecoding.testing.gpu_bench import GpuMeasurement, GpuReport, GpuSettings, measure, run
from flashdecoding.testing.gpu_inputs import build, calls_in_graph, copies_needed, references
from flashdecoding.testing.gpu_peers import GPU_PEERS, OURS, VARIANTS, GpuContender, Prepared
from flashdecoding.testing.gpu_rows import SETS, GpuRow, in_dtype, lognormal, paged, plain, ragged, uniform
from flashdecoding.testing.gpu_tables import line, markdown, to_json
from flashdecoding.testing.gpu_timing import Gpu, ReadCeiling
from flashdecoding.testing.timing import Timing

CPU = torch.device("cpu")
SETTINGS = GpuSettings(spacing_bytes=1, rounds=1)
CEILING = ReadCeiling(1e9, "a reader", {"a reader": 1e9, "torch.sum": 0.9e9}, 7e-7)
GPU = Gpu("Some GPU", 132, 60.0, 140.0, "580.1", "13.0", {"torch": "2.11.0"}, "2026-11-30 00:00 UTC")

SMALL = {
    "plain": plain("2x8/2x64x96"),
    "plain-odd": plain("1x4/4x32x37"),
    "ragged": replace(ragged("three", [77, 201, 3], heads=(8, 2)), head_dim=64),
    "drafts": paged("2x8/2x64x96", q_len=4),
    "page-1": paged("2x8/2x64x40", page_size=1),
    "window": paged("2x8/2x64x3K", window=128, sinks=True),
    "window-drafts": paged("2x8/2x64x3K", q_len=3, window=64),
}


# Rows


def test_sets_have_the_rows_that_the_documents_name() -> None:
    assert {name: len(rows) for name, rows in SETS.items()} == {
        "grid": 12, "ragged": 4, "drafts": 8, "pages": 4, "window": 1,
    }  # fmt: skip
    everything = [row.name for rows in SETS.values() for row in rows]
    assert len(set(everything)) == len(everything)
    assert {row.page_size for row in SETS["grid"]} == {None}
    assert {row.page_size for row in (*SETS["ragged"], *SETS["drafts"], *SETS["window"])} == {16}


def test_ragged_lengths_are_the_same_in_every_run() -> None:
    one, chats, short, three = (row.seqlens for row in SETS["ragged"])
    assert one == (131072, *[1024] * 31)
    assert (len(chats), max(chats) <= 65536, sum(chats)) == (64, True, 462066)
    assert (len(short), min(short) >= 1, max(short) <= 4096, sum(short)) == (256, True, True, 498087)
    assert three == (7777, 20001, 333)
    assert lognormal(64, 4096, 65536, seed=0) == list(chats) != lognormal(64, 4096, 65536, seed=1)
    assert uniform(256, 4096, seed=0) == list(short) != uniform(256, 4096, seed=1)
    assert set(lognormal(200, 4096, 5000, seed=0)) & {5000}  # clipped


def test_bytes_are_those_of_visible_keys() -> None:
    assert plain("1x32/8x128x1K").nbytes == 2 * 8 * 1024 * 128 * 2
    assert in_dtype(plain("1x32/8x128x1K"), "fp32").nbytes == 2 * 8 * 1024 * 128 * 4
    row = ragged("", [5, 100])
    assert row.nbytes == 2 * 8 * 105 * 128 * 2
    assert row.stored_bytes == 2 * 8 * (1 + 7) * 16 * 128 * 2
    window = SETS["window"][0]
    assert window.nbytes == 2 * 8 * (8 * 128) * 64 * 2
    assert window.capacity == 128 << 10
    assert window.stored_bytes < 20e6
    assert all(own * 16 > 128 + 1024 for own in window.own_pages)  # no page that a kernel reads stands for two


def test_names_say_what_differs() -> None:
    assert plain("1x32/8x128x8K").name == "1x32/8x128x8K"
    assert in_dtype(plain("1x32/8x128x8K"), "fp16").name == "1x32/8x128x8K fp16"
    assert SETS["window"][0].name == "8x64/8x64x128K, page 16, window 128, sinks"
    assert SETS["drafts"][1].name == "1x32/8x128x8K, 8 queries, page 16"


@pytest.mark.parametrize("row", [row for rows in SETS.values() for row in rows], ids=lambda row: row.name)
def test_copies_are_read_in_turn_and_far_apart(row: GpuRow) -> None:
    copies = copies_needed(row.nbytes, 200_000_000)
    calls = calls_in_graph(row.nbytes, copies)
    assert copies >= 2
    assert (copies - 1) * row.nbytes >= 200_000_000
    assert calls % copies == 0
    assert calls >= 8
    assert calls * row.nbytes >= 500_000_000
    assert copies * row.stored_bytes < 6e9


def choices(sets: str | None, shapes: Sequence[str] = (), dtypes: Sequence[str] = ()) -> list[str]:
    return [row.name for row in command.choose_rows(sets, shapes, dtypes)]


def test_rows_are_chosen_by_set_shape_and_dtype() -> None:
    names = {name: [row.name for row in rows] for name, rows in SETS.items()}
    assert choices(None) == names["grid"] + names["ragged"]
    assert choices("window, drafts") == names["drafts"] + names["window"]
    assert choices("all") == [name for each in names.values() for name in each]
    assert choices(None, ["1x8/2x64x3K"], ["bf16", "fp32"]) == ["1x8/2x64x3K", "1x8/2x64x3K fp32"]
    assert choices("window", dtypes=["fp16"]) == [f"{names['window'][0]} fp16"]


# Inputs


def test_caches_are_stored_sequence_first_and_differ() -> None:
    inputs = build(SMALL["plain"], 3, CPU)
    assert inputs.q.shape == (2, 8, 1, 64)
    assert len({x.data_ptr() for pair in inputs.copies for x in pair}) == 6
    for k, v in inputs.copies:
        assert k.shape == v.shape == (2, 2, 96, 64)
        assert k.transpose(1, 2).is_contiguous()
        assert v.transpose(1, 2).is_contiguous()
    assert not torch.equal(inputs.copies[0][0], inputs.copies[1][0])
    assert torch.equal(inputs.copies[0][0], build(SMALL["plain"], 1, CPU).copies[0][0])


@pytest.mark.parametrize("name", ["ragged", "page-1", "window"])
def test_page_tables_are_shuffled_and_share_no_visible_page(name: str) -> None:
    row = SMALL[name]
    inputs = build(row, 1, CPU)
    table = inputs.page_table
    assert table is not None
    last = [entries[:n][-own:] for entries, n, own in zip(table, row.pages, row.own_pages, strict=True)]
    visible = torch.cat(last).tolist()
    assert sorted(visible) == list(range(inputs.copies[0][0].shape[0]))
    assert visible != sorted(visible)
    assert all((entries[n:] == 0).all() for entries, n in zip(table, row.pages, strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_reference_catches_a_wrong_sequence(name: str) -> None:
    inputs = build(SMALL[name], 1, CPU)
    right = OURS.prepare(inputs).calls[0]()
    checks = references(inputs)
    assert {check.sequence for check in checks} == ({2, 1} if name == "ragged" else {0, inputs.row.batch - 1})
    for check in checks:
        check.check(right)
        with pytest.raises(AssertionError, match=r"sequence \d out: .*(miss the bound|of its norm)"):
            check.check(right * 1.02)


# Contenders


def attend(q: Tensor, k: Tensor, v: Tensor, pages: list[list[int]], lengths: list[int], **options: Any) -> Tensor:
    """q (B, Sq, Hq, D), k and v (pages, size, Hkv, D), pages by sequence: (B, Sq, Hq, D), by the float64 reference."""
    outputs = []
    for b, (own, length) in enumerate(zip(pages, lengths, strict=True)):
        keys, values = (x[own].flatten(0, 1)[None, :length].transpose(1, 2) for x in (k, v))
        out = reference_attention(q[b : b + 1].transpose(1, 2), keys, values, **options)
        outputs.append(out.transpose(1, 2))  # type: ignore[union-attr]
    return torch.cat(outputs).to(q.dtype)


FA3_SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]",
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, "
    "bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> Tensor",
)


def fa3_forward(*positional: Any) -> list[Tensor]:
    names = [word.split()[-1] for word in FA3_SCHEMA[0].split("(", 1)[1].split(")")[0].split(",")]
    a = SimpleNamespace(**dict(zip(names, positional, strict=True)))
    assert a.seqused_k.dtype == torch.int32
    assert a.softmax_scale == pytest.approx(a.q.shape[-1] ** -0.5)
    assert (a.softcap, a.num_splits, a.sm_margin, a.cp_world_size, a.cp_rank) == (0.0, 0, 0, 1, 0)
    assert a.q.is_contiguous() and a.k.is_contiguous() and a.v.is_contiguous() and a.out.is_contiguous()
    lengths = a.seqused_k.tolist()
    assert max(lengths) <= a.max_seqlen_k
    if a.page_table is None:
        assert a.max_seqlen_k == a.k.shape[1]
        pages = [[b] for b in range(len(lengths))]
    else:
        pages = [row[: -(-n // a.k.shape[1])].tolist() for row, n in zip(a.page_table, lengths, strict=True)]
    window = None if a.window_size_left < 0 else a.window_size_left + 1
    assert a.window_size_right == (-1 if window is None else 0)
    assert a.is_causal == (a.q.shape[1] > 1 or a.scheduler_metadata is not None)
    assert a.s_aux is None or a.s_aux.dtype == torch.bfloat16
    a.out.copy_(attend(a.q, a.k, a.v, pages, lengths, window=window, sinks=a.s_aux))
    return [a.out]


def fa3_metadata(*positional: Any) -> Tensor:
    batch, _, longest, q_heads, kv_heads, head_dim, _, dtype, lengths = positional[:9]
    assert (q_heads, kv_heads, head_dim, dtype) == (8, 2, 64, torch.bfloat16)
    assert lengths.tolist() == lengths.clamp(max=longest).tolist()
    assert len(lengths) == batch
    assert positional[16] is True
    return torch.zeros(4 * batch, dtype=torch.int32)


@pytest.fixture(scope="module")
def fa3() -> Iterator[Any]:
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    for schema, function in zip(FA3_SCHEMA, (fa3_forward, fa3_metadata), strict=True):
        library.define(schema)
        library.impl(schema.split("(", 1)[0], function, "CPU")
    yield torch.ops._vllm_fa3_C
    library._destroy()


class FlashInferWrapper:
    """Stands in for three wrappers: as far as they are used, their calls differ in the first argument of ``plan``."""

    queries_planned = True

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert (workspace.dtype, int(workspace.count_nonzero()), layout) == (torch.uint8, 0, "NHD")
        self.options = options

    def plan(self, *tables: Any, **options: Any) -> None:
        if self.queries_planned:
            offsets, *tables = tables  # type: ignore[assignment]
            assert options.pop("causal") is True
            self.q_len = int(offsets[1])
            assert offsets.tolist() == [self.q_len * b for b in range(len(offsets))]
        else:
            assert self.options == {"use_tensor_cores": True}
            self.q_len = 1
        offsets, pages, last, q_heads, kv_heads, head_dim, self.size = tables
        assert (offsets.dtype, pages.dtype, last.dtype) == (torch.int32,) * 3
        assert (q_heads % kv_heads, options.pop("q_data_type"), options.pop("kv_data_type")) == (
            0,
            *[torch.bfloat16] * 2,
        )
        self.pages = [pages[a:b].tolist() for a, b in pairwise(offsets.tolist())]
        self.lengths = [(len(own) - 1) * self.size + n for own, n in zip(self.pages, last.tolist(), strict=True)]
        self.heads = (q_heads, head_dim)
        window_left = options.pop("window_left")
        self.window = None if window_left < 0 else window_left + 1
        assert not options

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *more: Any, out: Tensor) -> Tensor:
        k, v = cache
        assert q.shape[1:] == out.shape[1:] == self.heads
        assert (k.shape[1], k.is_contiguous(), v.is_contiguous()) == (self.size, True, True)
        sinks = None
        if more:
            sinks, scale = more
            assert (sinks.dtype, scale) == (torch.float32, pytest.approx(q.shape[-1] ** -0.5))
        rows = q.view(len(self.pages), self.q_len, *self.heads)
        return out.copy_(attend(rows, k, v, self.pages, self.lengths, window=self.window, sinks=sinks).flatten(0, 1))


class FlashInferDecode(FlashInferWrapper):
    queries_planned = False


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FlashInferDecode,
        BatchPrefillWithPagedKVCacheWrapper=FlashInferWrapper,
        BatchAttentionWithAttentionSinkWrapper=FlashInferWrapper,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer_peer, "WORKSPACE_BYTES", 64)
    return module


def results(row: GpuRow, contenders: Sequence[GpuContender]) -> dict[str, str]:
    """Who computes what ours does, for every copy; and the reasons of the others."""
    inputs = build(row, 2, CPU)
    with torch.no_grad():
        prepared, missing = gpu_bench.checked(inputs, [OURS, *contenders])
        ours = [call().clone() for call in prepared[OURS.name].calls]
        for name, ready in prepared.items():
            assert len(ready.calls) == 2
            for call, wanted in zip(ready.calls, ours, strict=True):
                out = ready.heads_first(call())
                assert (out.float() - wanted.float()).abs().max() < 0.02, name
    return {name: missing.get(name, "right") for name in (c.name for c in contenders)}


@pytest.mark.parametrize("name", SMALL)
def test_our_variants_are_right_on_every_row(name: str) -> None:
    assert set(results(SMALL[name], VARIANTS).values()) == {"right"}


@pytest.mark.parametrize("name", [name for name in SMALL if name != "plain-odd"])
def test_fa3_is_asked_for_what_the_row_is(name: str, fa3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers, "_fa3_operators", lambda: fa3)
    both = [GPU_PEERS["fa3"], GPU_PEERS["fa3-vllm"]]
    assert results(SMALL[name], both) == {"fa3": "right", "fa3-vllm": "right"}


@pytest.mark.parametrize("name", SMALL)
def test_flashinfer_is_asked_for_what_the_row_is(name: str, flashinfer: SimpleNamespace) -> None:
    assert results(SMALL[name], [GPU_PEERS["flashinfer"]]) == {"flashinfer": "right"}
    in_fp32 = results(in_dtype(SMALL[name], "fp32"), [GPU_PEERS["flashinfer"]])
    assert in_fp32 == {"flashinfer": "it takes 16-bit queries"}


def test_torch_peers_take_part_in_plain_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: scaled_dot_product_attention)
    anywhere = replace(GPU_PEERS["sdpa-fa2"], context=nullcontext)
    peers = [anywhere, GPU_PEERS["flex"]]
    assert results(SMALL["plain"], peers) == {"sdpa-fa2": "right", "flex": "right"}
    assert results(SMALL["plain-odd"], peers) == {"sdpa-fa2": "right", "flex": "right"}
    for name in ("ragged", "drafts", "window"):
        assert all("one piece" in reason for reason in results(SMALL[name], peers).values())


@pytest.mark.parametrize("name", ["sdpa-fa2", "sdpa-cudnn"])
def test_sdpa_is_confined_to_one_backend(name: str) -> None:
    flash, cudnn = (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.cudnn_sdp_enabled)
    with GPU_PEERS[name].context():
        assert (flash(), cudnn()) == (name == "sdpa-fa2", name == "sdpa-cudnn")
        assert not torch.backends.cuda.math_sdp_enabled()


def test_peers_that_are_not_installed_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delenv("PEERS", raising=False)
    missing = results(SMALL["plain"], [GPU_PEERS["fa3"], GPU_PEERS["flashinfer"]])
    assert "PEERS names no folder" in missing["fa3"]
    assert "flashinfer is not installed" in missing["flashinfer"]
    monkeypatch.setenv("PEERS", str(tmp_path))
    assert "cannot be loaded" in results(SMALL["plain"], [GPU_PEERS["fa3"]])["fa3"]


def test_flashinfer_compiles_each_kind_of_module_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def generate(*arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(build=lambda verbose: built.append((arguments[5], arguments[8], verbose)))

    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flashinfer.jit", SimpleNamespace(gen_batch_prefill_module=generate))
    others = [SMALL["window-drafts"], in_dtype(SMALL["plain-odd"], "fp32")]
    flashinfer_peer.build([*SETS["grid"], *SETS["ragged"], *SETS["window"], *others])
    assert sorted(built) == [(64, False, False), (64, True, False), (128, False, False), (256, False, False)]
    monkeypatch.setitem(sys.modules, "flashinfer.jit", SimpleNamespace())  # as in a version that has other names
    flashinfer_peer.build(SETS["grid"])


# The run


class FakeGraph:
    def __init__(self, calls: Sequence[Callable[[], Tensor]], number: int) -> None:
        self.calls, self.number = calls, number
        assert number % len(calls) == 0
        self.replay()

    def replay(self) -> None:
        self.result = self.calls[-1]()


def fake_times(graphs: dict[str, Any], *, rounds: int, calls: int) -> dict[str, Timing]:
    return {name: Timing(1e-6 * (2 + number), 1e-6, rounds) for number, name in enumerate(graphs)}


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "Graph", FakeGraph)
    monkeypatch.setattr(gpu_bench, "replay_in_turns", fake_times)
    monkeypatch.setattr(gpu_bench, "measure_ceiling", lambda *_: CEILING)
    monkeypatch.setattr(gpu_bench, "describe_gpu", lambda _: GPU)
    monkeypatch.setattr(gpu_bench, "HOST_ROW", SMALL["plain"])
    monkeypatch.setattr(gpu_bench, "host_seconds", lambda calls, _: Timing(2e-5, 1e-5, len(calls)))


def right(inputs: Any) -> Prepared:
    attention = reference_attention
    lengths = {"seqlens": inputs.seqlens, **inputs.options}
    return Prepared(
        [lambda k=k, v=v: attention(inputs.q, k, v, **lengths).to(inputs.q.dtype) for k, v in inputs.copies]
    )


def faulty(fault: str) -> GpuContender:
    def prepare(inputs: Any) -> Prepared:
        if fault == "absent":
            raise NotTakingPart("it is not installed")
        if fault == "raises":
            raise OSError("no compiler\nat all")
        calls = right(inputs).calls
        answers = {"zeros": 0.0, "nan": torch.nan}
        if fault in answers:
            return Prepared([lambda call=call: call() * answers[fault] for call in calls])
        if fault == "shape":
            return Prepared([lambda call=call: call()[:, :1] for call in calls])
        counts = iter(
            range(100)
        )  # the first call is the check; then come capture, replay, and the call to compare with

        def last() -> Tensor:
            number = next(counts)
            if fault == "capture" and number == 0:
                raise RuntimeError("capture is not allowed")
            return calls[-1]() * (2.0 if fault == "replay" and number == 1 else 1.0)

        return Prepared([*calls[:-1], last])

    return GpuContender(fault, fault, prepare)


FAULTS = {
    "absent": "it is not installed",
    "raises": "it failed: OSError: no compiler at all",
    "zeros": "its result is wrong",
    "nan": "its result is wrong",
    "shape": "its result is wrong: shape",
    "capture": "it failed: RuntimeError: capture is not allowed",
    "replay": "its result is wrong",
}


def test_a_peer_that_fails_anywhere_is_left_out_and_the_others_are_timed(without_gpu: None) -> None:
    peers = [*map(faulty, FAULTS), GpuContender("right", "Right", right)]
    m = measure(SMALL["plain"], [OURS, *VARIANTS, *peers], CEILING, SETTINGS, CPU)
    assert set(m.timings) == {OURS.name, *(c.name for c in VARIANTS), "right"}
    assert set(m.missing) == set(FAULTS)
    for fault, reason in FAULTS.items():
        assert reason in m.missing[fault]
    assert m.best_peer == "right"
    assert m.limit_seconds == m.row.nbytes / 1e9


def test_our_own_wrong_result_is_no_time_and_no_end(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SMALL["ragged"].name

    def prepare(inputs: Any) -> Prepared:
        ready = right(inputs)
        return (
            Prepared([lambda call=call: call() * 1.02 for call in ready.calls]) if inputs.row.name == wrong else ready
        )

    monkeypatch.setattr(gpu_bench, "OURS", replace(OURS, prepare=prepare))
    monkeypatch.setattr(gpu_bench, "VARIANTS", ())
    done = []
    report = run(
        [SMALL["plain"], SMALL["ragged"], SMALL["drafts"]], [], SETTINGS, CPU, after=lambda _, name: done.append(name)
    )
    assert done == ["read ceiling", SMALL["plain"].name, wrong, SMALL["drafts"].name, "host cost"]
    assert [m.row_name for m in report.measurements] == [SMALL["plain"].name, SMALL["drafts"].name]
    assert "AssertionError: three, 8/2x128, sequence" in report.failures[wrong]
    assert not report.good
    assert "NOT MEASURED" in line(report, wrong)
    assert "NOT MEASURED" in markdown(report)


def test_a_wrong_variant_of_ours_is_not_timed_and_the_run_is_not_good(
    without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = GpuContender(f"{OURS.name}-fast", "fast", lambda i: Prepared([lambda: right(i).calls[0]() * 1.02] * 2))
    monkeypatch.setattr(gpu_bench, "VARIANTS", (variant,))
    report = run([SMALL["plain"]], [], SETTINGS, CPU)
    assert set(report.measurements[0].timings) == {OURS.name}
    assert "AssertionError" in report.measurements[0].own_failures[variant.name]
    assert not report.good


def test_a_whole_run_is_printed_and_written(without_gpu: None, tmp_path: Path) -> None:
    built = []
    peer = GpuContender("peer", "The peer", right, "it is right", build=lambda rows: built.append(len(rows)))
    broken = GpuContender("broken", "Broken", right, build=lambda _: (_ for _ in ()).throw(OSError("no\ncompiler")))
    absent = replace(faulty("absent"), label="Nobody")
    paths = {tmp_path / "bench.json": to_json, tmp_path / "bench.md": markdown}
    lines = []

    def after(report: GpuReport, done: str) -> None:
        lines.append(line(report, done))
        command.write(paths, report)
        assert json.loads((tmp_path / "bench.json").read_text())["gpu"]["name"] == "Some GPU"

    report = run(list(SMALL.values()), [peer, broken, absent], SETTINGS, CPU, after=after)
    assert report.good
    assert sorted(os.listdir(tmp_path)) == ["bench.json", "bench.md"]
    assert "Some GPU (132 multiprocessors, 60 MiB L2" in lines[0]
    assert "Read ceiling 0.001 TB/s (fastest reader: a reader; torch.sum 0.001); an empty kernel" in lines[0]
    for row, text in zip(SMALL.values(), lines[1:], strict=False):
        assert text.startswith(f"{row.name}: limit ")
        assert "best peer / ours 2.50 (peer)" in text
    assert lines[-1].startswith("host cost of an eager call at 1x32/8x128x1K, us: flashdecoding 20.0,")
    whole = json.loads((tmp_path / "bench.json").read_text())
    assert [m["row"] for m in whole["measurements"]] == [row.name for row in SMALL.values()]
    assert whole["measurements"][0]["timings"]["peer"]["median"] == pytest.approx(5e-6)
    assert whole["measurements"][2]["seqlens"] == [77, 201, 3]
    assert whole["host_cost"]["timings"]["peer"]["median"] == 2e-5
    text = (tmp_path / "bench.md").read_text()
    assert "The peer: it is right." in text
    assert built == [len(SMALL) + 1]
    assert "Nobody is not measured: it is not installed." in text
    assert "Broken is not measured: it failed: OSError: no compiler." in text
    assert "0.001 after the last row" in text


def test_table_from_made_up_times() -> None:
    row = SETS["grid"][0]
    times = {OURS.name: 5e-6, "sdpa-fa2": 10e-6, "fa3": 8e-6}
    timings = {name: Timing(t, t, 21) for name, t in times.items()}
    m = GpuMeasurement(row.name, 1e-6, timings, {"flashinfer": "it failed: OSError: no"}, row, 51, 153)
    longer = replace(m, row_name="longer", row=SETS["grid"][3], timings={OURS.name: Timing(482e-6, 480e-6, 21)})
    contenders = [OURS, *(GPU_PEERS[name] for name in ("sdpa-fa2", "fa3", "flashinfer"))]
    text = markdown(GpuReport(GPU, SETTINGS, contenders, CEILING, measurements=[m, longer]))
    table = [part for part in text.splitlines() if part.startswith("|")]
    assert table[0] == "| row | bytes | limit | flashdecoding | SDPA FA2 | FA3 | best peer / ours |"
    assert table[2] == "| 1x32/8x128x1K | 4.19 MB | 1 | 5 (20) | 10 (10) | 8 (12) | 1.60 |"
    assert table[3] == "| longer | 2.15 GB | 1 | 482 (0) | - | - | - |"
    assert "Not timed at 1x32/8x128x1K, longer: flashinfer: it failed: OSError: no." in text


def test_the_command_prints_every_row_and_ends_with_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_gpu: None
) -> None:
    properties = SimpleNamespace(total_memory=1 << 30, L2_cache_size=100_000_000)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    spacing = []

    def on_cpu(rows: Any, peers: Any, settings: GpuSettings, device: torch.device, **more: Any) -> GpuReport:
        spacing.append((settings.spacing_bytes, device))
        return run(rows, peers, SETTINGS, CPU, **more)

    monkeypatch.setattr(command, "run_benchmark", on_cpu)
    console = Console(file=StringIO(), width=80)
    code = command.run(console, [SMALL["plain"]], [], 1, {tmp_path / "bench.md": markdown})
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert (code, spacing) == (0, [(300_000_000, torch.device("cuda", 0))])
    assert text.index("Some GPU") < text.index("2x8/2x64x96: limit ") < text.index("| 2x8/2x64x96 | ")
    assert (tmp_path / "bench.md").read_text() in text
    with pytest.raises(BadInput, match="more than half of the GPU's memory"):
        command.run(console, SETS["grid"], [], 1, {})


# The clock


def test_a_time_is_a_replay_over_its_calls_and_graphs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    def graph(name: str, milliseconds: float) -> SimpleNamespace:
        def replay() -> None:
            order.append(name)
            now[0] += milliseconds

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    graphs: dict[str, Any] = {"a": graph("a", 8.0), "b": graph("b", 4.0)}
    timings = gpu_timing.replay_in_turns(graphs, rounds=2, calls=4)
    assert "".join(order) == "aaaabbbb" * 2  # one that does not count, three that do
    assert {name: t.samples for name, t in timings.items()} == {"a": 6, "b": 6}
    assert timings["a"].median == pytest.approx(0.002)
    assert timings["b"].median == pytest.approx(0.001)


def test_a_graph_holds_its_calls_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    calls = [lambda n=n: order.append(n) or n for n in range(5)]
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(gpu_timing, "_capture_stream", lambda: None)
    graph = gpu_timing.Graph(calls, 10)
    assert order == [0, 1, 2, *range(5), *range(5)]
    assert graph.result == 4


def test_host_cost_is_a_mean_after_warm_up() -> None:
    calls: list[int] = []
    timing = gpu_timing.host_seconds([lambda: calls.append(0), lambda: calls.append(1)], CPU, repeats=10, rounds=3)
    assert timing.samples == 3
    assert 0 < timing.minimum <= timing.median < 1e-3
    assert calls == [0, 1] * 20


READ = """
import torch
from flashdecoding.gpu import probes
x = torch.randint(-9999, 9999, (3 * 4096,), dtype=torch.int32)
sums = probes.read(x, torch.zeros(9, dtype=torch.int32), probes.Reader(1024, 4, 4096))
assert sums.shape == (3,)
assert torch.equal(sums, x.view(3, 4096).sum(1, dtype=torch.int32)), sums
print("every value read once")
"""


def test_the_reader_reads_every_value_once() -> None:
    pytest.importorskip("triton", minversion="3.6", reason="Triton 3.6 or newer is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "every value read once\n", done.stderr[-2000:]


def test_the_reader_loads_16_bytes_at_a_time() -> None:
    triton = pytest.importorskip("triton", minversion="3.6", reason="Triton 3.6 or newer is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flashdecoding.gpu.probes import READERS, empty_kernel, read_kernel

    types = {"x_ptr": "*i32", "sums_ptr": "*i32", "chunk": "i32", "BLOCK": "constexpr"}
    divisible = {(number,): [["tt.divisibility", 16]] for number in range(3)}  # what the launcher finds
    for reader in READERS:
        assert reader.chunk % reader.block == 0
        source = ASTSource(read_kernel, types, {"BLOCK": reader.block}, divisible)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": reader.warps}).asm["ptx"]
        loads = ptx.count("ld.global")
        assert loads == ptx.count("ld.global.v4.b32") == reader.block // (4 * 32 * reader.warps)
    triton.compile(ASTSource(empty_kernel, {"x_ptr": "*i32"}), target=GPUTarget("cuda", 90, 32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: it captures and replays CUDA graphs")
def test_small_rows_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_timing, "READ_BYTES", 64 << 20)
    device = torch.device("cuda", torch.cuda.current_device())
    peers = [GPU_PEERS["sdpa-fa2"], GPU_PEERS["sdpa-cudnn"]]
    rows = [plain("2x8/2x128x1K"), *(SMALL[name] for name in ("ragged", "drafts", "window"))]
    report = run(rows, peers, GpuSettings(spacing_bytes=10_000_000, rounds=2), device)
    assert report.good, (report.failures, [m.missing for m in report.measurements])
    assert report.measurements[0].best_peer is not None
    assert set(report.host) >= {OURS.name, "sdpa-fa2"}
    assert report.ceiling.bandwidth > 1e11
