"""The memory of all ranks of a job. Ranks that are processes: examples/python/test_examples.py."""

import sys
import threading
import types

import pytest

import egmem
import egmem.group

SECRET = b"0123456789abcdef"


class Ranks:
    """Ranks that are threads, with the methods of a communicator of mpi4py and of torch.distributed."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.table = [None] * size
        self.own = threading.local()

    def Get_rank(self):
        return self.own.rank

    def Get_size(self):
        return self.size

    def allgather(self, own):
        self.table[self.own.rank] = own
        self.barrier.wait(60)
        table = list(self.table)
        self.barrier.wait(60)
        return table

    def run(self, work):
        """Runs `work(rank)` in a thread for each rank; returns the results, or the exceptions."""
        results = [None] * self.size

        def one(rank):
            self.own.rank = rank
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def gather_and_verify(driver, ranks, **options):
    def work(rank):
        own = egmem.Buffer(1 << 20, shareable=True, driver=driver)
        own.write(bytes([rank]))
        memories = egmem.group.gather(own if rank != 1 else None, driver=driver, **options)
        assert memories[rank] is (own if rank != 1 else None)
        assert memories[1] is None
        return [memory and memory.read(0, 1) for memory in memories]

    for result in ranks.run(work):
        assert result == [b"\0", None, b"\2", b"\3"], result


def test_over_mpi4py(driver):
    ranks = Ranks(4)
    gather_and_verify(driver, ranks, comm=ranks)
    gather_and_verify(driver, ranks, comm=ranks, secret=SECRET)


def test_over_torch_distributed(driver, monkeypatch):
    ranks = Ranks(4)

    def all_gather_object(every, own, group=None):
        every[:] = ranks.allgather(own)

    distributed = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda group: ranks.Get_rank(),
        get_world_size=lambda group: ranks.size,
        all_gather_object=all_gather_object,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(distributed=distributed))
    gather_and_verify(driver, ranks)


def test_failures(driver, monkeypatch, tmp_path):
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_NUM_TASKS", "EGMEM_RANK", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(egmem.InvalidArgument, match="start it with torchrun, mpirun or srun"):
        egmem.group.gather(None, driver=driver)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(egmem.InvalidArgument, match="torchrun: RANK is set and WORLD_SIZE is not"):
        egmem.group.gather(None, driver=driver)
    monkeypatch.delenv("RANK")
    for name, value in {"RANK": "1", "SIZE": "2", "ADDRESS": f"unix:{tmp_path}/group"}.items():
        monkeypatch.setenv(f"EGMEM_{name}", value)
    with pytest.raises(egmem.TimedOut, match="rank 0 of 2 is missing"):
        egmem.group.gather(None, driver=driver, timeout=0.2)
    plain = egmem.Buffer(4096, driver=driver)
    with pytest.raises(TypeError, match="shareable=True"):
        egmem.group.gather(plain, driver=driver)
    with pytest.raises(egmem.InvalidArgument, match="group secret"):
        egmem.group.gather(None, secret=b"short", driver=driver)
    ranks = Ranks(2)
    for error in ranks.run(lambda rank: egmem.group.gather(None, comm=ranks, secret=SECRET + bytes([rank]), driver=driver)):
        assert isinstance(error, egmem.Refused)

    class Broken(Ranks):
        def allgather(self, own):
            raise ZeroDivisionError("in the transport")

    ranks = Broken(2)
    for error in ranks.run(lambda rank: egmem.group.gather(None, comm=ranks, driver=driver)):
        assert isinstance(error, ZeroDivisionError)
