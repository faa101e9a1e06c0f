"""Tensors and arguments that are legal in PyTorch or NumPy but not what a kernel may take for granted."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from flashdecoding import decode_attention, partial_attention, plan_decode
from flashdecoding.cpu import threads
from flashdecoding.plan import HostPlan
from flashdecoding.testing import Case, Problem, assert_same_bits, assert_within_bound, expect


def _tensors(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 8, 1, 64, generator=generator)
    return q, torch.randn(2, 2, 300, 64, generator=generator), torch.randn(2, 2, 300, 64, generator=generator)


def test_default_device_is_not_where_kernels_work() -> None:
    q, k, v = _tensors()
    wanted = decode_attention(q, k, v)
    with torch.device("meta"):
        assert_same_bits(decode_attention(q, k, v), wanted)
        assert partial_attention(q, k, v).o.device.type == "cpu"


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "out"])
def test_freed_storage_is_refused(name: str) -> None:
    q, k, v = _tensors()
    named: dict[str, Tensor] = {"q": q, "k": k, "v": v, "mask": torch.ones(1, 1, 1, 300, dtype=torch.bool)}
    named["out"] = torch.empty(2, 8, 1, 64)
    named[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{name} of shape .* has no memory"):
        decode_attention(**named)


without_torchs_own_warning = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")


@without_torchs_own_warning
@pytest.mark.parametrize("index", [0, 1, 2])
def test_transforms_are_refused(index: int) -> None:
    tensors = list(_tensors())
    name = "qkv"[index]

    def call(x: Tensor) -> Tensor:
        out = decode_attention(*tensors[:index], x, *tensors[index + 1 :])
        assert isinstance(out, Tensor)
        return out

    stacked = torch.stack([tensors[index]] * 2)
    with pytest.raises(ValueError, match=f"{name} of shape .* has no memory"):
        torch.vmap(call)(stacked)
    with pytest.raises(ValueError, match=f"{name}: requires grad"):
        torch.func.grad(lambda x: call(x).sum())(tensors[index])
    with pytest.raises(ValueError, match=f"{name}: has a forward-mode tangent"):
        torch.func.jvp(call, (tensors[index],), (tensors[index],))


@without_torchs_own_warning
@pytest.mark.parametrize("name", ["q", "v", "sinks", "alibi_slopes", "out"])
def test_a_tangent_is_not_dropped(name: str) -> None:
    q, k, v = _tensors()
    named: dict[str, Tensor] = {"q": q, "k": k, "v": v, "sinks": torch.zeros(8), "alibi_slopes": torch.zeros(8)}
    named["out"] = torch.zeros(2, 8, 1, 64)
    with forward_ad.dual_level(), torch.no_grad():  # which turns off backward mode only
        decode_attention(**named)
        named[name] = forward_ad.make_dual(named[name], torch.ones_like(named[name]))
        with pytest.raises(ValueError, match=f"{name}: has a forward-mode tangent"):
            decode_attention(**named)


@pytest.mark.parametrize("name", ["seqlens", "kv_begin"])
@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        (torch.tensor([100, 7]).to_sparse(), "sparse"),
        (torch.nested.nested_tensor([torch.tensor([100]), torch.tensor([7])], layout=torch.jagged), "nested"),
        (torch._efficientzerotensor((2,), dtype=torch.int64), "read"),
    ],
    ids=["sparse", "nested", "zero-tensor"],
)
def test_lengths_of_other_layouts_are_refused(name: str, lengths: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*{reason}"):
        decode_attention(*_tensors(), **{name: lengths})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"seqlens must be .*{reason}"):
        plan_decode(lengths, q_heads=8, kv_heads=2, head_dim=64, dtype=torch.float32)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_pending_sign_is_refused(index: int) -> None:
    tensors = list(_tensors())
    shape = tensors[index].shape
    tensors[index] = torch.randn(shape, dtype=torch.complex64).conj().imag
    assert tensors[index].is_neg()
    with pytest.raises(ValueError, match="resolve_neg"):
        decode_attention(*tensors)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint16, np.int64])
def test_numpy_lengths(dtype: Any) -> None:
    q, k, v = _tensors()
    lengths = np.array([100, 7], dtype)
    wanted = decode_attention(q, k, v, seqlens=[100, 7], window=50)
    assert_same_bits(decode_attention(q, k, v, seqlens=lengths, window=np.int64(50)), wanted)
    plan = plan_decode(lengths, q_heads=8, kv_heads=2, head_dim=64, dtype=torch.float32, window=50)
    assert plan.splits_of(1) == [(0, 7)]
    assert_same_bits(decode_attention(q, k, v, plan=plan, window=50), wanted)


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        ({"window": 1}, {"window": 1.0}),
        ({"window": 1}, {"window": True}),
        ({"causal": True}, {"causal": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
    ],
    ids=str,
)
def test_refusal_does_not_depend_on_earlier_calls(accepted: dict[str, Any], refused: dict[str, Any]) -> None:
    q, k, v = _tensors()
    decode_attention(q, k, v, **accepted)
    with pytest.raises(ValueError, match=next(iter(refused))):
        decode_attention(q, k, v, **refused)


@pytest.mark.parametrize(
    "changes",
    [{"window": 2**70}, {"scale": 10**400}, {"seqlens": 2**70}, {"plan": "x"}, {"seqlens": {300}}, {"seqlens": b"ab"}],
    ids=str,
)
def test_absurd_numbers_are_refused_by_name(changes: dict[str, Any]) -> None:
    q, k, v = _tensors()
    with pytest.raises(ValueError, match=next(iter(changes))):
        decode_attention(q, k, v, **changes)


def test_plan_does_not_outlive_an_edit_of_its_lengths() -> None:
    q, k, v = _tensors()
    plan = plan_decode([300, 17], q_heads=8, kv_heads=2, head_dim=64, dtype=torch.float32)
    plan.seqlens.sub_(1)
    with pytest.raises(ValueError, match=r"plan\.update"):
        decode_attention(q, k, v, seqlens=plan.seqlens, plan=plan)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_copies_of_a_plan_are_independent(duplicate: Callable[[Any], Any]) -> None:
    plan = plan_decode([300, 17], q_heads=8, kv_heads=2, head_dim=64, dtype=torch.float32)
    other = duplicate(plan)
    other.update([7, 5000])
    assert plan.seqlens.tolist() == [300, 17]
    assert other.seqlens.tolist() == [7, 5000]
    assert other.split_offsets.tolist() == [0, 1, 11]


def test_writing_out_is_seen_by_autograd() -> None:
    q, k, v = _tensors()
    weight, out = torch.ones(2, 8, 1, 64, requires_grad=True), torch.empty(2, 8, 1, 64)
    loss = (weight * out).sum()
    decode_attention(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(ValueError, match="requires grad"):
        decode_attention(q, k, v, out=torch.empty(2, 8, 1, 64, requires_grad=True))


def test_make_fx_records_the_call() -> None:
    q, k, v = _tensors()
    graph = make_fx(lambda q, k, v: decode_attention(q, k, v, seqlens=[300, 17]))(q, k, v)
    other = _tensors(seed=1)
    assert_same_bits(graph(*other), decode_attention(*other, seqlens=[300, 17]))


def test_ragged_window_does_not_see_batch_mates() -> None:
    """The splits of a sequence follow from its own number of queries."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 3000, 64, generator=generator), torch.randn(2, 2, 3000, 64, generator=generator)
    q = torch.randn(1, 8, 18, 64, generator=generator)
    packed = {"cu_q_lens": torch.tensor([0, 1, 18], dtype=torch.int32), "max_q_len": 17, "window": 700}
    together = decode_attention(q, k, v, **packed)
    alone = {"cu_q_lens": torch.tensor([0, 1], dtype=torch.int32), "max_q_len": 1, "window": 700}
    assert_same_bits(together[:, :, :1], decode_attention(q[:, :, :1], k[:1], v[:1], **alone))


def test_interrupted_caller_waits_for_its_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Python threads: memory that helpers work in must outlive them."""
    started, finish, finished = threading.Event(), threading.Event(), threading.Event()
    caller = threading.get_ident()

    def worker(argument: bytes) -> None:
        if threading.get_ident() == caller:
            started.wait(10)
            threading.Timer(0.2, finish.set).start()
            raise KeyboardInterrupt
        started.set()
        finish.wait(10)
        finished.set()

    monkeypatch.setattr(threads, "openmp", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        threads.run_parallel(worker, b"", 2)
    assert finished.is_set()


def test_python_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _tensors()
    k, v = k.repeat(1, 1, 20, 1), v.repeat(1, 1, 20, 1)
    wanted = decode_attention(q, k, v, return_lse=True)
    monkeypatch.setattr(threads, "openmp", lambda: None)
    for actual, expected in zip(decode_attention(q, k, v, return_lse=True), wanted, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 1e12, 1e30, 1e300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_softcap_of_any_size(softcap: float, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in _tensors())
    problem = Problem(q * 0.01, k, v, {"softcap": softcap})
    out, lse = decode_attention(problem.q, k, v, softcap=softcap, return_lse=True)
    assert_within_bound(out, lse, expect(problem))


def test_infinite_sink_takes_all_weight() -> None:
    q, k, v = _tensors()
    sinks = torch.tensor([float("inf"), *[0.0] * 7])
    out = decode_attention(q, k, v, sinks=sinks)
    assert_within_bound(out, None, expect(Problem(q, k, v, {"sinks": sinks})))
    assert not out[:, 0].any()
    assert_within_bound(
        partial_attention(q, k, v).finalize(sinks=sinks), None, expect(Problem(q, k, v, {"sinks": sinks}))
    )


@pytest.mark.parametrize("slope", [0.5, 4.0])
def test_alibi_far_from_the_query(slope: float) -> None:
    """What all keys of a piece share of the bias goes into m exactly, however far away they are."""
    q, k, v = _tensors()
    slopes = torch.full((8,), slope)
    options = {"alibi_slopes": slopes, "q_start": 200_000}
    state = partial_attention(q, k, v, **options)
    wanted = expect(Problem(q, k, v, options))
    assert_within_bound(state.finalize(), state.lse, wanted)


def test_pages_out_of_reach_may_hold_anything() -> None:
    """Before the window of a piece, past its causal end, and of a sequence without queries."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(40, 2, 16, 64, generator=generator), torch.randn(40, 2, 16, 64, generator=generator)
    q = torch.randn(1, 8, 2, 64, generator=generator)
    table = torch.arange(80, dtype=torch.int32).view(2, 40) % 40
    call = {"seqlens": [640, 640], "window": 100, "q_start": [399, 0]}
    packed = {"cu_q_lens": torch.tensor([0, 2, 2], dtype=torch.int32), "max_q_len": 2}
    wanted = partial_attention(q, k, v, page_table=table, **call, **packed)
    spoiled = table.clone()
    spoiled[0, : 300 // 16], spoiled[0, 401 // 16 + 1 :], spoiled[1] = -1, 10**6, -7
    state = partial_attention(q, k, v, page_table=spoiled, **call, **packed)
    for actual, expected in ((state.m, wanted.m), (state.l, wanted.l), (state.o, wanted.o)):
        assert_same_bits(actual, expected)
    spoiled[0, 300 // 16] = -1
    with pytest.raises(ValueError, match=r"page_table\[0, 18\] = -1"):
        partial_attention(q, k, v, page_table=spoiled, **call, **packed)


@pytest.mark.parametrize("scale", [1e-300, -1e-46, 1e-40, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_at_the_ends_of_the_range(scale: float, dtype: torch.dtype) -> None:
    """As if scores were equal, or all but the largest -inf: finite either way, in tiles that are padded too."""
    problem = Case(dtype, 64, 64, 16, 2, (70,)).build().with_options(scale=scale)
    out, lse = decode_attention(problem.q, problem.k, problem.v, **problem.options, return_lse=True)
    assert_within_bound(out, lse, expect(problem))


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("which", [(0,), (1, 2), (0, 1, 2)])
def test_a_subclass_without_behaviour_is_a_tensor(which: tuple[int, ...]) -> None:
    problem = Case(torch.float32, 64, 64, 4, 2, (70,)).build()
    tensors = [problem.q, problem.k, problem.v]
    wanted = decode_attention(*tensors, **problem.options)
    for i in which:
        tensors[i] = tensors[i].as_subclass(Subclass)
    out = decode_attention(*tensors, **problem.options)
    assert_same_bits(out.as_subclass(torch.Tensor), wanted)
    assert partial_attention(*tensors, **problem.options).o.shape == wanted.shape


def test_out_may_lie_where_an_input_does() -> None:
    """Rows that belong to no sequence are cleared last, and sinks are read before they are written over."""
    k, v = torch.randn(2, 2, 300, 64), torch.randn(2, 2, 300, 64)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    room = torch.randn(1, 4, 7, 64)
    wanted = decode_attention(room[:, :, 2:7].clone(), k, v, cu_q_lens=offsets, max_q_len=1)
    assert_same_bits(
        decode_attention(room[:, :, 2:7], k, v, cu_q_lens=offsets, max_q_len=1, out=room[:, :, :5]), wanted
    )
    q, room = torch.randn(2, 4, 1, 64).double(), torch.zeros(2, 4, 1, 64).double()
    sinks = room.view(-1)[:4].copy_(torch.arange(4.0))
    wanted = decode_attention(q, k.double(), v.double(), sinks=sinks.clone())
    assert_same_bits(decode_attention(q, k.double(), v.double(), sinks=sinks, out=room), wanted)


def test_traced_lengths_must_be_whole_numbers() -> None:
    class Traced(torch.Tensor):
        pass

    q, k = torch.randn(2, 4, 1, 64).as_subclass(Traced), torch.randn(2, 2, 30, 64)
    for bad in ([2.9, 3.9], [True, False], True):
        with pytest.raises(ValueError, match="must be ints"):
            decode_attention(q, k, k, seqlens=bad)  # type: ignore[arg-type]


def test_an_update_beside_a_call_is_seen_whole() -> None:
    """A call that has read the lengths cuts by them, even if the plan has others by then."""
    plan = plan_decode([3000, 2900], q_heads=4, kv_heads=2, head_dim=64, dtype=torch.float32)
    assert isinstance(plan, HostPlan)
    read = plan.lengths
    cut = plan.cut_for(read)
    plan.update([600, 500])
    assert plan.cut_for(read) == cut != plan.cut_for(plan.lengths)
