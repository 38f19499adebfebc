"""A FIFO from one process to another: a bounded queue in memory that both have, which tells when the other has ended."""

import multiprocessing
import struct

import egmem

try:
    egmem.set_default_driver(egmem.open())
except egmem.NoDriver:
    egmem.set_default_driver(egmem.simulated("gh200"))

RECORD = struct.Struct("<QQ")  # a number and its complement
COUNT, BATCH = 100_000, 250


def produce(producer):
    for first in range(0, COUNT, BATCH):
        records = b"".join(RECORD.pack(n, n ^ (2**64 - 1)) for n in range(first, first + BATCH))
        assert producer.send(records)  # the consumer sees all of a batch or none


if __name__ == "__main__":
    if egmem.default_driver().is_simulated:
        print("SIMULATED: there is no GPU here")
    producer, consumer = egmem.ring(RECORD.size, records=4096)
    context = multiprocessing.get_context("spawn")  # a forked child cannot use its parent's driver
    process = context.Process(target=produce, args=(producer,))
    process.start()  # the producer's side goes to the process that unpickles it
    received = 0
    while records := consumer.receive(1000):  # b"" once the producer has ended and has left none
        for number, complement in RECORD.iter_unpack(records):
            assert number == received and complement == number ^ (2**64 - 1)
            received += 1
    process.join()
    assert (received, process.exitcode, consumer.alone) == (COUNT, 0, True)
    print(f"{received} records came from another process, in order, through room for {consumer.records}")
