"""Arrays of PyTorch and CuPy on a GPU: where a cache's blocks lie in them, and the streams that order their library's work; arrays of
numbers."""

from __future__ import annotations

import importlib
import math
import operator
import sys
from typing import Any, Iterable, List, Optional, Tuple

from ._errors import InvalidArgument

# The most parts of one array.
_MAX_PARTS = 1 << 16
_ADDRESSES = 1 << 64

# A part's address, the bytes from one block to the next, and those of a block.
_Part = Tuple[int, int, int]
# The length of a dimension, and the bytes between two of its elements.
_Dimension = Tuple[int, int]


def current_stream(library: str, gpu: int) -> Any:
    """Returns a library's current stream of a GPU in this thread."""
    cuda = importlib.import_module(library).cuda
    return cuda.get_current_stream(gpu) if library == "cupy" else cuda.current_stream(gpu)


def handle_of(stream: Any) -> Tuple[int, Optional[int]]:
    """Returns the handle of another library's stream, and its GPU if the object tells: of an integer, of an object with
    ``__cuda_stream__``, and of one with ``cuda_stream`` (PyTorch) or ``ptr`` (CuPy)."""
    if hasattr(stream, "__index__"):
        raw: Any = stream
    elif hasattr(stream, "__cuda_stream__"):
        raw = stream.__cuda_stream__()[1]
    else:
        raw = getattr(stream, "cuda_stream", getattr(stream, "ptr", None))
    raw = operator.index(raw) if hasattr(raw, "__index__") else -1
    if not 0 <= raw < _ADDRESSES:
        raise InvalidArgument(f"{stream!r} is no stream")
    gpu = getattr(stream, "device_index", getattr(stream, "device_id", None))
    # CuPy's default streams have -1: they are those of the current GPU.
    return raw, gpu if isinstance(gpu, int) and gpu >= 0 else None


def words(array: Any) -> bytes:
    """Returns the integers of an array of NumPy as words of 64 bits."""
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise InvalidArgument("an array of pages or blocks has one dimension and integers")
    return array.astype("<u8").tobytes()


def parts_of(tensors: Iterable[Any], block_dim: Optional[int]) -> Tuple[List[_Part], int, int, Optional[str], List[Any]]:
    """Returns the parts of a cache's arrays, the number of blocks, the GPU, the library if its stream is known, and the arrays."""
    arrays = list(tensors)
    if not arrays:
        raise InvalidArgument("a cache has at least one tensor")
    parts: List[_Part] = []
    found = []
    for array in arrays:
        library = _library_of(array)
        try:
            gpu, address, item, dimensions = _read(array, library)
        except AttributeError as error:
            raise TypeError(f"{type(array)} is no tensor on a GPU; valid: tensors of PyTorch, arrays of CuPy") from error
        of_array, blocks = _blocks(address, item, dimensions, block_dim)
        parts += of_array
        found.append((blocks, gpu, library))
        if gpu != found[0][1]:
            raise InvalidArgument("the tensors of a cache are on one GPU")
        if library != found[0][2]:
            raise InvalidArgument("the tensors of a cache are of one library")
        if blocks != found[0][0]:
            raise InvalidArgument(
                f"the tensors of a cache have {found[0][0]} and {blocks} blocks; valid: as many blocks in each, which dimension "
                "block_dim= counts"
            )
    return (parts, *found[0], arrays)


def _library_of(array: Any) -> Optional[str]:
    # No library is imported: an array's is there already. A module of the same name may be another one, or be imported in part.
    for library, name in ("torch", "Tensor"), ("cupy", "ndarray"):
        kind = getattr(sys.modules.get(library), name, None)
        if isinstance(kind, type) and isinstance(array, kind):
            return library
    return None


def _read(array: Any, library: Optional[str]) -> Tuple[int, int, int, List[_Dimension]]:
    """Returns an array's GPU, its address, the bytes of an element, and its dimensions."""
    if library == "cupy":
        gpu, address, item, strides = array.device.id, array.data.ptr, array.itemsize, array.strides
    else:
        if array.device.type != "cuda":
            # A kernel that accesses memory of the CPU that is not pinned loses the GPU's context.
            raise InvalidArgument(f"a tensor of the cache is on {array.device.type!r}; valid: tensors on a GPU")
        gpu, address, item = array.device.index, array.data_ptr(), array.element_size()
        strides = [stride * item for stride in array.stride()]
    if not (isinstance(gpu, int) and isinstance(address, int)):
        raise TypeError(
            f"{type(array)} has GPU {gpu!r} and address {address!r}, which must be numbers; valid: tensors of PyTorch, arrays of CuPy"
        )
    if any(stride < 0 for stride in strides):
        raise InvalidArgument("an array of the cache has a negative stride")
    return gpu, address, item, list(zip(array.shape, strides))


def _blocks(address: int, item: int, dimensions: List[_Dimension], block_dim: Optional[int]) -> Tuple[List[_Part], int]:
    """Returns the parts of an array and the number of its blocks, which dimension ``block_dim`` counts. A block's elements lie side
    by side in the dimensions behind it, in any order of these; each index in the dimensions before it is a part."""
    shape = [length for length, _ in dimensions]
    if block_dim is None and len(shape) >= 3 and shape[0] == 2:
        raise InvalidArgument(
            f"an array of the cache has the shape {shape}, which may be keys and values of {shape[1]} blocks, or 2 blocks; pass "
            "block_dim=1 for keys and values, block_dim=0 for 2 blocks"
        )
    dim = block_dim or 0
    if dim >= len(shape):
        raise InvalidArgument(
            f"block_dim is {dim}, and an array of the cache has the shape {shape}; valid: a dimension of each array"
        )
    if 0 in shape:
        raise InvalidArgument(f"an array of the cache has no block: its shape is {shape}")
    size = item
    for length, stride in sorted((behind for behind in dimensions[dim + 1 :] if behind[0] > 1), key=lambda behind: behind[1]):
        if stride != size:
            raise InvalidArgument(
                "a block's elements are not contiguous in an array of the cache, whose dimensions have these lengths and bytes "
                f"between elements: {dimensions}; copy it to an array whose blocks have no gaps, or pass block_dim= for the "
                "dimension that counts the blocks"
            )
        size *= length
    count = math.prod(shape[:dim])
    if count > _MAX_PARTS:
        raise InvalidArgument(f"the dimensions before block_dim have {count} parts; valid: 1 to {_MAX_PARTS}")
    offsets = [0]
    for length, stride in dimensions[:dim]:
        offsets = [offset + index * stride for offset in offsets for index in range(length)]
    if all(offset == index * size for index, offset in enumerate(offsets)):
        # Parts that lie side by side in memory as in a page are one.
        size, offsets = size * count, [0]
    blocks, stride = dimensions[dim]
    # No stride is negative: the last block of the last part ends the array.
    end = address + offsets[-1] + (blocks - 1) * stride + size
    if address < 0 or max(end, blocks) > _ADDRESSES:
        raise InvalidArgument(
            f"an array of the cache at address {address:#x} ends beyond the last address: its dimensions have these lengths and bytes "
            f"between elements: {dimensions}; pass an array that lies in memory"
        )
    # A single block's stride says nothing.
    return [(address + offset, size if blocks == 1 else stride, size) for offset in offsets], blocks
