"""LMCache's CPU memory from egmem.

    allocator = egmem_lmcache.EgmemMemoryAllocator(16 << 30, node=0)
    backend = LocalCPUBackend(config, metadata, memory_allocator=allocator)

`EgmemMemoryAllocator` is LMCache's `MixedMemoryAllocator`, which its CPU backend insists on where it evicts, with another memory: pinned, of
exactly the size asked for, on a host NUMA node. LMCache's own managers of addresses cut it into objects, with pages
(`use_paging=True` with `shapes`, `dtypes` and `fmt`) or without. LMCache decides what is kept and evicted, so there is no
`egmem.kv.Tier` below it. The memory ends with the process, so it needs no tag of the model.

Tested with the classes of LMCache 0.5.6 on the simulator (test_adapters.py) and with copies of an H100; not in an engine that serves.
"""

import contextlib
import threading

import torch
from lmcache.v1.memory_allocators.buffer_allocator import BufferAllocator
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import PagedTensorMemoryAllocator
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import AddressManager, MemoryAllocatorInterface, MemoryFormat

import egmem.torch


class EgmemMemoryAllocator(MixedMemoryAllocator):
    def __init__(
        self,
        size,
        *,
        node=None,
        use_paging=False,
        shapes=None,
        dtypes=None,
        fmt=MemoryFormat.KV_2LTD,
        align_bytes=AddressManager.ALIGN_BYTES,
    ):
        # LMCache's own constructor would allocate and register memory; its methods use what is set here.
        self.size, self.align_bytes = size, align_bytes
        self.buffer = egmem.torch.empty(size, dtype=torch.uint8, node=node, backing="auto")
        if use_paging:
            self.pin_allocator = PagedTensorMemoryAllocator(self.buffer, shapes, dtypes, fmt)
        else:
            self.pin_allocator = TensorMemoryAllocator(self.buffer, align_bytes=align_bytes)
        # Pages are kept in a deque, which needs no lock.
        self.host_mem_lock = contextlib.nullcontext() if use_paging else threading.Lock()
        self.buffer_allocator = BufferAllocator("cpu")

    def close(self):
        """Gives the memory back with the last object in it. Nothing is allocated any more; objects may still be freed."""
        with self.host_mem_lock:
            self.buffer, self.pin_allocator = None, _Closed()

    def __str__(self):
        return "EgmemMemoryAllocator"


class _Closed(MemoryAllocatorInterface):
    """Has no memory, and takes back objects of the memory that was there."""

    def allocate(self, shapes, dtypes, fmt=MemoryFormat.KV_2LTD, allocator_type=None):
        return None

    def batched_allocate(self, shapes, dtypes, batch_size, fmt=MemoryFormat.KV_2LTD, allocator_type=None):
        return None

    def free(self, memory_obj, allocator_type=None):
        pass

    def batched_free(self, memory_objs, allocator_type=None, update_stats=True):
        pass

    def memcheck(self):
        return True
