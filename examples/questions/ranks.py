"""Put and get without MPI or NVSHMEM: each rank has a GPU, maps the memory of all ranks of the node, and loads and stores.

    torchrun --nproc-per-node=4 ranks.py
    mpirun -n 4 python ranks.py
"""

import os

import egmem
import egmem.group

try:
    driver = egmem.open()
except egmem.NoDriver:
    driver = egmem.simulated("gh200x4")


def local_rank():
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "EGMEM_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit("start this program by torchrun, mpirun or srun")


def barrier():  # a gather without memory; also torch.distributed.barrier(), comm.Barrier()
    egmem.group.gather(None, driver=driver)


SLOT = 1 << 20
gpu = local_rank() % driver.gpu_count
own = egmem.Buffer("16MiB", near_gpu=gpu, shareable=True, driver=driver)
memories = egmem.group.gather(own, driver=driver)  # once: an import, a mapping and a grant for each rank's memory
ranks = len(memories)
rank = next(index for index, memory in enumerate(memories) if memory is own)
stream = egmem.Stream(gpu, driver=driver)
mine = egmem.Buffer(SLOT, near_gpu=gpu, driver=driver)
mine.fill(rank + 1)

# Put: GPU `gpu` writes into the right neighbour's memory. Nobody there takes part.
right = memories[(rank + 1) % ranks]
mine.copy_to(right[:SLOT], stream)
stream.synchronize()  # a stream orders this process's work; the barrier orders the ranks
barrier()
left = (rank - 1) % ranks
assert own.read(SLOT - 1, 1) == bytes([left + 1])

# Get: this rank's GPU reads from all others, what their left neighbours have put there.
for index, memory in enumerate(memories):
    memory[:SLOT].copy_to(mine, stream)
    stream.synchronize()
    assert mine.read(SLOT - 1, 1) == bytes([(index - 1) % ranks + 1])
barrier()  # no rank ends, or writes again, before all have read
print(f"rank {rank} of {ranks}: put and got", flush=True)
