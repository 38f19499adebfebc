"""The memory of all ranks of a job, mapped in each with one call.

>>> import egmem, egmem.group
>>> buffer = egmem.Buffer(1 << 20, shareable=True)
>>> memories = egmem.group.gather(buffer)         # under torchrun, mpirun, srun, or with EGMEM_RANK, EGMEM_SIZE, EGMEM_ADDRESS
>>> memories[1].read(0, 8)                         # rank 1's memory, mapped here
"""

from __future__ import annotations

import sys
from typing import Any, Callable, List, Optional, Tuple

from ._egmem import Driver, Memory, _gather

__all__ = ["gather"]


def gather(
    memory: Optional[Memory],
    *,
    comm: Any = None,
    secret: Optional[bytes] = None,
    driver: Optional[Driver] = None,
    timeout: float = 300.0,
) -> List[Optional[Memory]]:
    """Gives this rank's memory to all ranks of the job, and returns the memory of each, mapped here: this rank's own, and None for
    a rank that gives none. All ranks call it together.

    ``memory`` was made with ``shareable=True``. Ranks of one machine exchange file descriptors, ranks of several fabric handles:
    all ranks use one type, and if there is none, all raise NotSupported with each rank's reason.

    ``comm`` is how the ranks reach each other: a communicator of mpi4py, a process group of torch.distributed, or None for
    torch.distributed's default group if it is initialised, and otherwise for the environment of torchrun, mpirun, srun or a
    Kubernetes Job, or EGMEM_RANK, EGMEM_SIZE and EGMEM_ADDRESS. Whoever reads what ``comm`` sends can map fabric memory, unless
    the ranks have a ``secret``, of 16 bytes or more. Between machines the environment needs EGMEM_SECRET.

    Raises TimedOut if ranks are missing after ``timeout`` seconds, with torch.distributed and mpi4py after their own time.
    """
    rank, memories = _gather(memory, _ranks(comm), secret, driver, timeout)
    memories[rank] = memory
    return memories


def _ranks(comm: Any) -> Optional[Tuple[int, int, Callable[[bytes], List[bytes]]]]:
    if comm is not None and hasattr(comm, "Get_rank"):
        return comm.Get_rank(), comm.Get_size(), comm.allgather
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if comm is None and not (distributed and distributed.is_available() and distributed.is_initialized()):
        return None
    if distributed is None:
        raise TypeError(f"comm is {comm!r}; valid: a communicator of mpi4py, a process group of torch.distributed, None")
    size = distributed.get_world_size(comm)

    def all_gather(own: bytes) -> List[bytes]:
        every: List[Any] = [None] * size
        distributed.all_gather_object(every, own, group=comm)
        return every

    return distributed.get_rank(comm), size, all_gather
