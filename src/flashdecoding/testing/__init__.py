"""What tests, benchmarks and the command line check results with: cases, poison, layouts, the error bound."""

from flashdecoding.testing.cases import FEATURE_PAIRS, GRID, RAGGED, SINGLE_FEATURES, SIZES, Case, Problem
from flashdecoding.testing.compare import Expected, assert_same_bits, assert_within_bound, expect, worst_roundings
from flashdecoding.testing.layouts import LAYOUTS, arrange
from flashdecoding.testing.poison import poison_, poison_unseen, poisoned_out, seen_slots, visible_keys

__all__ = [
    "FEATURE_PAIRS",
    "GRID",
    "LAYOUTS",
    "RAGGED",
    "SINGLE_FEATURES",
    "SIZES",
    "Case",
    "Expected",
    "Problem",
    "arrange",
    "assert_same_bits",
    "assert_within_bound",
    "expect",
    "poison_",
    "poison_unseen",
    "poisoned_out",
    "seen_slots",
    "visible_keys",
    "worst_roundings",
]
