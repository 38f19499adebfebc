// The kernel beside copies, for benches/kv/beside.rs: `ci/ptx` compiles it to fma.ptx.

typedef unsigned long long u64;

#ifndef __CUDA_RUNTIME_H__ // clang without CUDA's headers: builtins instead.
#define __global__ __attribute__((global))
#define THREAD __nvvm_read_ptx_sreg_tid_x()
#define THREADS __nvvm_read_ptx_sreg_ntid_x()
#define BLOCK __nvvm_read_ptx_sreg_ctaid_x()
#define WHOLE __attribute__((launch_bounds(1024)))
#else
#define THREAD threadIdx.x
#define THREADS blockDim.x
#define BLOCK blockIdx.x
#define WHOLE __launch_bounds__(1024)
#endif

// Each thread makes `rounds` times 8 independent multiplications with addition, in registers. `sum` is written only
// for a result that does not occur.
extern "C" __global__ void beside_fma(u64 rounds, float *sum) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = (float)(THREAD + i) * 1e-3f;
    }
    float a = 0.999f, b = 1e-4f * (float)(BLOCK + 1);
    for (u64 round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = __builtin_fmaf(x[i], a, b);
        }
    }
    float all = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        all += x[i];
    }
    if (all == -1.0f) {
        *sum = all;
    }
}

// The same by blocks that leave no room on their multiprocessor for a block of the copies: 1024 threads with 32
// results each.
extern "C" __global__ WHOLE void beside_whole(u64 rounds, float *sum) {
    float x[32];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        x[i] = (float)(THREAD + i) * 1e-3f;
    }
    float a = 0.999f, b = 1e-4f * (float)(BLOCK + 1);
    for (u64 round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            x[i] = __builtin_fmaf(x[i], a, b);
        }
    }
    float all = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        all += x[i];
    }
    if (all == -1.0f) {
        *sum = all;
    }
}
