// Three processes work on one memory, in order: each waits for its turn at a flag in the memory itself.
//
//     c++ -std=c++17 turns.cpp $(pkg-config --cflags --libs egmem) -o turns
#include <atomic>
#include <egmem.hpp>
#include <iostream>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

constexpr unsigned ranks = 3, rounds = 1000;
struct shared {
    std::atomic<unsigned> turn; // lock-free, so it works between processes
    unsigned long long value;   // belongs to the rank whose turn it is
};
static_assert(std::atomic<unsigned>::is_always_lock_free);

void work(shared *memory, unsigned rank)
{
    alarm(60); // ends a process that waits for one that has died
    for (unsigned round = 0; round < rounds; round++) {
        while (memory->turn.load(std::memory_order_acquire) != round * ranks + rank) sched_yield();
        // A rank that has a kernel do this waits for its stream before it passes the turn on.
        memory->value = memory->value * 31 + rank;
        memory->turn.fetch_add(1, std::memory_order_release);
    }
}

int main()
{
    int sockets[ranks][2];
    pid_t children[ranks] = {};
    for (unsigned rank = 1; rank < ranks; rank++) { // before a driver is opened: a child cannot use its parent's
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets[rank]) != 0) return 1;
        if ((children[rank] = fork()) == 0) {
            auto driver = egm::driver::open_or_simulated("gh200");
            auto memory = egm::channel::of_fd(sockets[rank][1]).receive(driver); // imports it, maps it
            work(memory.data<shared>(), rank);
            return 0;
        }
    }
    auto driver = egm::driver::open_or_simulated("gh200");
    auto options = egm::options<egm_buffer_options>();
    options.location = egm::host_node(egm::topology(driver).gpu(0).host_node);
    options.bytes = 2 << 20;
    options.flags = EGM_SHAREABLE;
    egm::buffer memory(driver, options); // new memory is zero, so turn is 0
    for (unsigned rank = 1; rank < ranks; rank++)
        egm::channel::of_fd(sockets[rank][0]).send(memory);
    work(memory.data<shared>(), 0);

    int status = 0, failed = 0;
    for (unsigned rank = 1; rank < ranks; rank++)
        failed |= waitpid(children[rank], &status, 0) < 0 || status != 0;
    unsigned long long expected = 0, value = memory.data<shared>()->value;
    for (unsigned turn = 0; turn < ranks * rounds; turn++)
        expected = expected * 31 + turn % ranks;
    std::cout << ranks * rounds << " turns, " << (value == expected ? "in order\n" : "out of order\n");
    return failed || value != expected;
}
