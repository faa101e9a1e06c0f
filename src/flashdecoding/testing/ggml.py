"""llama.cpp's flash attention on the CPU, called through the shared libraries that `llama-cpp-python` installs.

Only ggml's public C functions are used. A graph of one node is built once; each call points its K and V at another
copy of the cache and lets ggml's CPU backend compute it.
"""

import ctypes
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SUFFIX = {"Darwin": ".dylib", "Windows": ".dll"}.get(platform.system(), ".so")
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}

_pointer, _int, _int64, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", _pointer), ("no_alloc", ctypes.c_bool))


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_pointer, (_InitParams,)),
    "ggml_free": (None, (_pointer,)),
    "ggml_set_no_alloc": (None, (_pointer, ctypes.c_bool)),
    "ggml_new_tensor_4d": (_pointer, (_pointer, _int, _int64, _int64, _int64, _int64)),
    "ggml_get_data": (_pointer, (_pointer,)),
    "ggml_flash_attn_ext": (_pointer, (*[_pointer] * 5, _float, _float, _float)),
    "ggml_new_graph": (_pointer, (_pointer,)),
    "ggml_build_forward_expand": (None, (_pointer, _pointer)),
    "ggml_backend_cpu_init": (_pointer, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_pointer, _int)),
    "ggml_backend_graph_compute": (_int, (_pointer, _pointer)),
    "ggml_backend_free": (None, (_pointer,)),
}


class Ggml:
    """ggml's functions, looked up in ``libraries``. ``AttributeError`` if one is missing."""

    def __init__(self, libraries: list[ctypes.CDLL]) -> None:
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            found = [getattr(library, name) for library in libraries if hasattr(library, name)]
            if not found:
                raise AttributeError(f"ggml has no function {name}")
            found[0].restype, found[0].argtypes = result, arguments
            self._functions[name] = found[0]

    def __getattr__(self, name: str) -> Any:
        return self._functions[f"ggml_{name}"]


def load() -> Ggml:
    """ggml as `llama-cpp-python` installed it. ``ImportError`` says what is missing."""
    spec = find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("llama-cpp-python is not installed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
    base_first = sorted(folder.glob(f"libggml*{_SUFFIX}"), key=lambda file: ("base" not in file.name, file.name))
    try:
        return Ggml([ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL) for file in base_first])
    except (OSError, AttributeError) as error:
        raise ImportError(f"llama-cpp-python is installed, but its ggml cannot be called: {error}") from error


class FlashAttention:
    """One query a sequence, q (B, Hq, 1, D), over caches (B, Hkv, N, D) and (B, Hkv, N, D), all contiguous.

    ggml takes q in float32 and answers in float32. The result of a call is a view of memory that the next call
    overwrites.
    """

    def __init__(self, ggml: Ggml, q: Tensor, k: Tensor, threads: int) -> None:
        self._ggml = ggml
        self._backend = ggml.backend_cpu_init()
        ggml.backend_cpu_set_n_threads(self._backend, threads)
        batch, q_heads, q_len, head_dim = q.shape
        _, kv_heads, kv_len, _ = k.shape
        room = (8 << 20) + 8 * q.numel()
        self._context = ggml.init(_InitParams(room, None, False))
        node_q = ggml.new_tensor_4d(self._context, _TYPES[torch.float32], head_dim, q_len, q_heads, batch)
        data = ggml.get_data(node_q)
        _view(data, q.numel()).copy_(q.float().reshape(-1))
        ggml.set_no_alloc(self._context, True)
        shape = (head_dim, kv_len, kv_heads, batch)
        node_k, node_v = (ggml.new_tensor_4d(self._context, _TYPES[k.dtype], *shape) for _ in "kv")
        ggml.set_no_alloc(self._context, False)
        offset = _offset_of_data(node_q, data)
        self._places = [_pointer.from_address(node + offset) for node in (node_k, node_v)]
        result = ggml.flash_attn_ext(self._context, node_q, node_k, node_v, None, head_dim**-0.5, 0.0, 0.0)
        self._graph = ggml.new_graph(self._context)
        ggml.build_forward_expand(self._graph, result)
        out = _view(ggml.get_data(result), q.numel())
        self._out = out.view(batch, q_len, q_heads, head_dim).transpose(1, 2)

    def __call__(self, k: Tensor, v: Tensor) -> Tensor:
        for place, cache in zip(self._places, (k, v), strict=True):
            place.value = cache.data_ptr()
        status = self._ggml.backend_graph_compute(self._backend, self._graph)
        if status != 0:
            raise RuntimeError(f"ggml's CPU backend failed with status {status}")
        return self._out

    def __del__(self) -> None:
        if hasattr(self, "_context"):
            self._ggml.free(self._context)
            self._ggml.backend_free(self._backend)


def _view(address: int, count: int) -> Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


def _offset_of_data(node: int, data: int) -> int:
    """Where a ggml tensor keeps the address of its data: there is a getter but no setter, and the layout may change."""
    words = (ctypes.c_uint64 * 40).from_address(node)
    return 8 * list(words).index(data)
