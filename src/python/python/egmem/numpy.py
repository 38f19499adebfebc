"""NumPy arrays in memory of a chosen node, which GPUs can use too.

An array below 64 MiB is a block of ``heap``, or of a heap that this module keeps for the node: its size, rounded up to at most an
eighth more for small arrays and to 2 KiB for large ones. A larger one, and one with a ``label`` or a ``backing``, is mapped for itself: its size, rounded up
to 2 MiB. The memory goes back with the last array that shares it, after the GPUs' work. The module's heaps give memory that is no longer
used back to the machine after 10 to 20 seconds.

The functions that allocate have these arguments in common:

* ``node``, a host node, or ``near_gpu``, the node nearest to a GPU; by default the one nearest to GPU 0. NumPy's arrays are the CPU's, so there
  is no ``device``.
* ``heap``, an ``egmem.Heap`` to take a block of, of any size. ``InvalidArgument`` if it is on another node than ``node`` says.
* ``driver``, by default ``egmem.default_driver()``.
* ``label`` names the array's own memory in ``egmem ps``.
* ``progress(done, total)`` is called in bytes while large memory is allocated, as by ``egmem.Buffer``.
* ``backing``, as of ``egmem.Buffer``, gives the array memory of its own, too. ``"auto"`` is the driver's above 64 MiB, because
  registered memory then has several chunks, over whose borders other libraries cannot copy to a GPU at once.
"""

from __future__ import annotations

import math
import os
from typing import Any, BinaryIO, Optional, Sequence, SupportsIndex, Tuple, Union

import numpy

from . import _egmem, _heaps
from ._errors import InvalidArgument
from ._heaps import GpuLike, NodeLike, Progress
from ._shapes import dimensions_in, dimensions_of

__all__ = ["array", "asarray", "empty", "load", "save", "zeros"]

_Shape = Union[SupportsIndex, Sequence[SupportsIndex]]
_Path = Union[str, "os.PathLike[str]"]
_LABEL = "egmem.numpy"
# How much of a file is read at a time.
_READ = 16 << 20


def _dtype(given: Any) -> Any:
    dtype = numpy.dtype(given)
    if dtype.hasobject:
        raise TypeError("arrays of Python objects cannot be in memory of GPUs")
    return dtype


def _allocate(shape: _Shape, dtype: Any, **options: Any) -> Any:
    dtype = _dtype(dtype)
    dimensions = dimensions_of(shape)
    nbytes = math.prod(dimensions) * dtype.itemsize
    if nbytes == 0:
        return numpy.empty(dimensions, dtype)
    return numpy.frombuffer(_heaps.allocate(nbytes, _LABEL, **options), dtype).reshape(dimensions)


def empty(
    shape: _Shape,
    dtype: Any = float,
    *,
    node: NodeLike = None,
    near_gpu: GpuLike = None,
    heap: Optional[_egmem.Heap] = None,
    driver: Optional[_egmem.Driver] = None,
    label: Optional[str] = None,
    progress: Optional[Progress] = None,
    backing: Optional[str] = None,
) -> Any:
    """Returns an array whose values are not initialised. The module says what the arguments mean."""
    return _allocate(shape, dtype, node=node, near_gpu=near_gpu, heap=heap, driver=driver, label=label, progress=progress, backing=backing)


def zeros(
    shape: _Shape,
    dtype: Any = float,
    *,
    node: NodeLike = None,
    near_gpu: GpuLike = None,
    heap: Optional[_egmem.Heap] = None,
    driver: Optional[_egmem.Driver] = None,
    label: Optional[str] = None,
    progress: Optional[Progress] = None,
    backing: Optional[str] = None,
) -> Any:
    """As :func:`empty`, with every value 0."""
    return _allocate(
        shape, dtype, node=node, near_gpu=near_gpu, heap=heap, driver=driver, label=label, progress=progress, backing=backing, zeroed=True
    )


def array(
    values: Any,
    dtype: Any = None,
    *,
    node: NodeLike = None,
    near_gpu: GpuLike = None,
    heap: Optional[_egmem.Heap] = None,
    driver: Optional[_egmem.Driver] = None,
    label: Optional[str] = None,
    progress: Optional[Progress] = None,
    backing: Optional[str] = None,
) -> Any:
    """Returns a copy of ``values``. See :func:`empty`."""
    source = numpy.asarray(values, dtype)
    copied = empty(
        source.shape, source.dtype, node=node, near_gpu=near_gpu, heap=heap, driver=driver, label=label, progress=progress, backing=backing
    )
    copied[...] = source
    return copied


def asarray(memory: Any, dtype: Any = "u1", shape: Optional[_Shape] = None, *, offset: int = 0) -> Any:
    """Returns an array over a buffer, a block or fetched memory, without a copy. It keeps the memory.

    Without ``shape`` it has one dimension, to the memory's end. One dimension may be -1, which is then all that follows. ``offset``
    is in bytes. Raises ``InvalidArgument`` for a shape that the memory does not have.
    """
    dtype = _dtype(dtype)
    offset = _egmem._size(offset)
    dimensions = dimensions_in(-1 if shape is None else shape, dtype, dtype.itemsize, memoryview(memory).nbytes, offset)
    count = math.prod(dimensions)
    # NumPy makes no array of nothing.
    if count * dtype.itemsize == 0:
        return numpy.empty(dimensions, dtype)
    return numpy.frombuffer(memory, dtype, count, offset).reshape(dimensions)


def load(
    path: _Path,
    *,
    node: NodeLike = None,
    near_gpu: GpuLike = None,
    heap: Optional[_egmem.Heap] = None,
    driver: Optional[_egmem.Driver] = None,
    label: Optional[str] = None,
    progress: Optional[Progress] = None,
    backing: Optional[str] = None,
) -> Any:
    """Returns the array of a ``.npy`` file, which is read straight into the memory of a new one. ``progress(done, total)`` is called in
    bytes of the file that were read.

    Raises ``InvalidArgument`` for another file, one that is too short, and one of Python objects, which is never unpickled.
    """
    with open(path, "rb", buffering=0) as file:
        dimensions, is_fortran, dtype = _header(file, path)
        stored = dimensions[::-1] if is_fortran else dimensions
        nbytes = math.prod(dimensions) * dtype.itemsize
        rest = os.fstat(file.fileno()).st_size - file.tell()
        if rest < nbytes:
            raise InvalidArgument(f"{os.fspath(path)!r} has {rest} bytes behind its header, and its array {nbytes}", "pass a whole file")
        loaded = empty(stored, dtype, node=node, near_gpu=near_gpu, heap=heap, driver=driver, label=label, backing=backing)
        _read(file, path, loaded, progress)
    return loaded.T if is_fortran else loaded


def _header(file: BinaryIO, path: _Path) -> Tuple[Tuple[int, ...], bool, Any]:
    """Reads the header of a ``.npy`` file: shape, whether the first dimension is the innermost, and type."""
    formats = {(1, 0): numpy.lib.format.read_array_header_1_0, (2, 0): numpy.lib.format.read_array_header_2_0}
    try:
        version = numpy.lib.format.read_magic(file)
        if version not in formats:
            raise ValueError(f"its version is {version}")
        shape, is_fortran, dtype = formats[version](file)
    except ValueError as error:
        raise InvalidArgument(f"{os.fspath(path)!r} is no .npy file of version 1 or 2: {error}", "save it by egmem.numpy.save") from error
    if dtype.hasobject:
        raise InvalidArgument(f"{os.fspath(path)!r} has Python objects, which are not unpickled", "save numbers")
    return dimensions_of(shape), is_fortran, dtype


def _read(file: BinaryIO, path: _Path, into: Any, progress: Optional[Progress]) -> None:
    if into.nbytes == 0:
        return
    view = memoryview(into.reshape(-1).view("u1"))
    done = 0
    while done < view.nbytes:
        read: Any = file.readinto(view[done : done + _READ])  # type: ignore[attr-defined]
        if not read:
            raise InvalidArgument(f"{os.fspath(path)!r} ends after {done} of {view.nbytes} bytes", "pass a whole file")
        done += read
        if progress is not None:
            progress(done, view.nbytes)


def save(path: _Path, array: Any) -> None:
    """Writes an array as a ``.npy`` file of exactly this name: an array of consecutive bytes straight from its memory. Python objects are
    refused with ``InvalidArgument``, and nothing is written."""
    array = numpy.asanyarray(array)
    if array.dtype.hasobject:
        raise InvalidArgument("an array of Python objects is not saved", "save numbers")
    with open(path, "wb") as file:
        numpy.lib.format.write_array(file, array, allow_pickle=False)
