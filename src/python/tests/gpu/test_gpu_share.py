"""Memory for workers on a GPU: two processes write it, and a killed one leaves nothing. It does not need PyTorch.

With EGMEM_SIM=gh200 it runs on the simulator.
"""

import multiprocessing
import os
import signal
import tempfile
import unittest

os.environ["EGMEM_PS"] = "1"

from support import REQUIRED  # noqa: E402

import egmem  # noqa: E402

SIZE = 96 << 20  # several physical memories
HALF = SIZE // 2
KEPT = []


def fill(part, byte, gpu):
    """In a worker: half of the bytes by the CPU, half by a copy of a GPU."""
    half = part.nbytes // 2
    part.fill(byte, 0, half)
    source = egmem.Buffer(part.nbytes - half, near_gpu=gpu)
    source.fill(byte + 1)
    stream = egmem.Stream(gpu)
    source.copy_to(part[half:], stream)
    stream.synchronize()
    return type(part).__name__, part.access(), part.access(gpu)


def hold(memory, ready):
    """In a worker: keeps memory until the worker is killed."""
    KEPT.append(memory)
    ready.send_bytes(memory.read(0, 1))
    signal.pause()


def fds():
    return len(os.listdir("/proc/self/fd"))


def listed(address):
    """What this process's ledger has of the memory at an address. EGMEM_PS=1 has it offered to `egmem.ps_dict`."""
    own = [found for found in egmem.ps_dict()["processes"] if found["process"]["pid"] == os.getpid()]
    memories = [memory for found in own for memory in found["allocations"]]
    return [memory for memory in memories if any(part["start"] <= address < part["start"] + part["bytes"] for part in memory["mapped"])]


def opened(case):
    try:
        return egmem.default_driver()
    except egmem.Error as error:
        if REQUIRED:
            raise
        case.skipTest(str(error))


class Share(unittest.TestCase):
    def setUp(self):
        self.driver = opened(self)
        self.gpu = self.driver.gpu_count - 1
        self.spawn = multiprocessing.get_context("spawn")

    def by_gpu(self, memory):
        """The bytes of memory, through a GPU's own memory."""
        stream = egmem.Stream(0)
        gpu = egmem.Buffer(memory.nbytes, device=0)
        back = egmem.Buffer(memory.nbytes)
        memory.copy_to(gpu, stream)
        gpu.copy_to(back, stream)
        stream.synchronize()
        return back.read()

    def test_two_workers_fill_one_buffer(self):
        with egmem.Buffer(SIZE, shareable=True) as buffer:
            with self.spawn.Pool(2) as pool:
                parts = [(buffer[:HALF], 1, 0), (buffer[HALF:], 3, self.gpu)]
                for answer in pool.starmap(fill, parts, 1):
                    self.assertEqual(answer, ("SharedBuffer", "rw", "rw"))
            del parts  # they keep the buffer
            wanted = b"".join(bytes([byte]) * (HALF // 2) for byte in (1, 2, 3, 4))
            self.assertEqual(buffer.read(), wanted)
            self.assertEqual(self.by_gpu(buffer), wanted)

    def test_blocks_of_a_heap(self):
        heap = egmem.Heap(shareable=True)
        blocks = [heap.allocate(1 << 20) for _ in range(4)]
        with self.spawn.Pool(2) as pool:
            pool.starmap(fill, [(block, 10 * number, 0) for number, block in enumerate(blocks)], 1)
        for number, block in enumerate(blocks):
            wanted = bytes([10 * number]) * (1 << 19) + bytes([10 * number + 1]) * (1 << 19)
            self.assertEqual(block.read(), wanted)
            self.assertEqual(self.by_gpu(block), wanted)

    def test_a_killed_worker_leaves_nothing(self):
        buffer = egmem.Buffer(SIZE, shareable=True)
        buffer.fill(5)
        before = None
        for _ in range(3):
            ours, theirs = self.spawn.Pipe()
            worker = self.spawn.Process(target=hold, args=(buffer, theirs))
            worker.start()
            self.assertEqual(ours.recv_bytes(), b"\5")
            worker.kill()
            worker.join()
            self.assertEqual(worker.exitcode, -signal.SIGKILL)
            worker.close()
            ours.close()
            theirs.close()
            before = before or fds()
        self.assertLessEqual(fds(), before)
        self.assertEqual(self.by_gpu(buffer), b"\5" * SIZE)
        address = buffer.address
        self.assertEqual(len(listed(address)), 1)
        buffer.close()
        self.assertEqual(listed(address), [])
        with egmem.Buffer(SIZE, shareable=True) as other:
            self.assertEqual(other.read(0, 1), b"\0")
            self.assertEqual(fill(other, 7, 0)[2], "rw")
            self.assertEqual(self.by_gpu(other[-1:]), b"\x08")

    def test_share_and_receive(self):
        buffer = egmem.Buffer(SIZE, shareable=True)
        with tempfile.TemporaryDirectory() as folder, buffer.share(f"{folder}/socket"):
            received = egmem.receive(f"{folder}/socket")
            read_only = egmem.receive(f"{folder}/socket", mode="r")
        self.assertEqual(fill(received, 1, self.gpu), ("SharedBuffer", "rw", "rw"))
        self.assertEqual((read_only.access(), read_only.access(0)), ("r", "r"))
        buffer.close()
        wanted = b"\1" * HALF + b"\2" * HALF
        self.assertEqual(read_only.read(), wanted)
        self.assertEqual(self.by_gpu(read_only), wanted)


if __name__ == "__main__":
    unittest.main(verbosity=2)
