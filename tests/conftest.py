"""Settings that hold for every test: no network, no display, no GPU memory kept from a large test."""

import os
from collections.abc import Iterator

import pytest

# Read by the libraries when they are imported, so they are set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "agg"
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # each has its share of the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

KEPT_BYTES = 1 << 30  # GPU memory that a process may keep for later tests


@pytest.fixture(autouse=True)
def gpu_memory_is_given_back() -> Iterator[None]:
    """Many processes share a GPU; caches with strides past 2**31 take it in turns."""
    yield
    import torch

    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


def pytest_report_header() -> str:
    import torch

    return f"GPU: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none; what needs one is skipped'}"
