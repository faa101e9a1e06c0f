"""What users type, turned into numbers, or refused in one line."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

MOST_LENGTHS = 4096

T = TypeVar("T")


class BadInput(ValueError):
    """Something the user gave cannot be used; the command line prints the message and exits with 2."""


def numbers(text: str, what: str) -> list[float]:
    """Comma-separated numbers; -inf is one, NaN and +inf are not."""
    values = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            raise BadInput(f"{what} must be numbers separated by commas, got {text!r}") from None
        if not value < float("inf"):
            raise BadInput(f"{what} must be finite or -inf, got {part.strip()}")
        values.append(value)
    return values


def number_rows(text: str, what: str) -> list[list[float]]:
    """Rows of equally many finite numbers, separated by semicolons; without a semicolon, one number a row."""
    rows = [numbers(row, what) for row in text.split(";")] if ";" in text else [[x] for x in numbers(text, what)]
    if any(x == -float("inf") for row in rows for x in row):
        raise BadInput(f"{what} must be finite, got {text!r}")
    if len({len(row) for row in rows}) > 1:
        raise BadInput(f"{what} must have rows of one length, got lengths {[len(row) for row in rows]}")
    return rows


def positive_ints(text: str, what: str) -> list[int]:
    """Comma-separated positive integers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]+", part) and int(part) > 0 for part in parts):
        raise BadInput(f"{what} must be positive whole numbers separated by commas, got {text!r}")
    return [int(part) for part in parts]


def lengths(text: str) -> list[int]:
    """Lengths of a batch: ``1000,20000,333``; ``64x4096`` is 64 sequences of 4096, and K stands for 1024."""
    result: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:([0-9]+)\s*[xX*]\s*)?([0-9]+)([kK]?)\s*", part)
        if match is None:
            raise BadInput(f"lengths must look like 1000,20000,333 or 64x4096 or 2x8K, got {text!r}")
        count, length = int(match[1] or 1), int(match[2]) << (10 if match[3] else 0)
        if length >= 1 << 31:
            raise BadInput(f"a length must be below 2^31, got {length}")
        if not 1 <= count <= MOST_LENGTHS - len(result):
            raise BadInput(f"a batch must have 1 to {MOST_LENGTHS} sequences, got {text!r}")
        result += [length] * count
    return result


def heads(text: str) -> tuple[int, int]:
    """``32/8``: 32 q heads on 8 kv heads; one number stands for both."""
    match = re.fullmatch(r"\s*([0-9]+)\s*(?:/\s*([0-9]+)\s*)?", text)
    if match is None:
        raise BadInput(f"heads must be Q_HEADS/KV_HEADS, such as 32/8, got {text!r}")
    q_heads, kv_heads = int(match[1]), int(match[2] or match[1])
    if q_heads < 1 or kv_heads < 1 or q_heads % kv_heads:
        raise BadInput(f"q heads must be a positive multiple of kv heads, got {q_heads} and {kv_heads}")
    return q_heads, kv_heads


def chosen(available: Mapping[str, T], names: str, what: str, others: str) -> list[T]:
    """Those of ``available`` that comma-separated ``names`` name, in its order; ``others`` are words for the rest."""
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in available]
    if unknown:
        raise BadInput(f"{what} are {', '.join(available)}, or {others}; got {', '.join(map(repr, unknown))}")
    return [value for name, value in available.items() if name in wanted]


def writable(path: Path) -> Path:
    """A path for a file that the command writes."""
    if not path.absolute().parent.is_dir():
        raise BadInput(f"cannot write {path}: its folder does not exist")
    if path.is_dir():
        raise BadInput(f"cannot write {path}: it is a folder")
    return path
