"""PyTorch on egmem's memory: pinned CPU tensors, offloading, and CUDA tensors in CPU memory.

* :func:`empty` and :func:`pin` make pinned CPU tensors of exactly the size asked for, on a chosen node.
* :func:`offload` keeps the tensors that autograd saves in CPU memory until the backward pass needs them.
* :func:`offload_optimizer` keeps an optimizer's state in CPU memory, where the GPU reads and writes it.
* :class:`MemPool` and :func:`use` put CUDA tensors into CPU memory, through PyTorch's caching allocator: its streams,
  ``record_stream``, CUDA graphs and out-of-memory errors work as ever, and no Python code runs when memory is allocated.
* :func:`set_current_allocator` does so for all CUDA tensors of the process.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
from typing import Any, Callable, Iterator, Optional, Sequence, SupportsIndex, Tuple, Union

import torch
from torch.utils.weak import WeakIdKeyDictionary

from . import _captures, _egmem, _heaps, _offload
from ._errors import InvalidArgument, NotAccessible, NotSupported, OutOfMemory
from ._heaps import GpuLike, NodeLike, Progress
from ._records import Node
from ._shapes import dimensions_of

__all__ = [
    "MemPool",
    "current_allocator_heap",
    "empty",
    "empty_like",
    "heap_on",
    "offload",
    "offload_optimizer",
    "pin",
    "set_current_allocator",
    "use",
]

_LABEL = "egmem.torch"
# How many bytes of freed blocks streams keep.
_KEEP = 256 << 20

# Memory that ends while PyTorch captures a graph is freed afterwards.
_captures.watch_torch()

def _gpu(device: Any = None) -> int:
    """Returns a device's GPU; by default the current one."""
    with contextlib.suppress(TypeError):
        return operator.index(device)
    if device is not None:
        device = torch.device(device)
        if device.type != "cuda":
            raise InvalidArgument(f"device is {str(device)!r}, which is no GPU", "pass a GPU, such as \"cuda:0\"")
        if device.index is not None:
            return int(device.index)
    # Until PyTorch initialises CUDA, which fixes its allocator, no other GPU was made current.
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def _near(node: NodeLike, near_gpu: GpuLike) -> GpuLike:
    """Returns the GPU whose nearest node is meant: without a place, the current one."""
    return _gpu() if node is None and near_gpu is None else near_gpu


def heap_on(node: NodeLike = None, *, near_gpu: GpuLike = None, driver: Optional[_egmem.Driver] = None) -> _egmem.Heap:
    """Returns the heap that this module's functions share for a node; by default the node nearest to ``near_gpu``, or to the current
    GPU. It gives memory that is no longer used back to the machine after 10 to 20 seconds."""
    driver = driver if driver is not None else _egmem.default_driver()
    return _heaps.heap_on(driver, _heaps.node_of(driver, node, _near(node, near_gpu)), _LABEL)


def empty(
    *size: Union[SupportsIndex, Sequence[SupportsIndex]],
    dtype: Optional[torch.dtype] = None,
    node: NodeLike = None,
    near_gpu: GpuLike = None,
    heap: Optional[_egmem.Heap] = None,
    requires_grad: bool = False,
    driver: Optional[_egmem.Driver] = None,
    label: Optional[str] = None,
    progress: Optional[Progress] = None,
    backing: Optional[str] = None,
) -> torch.Tensor:
    """Returns a pinned CPU tensor on a host node, whose values are not initialised.

    A tensor below 64 MiB is a block of ``heap``, or of the node's shared heap: its size, rounded up to at most an eighth more
    for small tensors and to 2 KiB for large ones. A larger one without ``heap``, and one with a ``label`` or a ``backing``, is mapped for itself: its size,
    rounded up to 2 MiB. PyTorch's own pinned tensors take the next power of two. ``is_pinned()`` is true, and ``non_blocking`` copies do
    not wait. The memory goes back with the last tensor that shares it, after the GPUs' work: copies that still run are waited for. A
    tensor that ends while a stream is captured into a graph is freed after the capture.

    Without ``node``, ``near_gpu`` and ``heap`` it is on the node nearest to the current GPU. ``driver``, ``label``, ``progress`` and
    ``backing`` are as in ``egmem.numpy``.
    """
    shape = dimensions_of(size[0] if len(size) == 1 else size)
    dtype = dtype if dtype is not None else torch.get_default_dtype()
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    near_gpu = _near(node, near_gpu) if heap is None else near_gpu
    memory = _heaps.allocate(
        nbytes, _LABEL, node=node, near_gpu=near_gpu, heap=heap, driver=driver, label=label, progress=progress, backing=backing
    )
    tensor = _tensor(memory, dtype, shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _tensor(memory: Any, dtype: torch.dtype, shape: Tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor that owns a share of the memory. PyTorch frees it without Python, in any thread."""
    flat = torch.from_dlpack(memory.on("cpu"))
    return flat.view(dtype).view(shape)


def empty_like(tensor: torch.Tensor, *, node: NodeLike = None, heap: Optional[_egmem.Heap] = None) -> torch.Tensor:
    """Returns a pinned CPU tensor with another one's shape and type, and with the strides that ``torch.empty_like`` gives it. See
    :func:`empty`."""
    like = torch.empty_like(tensor, device="meta", requires_grad=False)
    return empty(like.numel(), dtype=like.dtype, node=node, heap=heap).as_strided(like.size(), like.stride())


def pin(tensor: torch.Tensor, *, node: NodeLike = None, heap: Optional[_egmem.Heap] = None) -> torch.Tensor:
    """Returns a copy of a tensor in pinned memory on a host node, with the same strides. As with PyTorch's ``pin_memory``, it takes
    the memory from the tensor's first element to its last: less than its size for one that was expanded, more for one with gaps."""
    if tensor.numel() == 0:
        return empty_like(tensor, node=node, heap=heap)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
    pinned = empty(extent, dtype=tensor.dtype, node=node, heap=heap)
    pinned.copy_(tensor.as_strided((extent,), (1,)))
    return pinned.as_strided(tensor.size(), tensor.stride())


@contextlib.contextmanager
def offload(
    node: NodeLike = None,
    *,
    min_bytes: Union[int, str] = 1 << 20,
    heap: Optional[_egmem.Heap] = None,
    ahead: int = 2,
) -> Iterator[_egmem.Heap]:
    """Keeps the tensors that autograd saves within the block in CPU memory, until the backward pass asks for them.

    Tensors of GPUs with ``min_bytes`` or more of distinct elements are copied out on a stream of their own, beside the forward pass.
    The backward pass fetches those that were saved before the one that it asks for, ``ahead`` of them, on another stream. Parameters
    and other leaves stay, and views of them. Tensors come back with their strides, and views of one storage that overlap or adjoin as views of one
    storage; their common elements are copied once. That storage stays on the GPU until the last of these views was asked for. The heap
    that has the memory is the context's value. While a stream is captured into a CUDA graph nothing can be offloaded: such a
    forward or backward pass raises ``egmem.NotSupported``. A tensor that stays and is modified in place after it was saved raises
    ``RuntimeError`` in the backward pass, as without ``offload``.

    >>> with egmem.torch.offload(node=0):     # doctest: +SKIP
    ...     loss = model(batch).sum()
    >>> loss.backward()                       # doctest: +SKIP
    """
    heap = heap if heap is not None else heap_on(node)
    saved = _offload.Offload(heap, _egmem._size(min_bytes), ahead)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        yield heap


def _expect_no_expandable_segments() -> None:
    """PyTorch aborts the process when a pool with an allocator of its own meets expandable segments."""
    settings = [os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    on = any("expandable_segments:true" in text.replace(" ", "").lower() for text in settings)
    if torch.cuda.is_initialized():
        with contextlib.suppress(Exception):
            told = torch.cuda.memory._snapshot()["allocator_settings"]
            on = bool(told.get("expandable_segments", on))
    if on:
        raise NotSupported(
            "PyTorch's expandable_segments does not work with memory of another allocator: it aborts the process",
            "remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF",
        )


def _custom_allocator(heap: _egmem.Heap, keep: Union[int, str], *, segments: bool) -> Tuple[Any, Any]:
    if heap.driver.is_simulated:
        raise NotSupported("PyTorch's GPUs cannot use memory of a simulated driver", "use a heap of egmem.open()")
    _expect_no_expandable_segments()
    slot = _egmem._torch_register(heap, _egmem._size(keep))
    return slot, slot.allocator(torch._C._cuda_customAllocator, segments=segments)


class MemPool(torch.cuda.MemPool):
    """A ``torch.cuda.MemPool`` of one GPU, whose memory comes from a heap on a host node.

    The GPU is ``device``, by default the current one; which GPU is current later makes no difference. Without ``node`` or ``heap`` the
    memory is on the node nearest to that GPU.

    PyTorch's caching allocator takes segments from it, so ``record_stream``, CUDA graphs, statistics and
    ``torch.OutOfMemoryError`` are PyTorch's own. PyTorch routes by thread: the backward pass runs in other threads, whose
    tensors come from the GPU as ever.

    PyTorch frees segments, which hold several tensors. As with ``cudaFree``, their memory has another user only after all work of
    the GPUs. The heap and its functions stay until the process ends: PyTorch may return segments after the pool is gone.

    Raises ``NotAccessible`` if the GPU has no access to the heap's memory.

    >>> pool = egmem.torch.MemPool(node=0)            # doctest: +SKIP
    >>> with torch.cuda.use_mem_pool(pool):           # doctest: +SKIP
    ...     weights = torch.zeros(1 << 30, device="cuda")
    """

    heap: _egmem.Heap
    gpu: int

    def __init__(
        self, node: NodeLike = None, *, heap: Optional[_egmem.Heap] = None, device: Any = None
    ) -> None:
        torch.cuda.init()
        gpu = _gpu(device)
        heap = heap if heap is not None else heap_on(node, near_gpu=gpu if node is None else None)
        _expect_access(heap, gpu)
        slot, allocator = _custom_allocator(heap, _KEEP, segments=True)
        with torch.cuda.device(gpu):  # PyTorch's pool is the current GPU's
            super().__init__(allocator)
        self.gpu = gpu
        self.heap = heap
        self.slot = slot

    def expect_on(self, device: Any) -> None:
        """Raises ``InvalidArgument`` unless ``device``, by default the current one, is the pool's GPU: PyTorch would take the
        memory of another GPU for it."""
        gpu = _gpu(device)
        if gpu != self.gpu:
            raise InvalidArgument(
                f"the pool is of GPU {self.gpu}, and cannot allocate for GPU {gpu}",
                f"make a pool of that GPU: egmem.torch.MemPool(device={gpu})",
            )

    def last_error(self) -> Optional[BaseException]:
        """Returns why the heap last had no memory, as egmem's exception."""
        error: Optional[BaseException] = self.slot.last_error()
        return error


def _expect_access(heap: _egmem.Heap, gpu: int) -> None:
    with contextlib.suppress(OutOfMemory):  # of a full heap, the first allocation tells
        access = heap.allocate(1).access(gpu)
        if access != "rw":
            raise NotAccessible(
                f"GPU {gpu} has {'only read' if access else 'no'} access to the heap's memory", f"name it in the heap's access_by: {gpu}"
            )


def _of_its_gpu(use_mem_pool: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``use_mem_pool`` with a check of this module's pools."""

    @functools.wraps(use_mem_pool)
    def checked(pool: Any, device: Any = None) -> Any:
        if isinstance(pool, MemPool):
            pool.expect_on(device)
        return use_mem_pool(pool, device)

    return checked


# PyTorch does not compare the pool's GPU with the device.
_use_mem_pool = torch.cuda.use_mem_pool
torch.cuda.use_mem_pool = torch.cuda.memory.use_mem_pool = _of_its_gpu(_use_mem_pool)


@contextlib.contextmanager
def use(pool: Union[MemPool, Node, int, None] = None, device: Any = None) -> Iterator[MemPool]:
    """Allocates the CUDA tensors that this thread makes within the block in a pool, or in a new one on a node.

    A new pool is of the GPU ``device``, by default the current one. The pool's GPU is current within the block, as a stream's is within
    ``torch.cuda.stream``; tensors that the block makes on other GPUs are in their own memory. Raises ``InvalidArgument`` if ``device``
    is not the pool's GPU.
    """
    if not isinstance(pool, MemPool):
        pool = MemPool(pool, device=device)
    elif device is not None:
        pool.expect_on(device)
    with torch.cuda.device(pool.gpu), _use_mem_pool(pool, pool.gpu):
        yield pool


# The pool of each tensor of an optimizer's state lives as long as the tensor. An attribute of the tensor would be
# saved and copied with it.
_pools: Any = WeakIdKeyDictionary()


def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    node: NodeLike = None,
    *,
    pool: Optional[MemPool] = None,
    min_bytes: Union[int, str] = 1 << 16,
) -> MemPool:
    """Keeps an optimizer's state in CPU memory: after each step, new state of ``min_bytes`` or more moves to a pool on a node.

    The state stays CUDA tensors, which the GPU reads and writes where they are, so a step copies nothing and needs no room for
    them in the GPU. Call it before or after the first step.

    Each GPU that has state has a pool. The result is ``pool``, or else that of the first parameter's GPU. Those of other GPUs
    have the same heap if ``pool`` is given; without ``node`` each is on the node nearest to its GPU.
    """
    least = _egmem._size(min_bytes)
    if pool is None:
        on_gpu = (each.device for group in optimizer.param_groups for each in group["params"] if each.is_cuda)
        pool = MemPool(node, device=next(on_gpu, None))
        heap = None
    else:
        heap = pool.heap
    pools = {pool.gpu: pool}

    def pool_of(device: torch.device) -> MemPool:
        gpu = _gpu(device)
        if gpu not in pools:
            pools[gpu] = MemPool(node, heap=heap, device=gpu)
        return pools[gpu]

    def move(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or not value.is_cuda or value in _pools:
                    continue
                if value.numel() * value.element_size() < least:
                    continue
                memory = pool_of(value.device)
                with use(memory):
                    moved = torch.empty_like(value)
                moved.copy_(value)
                _pools[moved] = memory
                state[name] = moved

    optimizer.register_step_post_hook(move)
    move(optimizer)
    return pool


_current: Optional[_egmem.Heap] = None


def current_allocator_heap() -> Optional[_egmem.Heap]:
    """Returns the heap of :func:`set_current_allocator`, or ``None``."""
    return _current


def set_current_allocator(
    node: NodeLike = None, *, heap: Optional[_egmem.Heap] = None, keep: Union[int, str] = _KEEP
) -> _egmem.Heap:
    """Allocates all CUDA tensors of this process from a heap on a host node. Call it before the first CUDA tensor is made.

    Freed memory is reused in the order of streams; ``record_stream`` and CUDA graphs are known to it. A request that has no
    room raises PyTorch's ``RuntimeError`` "CUDA out of memory". PyTorch's memory statistics do not work with other allocators.
    """
    global _current
    heap = heap if heap is not None else heap_on(node)
    slot, allocator = _custom_allocator(heap, keep, segments=False)
    for name, address in zip(
        ("set_record_stream_fn", "set_begin_allocate_to_pool", "set_end_allocate_to_pool_fn", "set_release_pool"),
        slot.more_functions,
    ):
        getattr(allocator, name)(address)
    torch._C._cuda_changeCurrentAllocator(allocator)
    slot.raise_by(_check_fail())
    _current = heap
    return heap


def _check_fail() -> int:
    """Returns the address of PyTorch's function that raises its errors, or 0."""
    import ctypes

    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    with contextlib.suppress(OSError, AttributeError):
        function = getattr(ctypes.CDLL(path), "_ZN3c106detail14torchCheckFailEPKcS2_jS2_")
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0

