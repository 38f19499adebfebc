"""The line of a program that calls this package."""

from __future__ import annotations

import sys
import traceback
from typing import Optional, Tuple


def _printable(text: str) -> str:
    # A path that is not UTF-8 has surrogates, which Rust's strings cannot have.
    return text.encode("utf-8", "backslashreplace").decode()


def caller(with_stack: bool) -> Optional[Tuple[str, int, str, Optional[str]]]:
    """Returns file, line and function of the first frame outside of this package, with the stack as tracebacks show it if it is asked
    for; ``None`` if there is none, as in other libraries' threads."""
    frame = sys._getframe().f_back  # a native function has no frame of its own
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "egmem":
        frame = frame.f_back
    if frame is None:
        return None
    stack = _printable("".join(traceback.format_stack(frame))) if with_stack else None
    # Python 3.11 has no line for a frame whose code was changed.
    return _printable(frame.f_code.co_filename), frame.f_lineno or 0, _printable(frame.f_code.co_name), stack
