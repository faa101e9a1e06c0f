"""Comparison with the float64 reference under the error bound of the contract (line 4); a miss raises.

    |o - o64|     <= (2.5 u + 4 e A) (P64 |V|)
    |lse - lse64| <= 4 e max(A, |lse64|, 1)

u is the unit roundoff of the output's dtype, e that of the accumulation, A the row's largest scale * sum_d |q_d k_jd|.
One dominant product per score is the exception: there the 4 is ``worst_roundings``, each at most e A.
Where |o64| is below the normal range of the output's dtype, half a subnormal step is added.
Where the reference is not finite the result must not be either, and nowhere else (line 3); -inf must be -inf (line 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flashdecoding.reference import reference_attention, reference_bounds
from flashdecoding.testing.cases import Problem

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Expected:
    """What the reference says of a problem, float64: ``out`` (B, Hq, Sq, Dv), ``lse`` (B, Hq, Sq) and their bounds."""

    out: Tensor
    lse: Tensor
    out_bound: Tensor
    lse_bound: Tensor


def expect(problem: Problem, roundings: int = 4) -> Expected:
    """Run the reference on ``problem`` and form the bounds for an output in q's dtype.

    ``roundings`` is how often a score may round at the size of A: 4, or :func:`worst_roundings` where one product
    dwarfs the others, so that every later addition of its dot product rounds at its size.
    """
    result = reference_attention(problem.q, problem.k, problem.v, **problem.options, return_lse=True)
    assert isinstance(result, tuple)
    out, lse = result
    weight_abs_v, score_bound = reference_bounds(problem.q, problem.k, problem.v, **problem.options)
    info = torch.finfo(problem.q.dtype)
    unit = info.eps / 2
    accumulation = 2.0**-53 if problem.q.dtype == torch.float64 else 2.0**-24
    out_bound = (2.5 * unit + roundings * accumulation * score_bound[..., None]) * weight_abs_v
    out_bound = out_bound + (out.abs() < info.smallest_normal).double() * (info.smallest_normal * unit)
    lse_bound = roundings * accumulation * torch.maximum(score_bound, lse.abs()).clamp(min=1)
    return Expected(out, lse, out_bound, lse_bound)


def worst_roundings(head_dim: int, dtype: torch.dtype) -> int:
    """Roundings that no dot product of a backend exceeds: chains of D / 8, and the sums of those.

    A matrix unit, which takes 16-bit numbers, adds its products in an order of its own: one for each.
    """
    return 16 + (head_dim if dtype in (torch.bfloat16, torch.float16) else head_dim // 8)


def assert_within_bound(out: Tensor, lse: Tensor | None, expected: Expected, label: str = "") -> None:
    """Raise ``AssertionError`` unless ``out`` and ``lse`` agree with ``expected`` elementwise.

    The message names the worst element: its indices, both values, the error and its bound. ``lse`` None is left out.
    """
    _assert_elements(f"{label} out".strip(), out, expected.out, expected.out_bound)
    if lse is not None:
        _assert_elements(f"{label} lse".strip(), lse, expected.lse, expected.lse_bound)


def assert_same_bits(actual: Tensor, wanted: Tensor, label: str = "") -> None:
    """Raise ``AssertionError`` unless two tensors agree in dtype, shape and every bit; a NaN agrees with any NaN."""
    if actual.dtype != wanted.dtype or actual.shape != wanted.shape:
        raise AssertionError(f"{label}: {actual.dtype} {tuple(actual.shape)}, not {wanted.dtype} {tuple(wanted.shape)}")
    as_int = _INTEGERS[actual.element_size()]
    differs = (actual.view(as_int) != wanted.view(as_int)) & ~(actual.isnan() & wanted.isnan())
    if differs.any():
        index = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{label}: {int(differs.sum())} of {differs.numel()} values differ in bits, first at {index}: "
            f"{actual[index].item()!r}, not {wanted[index].item()!r}"
        )


def _assert_elements(label: str, actual: Tensor, wanted: Tensor, bound: Tensor) -> None:
    if actual.shape != wanted.shape:
        raise AssertionError(f"{label}: shape {tuple(actual.shape)}, not {tuple(wanted.shape)}")
    actual = actual.to(wanted.device, torch.float64)
    empty = wanted == -torch.inf
    finite = wanted.isfinite()
    wrong = torch.where(finite, ~actual.isfinite(), torch.where(empty, actual != -torch.inf, actual.isfinite()))
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{label}: {int(wrong.sum())} of {wrong.numel()} values are finite or not unlike the reference, "
            f"first at {index}: {actual[index].item()}, not {wanted[index].item()}"
        )
    if not bound[finite].isfinite().all():
        raise AssertionError(f"{label}: the bound is not finite where the reference is, and so bounds nothing")
    error = torch.where(finite, (actual - wanted).abs(), 0.0)
    excess = torch.where(finite, error - bound, -1.0)
    if (excess > 0).any():
        ratio = torch.where(excess > 0, error / bound, 0.0)
        index = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
        raise AssertionError(
            f"{label}: {int((excess > 0).sum())} of {excess.numel()} values miss the bound, worst at {index}: "
            f"{actual[index].item():.9g}, not {wanted[index].item():.9g}; error {error[index].item():.3g} "
            f"is {ratio[index].item():.3g} times the bound {bound[index].item():.3g}"
        )
