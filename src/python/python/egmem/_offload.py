"""Tensors that autograd saves, kept in CPU memory: the work of ``egmem.torch.offload``.

A saved view is described by the distinct elements that it has in its storage. The views of one storage share *parts*, copies of
elements in CPU memory: an element that has been copied out is not copied out again, unless it lies between gaps there. When the
backward pass asks for a view, the parts around it are copied into one *image* of the storage's range on the GPU, and all views
within that range are views of the image.

Copies run on streams of their own, in both directions. A part's memory is freed in the order of a third one.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import cuda
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _egmem
from ._errors import NotSupported

# The types in which elements are copied, by size: their values mean nothing here.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# An image begins at a multiple of this in its storage, so that addresses in it are aligned as they were.
_ALIGN = 512


class Elements(NamedTuple):
    """Distinct elements of a storage: offset and strides in elements, the largest stride first."""

    itemsize: int
    offset: int
    size: Tuple[int, ...]
    stride: Tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Elements":
        """Returns those of a view. Where rows may overlap, they are the whole range from the first element to the last."""
        inner_first = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1 and stride > 0)
        merged: List[Tuple[int, int]] = []
        extent, overlaps = 1, False
        for stride, size in inner_first:
            overlaps = overlaps or stride < extent
            extent += (size - 1) * stride
            if merged and merged[-1][0] * merged[-1][1] == stride:
                merged[-1] = merged[-1][0], merged[-1][1] * size
            else:
                merged.append((stride, size))
        if overlaps or not merged:
            merged = [(1, extent)]
        merged.reverse()
        size, stride = tuple(size for _, size in merged), tuple(stride for stride, _ in merged)
        return cls(tensor.element_size(), int(tensor.storage_offset()), size, stride)

    @classmethod
    def range(cls, start: int, end: int) -> "Elements":
        """Returns the bytes of a range."""
        return cls(1, start, (end - start,), (1,))

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.itemsize

    @property
    def start(self) -> int:
        """The first byte in the storage."""
        return self.offset * self.itemsize

    @property
    def end(self) -> int:
        """The byte after the last one."""
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride))
        return (last + 1) * self.itemsize

    @property
    def is_dense(self) -> bool:
        return self.stride == (1,)

    def within(self, storage: torch.UntypedStorage, device: torch.device, base: int = 0) -> torch.Tensor:
        """Returns the elements as a tensor, in a storage whose first byte is byte ``base`` of the described one."""
        offset = self.offset - base // self.itemsize
        return torch.empty(0, dtype=_RAW[self.itemsize], device=device).set_(storage, offset, self.size, self.stride)


def missing(wanted: Tuple[int, int], ranges: Iterable[Tuple[int, int]]) -> List[Tuple[int, int]]:
    """Returns what remains of a range without others."""
    start, end = wanted
    gaps = []
    for low, high in sorted(ranges):
        if high <= start or low >= end:
            continue
        if low > start:
            gaps.append((start, low))
        start = max(start, high)
    if start < end:
        gaps.append((start, end))
    return gaps


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)


def _used_on(tensor: torch.Tensor, stream: Any) -> None:
    """Has PyTorch reuse the tensor's memory after the work that the stream has when the tensor ends."""
    tensor.record_stream(stream)


class Streams:
    """The streams of a GPU for copies out, for copies back, and for frees."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.back, self.frees = (cuda.Stream(device) for _ in range(3))

    def copy_out(self, host: torch.Tensor, source: torch.Tensor) -> Any:
        """Copies after the current stream's work; returns the event of its end."""
        self.out.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(self.out):
            _copy(host, source)
            copied = self.out.record_event()
        _used_on(source, self.out)
        return copied


# By GPU, for all threads: PyTorch has 32 streams, which it gives out in turn, and a program's own may be among them.
_streams: Dict[torch.device, Streams] = {}


def _streams_of(device: torch.device) -> Streams:
    found = _streams.get(device)
    return found if found is not None else _streams.setdefault(device, Streams(device))


class _Part:
    """Elements of a storage in CPU memory."""

    __slots__ = ("elements", "_block", "_host", "_last", "_streams", "__weakref__")

    def __init__(self, elements: Elements, storage: torch.UntypedStorage, heap: _egmem.Heap, streams: Streams) -> None:
        self.elements = elements
        self._streams = streams
        self._block: Any = heap.allocate(elements.nbytes)
        host = torch.from_dlpack(self._block.on("cpu"))
        self._host: Any = host.view(_RAW[elements.itemsize]).view(elements.size)
        # Of the last copy from or to the block. Copies back run on one stream, so the last of them ends after the others.
        self._last = streams.copy_out(self._host, elements.within(storage, streams.device))

    def copy_back(self, image: torch.Tensor, base: int) -> None:
        """Copies into an image that begins at byte ``base``. The current stream is the one for copies back."""
        self._streams.back.wait_event(self._last)
        _copy(self.elements.within(image.untyped_storage(), image.device, base), self._host)
        self._last = self._streams.back.record_event()

    def __del__(self) -> None:
        block, self._host = getattr(self, "_block", None), None
        last = getattr(self, "_last", None)
        if block is None or last is None:
            return
        # Freed in the order of a stream that waits for the copies: no GPU is waited for. It is a stream of its own:
        # the thread that collects garbage may be capturing its current one. Where that fails, the block's own end
        # waits.
        with contextlib.suppress(Exception):
            self._streams.frees.wait_event(last)
            block.free_after(self._streams.frees)


class _Image:
    """A range of a storage, on the GPU again."""

    def __init__(self, start: int, end: int, parts: Iterable[_Part], streams: Streams) -> None:
        self.start, self.end = start, end
        self.base = start // _ALIGN * _ALIGN
        self._streams = streams
        # The memory is the current stream's, whose earlier work may still use it.
        self._stream = cuda.current_stream(streams.device)
        self.bytes = torch.empty(end - self.base, dtype=torch.uint8, device=streams.device)
        self._waited = False
        streams.back.wait_stream(self._stream)
        with cuda.stream(streams.back):
            for part in parts:
                part.copy_back(self.bytes, self.base)
            self._copied = streams.back.record_event()
        # The saved views that have not been returned from it.
        self.waiting: Any = weakref.WeakSet()

    def use(self) -> torch.UntypedStorage:
        """Makes the current stream wait for the copies."""
        current = cuda.current_stream(self._streams.device)
        current.wait_event(self._copied)
        if current == self._stream:
            self._waited = True
        else:
            _used_on(self.bytes, current)
        return self.bytes.untyped_storage()

    def __del__(self) -> None:
        # PyTorch has the memory reused in the order of its stream, which does not know of the copies.
        if not getattr(self, "_waited", True):
            with contextlib.suppress(Exception):
                _used_on(self.bytes, self._streams.back)


class _Saved:
    """A view that autograd saved."""

    __slots__ = ("storage", "parts", "previous", "start", "end", "_as", "__weakref__")

    def __init__(self, tensor: torch.Tensor, elements: Elements, storage: "_Storage") -> None:
        self.storage = storage
        self.parts: List[_Part] = []
        self.previous: Any = None
        self.start, self.end = elements.start, elements.end
        self._as = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()

    def within(self, storage: torch.UntypedStorage, device: torch.device, base: int) -> torch.Tensor:
        dtype, offset, size, stride, is_conj, is_neg = self._as
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(storage, offset - base // dtype.itemsize, size, stride)
        tensor = tensor.conj() if is_conj else tensor
        return torch._neg_view(tensor) if is_neg else tensor


def _around(start: int, end: int, parts: List[_Part]) -> Tuple[int, int, List[_Part]]:
    """Extends a range by the parts that overlap or adjoin it: their views share memory again. Those far away do not, so that no
    gap takes memory."""
    while True:
        near = [part for part in parts if part.elements.end >= start and part.elements.start <= end]
        first = min([start, *(part.elements.start for part in near)])
        last = max([end, *(part.elements.end for part in near)])
        if (first, last) == (start, end):
            return start, end, near
        start, end = first, last


class _Storage:
    """What is saved of one state of a storage. Saved views keep it, and the parts that they have elements in."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._parts: Any = weakref.WeakSet()
        self._saved: Any = weakref.WeakSet()
        self._images: List[_Image] = []

    def save(self, tensor: torch.Tensor, elements: Elements, heap: _egmem.Heap) -> _Saved:
        """Copies those elements out that no part has."""
        parts = list(self._parts)
        saved = _Saved(tensor, elements, self)
        dense = [part.elements for part in parts if part.elements.is_dense]
        gaps = missing((elements.start, elements.end), [(each.start, each.end) for each in dense])
        new = [Elements.range(*gap) for gap in gaps] if elements.is_dense else [elements] if gaps else []
        new = [each for each in new if all(part.elements != each for part in parts)]
        for each in new:
            parts.append(_Part(each, tensor.untyped_storage(), heap, self.streams))
        saved.parts = [part for part in parts if part.elements.start < saved.end and part.elements.end > saved.start]
        self._parts.update(saved.parts)
        self._saved.add(saved)
        if new:  # an image lacks them
            self._images = [image for image in self._images if image.end < saved.start or image.start > saved.end]
        return saved

    def fetch(self, saved: _Saved) -> _Image:
        """Returns the image that has a view, which is copied back if there is none."""
        for image in self._images:
            if image.start <= saved.start and saved.end <= image.end:
                return image
        start, end, parts = _around(saved.start, saved.end, list(self._parts))
        image = _Image(start, end, parts, self.streams)
        image.waiting.update(other for other in list(self._saved) if start <= other.start and other.end <= end)
        self._images.append(image)
        return image

    def take(self, saved: _Saved, image: _Image) -> torch.Tensor:
        """Returns a view for the current stream. The image ends with the last of its views that was waiting."""
        image.waiting.discard(saved)
        if not image.waiting:
            self._images = [other for other in self._images if other is not image]
        return saved.within(image.use(), self.streams.device, image.base)


class _Kept:
    """A tensor that stays where it is. It has no reference to the graph that refers to it."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def tensor(self) -> torch.Tensor:
        """Returns it; PyTorch itself checks this only for tensors that no hook has packed."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {list(self._tensor.shape)} that autograd saved within egmem.torch.offload was modified in place: "
                f"it is at version {self._tensor._version}, version {self._version} was saved"
            )
        return self._tensor


def _is_parameter(tensor: Optional[torch.Tensor]) -> bool:
    return tensor is not None and (isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad))


class Offload:
    """Packs and unpacks what autograd saves."""

    def __init__(self, heap: _egmem.Heap, min_bytes: int, ahead: int) -> None:
        self._heap = heap
        self._min_bytes = min_bytes
        self._ahead = ahead
        # A collection of garbage within it may end parts and images, which take no lock.
        self._lock = threading.RLock()
        # By storage and version: what was changed in place since is another state.
        self._storages: Any = weakref.WeakValueDictionary()
        # The view that was saved last, for each GPU.
        self._last: Dict[torch.device, Any] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """Copies a tensor out, or keeps it."""
        if not self._moves(tensor):
            return _Kept(tensor)
        elements = Elements.of(tensor)
        if elements.nbytes < self._min_bytes:
            return _Kept(tensor)
        expect_no_capture()
        with self._lock:
            key = StorageWeakRef(tensor.untyped_storage()), tensor._version
            storage = self._storages.get(key)
            if storage is None:
                storage = self._storages[key] = _Storage(_streams_of(tensor.device))
            saved: _Saved = storage.save(tensor, elements, self._heap)
            saved.previous = self._last.get(tensor.device)
            self._last[tensor.device] = weakref.ref(saved)
        return saved

    def unpack(self, packed: Any) -> torch.Tensor:
        """Returns the tensor for the current stream, and begins to fetch those that were saved before it."""
        if isinstance(packed, _Kept):
            return packed.tensor()
        expect_no_capture()
        with self._lock:
            image = packed.storage.fetch(packed)
            with contextlib.suppress(cuda.OutOfMemoryError):  # then they are fetched when they are needed
                for earlier in self._saved_before(packed):
                    earlier.storage.fetch(earlier)
            tensor: torch.Tensor = packed.storage.take(packed, image)
        return tensor

    def _moves(self, tensor: torch.Tensor) -> bool:
        plain = tensor.is_cuda and tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
        # Of a parameter's view, such as the transposed weight of a linear layer, the memory stays in any case.
        return plain and not _is_parameter(tensor) and not _is_parameter(tensor._base) and tensor.numel() > 0

    def _saved_before(self, saved: _Saved) -> Iterator[_Saved]:
        for _ in range(self._ahead):
            earlier: Optional[_Saved] = saved.previous() if saved.previous is not None else None
            if earlier is None:
                return
            yield earlier
            saved = earlier


def expect_no_capture() -> None:
    """A graph would copy to and from the blocks at each replay, when they belong to other tensors."""
    if cuda.is_current_stream_capturing():
        raise NotSupported(
            "tensors cannot be offloaded while a stream is being captured into a CUDA graph",
            "capture outside of egmem.torch.offload, or run this part without a graph",
        )
