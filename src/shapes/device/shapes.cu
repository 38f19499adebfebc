// Kernels and functions for programs without CUDA C++: src/shapes/device/mod.rs describes each. `ci/ptx`
// compiles them to shapes.ptx with clang alone; nvcc takes them too.

#include "egmem_append.cuh"
#include "egmem_ring.cuh"

#ifndef __CUDA_RUNTIME_H__ // clang without CUDA's headers: builtins instead.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define THREAD __nvvm_read_ptx_sreg_tid_x()
#define THREADS __nvvm_read_ptx_sreg_ntid_x()
#define BLOCK __nvvm_read_ptx_sreg_ctaid_x()
#define BLOCKS __nvvm_read_ptx_sreg_nctaid_x()
#else
#define THREAD threadIdx.x
#define THREADS blockDim.x
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
#endif

typedef egmem_u64 u64;

// Copies bytes with the warp's lanes, in the largest units that size and addresses allow.
static __device__ inline void copy_by_warp(unsigned char *to, const unsigned char *from, u64 bytes) {
    unsigned lane = egmem_lane();
    if ((((u64)to | (u64)from | bytes) & 7) == 0) {
        for (u64 i = lane; i < bytes / 8; i += 32) {
            ((u64 *)to)[i] = ((const volatile u64 *)from)[i];
        }
    } else {
        for (u64 i = lane; i < bytes; i += 32) {
            to[i] = ((const volatile unsigned char *)from)[i];
        }
    }
}

// Moves records between a side and memory, a batch at a time. The first lane has the side.
static __device__ inline void move_records(void *ring, unsigned char *memory, u64 count, u64 ns, u64 *done,
                                           bool produces) {
    egmem_ring_side side;
    if (BLOCK != 0 || THREAD >= 32 || !egmem_ring_open(&side, ring, produces)) {
        return;
    }
    bool first = egmem_lane() == 0;
    u64 moved = 0;
    while (moved < count) {
        u64 most = 0;
        if (first && egmem_ring_wait(&side, 1, ns)) {
            most = egmem_ring_known(&side);
            most = most < count - moved ? most : count - moved;
            most = most < 256 ? most : 256;
        }
        u64 batch = egmem_warp_first(most);
        if (batch == 0) {
            break;
        }
        // Behind a barrier, the first lane's acquire counts for the others too.
        egmem_warp_barrier();
        egmem_ring_fence(&side, batch);
        unsigned char *here = (unsigned char *)egmem_ring_at(&side);
        unsigned char *there = memory + moved * side.record_bytes;
        copy_by_warp(produces ? here : there, produces ? there : here, batch * side.record_bytes);
        egmem_ring_fence(&side, batch);
        egmem_warp_barrier();
        if (first) {
            egmem_ring_advance(&side, batch);
        } else {
            side.next += batch;
        }
        moved += batch;
    }
    if (first) {
        *done = moved;
    }
}

extern "C" __global__ void egmem_ring_push_records(void *ring, unsigned char *from, u64 count, u64 ns, u64 *done) {
    move_records(ring, from, count, ns, done, true);
}

extern "C" __global__ void egmem_ring_pop_records(void *ring, unsigned char *to, u64 count, u64 ns, u64 *done) {
    move_records(ring, to, count, ns, done, false);
}

// The functions for PTX of other sources, to be linked. A side takes 72 bytes at a multiple of 8.

extern "C" __device__ unsigned egmem_ring_fn_open(egmem_ring_side *side, void *ring, unsigned produces) {
    return egmem_ring_open(side, ring, produces != 0);
}
extern "C" __device__ u64 egmem_ring_fn_look(egmem_ring_side *side) { return egmem_ring_look(side); }
extern "C" __device__ unsigned egmem_ring_fn_wait(egmem_ring_side *side, u64 count, u64 ns) {
    return egmem_ring_wait(side, count, ns);
}
extern "C" __device__ void *egmem_ring_fn_at(const egmem_ring_side *side) { return egmem_ring_at(side); }
extern "C" __device__ void egmem_ring_fn_fence(const egmem_ring_side *side, u64 count) {
    egmem_ring_fence(side, count);
}
extern "C" __device__ void egmem_ring_fn_advance(egmem_ring_side *side, u64 count) { egmem_ring_advance(side, count); }

static_assert(sizeof(egmem_ring_side) == 72, "src/shapes/device/mod.rs says so");

extern "C" __device__ unsigned egmem_append_fn_open(egmem_append *to, void *appender) {
    return egmem_append_open(to, appender);
}
extern "C" __device__ u64 egmem_append_fn_reserve(const egmem_append *to, u64 count) {
    return egmem_append_reserve(to, count);
}
extern "C" __device__ void *egmem_append_fn_at(egmem_append *to, u64 index, u64 ns) {
    return egmem_append_at(to, index, ns);
}

static_assert(sizeof(egmem_append) == 48, "src/shapes/device/mod.rs says so");

// For measurements: records of 16 bytes, (number, complement).

struct __attribute__((aligned(16))) Numbered {
    u64 number, other;
};

// One block: pushes `count` records, at most `batch` for each commit; `batch` is at most the capacity.
extern "C" __global__ void egmem_ring_push_numbered(void *ring, u64 count, u64 batch, u64 ns, u64 *done) {
    // Volatile: clang 14 moves reads of a static variable over __syncthreads.
    __attribute__((shared)) static volatile u64 base;
    __attribute__((shared)) static volatile u64 room;
    egmem_ring_side side;
    if (BLOCK != 0 || !egmem_ring_open_producer(&side, ring) || side.record_bytes != sizeof(Numbered)) {
        return;
    }
    u64 pushed = 0;
    while (pushed < count) {
        u64 wanted = batch < count - pushed ? batch : count - pushed;
        if (THREAD == 0) {
            base = side.next;
            room = egmem_ring_wait(&side, wanted, ns);
        }
        __syncthreads();
        if (!room) {
            break;
        }
        side.next = base; // the other threads'
        egmem_ring_fence(&side, wanted);
        for (u64 i = THREAD; i < wanted; i += THREADS) {
            Numbered *to = (Numbered *)(side.records + (((base + i) * side.record_bytes) & side.mask));
            Numbered record = {pushed + i, ~(pushed + i)};
            *to = record;
        }
        egmem_ring_fence(&side, wanted);
        __syncthreads();
        if (THREAD == 0) {
            egmem_ring_advance(&side, wanted);
        }
        pushed += wanted;
    }
    if (THREAD == 0) {
        *done = pushed;
    }
}

static __device__ inline u64 cycles() {
    u64 now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now) : : "memory");
    return now;
}

// One thread: pushes a record and waits until the consumer has released it, `count` times. `times` gets the cycles of
// each; `clock` the nanoseconds and the cycles of all.
extern "C" __global__ void egmem_ring_round_trips(void *ring, u64 count, u64 ns, u64 *times, u64 *clock) {
    egmem_ring_side side;
    if (BLOCK != 0 || THREAD != 0 || !egmem_ring_open_producer(&side, ring)) {
        return;
    }
    u64 begin = egmem_nanoseconds(), first = cycles();
    for (u64 i = 0; i < count; i++) {
        u64 start = cycles();
        Numbered record = {i, ~i};
        if (!egmem_ring_push(&side, record, ns)) {
            return;
        }
        while (!egmem_ring_is_drained(&side)) {
            if (egmem_nanoseconds() - begin > ns) {
                return;
            }
        }
        times[i] = cycles() - start;
    }
    clock[0] = egmem_nanoseconds() - begin;
    clock[1] = cycles() - first;
}

// Whether an item makes a record: about `share` of 256, the same ones each time.
static __device__ inline bool makes_record(u64 item, u64 share) {
    u64 z = item * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    return (z >> 56) < share;
}

// Appends a record for each item below `count` that makes one and is not done yet, and marks it as done. Without `done`,
// all are to be done.
extern "C" __global__ void egmem_append_items(void *appender, u64 count, u64 share, unsigned char *done, u64 ns) {
    egmem_append to;
    if (!egmem_append_open(&to, appender)) {
        return;
    }
    u64 threads = (u64)BLOCKS * THREADS;
    // Whole warps: a warp's lanes have neighbouring items.
    for (u64 i = (u64)BLOCK * THREADS + THREAD; i - egmem_lane() < count; i += threads) {
        bool has = i < count && makes_record(i, share) && !(done && done[i]);
        Numbered record = {i, ~i};
        if (egmem_append_warp(&to, has, record, ns) && done) {
            done[i] = 1;
        }
    }
}
