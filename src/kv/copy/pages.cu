// The kernel that copies pages of a tier: src/kv/copy/kernel.rs says how it is launched. `ci/ptx` compiles it to pages.ptx
// with clang alone; nvcc takes it too.
//
// Memory of the CPU is far away: to fill a link of 55 GB/s, some 200 KiB must be on their way at any time. So each thread
// loads 8 × 16 bytes before it stores the first, and few blocks are enough.

typedef unsigned long long u64;

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

#define LOADS 8                      // of 16 bytes, for each thread
#define ROW 512u                     // the bytes that a warp moves by one instruction
#define CHUNK (u64)(LOADS * ROW)     // the bytes that a warp moves at a time

struct Vector {
    unsigned a, b, c, d;
};

// Not by the cache for constants (.nc): the CPU writes these bytes between kernels.
static __device__ inline Vector load(u64 from) {
    Vector v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.a), "=r"(v.b), "=r"(v.c), "=r"(v.d)
                 : "l"(from)
                 : "memory");
    return v;
}

static __device__ inline void store(u64 to, Vector v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(v.a), "r"(v.b), "r"(v.c), "r"(v.d)
                 : "memory");
}

// The job's own list, which nothing writes while the kernel runs.
static __device__ inline u64 constant(const u64 *at) {
    u64 value;
    asm("ld.global.nc.u64 %0, [%1];" : "=l"(value) : "l"(at));
    return value;
}

// A chunk's place on both sides.
struct Place {
    u64 page, block, bytes;
};

// The list: for each pair the page's address and the offset of its block in every part.
static __device__ inline Place locate(u64 chunk, const u64 *list, const u64 *bases, u64 parts, u64 part_bytes,
                                      u64 chunks) {
    u64 piece = chunk / chunks;
    u64 at = (chunk - piece * chunks) * CHUNK;
    u64 pair = piece / parts;
    u64 part = piece - pair * parts;
    Place place;
    place.page = constant(list + 2 * pair) + part * part_bytes + at;
    place.block = constant(bases + part) + constant(list + 2 * pair + 1) + at;
    place.bytes = part_bytes - at < CHUNK ? part_bytes - at : CHUNK;
    return place;
}

static __device__ inline void copy(u64 to, u64 from, u64 bytes, unsigned lane) {
    Vector held[LOADS];
    u64 first = lane * 16;
    if (bytes == CHUNK) {
#pragma unroll
        for (unsigned i = 0; i < LOADS; i++) {
            held[i] = load(from + first + i * ROW);
        }
#pragma unroll
        for (unsigned i = 0; i < LOADS; i++) {
            store(to + first + i * ROW, held[i]);
        }
    } else {
#pragma unroll
        for (unsigned i = 0; i < LOADS; i++) {
            if (first + i * ROW < bytes) {
                held[i] = load(from + first + i * ROW);
            }
        }
#pragma unroll
        for (unsigned i = 0; i < LOADS; i++) {
            if (first + i * ROW < bytes) {
                store(to + first + i * ROW, held[i]);
            }
        }
    }
}

// Any grid of whole warps. Addresses and sizes are multiples of 16. `loads`: from pages to blocks, else the other way.
extern "C" __global__ void egmem_kv_copy(const u64 *list, u64 pairs, const u64 *bases, u64 parts, u64 part_bytes,
                                         u64 loads) {
    u64 warp = ((u64)BLOCK * THREADS + THREAD) / 32;
    u64 warps = (u64)BLOCKS * THREADS / 32;
    unsigned lane = THREAD % 32;
    u64 chunks = (part_bytes + CHUNK - 1) / CHUNK;
    u64 total = pairs * parts * chunks;
    if (warp >= total) {
        return;
    }
    Place here = locate(warp, list, bases, parts, part_bytes, chunks);
    for (u64 chunk = warp; chunk < total; chunk += warps) {
        // Asked for before the copy, so that the list's way is part of the copy's.
        u64 then = chunk + warps < total ? chunk + warps : chunk;
        Place next = locate(then, list, bases, parts, part_bytes, chunks);
        copy(loads ? here.block : here.page, loads ? here.page : here.block, here.bytes, lane);
        here = next;
    }
}
