"""What only a GPU can show: captured graphs, streams, values that the host never sees, offsets past 2**31."""

import threading
from typing import Any

import pytest
import torch
from backends import decode
from torch import Tensor

from flashdecoding import decode_attention, plan_decode, validate
from flashdecoding.testing import Case, Problem, arrange, assert_same_bits, assert_within_bound, expect

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch finds none")

BF16 = (torch.bfloat16, 128, 128)
FP16 = (torch.float16, 80, 80)
FP32 = (torch.float32, 64, 64)
STEPS = ([3000, 1, 0, 129], [1, 3000, 2999, 0], [0, 0, 0, 0], [3000, 3000, 3000, 3000], [64, 63, 65, 128])


def _int32(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def _plan(problem: Problem, seqlens: Any, **more: Any) -> Any:
    sizes = {"q_heads": problem.q.shape[1], "kv_heads": problem.k.shape[1], "head_dim": problem.q.shape[3]}
    sizes |= {"head_dim_v": problem.v.shape[3], "q_len": problem.q.shape[2], "window": problem.options.get("window")}
    return plan_decode(seqlens, dtype=problem.q.dtype, device="cuda", **sizes, **more)


def _assert_right(result: tuple[Tensor, Tensor], problem: Problem, lengths: Any) -> None:
    stepped = problem.with_options(seqlens=torch.tensor(lengths, dtype=torch.int32))
    assert_within_bound(*result, expect(stepped.to("cpu")), str(lengths))


CAPTURED = {
    "plain": (Case(*BF16, 32, 8, (3000,) * 4), "contiguous"),
    "drafts-paged": (Case(*BF16, 8, 2, (3000,) * 4, q_len=5), "paged-16"),
    "window-sinks": (Case(*FP16, 8, 2, (3000,) * 4, window=300, sinks=True), "paged-53"),
    "fp32": (Case(*FP32, 8, 2, (3000,) * 4), "sequence-first"),
}


@pytest.mark.parametrize("planned", [False, True], ids=["unplanned", "planned"])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_graph_replays_with_other_lengths(name: str, planned: bool) -> None:
    """The plan is cut again by the graph, or in place before it."""
    case, layout = CAPTURED[name]
    problem = arrange(case.build("cuda"), layout)
    lens = _int32(STEPS[0])
    plan = _plan(problem, lens, max_seqlen=3000) if planned else None
    call = problem.with_options(**({"plan": plan, "seqlens": None} if planned else {"seqlens": lens}))
    decode(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if plan is not None:
            plan.update(lens)
        result = decode(call)
    for lengths in STEPS:
        lens.copy_(_int32(lengths))
        for x in result:
            x.fill_(torch.nan)
        graph.replay()
        _assert_right(result, problem, lengths)
        eager = decode(problem.with_options(seqlens=_int32(lengths)))
        for captured, right in zip(result, eager, strict=True):
            assert_same_bits(captured, right, "a graph and an eager call")


def test_one_plan_for_layers_in_a_graph() -> None:
    """A step's layers share the plan; their scratch is their own."""
    problems = [Case(*BF16, 8, 2, (3000, 5, 700, 64), name=layer).build("cuda") for layer in ("one", "two", "three")]
    lens = problems[0].options["seqlens"].clone()
    plan = _plan(problems[0], lens)
    wanted = [decode(problem) for problem in problems]
    calls = [problem.with_options(seqlens=None, plan=plan) for problem in problems]
    for call in calls:
        decode(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [decode(call) for call in calls]
    for _ in range(20):
        for result in results:
            for x in result:
                x.fill_(torch.nan)
        graph.replay()
        for result, right in zip(results, wanted, strict=True):
            assert_same_bits(result[0], right[0])
            assert_same_bits(result[1], right[1])


def test_caches_that_hold_no_key_leave_stage_2_the_plan_of_this_call() -> None:
    """No stage 1 lies between the plan and stage 2, which must not read what the memory of the plan held before."""
    problem = Case(*BF16, 32, 8, (0,) * 64).build("cuda")
    k, v = problem.k[:, :, :0], problem.v[:, :, :0]
    for _ in range(200):
        old = [torch.full((size,), 7, dtype=torch.int32, device="cuda") for size in (512, 1024, 2048, 4096, 8192)]
        del old  # for the call to find
        out, lse = decode_attention(problem.q, k, v, return_lse=True)
        assert (out == 0).all() and (lse == -torch.inf).all()


def test_host_lengths_are_refused_while_a_graph_is_captured() -> None:
    problem = Case(*BF16, 8, 2, (300, 5)).build("cuda")
    decode(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match=r"seqlens must be on cuda:0 while .* \[300, 5\]"):
            decode(problem.with_options(seqlens=[300, 5]))
        result = decode(problem.with_options(seqlens=7))
    graph.replay()
    _assert_right(result, problem, [7, 7])


def test_streams_at_once() -> None:
    """Calls on several streams, from several threads, also with one plan: each has its own bits every time."""
    cases = (Case(*BF16, 32, 8, (5000, 700)), Case(*FP32, 8, 2, (2049, 0, 63), q_len=2), Case(*FP16, 6, 2, (9000,)))
    problems = [case.build("cuda") for case in cases]
    plan = _plan(problems[0], problems[0].options["seqlens"])
    problems.append(problems[0].with_options(seqlens=None, plan=plan))
    wanted = [decode(problem) for problem in problems]
    torch.cuda.synchronize()
    errors: list[str] = []

    def work(problem: Problem, right: tuple[Tensor, Tensor]) -> None:
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                results = [decode(problem) for _ in range(50)]
            stream.synchronize()
            for out, lse in results:
                assert_same_bits(out, right[0])
                assert_same_bits(lse, right[1])
        except Exception as error:
            errors.append(repr(error))

    pairs = list(zip(problems, wanted, strict=True)) * 2
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("q_len", [1, 3])
def test_pages_that_do_not_exist_make_nan_of_their_rows_only(q_len: int) -> None:
    problem = arrange(Case(*BF16, 8, 2, (300, 300, 290), q_len=q_len).build("cuda"), "paged-16")
    wanted = decode(problem)
    for page in (-1, problem.k.shape[0], 2**31 - 1, -(2**31)):
        table = problem.options["page_table"].clone()
        table[1, 7] = page
        table[2, 19:] = page  # past its length
        out, lse = decode(problem.with_options(page_table=table))
        assert out[1].isnan().all() and lse[1].isnan().all()
        for b in (0, 2):
            assert_same_bits(out[b], wanted[0][b])
            assert_same_bits(lse[b], wanted[1][b])


@pytest.mark.parametrize(("key", "lost"), [(60, [True, True, False]), (62, [False, True, True]), (58, [False] * 3)])
def test_a_lost_page_reaches_the_queries_that_see_its_key(key: int, lost: list[bool]) -> None:
    problem = arrange(Case(*FP16, 2, 1, (64,), q_len=3, window=3).build("cuda"), "paged-1")
    problem.options["page_table"][0, key] = -1
    out, lse = decode(problem)
    assert lse[0, 0].isnan().tolist() == out[0, 0, :, 0].isnan().tolist() == lost


def test_lengths_out_of_range_count_as_the_nearest() -> None:
    problem = Case(*BF16, 8, 2, (300, 17, 200), spare=12).build("cuda")
    wanted = decode(problem.with_options(seqlens=_int32([312, 0, 200])))
    for dtype in (torch.int32, torch.int64):
        lens = torch.tensor([2**31 - 1, -(2**31), 200], dtype=dtype, device="cuda")
        plan = _plan(problem, lens, max_seqlen=312)
        for call in ({"seqlens": lens}, {"seqlens": None, "plan": plan}):
            out, lse = decode(problem.with_options(**call))
            assert_same_bits(out, wanted[0])
            assert_same_bits(lse, wanted[1])


def test_offsets_of_queries_from_nowhere_write_nothing_outside() -> None:
    problem = Case(*FP32, 4, 2, (70, 33, 9), q_len=(2, 1, 3)).build("cuda")
    for offsets in ((0, 2**31 - 1, -5, 4), (-(2**31), 6, 5, 2**31 - 1), (7, 7, 7, 9)):
        room = torch.full((3, *problem.q.shape), 7.0, device="cuda")
        decode(problem.with_options(cu_q_lens=_int32(offsets), out=room[1]))
        assert (room[0] == 7).all() and (room[2] == 7).all()


def test_validation_refuses_what_is_otherwise_made_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "WANTED", True)
    problem = arrange(Case(*BF16, 8, 2, (300, 17)).build("cuda"), "paged-16")
    right = decode(problem)
    _assert_right(right, problem, [300, 17])
    with pytest.raises(ValueError, match=r"seqlens\[1\] = -4"):
        decode(problem.with_options(seqlens=_int32([300, -4])))
    table = problem.options["page_table"].clone()
    table[0, 3] = 10**6
    with pytest.raises(ValueError, match=r"page_table\[0, 3\] = 1000000"):
        decode(problem.with_options(page_table=table))
    packed = Case(*FP32, 4, 2, (70, 33), q_len=(2, 1)).build("cuda")
    with pytest.raises(ValueError, match="cu_q_lens must not decrease"):
        decode(packed.with_options(cu_q_lens=_int32([0, 3, 2])))


def test_a_plan_that_does_not_fit_is_refused() -> None:
    problem = Case(*BF16, 8, 2, (300, 17)).build("cuda")
    plan = _plan(problem, [300, 17])
    for lens in (_int32([300, 17]), [300, 18]):
        with pytest.raises(ValueError, match=r"or the tensor it was made from|differ from the plan's"):
            decode(problem.with_options(seqlens=lens, plan=plan))
    lens = _int32([300, 17])
    for given, made in (([300, 17], plan), (plan.seqlens, plan), (lens, _plan(problem, lens))):
        decode(problem.with_options(seqlens=given, plan=made))
    lens, plan_of_lens = given, made
    lens -= 1  # without plan.update
    with pytest.raises(ValueError, match="unchanged since"):
        decode(problem.with_options(seqlens=lens, plan=plan_of_lens))
    with torch.inference_mode():  # whose tensors count no changes
        lens = _int32([300, 17])
        plan_of_lens = _plan(problem, lens)
        decode(problem.with_options(seqlens=plan_of_lens.seqlens, plan=plan_of_lens))
        with pytest.raises(ValueError, match="an inference tensor cannot tell"):
            decode(problem.with_options(seqlens=lens, plan=plan_of_lens))
    with pytest.raises(ValueError, match="q_heads=8"):
        decode_attention(problem.q[:, :4], problem.k, problem.v, plan=plan)
    on_host = plan_decode([300, 17], q_heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="device=cpu, the call has cuda:0"):
        decode(problem.with_options(seqlens=None, plan=on_host))
    with pytest.raises(ValueError, match="float32"):
        plan.update(torch.ones(2, device="cuda"))
    assert plan.lengths == (300, 17)


def test_a_plan_shows_its_splits_and_can_be_copied() -> None:
    import copy

    plan = plan_decode(_int32([70000, 0, 64]), q_heads=8, kv_heads=2, head_dim=64, dtype=torch.float16)
    assert plan.seqlens.tolist() == [70000, 0, 64] and plan.lengths is None
    splits = [plan.splits_of(b) for b in range(3)]
    assert splits[1:] == [[], [(0, 64)]] and splits[0][0][0] == 0 and splits[0][-1][1] == 70000
    assert plan.num_splits == sum(map(len, splits)) == len(splits[0]) + 1 > 10
    twin = copy.deepcopy(plan)
    plan.update([1, 2, 3])
    assert [twin.splits_of(b) for b in range(3)] == splits and plan.splits_of(2) == [(0, 3)]


def test_compiled_call_keeps_a_batch_invariant_plan() -> None:
    problem = Case(*BF16, 8, 2, (9000, 129, 40)).build("cuda")
    lens = problem.options["seqlens"]
    plan = _plan(problem, lens, batch_invariant=True)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return decode_attention(q, k, v, plan=plan)

    wanted = layer(problem.q, problem.k, problem.v)
    assert not torch.equal(wanted, decode(problem)[0]), "another cut, other bits: else this test shows nothing"
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    assert_same_bits(compiled(problem.q, problem.k, problem.v), wanted)
