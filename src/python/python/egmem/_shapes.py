"""Shapes as NumPy and PyTorch take them."""

from __future__ import annotations

import operator
from typing import Any, Tuple

from ._errors import InvalidArgument


def dimensions_of(shape: Any) -> Tuple[int, ...]:
    """Returns the dimensions of a shape: an integer of any type, or integers.

    Raises ``InvalidArgument`` for a negative one, and ``TypeError`` for what is no integer.
    """
    try:
        dimensions: Tuple[int, ...] = (operator.index(shape),)
    except TypeError:
        dimensions = tuple(operator.index(dimension) for dimension in shape)
    for dimension in dimensions:
        if dimension < 0:
            raise InvalidArgument(f"a dimension of the shape is {dimension}", "pass 0 or more elements for each dimension")
    return dimensions
