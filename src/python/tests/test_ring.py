"""Rings: between threads, and between processes that end."""

import copy
import pickle
import subprocess
import sys
import textwrap
import threading

import pytest

import egmem


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    monkeypatch.setenv("EGMEM_SIM", "gh200")


def test_records_come_in_order_between_threads():
    producer, consumer = egmem.ring(8, records=100)
    assert (producer.records, consumer.record_bytes, producer.alone) == (100, 8, False)
    assert "producer, 100 records of 8 bytes" in repr(producer)

    def produce():
        for number in range(0, 1000, 10):
            batch = b"".join(n.to_bytes(8, "little") for n in range(number, number + 10))
            assert producer.send(bytearray(batch), timeout=60)
        producer.close()

    thread = threading.Thread(target=produce)
    thread.start()
    seen = []
    while records := consumer.receive(1000):  # all that are there: whole batches
        assert len(records) % 80 == 0 and len(records) <= 800
        seen += [int.from_bytes(records[at : at + 8], "little") for at in range(0, len(records), 8)]
    thread.join()
    assert seen == list(range(1000)) and consumer.alone


def test_the_module_copy_takes_no_side_away():
    producer, consumer = egmem.ring(8)
    for side in (producer, consumer, egmem.Event(interprocess=True)):
        for copier in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="not copied"):
                copier(side)
    assert producer.send(b"8 bytes!") and consumer.receive() == b"8 bytes!"


def test_a_full_ring_and_an_empty_one_wait_until_the_timeout():
    producer, consumer = egmem.ring("4KiB", records=2)
    assert producer.send(bytes(8192)) and not producer.send(bytes(4096), timeout=0)
    assert consumer.receive(7) == bytes(8192)
    assert consumer.receive(timeout=0.01) == b""
    assert producer.send(b"") and consumer.receive(timeout=0) == b""
    consumer.close()
    assert producer.alone
    with pytest.raises(egmem.Closed, match="consumer's side"):
        consumer.receive()


def test_what_a_ring_cannot_do_is_refused():
    producer, consumer = egmem.ring(16, records=4)
    with pytest.raises(egmem.InvalidArgument, match="multiple of record_bytes"):
        producer.send(bytes(15))
    with pytest.raises(egmem.InvalidArgument, match="5 records"):
        producer.send(bytes(80))
    with pytest.raises(egmem.InvalidArgument, match="timeout"):
        producer.send(bytes(16), timeout=-1)
    with pytest.raises(egmem.InvalidArgument, match="most"):
        consumer.receive(0)
    with pytest.raises(TypeError):
        producer.send("text")
    with pytest.raises(egmem.InvalidArgument, match="the consumer's side of the ring receives; valid: the producer's"):
        consumer.send(bytes(16))
    with pytest.raises(egmem.InvalidArgument, match="the producer's side of the ring sends; valid: the consumer's"):
        producer.receive()
    for arguments in ((0,), (16, 0), ("4GiB",)):
        with pytest.raises(egmem.InvalidArgument):
            egmem.ring(*arguments)


CONSUMER = """
    import pickle, sys, egmem
    consumer = pickle.loads(bytes.fromhex(sys.stdin.readline()))
    assert consumer.record_bytes == 8
    print(consumer.receive().hex(), flush=True)
    sys.stdin.readline()
"""


def test_a_side_goes_to_one_process_after_the_other():
    producer, consumer = egmem.ring(8)
    for turn in range(3):
        assert producer.send(bytes([turn] * 8))
        code = [sys.executable, "-c", textwrap.dedent(CONSUMER)]
        with subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            child.stdin.write(pickle.dumps(consumer).hex() + "\n")
            child.stdin.flush()
            assert bytes.fromhex(child.stdout.readline()) == bytes([turn] * 8)
            assert not producer.alone
            with pytest.raises(egmem.Closed):
                consumer.receive(timeout=0)
            with pytest.raises(egmem.Refused, match="third process"):
                pickle.loads(pickle.dumps(consumer))
            child.kill()
        assert producer.alone


def test_the_producers_side_goes_too():
    producer, consumer = egmem.ring(1)
    code = "import pickle, sys; side = pickle.loads(bytes.fromhex(sys.argv[1])); assert side.send(b'abc')"
    subprocess.run([sys.executable, "-c", code, pickle.dumps(producer).hex()], check=True, timeout=60)
    assert consumer.receive(2) == b"ab" and consumer.receive(2) == b"c" and consumer.receive(2) == b""
    with pytest.raises(egmem.Refused, match="the other one"):
        pickle.loads(pickle.dumps(consumer))
