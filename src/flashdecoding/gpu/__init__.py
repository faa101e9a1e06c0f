"""The GPU backend: the two stages as Triton kernels."""
