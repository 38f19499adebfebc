"""The line of a program that calls this package."""

from __future__ import annotations

import sys
import traceback
from typing import Optional, Tuple


def caller(with_stack: bool) -> Optional[Tuple[str, int, str, Optional[str]]]:
    """Returns file, line and function of the first frame outside of this package, with the stack as tracebacks show it if it is asked
    for; ``None`` if all frames are the package's."""
    frame = sys._getframe(1)  # a native function has no frame of its own
    while str(frame.f_globals.get("__name__")).partition(".")[0] == "egmem":
        if frame.f_back is None:
            return None
        frame = frame.f_back
    stack = "".join(traceback.format_stack(frame)) if with_stack else None
    # Python 3.11 has no line for a frame whose code was changed.
    return frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name, stack
