"""Element types and shapes of views, as NumPy, PyTorch and DLPack name them."""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Tuple

from ._errors import InvalidArgument
from ._shapes import dimensions_in


class _Type(NamedTuple):
    name: str
    # DLPack's: 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool, from 7 on the kinds of float8.
    code: int
    # In bytes.
    size: int
    # The array interfaces' name. Bytes without a meaning are "V".
    typestr: str


_ALL = [
    _Type(name, code, int(typestr[2:]), typestr)
    for name, code, typestr in (
        ("uint8", 1, "|u1"),
        ("int8", 0, "|i1"),
        ("uint16", 1, "<u2"),
        ("int16", 0, "<i2"),
        ("uint32", 1, "<u4"),
        ("int32", 0, "<i4"),
        ("uint64", 1, "<u8"),
        ("int64", 0, "<i8"),
        ("float16", 2, "<f2"),
        ("float32", 2, "<f4"),
        ("float64", 2, "<f8"),
        ("bfloat16", 4, "|V2"),
        ("complex64", 5, "<c8"),
        ("complex128", 5, "<c16"),
        ("bool", 6, "|b1"),
        ("float8_e3m4", 7, "|V1"),
        ("float8_e4m3", 8, "|V1"),
        ("float8_e4m3b11fnuz", 9, "|V1"),
        ("float8_e4m3fn", 10, "|V1"),
        ("float8_e4m3fnuz", 11, "|V1"),
        ("float8_e5m2", 12, "|V1"),
        ("float8_e5m2fnuz", 13, "|V1"),
        ("float8_e8m0fnu", 14, "|V1"),
    )
]
# Several types are exported as bytes without a meaning: such a name is no type's.
_BY_TYPESTR = {found.typestr[1:]: found for found in _ALL if found.typestr[1] != "V"}
_BY_NAME = {found.name: found for found in _ALL}


def read(dtype: Any, shape: Any, address: int, nbytes: int, offset: int) -> Tuple[_Type, Tuple[int, ...]]:
    """Returns the element type and the dimensions of a view of memory from ``offset`` on."""
    found = _ALL[0] if dtype is None else _type_of(dtype)
    if offset > nbytes:
        raise InvalidArgument(f"offset {offset} is beyond {nbytes} bytes")
    if (address + offset) % found.size:
        raise InvalidArgument(f"offset {offset} is no multiple of {found.size}, the size of {found.name}")
    if shape is None:
        return found, ((nbytes - offset) // found.size,)
    return found, dimensions_in(shape, found.name, found.size, nbytes, offset)


def _type_of(given: Any) -> _Type:
    """Reads a name, a NumPy type, a PyTorch type, or a class such as ``numpy.float32``."""
    if isinstance(given, (tuple, list, int)):
        raise InvalidArgument(f"dtype is {given}, which is a shape", f"pass shape={given}, and the element type as dtype")
    found = next(filter(None, map(_named, _names(given))), None)
    # NumPy's types have the same name in each byte order.
    if not getattr(given, "isnative", True) or not found and any(name[:1] == ">" and _named(name[1:]) for name in _names(given)):
        raise InvalidArgument(
            f"elements of type {given} have the other byte order",
            "pass a little-endian type, or view the memory as bytes and give those the type in NumPy",
        )
    if found is None:
        raise InvalidArgument(f"there is no element type {given}; valid: {', '.join(_BY_NAME)}")
    return found


def _names(given: Any) -> Iterator[str]:
    # One after the other: NumPy takes microseconds for each.
    for attribute in "name", "__name__":
        if isinstance(name := getattr(given, attribute, None), str):
            yield name
    yield str(given)


def _named(name: str) -> Any:
    """Returns the type of a name, such as ``float32`` or ``torch.float32``, or of a text of the array interfaces, such as ``<f4``,
    ``=f4`` or ``f4``; ``None`` for another one."""
    name = name.removeprefix("torch.")
    return _BY_NAME.get(name) or _BY_TYPESTR.get(name[1:] if name[:1] in ("<", "=", "|") else name)
