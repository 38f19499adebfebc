"""Shapes as NumPy and PyTorch take them."""

from __future__ import annotations

import math
import operator
from typing import Any, Tuple

from ._errors import InvalidArgument


def dimensions_of(shape: Any, *, one_open: bool = False) -> Tuple[int, ...]:
    """Returns the dimensions of a shape: an integer of any type, or integers. With ``one_open`` one of them may be -1.

    Raises ``InvalidArgument`` for a negative one, and ``TypeError`` for what is no integer.
    """
    try:
        dimensions: Tuple[int, ...] = (operator.index(shape),)
    except TypeError:
        dimensions = tuple(operator.index(dimension) for dimension in shape)
    if one_open and dimensions.count(-1) == 1:
        known = [dimension for dimension in dimensions if dimension != -1]
    else:
        known = list(dimensions)
    for dimension in known:
        if dimension < 0:
            raise InvalidArgument(
                f"a dimension of the shape is {dimension}",
                "pass 0 or more elements for each; one may be -1 only where the memory is there already: egmem.numpy.asarray, memory.view",
            )
    return dimensions


def dimensions_in(shape: Any, name: Any, item: int, nbytes: int, offset: int) -> Tuple[int, ...]:
    """Returns the dimensions of an array in memory of ``nbytes`` bytes from ``offset`` on. One of them may be -1, which is then all that
    follows. ``name`` is the element type's, and ``item`` its size.

    Raises ``InvalidArgument`` for a shape that the memory does not have, and as ``dimensions_of``.
    """
    dimensions = dimensions_of(shape, one_open=True)
    rest = nbytes - offset
    unit = item * math.prod(dimension for dimension in dimensions if dimension != -1)
    # Where a dimension is 0, the others have bounds too.
    most = item * math.prod(dimension for dimension in dimensions if dimension > 0)
    if unit > rest or most >= 1 << 63 or (-1 in dimensions and (unit == 0 or rest % unit)):
        raise InvalidArgument(
            f"shape {dimensions} of {name} does not fit into the {max(rest, 0)} bytes from offset {offset} on",
            "pass a shape and a type of these bytes, or a slice of the memory",
        )
    return tuple(rest // unit if dimension == -1 else dimension for dimension in dimensions)
