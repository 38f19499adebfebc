// The kernels beside an appender, for benches/shapes/appender.rs: `ci/ptx` compiles it to beside.ptx.

#include "../../src/shapes/device/egmem_device.cuh"

#ifndef __CUDA_RUNTIME_H__ // clang without CUDA's headers: builtins instead.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define THREAD __nvvm_read_ptx_sreg_tid_x()
#define THREADS __nvvm_read_ptx_sreg_ntid_x()
#define BLOCK __nvvm_read_ptx_sreg_ctaid_x()
#define BLOCKS __nvvm_read_ptx_sreg_nctaid_x()
extern "C" __attribute__((device)) void *malloc(unsigned long);
extern "C" __attribute__((device)) void free(void *);
#else
#define THREAD threadIdx.x
#define THREADS blockDim.x
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
#endif

typedef egmem_u64 u64;

struct __attribute__((aligned(16))) Numbered {
    u64 number, other;
};

// As in shapes.cu.
static __device__ inline bool makes_record(u64 item, u64 share) {
    u64 z = item * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    return (z >> 56) < share;
}

static __device__ inline u64 add(u64 *at, u64 value) {
    u64 old;
    asm volatile("atom.relaxed.gpu.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(at), "l"(value) : "memory");
    return old;
}

// Adds the number of records to `total`.
extern "C" __global__ void beside_count(u64 count, u64 share, u64 *total) {
    u64 threads = (u64)BLOCKS * THREADS, found = 0;
    for (u64 i = (u64)BLOCK * THREADS + THREAD; i - egmem_lane() < count; i += threads) {
        unsigned lanes = egmem_warp_ballot(i < count && makes_record(i, share));
        found += egmem_count_bits(lanes);
    }
    if (egmem_lane() == 0) {
        add(total, found);
    }
}

// Writes the records side by side; `next` starts as 0.
extern "C" __global__ void beside_write(u64 count, u64 share, Numbered *to, u64 *next) {
    u64 threads = (u64)BLOCKS * THREADS;
    for (u64 i = (u64)BLOCK * THREADS + THREAD; i - egmem_lane() < count; i += threads) {
        bool has = i < count && makes_record(i, share);
        unsigned lanes = egmem_warp_ballot(has);
        u64 first = 0;
        if (egmem_lane() == 0 && lanes) {
            first = add(next, egmem_count_bits(lanes));
        }
        first = egmem_warp_first(first);
        if (has) {
            Numbered record = {i, ~i};
            to[first + egmem_count_bits(lanes & egmem_lanes_before())] = record;
        }
    }
}

// A piece of up to 32 records from the device's heap for each warp's turn, in a list. `list` starts as 0; `missed`
// counts the records for which there was no piece.
struct Piece {
    Piece *next;
    u64 count;
    Numbered records[32];
};

extern "C" __global__ void beside_malloc(u64 count, u64 share, Piece **list, u64 *missed) {
    u64 threads = (u64)BLOCKS * THREADS;
    for (u64 i = (u64)BLOCK * THREADS + THREAD; i - egmem_lane() < count; i += threads) {
        bool has = i < count && makes_record(i, share);
        unsigned lanes = egmem_warp_ballot(has);
        if (lanes == 0) {
            continue;
        }
        u64 piece = 0;
        if (egmem_lane() == 0) {
            piece = (u64)malloc(sizeof(Piece));
        }
        piece = egmem_warp_first(piece);
        if (piece == 0) {
            if (egmem_lane() == 0) {
                add(missed, egmem_count_bits(lanes));
            }
            continue;
        }
        Piece *own = (Piece *)piece;
        if (has) {
            Numbered record = {i, ~i};
            own->records[egmem_count_bits(lanes & egmem_lanes_before())] = record;
        }
        if (egmem_lane() == 0) {
            own->count = egmem_count_bits(lanes);
            u64 old;
            asm volatile("atom.relaxed.gpu.exch.b64 %0, [%1], %2;" : "=l"(old) : "l"(list), "l"(piece) : "memory");
            own->next = (Piece *)old;
        }
        egmem_warp_barrier();
    }
}

// One thread: frees the pieces, and counts their records in `total`.
extern "C" __global__ void beside_free(Piece **list, u64 *total) {
    u64 found = 0;
    for (Piece *piece = *list; piece;) {
        Piece *next = piece->next;
        found += piece->count;
        free(piece);
        piece = next;
    }
    *list = 0;
    *total = found;
}
