"""A data loader: four workers fill batches in one shared buffer. No server, and no copy between processes."""

import multiprocessing

import egmem
import numpy

WORKERS, BATCHES, ROWS, COLUMNS = 4, 16, 64, 1024
BYTES = ROWS * COLUMNS * 4  # of a batch


def batch(memory, number):
    return numpy.asarray(memory[number * BYTES : (number + 1) * BYTES]).view("f4").reshape(ROWS, COLUMNS)


def begin(memory):
    global shared
    shared = memory  # the same bytes as the parent's buffer


def fill(number):
    batch(shared, number)[:] = number  # a real loader reads and decodes here
    return number


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")  # or forkserver: a forked child has no GPU
    with egmem.Buffer(BATCHES * BYTES, shareable=True) as buffer, context.Pool(WORKERS, begin, (buffer,)) as pool:
        for number in pool.imap_unordered(fill, range(BATCHES)):
            assert (batch(buffer, number) == number).all()  # a GPU uses buffer.address, or torch.from_dlpack
            print(f"batch {number} is filled")
