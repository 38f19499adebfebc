// The crate's GPU kernels; `kernels` in src/driver/lib.rs says what each does. `ci/ptx` compiles them to
// proof.ptx with clang alone; nvcc takes them too.
//
// Words are read and written in pairs of 16 bytes where the range allows; a range that starts or
// ends in the middle of a pair has one word more at that end.

typedef unsigned long long u64;

#ifndef __CUDA_RUNTIME_H__ // clang without CUDA's headers: what is used of them, by builtins.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define THREAD __nvvm_read_ptx_sreg_tid_x()
#define THREADS __nvvm_read_ptx_sreg_ntid_x()
#define BLOCK __nvvm_read_ptx_sreg_ctaid_x()
#define BLOCKS __nvvm_read_ptx_sreg_nctaid_x()
static __device__ inline void atomic_min(u64 *p, u64 v) { __nvvm_atom_min_gen_ull(p, v); }
static __device__ inline void atomic_add(u64 *p, u64 v) { __nvvm_atom_add_gen_ll((long long *)p, v); }
static __device__ inline void atomic_xor(u64 *p, u64 v) { __nvvm_atom_xor_gen_ll((long long *)p, v); }
#else
#define THREAD threadIdx.x
#define THREADS blockDim.x
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
static __device__ inline void atomic_min(u64 *p, u64 v) { atomicMin(p, v); }
static __device__ inline void atomic_add(u64 *p, u64 v) { atomicAdd(p, v); }
static __device__ inline void atomic_xor(u64 *p, u64 v) { atomicXor(p, v); }
#endif

struct __attribute__((aligned(16))) Pair {
    u64 a, b;
};

// A range as pairs, with the single word before them and the one after.
struct Range {
    u64 *words;
    u64 count;
    u64 before; // 0 or 1
    u64 pairs;
    __device__ Range(u64 *words, u64 count) : words(words), count(count) {
        before = ((u64)words >> 3) & 1 & (count != 0);
        pairs = (count - before) / 2;
    }
    __device__ Pair *pair(u64 p) const { return (Pair *)(words + before) + p; }
    // Whether this thread has a single word to do, and which.
    __device__ bool single(u64 thread, u64 *i) const {
        *i = thread == 0 ? 0 : count - 1;
        return thread == 0 ? before != 0 : thread == 1 && ((count - before) & 1) != 0;
    }
};

static __device__ inline u64 pattern(u64 seed, u64 i) {
    u64 z = seed + i * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static __device__ inline u64 grid_thread() { return (u64)BLOCK * THREADS + THREAD; }
static __device__ inline u64 grid_threads() { return (u64)BLOCKS * THREADS; }

// The word that belongs at `i` now; a wrong one is reported and kept.
static __device__ inline u64 checked(u64 word, u64 i, u64 expected_seed, u64 new_seed, u64 *report) {
    if (word == pattern(expected_seed, i)) {
        return pattern(new_seed, i);
    }
    atomic_min(&report[0], i);
    atomic_add(&report[1], 1);
    return word;
}

extern "C" __global__ void egmem_check_rewrite(u64 *words, u64 count, u64 expected_seed, u64 new_seed,
                                               u64 *report) {
    Range range(words, count);
    for (u64 p = grid_thread(); p < range.pairs; p += grid_threads()) {
        u64 i = range.before + 2 * p;
        Pair pair = *range.pair(p);
        pair.a = checked(pair.a, i, expected_seed, new_seed, report);
        pair.b = checked(pair.b, i + 1, expected_seed, new_seed, report);
        *range.pair(p) = pair;
    }
    u64 i;
    if (range.single(grid_thread(), &i)) {
        words[i] = checked(words[i], i, expected_seed, new_seed, report);
    }
}

extern "C" __global__ void egmem_read(u64 *words, u64 count, u64 *report) {
    Range range(words, count);
    u64 sum = 0;
#pragma unroll 4
    for (u64 p = grid_thread(); p < range.pairs; p += grid_threads()) {
        Pair pair = *range.pair(p);
        sum ^= pair.a ^ pair.b;
    }
    u64 i;
    if (range.single(grid_thread(), &i)) {
        sum ^= words[i];
    }
    // One atomic a block: the report may lie across a bus.
    static __shared__ u64 block_sum;
    if (THREAD == 0) {
        block_sum = 0;
    }
    __syncthreads();
    atomic_xor(&block_sum, sum);
    __syncthreads();
    if (THREAD == 0) {
        atomic_xor(&report[0], block_sum);
    }
}

extern "C" __global__ void egmem_write(u64 *words, u64 count, u64 seed) {
    Range range(words, count);
    for (u64 p = grid_thread(); p < range.pairs; p += grid_threads()) {
        u64 i = range.before + 2 * p;
        Pair pair;
        pair.a = pattern(seed, i);
        pair.b = pattern(seed, i + 1);
        *range.pair(p) = pair;
    }
    u64 i;
    if (range.single(grid_thread(), &i)) {
        words[i] = pattern(seed, i);
    }
}
