// The parts of the device functions: CUDA C++ for nvcc, NVRTC, and clang with or without CUDA's headers.
#ifndef EGMEM_DEVICE_CUH
#define EGMEM_DEVICE_CUH

#if defined(__CUDACC_RTC__) || defined(__CUDA_RUNTIME_H__)
#define EGMEM_FN static __device__ __forceinline__
#else // clang without CUDA's headers
#define EGMEM_FN static inline __attribute__((device, always_inline))
#endif

typedef unsigned long long egmem_u64;

// System scope: the same over PCIe and over NVLink-C2C.
EGMEM_FN egmem_u64 egmem_load_acquire(const egmem_u64 *at) {
    egmem_u64 value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

EGMEM_FN void egmem_store_release(egmem_u64 *at, egmem_u64 value) {
    asm volatile("st.release.sys.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
}

// Orders accesses through one mapping of memory before and after accesses through another mapping of it.
EGMEM_FN void egmem_fence_alias() { asm volatile("fence.proxy.alias;" : : : "memory"); }

// Among the threads of one GPU.

EGMEM_FN egmem_u64 egmem_atomic_add(egmem_u64 *at, egmem_u64 value) {
    egmem_u64 old;
    asm volatile("atom.relaxed.gpu.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(at), "l"(value) : "memory");
    return old;
}

EGMEM_FN egmem_u64 egmem_atomic_max(egmem_u64 *at, egmem_u64 value) {
    egmem_u64 old;
    asm volatile("atom.acq_rel.gpu.max.u64 %0, [%1], %2;" : "=l"(old) : "l"(at), "l"(value) : "memory");
    return old;
}

EGMEM_FN egmem_u64 egmem_atomic_or(egmem_u64 *at, egmem_u64 value) {
    egmem_u64 old;
    asm volatile("atom.acq_rel.gpu.or.b64 %0, [%1], %2;" : "=l"(old) : "l"(at), "l"(value) : "memory");
    return old;
}

// The GPU's clock. It may move on in steps of a microsecond or more.
EGMEM_FN egmem_u64 egmem_nanoseconds() {
    egmem_u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
    return now;
}

EGMEM_FN void egmem_sleep(unsigned nanoseconds) {
    asm volatile("nanosleep.u32 %0;" : : "r"(nanoseconds) : "memory");
}

EGMEM_FN unsigned egmem_lane() {
    unsigned lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// All 32 lanes call the following together.

EGMEM_FN void egmem_warp_barrier() { asm volatile("bar.warp.sync 0xffffffff;" : : : "memory"); }

EGMEM_FN unsigned egmem_warp_ballot(bool yes) {
    unsigned lanes;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
                 : "=r"(lanes)
                 : "r"((unsigned)yes)
                 : "memory");
    return lanes;
}

// The first lane's value.
EGMEM_FN egmem_u64 egmem_warp_first(egmem_u64 value) {
    unsigned low = (unsigned)value, high = (unsigned)(value >> 32);
    asm volatile("shfl.sync.idx.b32 %0, %0, 0, 31, 0xffffffff;" : "+r"(low) : : "memory");
    asm volatile("shfl.sync.idx.b32 %0, %0, 0, 31, 0xffffffff;" : "+r"(high) : : "memory");
    return (egmem_u64)high << 32 | low;
}

EGMEM_FN unsigned egmem_count_bits(unsigned word) {
    unsigned count;
    asm("popc.b32 %0, %1;" : "=r"(count) : "r"(word));
    return count;
}

// The lanes before this one.
EGMEM_FN unsigned egmem_lanes_before() {
    unsigned lanes;
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(lanes));
    return lanes;
}

#endif
