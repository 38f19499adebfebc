"""Captures of streams into CUDA graphs, during which no GPU may be waited for."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from typing import Any, Callable, Iterator

from . import _egmem

_lock = threading.Lock()
# The function that ends a graph's capture, by the graph. It runs once, at the latest when the graph is gone.
_under_way: Any = weakref.WeakKeyDictionary()
_watched = False


@contextlib.contextmanager
def defer_frees() -> Iterator[None]:
    """Frees no memory that GPUs may use before the block ends: no thread waits for a GPU within it.

    A wait for a GPU makes captures into CUDA graphs invalid. egmem knows of those that PyTorch makes (``torch.cuda.graph``), and of
    those on blocking streams, which are CuPy's by default. Put this around other captures: on non-blocking streams of CuPy, Numba or
    cuda.core, and of code in C++.

    >>> with egmem.defer_frees():
    ...     pass  # stream.begin_capture(); …; stream.end_capture()
    """
    _egmem._hold_frees()
    try:
        yield
    finally:
        _egmem._release_frees()


def watch_torch() -> bool:
    """Has each capture of PyTorch's ``CUDAGraph`` defer frees; returns ``False`` if PyTorch is not loaded.

    PyTorch reports no begin of a capture, and a driver answers only about a stream that the caller names. So the methods
    ``capture_begin`` and ``capture_end`` are replaced by ones that count captures.
    """
    global _watched
    graph = getattr(getattr(sys.modules.get("torch"), "cuda", None), "CUDAGraph", None)
    if _watched or graph is None:
        return _watched
    with _lock:
        if not _watched:
            graph.capture_begin = _begins(graph.capture_begin)
            graph.capture_end = _ends(graph.capture_end)
            _watched = True
    return True


def _begins(capture_begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(capture_begin)
    def begin(graph: Any, *arguments: Any, **options: Any) -> Any:
        _egmem._hold_frees()
        end = weakref.finalize(graph, _egmem._release_frees)
        end.atexit = False
        try:
            result = capture_begin(graph, *arguments, **options)
        except BaseException:
            end()
            raise
        _under_way[graph] = end
        return result

    return begin


def _ends(capture_end: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(capture_end)
    def ended(graph: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return capture_end(graph, *arguments, **options)
        finally:
            end = _under_way.pop(graph, None)
            if end is not None:
                end()

    return ended
