"""NumPy arrays in memory of a chosen node, which GPUs can use too."""

from __future__ import annotations

import math
from typing import Any, Optional, Sequence, SupportsIndex, Union

import numpy

from . import _egmem
from ._shapes import dimensions_of

__all__ = ["array", "empty", "zeros"]

_Shape = Union[SupportsIndex, Sequence[SupportsIndex]]


def _allocate(shape: _Shape, dtype: Any, node: Optional[int], heap: Optional[_egmem.Heap], zeroed: bool) -> Any:
    dtype = numpy.dtype(dtype)
    if dtype.hasobject:
        raise TypeError("arrays of Python objects cannot be in memory of GPUs")
    dimensions = dimensions_of(shape)
    nbytes = math.prod(dimensions) * dtype.itemsize
    if nbytes == 0:
        return numpy.empty(dimensions, dtype)
    memory: Any
    if heap is None:
        memory = _egmem.Buffer(nbytes, node=node)  # new memory is zero
    else:
        memory = heap.allocate_zeroed(nbytes) if zeroed else heap.allocate(nbytes)
    return numpy.frombuffer(memory, dtype).reshape(dimensions)


def empty(
    shape: _Shape, dtype: Any = float, *, node: Optional[int] = None, heap: Optional[_egmem.Heap] = None
) -> Any:
    """Returns an array whose values are not initialised: in a block of ``heap``, or in a buffer of its own on ``node``.

    Its memory goes back with the last array that shares it, after the GPUs' work. A buffer takes a multiple of 2 MiB: use a heap for small arrays.
    """
    return _allocate(shape, dtype, node, heap, False)


def zeros(
    shape: _Shape, dtype: Any = float, *, node: Optional[int] = None, heap: Optional[_egmem.Heap] = None
) -> Any:
    """As :func:`empty`, with every value 0."""
    return _allocate(shape, dtype, node, heap, True)


def array(values: Any, dtype: Any = None, *, node: Optional[int] = None, heap: Optional[_egmem.Heap] = None) -> Any:
    """Returns a copy of ``values`` as an array on a node. See :func:`empty`."""
    source = numpy.asarray(values, dtype)
    copied = empty(source.shape, source.dtype, node=node, heap=heap)
    copied[...] = source
    return copied
