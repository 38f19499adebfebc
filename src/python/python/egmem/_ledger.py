"""This process's live allocations, and whose memory is at an address."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from ._egmem import Driver, Memory, View, _allocations, _locate
from ._errors import InvalidArgument

# An allocation as the native module tells it: in words, its location and its node, how it was allocated, and all else.
_Told = Tuple[str, str, Optional[int], str, Dict[str, Any]]


@dataclass(frozen=True, repr=False, eq=False)
class Allocation:
    """A live allocation of this process, as it was when it was asked for. Made by ``allocations`` and ``locate``.

    A heap's chunks are allocations, its blocks are not.
    """

    nbytes: int
    """Its size in bytes, in the allocator's units."""
    location: str
    """Where it is, in words: ``"host NUMA node 0"``, ``"GPU 1"``."""
    node: Optional[int]
    """The host NUMA node, or ``None`` for memory of a GPU or on no particular node."""
    kind: str
    """How it was allocated: ``"vmm"``, ``"heap chunk"``, ``"pool"``, ``"import"``, …"""
    label: Optional[str]
    """The name that the program gave, or ``None``."""
    age: float
    """Seconds since it was allocated or imported."""
    file: Optional[str]
    """The file of the line that allocated it, or ``None``: no Python code called."""
    line: Optional[int]
    """The line, or ``None``."""
    function: Optional[str]
    """The function, or ``None``."""
    stack: Optional[str]
    """The stack of the call, as a traceback shows it; ``None`` unless ``EGMEM_BACKTRACES=1``."""
    address: Optional[int]
    """The first address, or ``None`` if it is not mapped."""
    driver: str
    """The driver: ``"cuda"`` or ``"simulated"``."""
    _text: str
    _all: Dict[str, Any]

    def to_dict(self) -> Dict[str, Any]:
        """Returns all that is known, with the keys of ``egmem ps --json``."""
        return copy.deepcopy(self._all)

    def __repr__(self) -> str:
        return f"<egmem.Allocation{self._text}>"


@dataclass(frozen=True, repr=False, eq=False)
class Located:
    """The memory at an address. Made by ``locate``."""

    allocation: Optional[Allocation]
    """The allocation, or ``None``: another library has allocated the memory."""
    offset: Optional[int]
    """The bytes from the start of the mapping or of the other library's allocation to the address; ``None`` if the driver does not tell."""
    location: Optional[str]
    """Where the memory is, in words; ``None`` if the driver does not tell."""
    nbytes: Optional[int]
    """The size of the allocation in bytes; ``None`` if the driver does not tell."""

    def __repr__(self) -> str:
        offset = "" if self.offset is None else f"offset {self.offset} of "
        what = self.allocation or f"memory of another library on {self.location or 'an unknown place'}"
        return f"<egmem.Located {offset}{what}>"


def _allocation(told: _Told) -> Allocation:
    text, location, node, kind, found = told
    site = found["site"] or {}
    return Allocation(
        nbytes=found["bytes"],
        location=location,
        node=node,
        kind=kind,
        label=found["label"],
        age=found["age_ms"] / 1000,
        file=site.get("file"),
        line=site.get("line"),
        function=site.get("function"),
        stack=site.get("backtrace"),
        address=found["mapped"][0]["start"] if found["mapped"] else None,
        driver=found["driver"],
        _text=text,
        _all=found,
    )


def allocations(driver: Optional[Driver] = None) -> List[Allocation]:
    """Returns this process's live allocations, the oldest first: those of ``driver``, or of all drivers."""
    return [_allocation(told) for told in _allocations(driver)]


def locate(memory: Any, driver: Optional[Driver] = None) -> Optional[Located]:
    """Returns whose memory is at an address: the allocation of this process with the offset, or what the driver tells of memory that
    another library has allocated. ``None`` for memory that is no driver's, such as a plain array.

    ``memory`` is an address, memory or a view of this package, or an array: of NumPy, PyTorch, CuPy or with an array interface.
    ``driver`` is the memory's driver; by default all drivers of this process are asked.
    """
    # The address of this package's memory is not given away here: freeing it would wait for all GPUs.
    found = _locate(memory if isinstance(memory, (Memory, View)) else _address_of(memory), driver)
    if found is None:
        return None
    told, offset, location, nbytes = found
    return Located(_allocation(told) if told else None, offset, location, nbytes)


def _address_of(memory: Any) -> int:
    """Returns the address of an object's bytes. Raises ``TypeError`` for one without an address."""
    if hasattr(memory, "data_ptr"):
        return memory.data_ptr()
    # An array of one number is a number too. NumPy's numbers, which are no arrays, have its interface.
    if hasattr(memory, "__index__") and not hasattr(memory, "__setitem__"):
        address = operator.index(memory)
        if not 0 <= address < 1 << 64:
            raise InvalidArgument(f"address is {memory}; valid: 0 to 2**64 - 1")
        return address
    for interface in "__array_interface__", "__cuda_array_interface__":
        if hasattr(memory, interface):
            return getattr(memory, interface)["data"][0]
    raise TypeError(f"memory is of type {type(memory).__name__}, which has no address: pass an address, memory of egmem, or an array")
