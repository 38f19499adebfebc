"""The ranks of a job map each other's memory.

    torchrun --nproc-per-node=4 examples/python/group.py
    mpirun -n 4 python examples/python/group.py
    srun -n 4 python examples/python/group.py

On the first GPU's node; where there is no GPU, on a simulated machine. With torchrun and PyTorch the ranks gather by
torch.distributed, with mpirun and mpi4py by MPI, otherwise by the launcher's environment variables.
"""

import os

import egmem
import egmem.group


def open_driver():
    try:
        return egmem.open()
    except egmem.NoDriver:
        return egmem.simulated("gh200")


def communicator():
    """Returns mpi4py's communicator under mpirun, if it is installed; initialises torch.distributed under torchrun."""
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        try:
            from mpi4py import MPI

            return MPI.COMM_WORLD
        except ImportError:
            return None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    return None


driver = open_driver()
comm = communicator()
own = egmem.Buffer(2 << 20, shareable=True, driver=driver)
own.write(b"\0" * 1024)
memories = egmem.group.gather(own, comm=comm, driver=driver)
rank = next(index for index, memory in enumerate(memories) if memory is own)
own.write(b"rank %2d" % rank)
for memory in memories:  # each rank leaves its mark in all memories
    memory.write(bytes([rank + 1]), 512 + rank)

# No rank reads before all have written, and none ends before all have read: a gather without memory is a barrier.
egmem.group.gather(None, comm=comm, driver=driver)
for index, memory in enumerate(memories):
    assert memory.read(0, 7) == b"rank %2d" % index, memory.read(0, 7)
assert list(own.read(512, len(memories))) == list(range(1, len(memories) + 1))
egmem.group.gather(None, comm=comm, driver=driver)
print(f"rank {rank} of {len(memories)} mapped the others' memory", flush=True)
