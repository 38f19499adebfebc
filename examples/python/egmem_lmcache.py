"""LMCache's CPU memory from egmem.

    allocator = egmem_lmcache.EgmemMemoryAllocator(16 << 30, node=0)
    backend = LocalCPUBackend(config, metadata, memory_allocator=allocator)

`EgmemMemoryAllocator` has LMCache's `MemoryAllocatorInterface`: pinned memory of exactly the size asked for on a host NUMA node,
which LMCache's own managers of addresses cut into objects, with pages (`use_paging=True` with `shapes`, `dtypes` and `fmt`) or
without. LMCache decides what is kept and evicted, so there is no `egmem.kv.Tier` below it.

Tested with the classes of LMCache 0.5.6 on the simulator (test_adapters.py); not in an engine that serves.
"""

import contextlib
import threading

import torch
from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import PagedTensorMemoryAllocator
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import MemoryAllocatorInterface, MemoryFormat

import egmem.torch


class EgmemMemoryAllocator(MemoryAllocatorInterface):
    def __init__(self, size, *, node=None, use_paging=False, shapes=None, dtypes=None, fmt=MemoryFormat.KV_2LTD):
        self.size = size
        self.buffer = egmem.torch.empty(size, dtype=torch.uint8, node=node)
        if use_paging:
            self.allocator = PagedTensorMemoryAllocator(self.buffer, shapes, dtypes, fmt)
        else:
            self.allocator = TensorMemoryAllocator(self.buffer)
        # Pages are kept in a deque, which needs no lock.
        self._lock = contextlib.nullcontext() if use_paging else threading.Lock()

    def allocate(self, shapes, dtypes, fmt=MemoryFormat.KV_2LTD, allocator_type=None):
        with self._lock:
            return self._owned(self.allocator.allocate(shapes, dtypes, fmt)) if self.allocator else None

    def batched_allocate(self, shapes, dtypes, batch_size, fmt=MemoryFormat.KV_2LTD, allocator_type=None):
        with self._lock:
            objects = self.allocator.batched_allocate(shapes, dtypes, batch_size, fmt) if self.allocator else None
        if objects is not None:
            for memory_object in objects:
                self._owned(memory_object)
        return objects

    def _owned(self, memory_object):
        """Has the object freed here, under the lock."""
        if memory_object is not None:
            memory_object.parent_allocator = self
        return memory_object

    def free(self, memory_obj, allocator_type=None):
        with self._lock:
            if self.allocator:
                self.allocator.free(memory_obj)

    def batched_free(self, memory_objs, allocator_type=None, update_stats=True):
        with self._lock:
            if self.allocator:
                self.allocator.batched_free(memory_objs, update_stats=update_stats)

    def memcheck(self):
        with self._lock:
            return self.allocator.memcheck() if self.allocator else True

    def close(self):
        """Gives the memory back with the last object in it. Nothing is allocated any more; objects may still be freed."""
        with self._lock:
            self.buffer = self.allocator = None

    def __str__(self):
        return "EgmemMemoryAllocator"
