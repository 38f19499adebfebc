"""CuPy on egmem's memory: arrays in CPU memory that kernels use, and pinned memory on a chosen node."""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional

import cupy

from . import _egmem, _heaps
from ._errors import InvalidArgument, OutOfMemory
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


class _Pool(cupy.cuda.MemoryPool):
    """CuPy's pool above a heap. CuPy drops the reason for its ``OutOfMemoryError``, which becomes the cause here."""

    def __init__(self, source: _egmem._CupySource) -> None:
        # `grow` has no reference to this pool: the cycle would keep its memory until a collection.
        failed = self._failed = threading.local()
        allocator = cupy.cuda.CFunctionAllocator(*source.functions, source)

        def grow(nbytes: int) -> Any:
            memory = allocator.malloc(nbytes)
            if not nbytes or memory.ptr:
                return memory
            failed.error = error = source.last_error()
            if error is not None and not isinstance(error, OutOfMemory):
                raise error
            # The pool frees its cached memory and retries, and then raises its OutOfMemoryError.
            raise cupy.cuda.runtime.CUDARuntimeError(_NO_ROOM)

        super().__init__(grow)

    def malloc(self, size: int) -> Any:
        self._failed.error = None
        try:
            return super().malloc(size)
        except cupy.cuda.memory.OutOfMemoryError as error:
            # Without one, it is the pool's own limit.
            raise error from self._failed.error


def memory_pool(
    node: NodeLike = None, *, near_gpu: GpuLike = None, heap: Optional[_egmem.Heap] = None, backing: Optional[str] = None
) -> Any:
    """Returns a ``cupy.cuda.MemoryPool`` whose memory comes from a heap on a host node, by default the one nearest to the current
    GPU. Without ``heap`` it makes one; ``backing`` is as for ``egmem.Heap``.

    The pool is CuPy's own: it orders reuse by streams and keeps freed memory. It asks the heap when it grows, and raises
    CuPy's ``OutOfMemoryError`` if the heap has no room, with egmem's error as its cause. Arrays may outlive it. Call its
    ``free_all_blocks`` before it is dropped: CuPy 14.2 keeps the memory that a dropped pool had cached.

    >>> pool = egmem.cupy.memory_pool(node=0)                       # doctest: +SKIP
    >>> with cupy.cuda.using_allocator(pool.malloc):                # doctest: +SKIP
    ...     array = cupy.zeros(1 << 30, dtype="u1")
    """
    heap = _heap(node, near_gpu, heap, backing)
    if heap.driver.is_simulated:
        raise InvalidArgument("CuPy's GPUs cannot use memory of a simulated driver", "pass a heap of egmem.open()")
    return _Pool(_egmem._CupySource(heap))


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
