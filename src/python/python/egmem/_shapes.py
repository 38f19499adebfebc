"""Shapes as NumPy and PyTorch take them."""

from __future__ import annotations

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
