// A kernel that knows egmem's device functions by name alone, for tests/all/shapes/linked.rs, which links it with
// shapes::device::PTX. `ci/ptx` compiles it to linked.ptx.

#if !defined(__CUDACC_RTC__) && !defined(__CUDA_RUNTIME_H__) // clang without CUDA's headers
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#endif

typedef unsigned long long u64;

// As src/shapes/device/mod.rs says: 72 and 48 bytes.
struct Side {
    u64 words[9];
};
struct Append {
    u64 words[6];
};

extern "C" {
__device__ unsigned egmem_ring_fn_open(Side *side, void *ring, unsigned produces);
__device__ u64 egmem_ring_fn_look(Side *side);
__device__ unsigned egmem_ring_fn_wait(Side *side, u64 count, u64 ns);
__device__ void *egmem_ring_fn_at(const Side *side);
__device__ void egmem_ring_fn_fence(const Side *side, u64 count);
__device__ void egmem_ring_fn_advance(Side *side, u64 count);
__device__ unsigned egmem_append_fn_open(Append *to, void *appender);
__device__ u64 egmem_append_fn_reserve(const Append *to, u64 count);
__device__ void *egmem_append_fn_at(Append *to, u64 index, u64 ns);
}

struct Record {
    u64 number, other;
};

// One thread: takes the numbers of `count` records from one ring, appends a record of each, and pushes it into another
// ring. `done` gets how many.
extern "C" __global__ void linked_pass(void *from, void *appender, void *to, u64 count, u64 ns, u64 *done) {
    Side in, out;
    Append all;
    if (!egmem_ring_fn_open(&in, from, 0) || !egmem_ring_fn_open(&out, to, 1) || !egmem_append_fn_open(&all, appender)) {
        return;
    }
    u64 passed = 0;
    while (passed < count) {
        if (!egmem_ring_fn_wait(&in, 1, ns)) {
            break;
        }
        u64 batch = egmem_ring_fn_look(&in);
        batch = batch < count - passed ? batch : count - passed;
        batch = batch < 100 ? batch : 100;
        if (!egmem_ring_fn_wait(&out, batch, ns)) {
            break;
        }
        egmem_ring_fn_fence(&in, batch);
        const volatile Record *taken = (const volatile Record *)egmem_ring_fn_at(&in);
        Record *pushed = (Record *)egmem_ring_fn_at(&out);
        u64 first = egmem_append_fn_reserve(&all, batch);
        for (u64 i = 0; i < batch; i++) {
            Record record = {taken[i].number, taken[i].other};
            Record *kept = (Record *)egmem_append_fn_at(&all, first + i, ns);
            if (kept) {
                *kept = record;
            }
            pushed[i] = record;
        }
        egmem_ring_fn_fence(&in, batch);
        egmem_ring_fn_advance(&out, batch);
        egmem_ring_fn_advance(&in, batch);
        passed += batch;
    }
    *done = passed;
}
