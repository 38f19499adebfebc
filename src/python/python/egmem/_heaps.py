"""Memory for arrays and tensors: blocks of heaps that a module shares, and mappings of their own."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Optional, SupportsIndex, Tuple, Union

from . import _egmem
from ._errors import InvalidArgument
from ._records import Gpu, Node

# How much a shared heap grows at a time: little, so that arrays take no more memory than their size.
_CHUNK = 16 << 20
# Memory of this many bytes or more is a buffer: its own mapping, rounded up to 2 MiB.
OWN_MAPPING = 64 << 20
# After how many seconds shared heaps give unused memory back.
_DECAY = 10.0

NodeLike = Union[Node, SupportsIndex, None]
GpuLike = Union[Gpu, SupportsIndex, None]
Progress = Callable[[int, int], object]

# The objects of a parent process would be refused: a forked child has keys of its own. There is no lock, which another
# thread of the parent could hold when it forks.
_heaps: Dict[Tuple[int, _egmem.Driver, int, str], _egmem.Heap] = {}
# What the machine of a driver was when it was first needed.
_topologies: Dict[Tuple[int, _egmem.Driver], _egmem.Topology] = {}


def node_of(driver: _egmem.Driver, node: NodeLike = None, near_gpu: GpuLike = None) -> int:
    """Returns ``node``, or the host node nearest to a GPU, by default GPU 0. The machine is read once for each driver."""
    if node is not None:
        if near_gpu is not None:
            raise InvalidArgument("node and near_gpu exclude each other", "pass one of them")
        return _egmem._node(node)
    key = os.getpid(), driver
    if key not in _topologies:
        _topologies[key] = driver.topology()
    gpu = 0 if near_gpu is None else _egmem._gpu(near_gpu)
    return _topologies[key].gpu(gpu).host_node


def heap_on(driver: _egmem.Driver, node: int, label: str) -> _egmem.Heap:
    """Returns the heap for a node that arrays with a label share."""
    key = os.getpid(), driver, node, label
    heap = _heaps.get(key)
    if heap is None:
        # Of two threads that make one, both take the first.
        heap = _heaps.setdefault(key, _egmem.Heap(node, chunk=_CHUNK, decay=_DECAY, label=label, driver=driver))
    return heap


def expect_on(
    heap: _egmem.Heap,
    *,
    node: NodeLike = None,
    near_gpu: GpuLike = None,
    driver: Optional[_egmem.Driver] = None,
    backing: Optional[str] = None,
) -> None:
    """Raises ``InvalidArgument`` for a heap that is elsewhere than a call says, and for a ``backing`` beside it."""
    if backing is not None:
        raise InvalidArgument("backing is given beside heap, whose backing its blocks have", "pass one of them")
    if driver is not None and driver != heap.driver:
        raise InvalidArgument("driver and heap are of two drivers", "pass one of them")
    if node is None and near_gpu is None:
        return
    wanted = node_of(heap.driver, node, near_gpu)
    if wanted != heap.node:
        place = "a GPU" if heap.node is None else f"node {heap.node}"
        raise InvalidArgument(f"the node is {wanted}, and the heap is on {place}", "pass one of them, or a heap of that node")


def allocate(
    nbytes: int,
    module: str,
    *,
    node: NodeLike = None,
    near_gpu: GpuLike = None,
    heap: Optional[_egmem.Heap] = None,
    driver: Optional[_egmem.Driver] = None,
    label: Optional[str] = None,
    progress: Optional[Progress] = None,
    backing: Optional[str] = None,
    zeroed: bool = False,
) -> Any:
    """Returns memory of ``nbytes`` bytes, at least 1: a block of ``heap`` or of the heap that ``module`` shares on the node, or, from
    64 MiB on and with a label or a backing, a buffer."""
    if heap is None:
        driver = driver if driver is not None else _egmem.default_driver()
        on = node_of(driver, node, near_gpu)
        if nbytes >= OWN_MAPPING or label is not None or backing is not None:
            # Other libraries copy by the driver, which refuses copies over the borders of registered chunks. New memory is zero.
            return _egmem.Buffer(nbytes, on, label=label or module, progress=progress, backing=backing, one_copy=True, driver=driver)
        heap = heap_on(driver, on, module)
    elif not isinstance(heap, _egmem.Heap):
        raise TypeError(f"heap is {type(heap).__name__}; valid: an egmem.Heap")
    else:
        expect_on(heap, node=node, near_gpu=near_gpu, driver=driver, backing=backing)
        if label is not None:
            raise InvalidArgument("label is given beside heap, whose label its blocks have", "give the heap a label: egmem.Heap(label=...)")
    align = 4096 if nbytes >= 1 << 20 else 256
    block = heap.allocate_zeroed(nbytes, align) if zeroed else heap.allocate(nbytes, align)
    if progress is not None:
        progress(nbytes, nbytes)
    return block
