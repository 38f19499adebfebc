// A FIFO from a GPU to the CPU, both of which run: records and two counters in memory that both reach.
//     nvcc -std=c++17 fifo.cu $(pkg-config --cflags --libs egmem) -o fifo
//
// Without nvcc a thread produces: c++ -std=c++17 -x c++ fifo.cu -x none -pthread …
#include <atomic>
#include <cstdio>
#include <egmem.hpp>
#include <thread>
#include <unistd.h>
#ifdef __CUDACC__
#include <cuda/atomic>
namespace order = cuda;
using counter = cuda::atomic<std::uint64_t, cuda::thread_scope_system>; // the CPU and all GPUs
#define BOTH __host__ __device__
#else
namespace order = std;
using counter = std::atomic<std::uint64_t>;
#define BOTH
#endif
constexpr std::uint64_t room = 4096, count = 200000;
struct fifo {
    alignas(128) counter head; // records written: the producer stores it, the consumer loads it
    alignas(128) counter tail; // records read: the other way round
    alignas(128) std::uint64_t records[room];
};
BOTH void push(fifo *to, std::uint64_t record)
{
    auto head = to->head.load(order::memory_order_relaxed);
    while (head - to->tail.load(order::memory_order_acquire) == room) {} // no slot is free
    to->records[head % room] = record;
    to->head.store(head + 1, order::memory_order_release); // a side that sees it sees the record
}

BOTH std::uint64_t pop(fifo *from)
{
    auto tail = from->tail.load(order::memory_order_relaxed);
    while (from->head.load(order::memory_order_acquire) == tail) {} // no record is there
    auto record = from->records[tail % room];
    from->tail.store(tail + 1, order::memory_order_release);
    return record;
}
#ifdef __CUDACC__
__global__ void produce(fifo *to) { for (std::uint64_t n = 0; n < count; n++) push(to, n * n); }
void launch(fifo *to) { produce<<<1, 1>>>(to); if (cudaGetLastError() != cudaSuccess) throw std::runtime_error("the kernel failed"); }
void finish() { if (cudaDeviceSynchronize() != cudaSuccess) throw std::runtime_error("the kernel failed"); } // before the memory is freed
#else
std::thread producer;
void launch(fifo *to) { producer = std::thread([=] { for (std::uint64_t n = 0; n < count; n++) push(to, n * n); }); }
void finish() { producer.join(); }
#endif
int main()
{
    auto memory = egm::buffer::near(egm::driver::open_or_simulated("gh200"), 0, sizeof(fifo)); // new memory is zero
    alarm(60); // ends a program that waits for a producer that has failed
    launch(memory.data<fifo>());
    int wrong = 0;
    for (std::uint64_t n = 0; n < count; n++) wrong += pop(memory.data<fifo>()) != n * n;
    finish();
    return std::printf("%d records came while the producer ran, %d wrong\n", (int)count, wrong), wrong != 0;
}
