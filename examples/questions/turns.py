"""Three processes pass data on through one memory, each by its own stream. Events order the work: no CPU waits for a GPU."""

import multiprocessing

import egmem

try:
    egmem.set_default_driver(egmem.open())
except egmem.NoDriver:
    egmem.set_default_driver(egmem.simulated("gh200"))

RANKS, TURNS, SLOT = 3, 99, 1 << 20


def work(rank, memory, left, right, end):
    stream, ours = egmem.Stream(), egmem.Event(interprocess=True)
    right.send(ours)
    theirs = left.recv()
    for turn in range(rank, TURNS, RANKS):
        if turn > 0:
            left.recv()  # the left rank has recorded; its work may still be waiting
            stream.wait(theirs)  # for the last record before this call
        memory[turn * SLOT : (turn + 1) * SLOT].copy_to(memory[(turn + 1) * SLOT : (turn + 2) * SLOT], stream)
        ours.record(stream)
        right.send("recorded")
    stream.synchronize()
    end.wait()  # an event ends with the process that made it


if __name__ == "__main__":
    if egmem.default_driver().is_simulated:
        print("SIMULATED: there is no GPU here")
    memory = egmem.Buffer((TURNS + 1) * SLOT, near_gpu=0, shareable=True)
    memory.fill(7, 0, SLOT)
    context = multiprocessing.get_context("spawn")  # a forked child cannot use its parent's driver
    pipes = [context.Pipe() for _ in range(RANKS)]  # from rank to rank
    end, ranks = context.Barrier(RANKS), []
    for rank in range(RANKS):
        ends = (pipes[rank - 1][1], pipes[rank][0], end)
        ranks.append(context.Process(target=work, args=(rank, memory, *ends)))
        ranks[-1].start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    assert memory.read(TURNS * SLOT, SLOT) == bytes([7]) * SLOT
    print(f"{TURNS} turns of {RANKS} processes, in order")
