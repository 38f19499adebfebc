"""SGLang's host KV cache (HiCache) in egmem's memory.

    import egmem_sglang
    egmem_sglang.install(node=0)        # before the server makes its host pools

`EgmemHostTensorAllocator` is a host tensor allocator, as SGLang's own ones are. SGLang's choice of allocators is a fixed list, so
`install` puts this one in the default one's place. The memory is pinned already: SGLang must not register it once more, so
`install` also replaces the function that does. With `address` and `name`, the pools lie in memory of `egmem serve`: each rank of
torch.distributed has names of its own, and a name that another process or pool has is refused with `egmem.InUse`. Servers whose
ranks are numbered alike (replicas) need a `name` each. By default a service lets a user create names under `uid:N/` alone, so
give `name="uid:1000/sglang"` with the number of the server's user.

A name ends with a hash of the pool's shape and type, of SGLang's version and of `tag`, so that no server is given the memory of one with
another model: pass the model and its revision as `tag`. SGLang has its index of what is cached in its process alone, so a restarted
server finds the memory made and pinned, and fills it anew. `egmem delete` removes names that no server asks for any more.

Tested with the pools and copy kernels of SGLang 0.5.23 on two H200 (docs/kv.md); not in a server.
"""

import hashlib
import itertools
import math
import sys
import time

import sglang
import torch
from sglang.srt.mem_cache.pool_host import common

import egmem
import egmem.torch


# How long a name may have another lease.
LEASE_SECONDS = 10


class EgmemHostTensorAllocator(common.HostTensorAllocator):
    """Pinned tensors of exactly their size on a host NUMA node."""

    def __init__(self, node=None, address=None, name=None, tag=None, numbers=None):
        super().__init__()
        self.node, self.address, self.name, self.tag = node, address, name, tag
        # SGLang makes an allocator for each pool: those of a process count together.
        self._numbers = itertools.count() if numbers is None else numbers

    def allocate(self, dims, dtype, device="cpu"):
        if device != "cpu":
            raise ValueError(f"a host tensor is in memory of the CPU, not of {device!r}")
        self.dims, self.dtype = dims, dtype
        if self.address is None:
            tensor = egmem.torch.empty(tuple(dims), dtype=dtype, node=self.node, backing="auto")
        else:
            tensor = self._of_server(dims, dtype)
        # Nothing is to be unregistered when SGLang destroys the pool.
        setattr(tensor, common._CUDA_HOST_REGISTERED_RANGES_ATTR, [])
        return tensor

    def _of_server(self, dims, dtype):
        """Returns memory that stays in the server: a process of the same rank that asks for the same tensors in the same order
        has it again."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        meaning = (self.tag, tuple(dims), str(dtype), sglang.__version__)
        digest = hashlib.sha256(repr(meaning).encode()).hexdigest()[:16]
        name = f"{self.name or 'sglang'}-{rank}-{next(self._numbers)}-{digest}"
        with egmem.connect(self.address) as client:
            client.create(name, math.prod(dims) * dtype.itemsize, node=self.node, exist_ok=True)
            memory = client.fetch(name, mode="rw")
            _expect_no_other_lease(client, memory)
        return torch.from_dlpack(memory.on("cpu"))[: math.prod(dims) * dtype.itemsize].view(dtype).view(tuple(dims))


def _expect_no_other_lease(client, memory):
    """Refuses memory that another process or pool has. The lease of a process that has just ended may last a moment longer."""
    last = time.monotonic() + LEASE_SECONDS
    while any(entry.name == memory.name and entry.leases > 1 for entry in client.list(memory.name)):
        if time.monotonic() > last:
            name = memory.name
            memory.release()
            raise egmem.InUse(f"{name} has another lease", "give each server a name of its own: install(name=...)")
        time.sleep(0.05)


def allocate_pinned(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    """Takes the place of SGLang's `alloc_with_host_register`: memory of egmem is not registered."""
    if isinstance(allocator, EgmemHostTensorAllocator):
        return allocator.allocate(dims, dtype=dtype, device=device)
    return common.alloc_with_host_register(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes)


def install(node=None, address=None, name=None, tag=None):
    """Has SGLang's host pools of CUDA, which name no allocator of a storage, allocate from egmem."""
    original = common.get_allocator_from_storage
    numbers = itertools.count()

    def get_allocator_from_storage(allocator_type):
        allocator = original(allocator_type)
        if type(allocator) is not common.HostTensorAllocator:
            return allocator
        return EgmemHostTensorAllocator(node, address, name, tag, numbers)

    common.ALLOC_MEMORY_FUNCS["cuda"] = allocate_pinned
    # The pools' modules have the function by name.
    for module in list(sys.modules.values()):
        if getattr(module, "get_allocator_from_storage", None) is original:
            module.get_allocator_from_storage = get_allocator_from_storage
