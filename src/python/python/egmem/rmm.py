"""RMM on egmem's memory: a memory resource for RAPIDS libraries (cuDF, cuML, cuGraph) in CPU memory that GPUs use."""

from __future__ import annotations

from typing import Any, Dict, Optional

import rmm.mr

from . import _egmem, _heaps
from ._errors import InvalidArgument
from ._heaps import GpuLike, NodeLike

__all__ = ["memory_resource"]


class _Stream:
    """A stream with its GPU, as egmem takes it."""

    __slots__ = ("cuda_stream", "device_index")

    def __init__(self, handle: int, gpu: int) -> None:
        self.cuda_stream = handle
        self.device_index = gpu


def _current_gpu() -> int:
    from rmm._cuda.gpu import getDevice

    return int(getDevice())


def memory_resource(
    node: NodeLike = None, *, gpu: GpuLike = None, heap: Optional[_egmem.Heap] = None, backing: Optional[str] = None
) -> Any:
    """Returns an ``rmm.mr.CallbackMemoryResource`` for GPU ``gpu``, by default the current one, whose memory comes from a heap on a host
    node. An allocation while another GPU is current raises ``InvalidArgument``: its stream would be taken for one of ``gpu``.

    ``gpu`` is the GPU of the streams. Without ``node`` and ``heap`` the memory is on the node nearest to it. A block is freed in the order of the stream that
    RMM frees it on, without waiting for the GPU. On a stream that is being captured into a graph that is an error, and the block
    stays allocated. A request without room raises a ``MemoryError``, as every resource of RMM does. ``backing`` is as for
    ``egmem.Heap``, without ``heap``.

    RMM calls Python for each allocation: put ``rmm.mr.PoolMemoryResource`` above it, which asks rarely.

    >>> upstream = egmem.rmm.memory_resource(node=0)                                  # doctest: +SKIP
    >>> pool = rmm.mr.PoolMemoryResource(upstream, initial_pool_size=1 << 30)         # doctest: +SKIP
    >>> rmm.mr.set_current_device_resource(pool)                                      # doctest: +SKIP
    """
    simulated = (heap.driver if heap is not None else _egmem.default_driver()).is_simulated
    own_gpu = _egmem._gpu(gpu) if gpu is not None else 0 if simulated else _current_gpu()
    if heap is None:
        heap = _egmem.Heap(node, near_gpu=own_gpu if node is None else None, label="egmem.rmm", backing=backing)
    else:
        _heaps.expect_on(heap, node=node, backing=backing)
    source = heap
    blocks: Dict[int, Any] = {}

    def allocate(nbytes: int, stream: Any) -> int:
        current = own_gpu if simulated else _current_gpu()
        if current != own_gpu:
            raise InvalidArgument(
                f"the resource is for GPU {own_gpu}, and GPU {current} is current", f"make one of that GPU: memory_resource(gpu={current})"
            )
        block = source.allocate(max(nbytes, 1))
        address: int = block.address
        blocks[address] = block
        return address

    def deallocate(address: int, nbytes: int, stream: Any) -> None:
        block = blocks.pop(address)
        try:
            if simulated:  # there is no GPU whose work could use the block
                block.close()
            else:
                block.free_after(_Stream(stream.__cuda_stream__()[1], own_gpu))
        except BaseException:
            blocks[address] = block  # a graph may use it at each replay: it stays allocated
            raise

    return rmm.mr.CallbackMemoryResource(allocate, deallocate)
