// MSCCL++'s fifo from a kernel to the CPU, measured as ring.rs measures the ring: a program of its own, for a GPU
// machine with nvcc. The device functions are those of MSCCL++'s header; the CPU's side is written here, as its
// Fifo::poll and Fifo::pop do it, so that no more of MSCCL++ needs to be built.
//
//     git clone https://github.com/microsoft/mscclpp        # the figures of docs/performance.md: commit 1f5f065d
//     nvcc -O3 -std=c++17 -arch=native -I mscclpp/include -o mscclpp-fifo benches/shapes/mscclpp.cu
//     ./mscclpp-fifo [ROUNDS]
//
// A kernel waits for ever for a CPU that takes nothing: if this program hangs, kill it.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda_runtime.h>
#include <mscclpp/fifo_device.hpp>

using mscclpp::FifoDeviceHandle;
using mscclpp::ProxyTrigger;

static const int CAPACITY = 4096;
static const int SHIFT = 12;
static const uint64_t TRIPS = 20000;
static const uint64_t COMMIT_BIT = 1ull << 63;

static void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

// Each thread pushes its share of `count` triggers.
__global__ void push_all(FifoDeviceHandle fifo, uint64_t count) {
    for (uint64_t n = threadIdx.x; n < count; n += blockDim.x) {
        ProxyTrigger trigger;
        trigger.fst = n;
        trigger.snd = ~n;
        fifo.push(trigger, -1);
    }
}

static __device__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
    return now;
}

// One thread pushes a trigger and waits until it is popped. `times` gets the cycles of each; `clock` the nanoseconds
// and the cycles of all.
__global__ void round_trips(FifoDeviceHandle fifo, uint64_t count, uint64_t *times, uint64_t *clock) {
    uint64_t begin = nanoseconds(), first = clock64();
    for (uint64_t n = 0; n < count; n++) {
        uint64_t start = clock64();
        ProxyTrigger trigger;
        trigger.fst = n;
        trigger.snd = ~n;
        fifo.sync(fifo.push(trigger, -1), -1);
        times[n] = clock64() - start;
    }
    clock[0] = nanoseconds() - begin;
    clock[1] = clock64() - first;
}

// A fifo, and the CPU's side of it.
struct Fifo {
    FifoDeviceHandle handle = {};

    Fifo() {
        CHECK(cudaHostAlloc((void **)&handle.triggers, CAPACITY * sizeof(ProxyTrigger), cudaHostAllocMapped));
        CHECK(cudaHostAlloc((void **)&handle.tail, sizeof(uint64_t), cudaHostAllocMapped));
        CHECK(cudaMalloc((void **)&handle.head, sizeof(uint64_t)));
        CHECK(cudaMalloc((void **)&handle.tailCache, sizeof(uint64_t)));
        memset((void *)handle.triggers, 0, CAPACITY * sizeof(ProxyTrigger));
        *handle.tail = 0;
        CHECK(cudaMemset(handle.head, 0, sizeof(uint64_t)));
        CHECK(cudaMemset(handle.tailCache, 0, sizeof(uint64_t)));
        CHECK(cudaDeviceSynchronize());
        handle.size = CAPACITY;
        handle.sizeMask = CAPACITY - 1;
        handle.sizeShift = SHIFT;
    }

    ~Fifo() {
        cudaFreeHost(handle.triggers);
        cudaFreeHost(handle.tail);
        cudaFree(handle.head);
        cudaFree(handle.tailCache);
    }

    // Takes `count` triggers and checks that each came once; returns the seconds from the first to the last.
    double take(uint64_t count) {
        using Clock = std::chrono::steady_clock;
        Clock::time_point start;
        uint64_t sum = 0;
        for (uint64_t at = 0; at < count; at++) {
            ProxyTrigger *slot = &handle.triggers[at & handle.sizeMask];
            uint64_t lap = ((at >> handle.sizeShift) & 1) ^ 1, snd;
            while ((snd = __atomic_load_n(&slot->snd, __ATOMIC_ACQUIRE)) >> 63 != lap) {
            }
            uint64_t fst = __atomic_load_n(&slot->fst, __ATOMIC_RELAXED);
            if (at == 0) {
                start = Clock::now();
            }
            if ((snd & ~COMMIT_BIT) != (~fst & ~COMMIT_BIT)) {
                fprintf(stderr, "trigger %llu is torn\n", (unsigned long long)at);
                exit(1);
            }
            sum += fst;
            __atomic_store_n(handle.tail, at + 1, __ATOMIC_RELEASE);
        }
        double seconds = std::chrono::duration<double>(Clock::now() - start).count();
        if (sum != count * (count - 1) / 2) {
            fprintf(stderr, "triggers are missing\n");
            exit(1);
        }
        return seconds;
    }
};

static double at(std::vector<double> values, double part) {
    std::sort(values.begin(), values.end());
    return values[(size_t)((values.size() - 1) * part)];
}

static double millions_a_second(int threads) {
    Fifo fifo;
    uint64_t count = std::min<uint64_t>((uint64_t)threads * 200000, 20000000);
    push_all<<<1, threads>>>(fifo.handle, count);
    CHECK(cudaGetLastError());
    double seconds = fifo.take(count);
    CHECK(cudaDeviceSynchronize());
    return count / seconds / 1e6;
}

static void there_and_back(int round) {
    Fifo fifo;
    // In the GPU's memory: a store to the host would make the next push wait for it.
    uint64_t *times;
    CHECK(cudaMalloc((void **)&times, (TRIPS + 2) * sizeof(uint64_t)));
    round_trips<<<1, 1>>>(fifo.handle, TRIPS, times, times + TRIPS);
    CHECK(cudaGetLastError());
    fifo.take(TRIPS);
    std::vector<uint64_t> cycles(TRIPS + 2);
    CHECK(cudaMemcpy(cycles.data(), times, cycles.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(times));
    double each = (double)cycles[TRIPS] / cycles[TRIPS + 1] / 1e3;
    std::vector<double> all;
    for (uint64_t n = 0; n < TRIPS; n++) {
        all.push_back(cycles[n] * each);
    }
    printf("there and back, round %d: p50 %.3f us, p99 %.3f us\n", round, at(all, 0.5), at(all, 0.99));
}

int main(int count, char **arguments) {
    int rounds = count > 1 ? std::max(1, atoi(arguments[1])) : 5;
    printf("MSCCL++'s fifo of %d triggers of 16 bytes\n%-32s %16s\n", CAPACITY, "way", "M records per s");
    for (int threads : {1, 32, 256, 1024}) {
        std::vector<double> rates;
        for (int round = 0; round < rounds; round++) {
            rates.push_back(millions_a_second(threads));
        }
        printf("GPU to CPU, %4d threads          %16.2f\n", threads, at(rates, 0.5));
    }
    for (int round = 0; round < rounds; round++) {
        there_and_back(round);
    }
    return 0;
}
