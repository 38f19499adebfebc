"""What works on a machine."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any, Dict, List, Optional, Tuple

from ._egmem import _doctor


class Report:
    """A report of ``doctor``: the capabilities of this machine, why the others are missing, and how to get them."""

    def __init__(self, found: Dict[str, Any], texts: Dict[Tuple[bool, bool], str]) -> None:
        self._found = found
        self._texts = texts

    @property
    def works(self) -> bool:
        """Whether host-NUMA memory works, for the CPU and at least one GPU."""
        return self._found["works"]

    @property
    def working_gpus(self) -> List[int]:
        """The ordinals of the GPUs for which it does."""
        return list(self._found["working_gpus"])

    @property
    def advice(self) -> List[Tuple[str, str]]:
        """Settings that should change: the finding, and what to do."""
        return [(advice["finding"], advice["remedy"]) for advice in self._found["advice"]]

    def to_text(self, all: bool = False) -> str:
        """Returns the text of ``egmem doctor``; with ``all``, that of ``egmem doctor --all``."""
        # As the command line: with colours on a terminal, unless NO_COLOR is set.
        return self._texts[bool(all), os.isatty(1) and "NO_COLOR" not in os.environ]

    def to_dict(self) -> Dict[str, Any]:
        """Returns the output of ``egmem doctor --json``, as a dictionary."""
        return copy.deepcopy(self._found)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<egmem.Report: Extended GPU Memory {'works' if self.works else 'does not work'}>"


def doctor(*, sim: Optional[str] = None, timeout: float = 30.0) -> Report:
    """Finds out what works on this machine, or on a simulated one: ``"gh200"``, ``"gh200x4"``, ``"gb200"``, ``"h200x8"`` or a JSON
    file; by default the one that ``EGMEM_SIM`` names.

    Each trial runs in a process of its own (``python -m egmem probe``), because drivers have crashed inside such calls. ``timeout`` is
    in seconds, for each step. Signal handlers run between the steps.
    """
    probe = [sys.executable, "-m", "egmem", "probe", *(["--sim", sim] if sim is not None else [])]
    return Report(*_doctor(probe, sim, timeout))
