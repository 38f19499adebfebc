"""CuPy on egmem's memory: arrays in CPU memory that kernels use, and pinned memory on a chosen node."""

from __future__ import annotations

from typing import Any, Callable, Optional

import cupy

from . import _egmem
from ._errors import OutOfMemory

__all__ = ["asarray", "memory_pool", "pinned_allocator"]

# cudaErrorMemoryAllocation, which CuPy compiles in and shows to no Python program.
_NO_ROOM = 2


def _heap(node: Optional[int], heap: Optional[_egmem.Heap]) -> _egmem.Heap:
    if heap is not None:
        return heap
    if node is None:
        return _egmem.Heap(near_gpu=cupy.cuda.runtime.getDevice(), label="egmem.cupy")
    return _egmem.Heap(node, label="egmem.cupy")


def memory_pool(node: Optional[int] = None, *, heap: Optional[_egmem.Heap] = None) -> Any:
    """Returns a ``cupy.cuda.MemoryPool`` whose memory comes from a heap on a host node.

    The pool is CuPy's own: it orders reuse by streams and keeps freed memory. It asks the heap when it grows, and raises
    CuPy's ``OutOfMemoryError`` if the heap has no room.

    >>> pool = egmem.cupy.memory_pool(node=0)                       # doctest: +SKIP
    >>> with cupy.cuda.using_allocator(pool.malloc):                # doctest: +SKIP
    ...     array = cupy.zeros(1 << 30, dtype="u1")
    """
    source = _egmem._CupySource(_heap(node, heap))
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
    node: Optional[int] = None, *, heap: Optional[_egmem.Heap] = None
) -> Callable[[int], Any]:
    """Returns a function for ``cupy.cuda.set_pinned_memory_allocator``: pinned memory of exactly the size asked for."""
    source = _heap(node, heap)

    def allocate(nbytes: int) -> Any:
        try:
            block = source.allocate(max(int(nbytes), 1))
        except OutOfMemory as error:
            raise cupy.cuda.memory.OutOfMemoryError(nbytes, source.backed, source.limit) from error
        return cupy.cuda.PinnedMemoryPointer(_Pinned(block), 0)

    return allocate


def asarray(memory: Any, dtype: Any = None, shape: Any = None, *, device: Optional[int] = None) -> Any:
    """Returns a CuPy array over a buffer or a block, without a copy."""
    gpu = cupy.cuda.runtime.getDevice() if device is None else device
    return cupy.from_dlpack(memory.view(dtype, shape, device=f"cuda:{gpu}"))
