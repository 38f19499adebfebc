"""CuPy on egmem's memory: arrays in CPU memory that kernels use, and pinned memory on a chosen node."""

from __future__ import annotations

from typing import Any, Callable, Optional

import cupy

from . import _egmem, _heaps
from ._errors import OutOfMemory
from ._heaps import GpuLike, NodeLike

__all__ = ["asarray", "memory_pool", "pinned_allocator"]

# cudaErrorMemoryAllocation, which CuPy compiles in and shows to no Python program.
_NO_ROOM = 2


def _heap(node: NodeLike, near_gpu: GpuLike, heap: Optional[_egmem.Heap], backing: Optional[str]) -> _egmem.Heap:
    if heap is not None:
        _heaps.expect_on(heap, node=node, near_gpu=near_gpu, backing=backing)
        return heap
    if node is None and near_gpu is None:
        near_gpu = cupy.cuda.runtime.getDevice()
    return _egmem.Heap(node, near_gpu=near_gpu, label="egmem.cupy", backing=backing)


def memory_pool(
    node: NodeLike = None, *, near_gpu: GpuLike = None, heap: Optional[_egmem.Heap] = None, backing: Optional[str] = None
) -> Any:
    """Returns a ``cupy.cuda.MemoryPool`` whose memory comes from a heap on a host node, by default the one nearest to the current
    GPU. Without ``heap`` it makes one; ``backing`` is as for ``egmem.Heap``.

    The pool is CuPy's own: it orders reuse by streams and keeps freed memory. It asks the heap when it grows, and raises
    CuPy's ``OutOfMemoryError`` if the heap has no room.

    >>> pool = egmem.cupy.memory_pool(node=0)                       # doctest: +SKIP
    >>> with cupy.cuda.using_allocator(pool.malloc):                # doctest: +SKIP
    ...     array = cupy.zeros(1 << 30, dtype="u1")
    """
    source = _egmem._CupySource(_heap(node, near_gpu, heap, backing))
    allocator = cupy.cuda.CFunctionAllocator(*source.functions, source)

    def grow(nbytes: int) -> Any:
        memory = allocator.malloc(nbytes)
        if nbytes and not memory.ptr:
            # The pool frees its cached memory and retries, and then raises its OutOfMemoryError.
            raise cupy.cuda.runtime.CUDARuntimeError(_NO_ROOM)
        return memory

    return cupy.cuda.MemoryPool(grow)


class _Pinned:
    """The memory of a ``PinnedMemoryPointer``: it has an address and a size."""

    __slots__ = ("ptr", "size", "_block")

    def __init__(self, block: Any) -> None:
        self._block = block
        self.ptr: int = block.address
        self.size: int = block.nbytes


def pinned_allocator(
    node: NodeLike = None, *, near_gpu: GpuLike = None, heap: Optional[_egmem.Heap] = None, backing: Optional[str] = None
) -> Callable[[int], Any]:
    """Returns a function for ``cupy.cuda.set_pinned_memory_allocator``: pinned memory of exactly the size asked for. The arguments
    are as for ``memory_pool``."""
    source = _heap(node, near_gpu, heap, backing)

    def allocate(nbytes: int) -> Any:
        try:
            block = source.allocate(max(int(nbytes), 1))
        except OutOfMemory as error:
            raise cupy.cuda.memory.OutOfMemoryError(nbytes, source.backed, source.limit) from error
        return cupy.cuda.PinnedMemoryPointer(_Pinned(block), 0)

    return allocate


def asarray(memory: Any, dtype: Any = None, shape: Any = None, *, device: Optional[int] = None) -> Any:
    """Returns a CuPy array over a buffer or a block, without a copy. ``device`` is CuPy's GPU that it is for, by default the current one;
    one dimension of ``shape`` may be -1."""
    gpu = cupy.cuda.runtime.getDevice() if device is None else device
    return cupy.from_dlpack(memory.view(dtype, shape, device=f"cuda:{gpu}"))
