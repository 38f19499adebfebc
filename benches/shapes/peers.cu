// The baseline for replicated.rs and peer.rs: the same work by the means of CUDA's runtime. A program of its own, for
// a machine with two GPUs that reach each other and nvcc.
//
//     nvcc -O3 -std=c++17 -arch=native -o peers benches/shapes/peers.cu -lcuda
//     ./peers [MIB] [ROUNDS]        # 1024 and 5
//
// Managed memory is used for MIB alone, which both GPUs must have free.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>

static void check(int code, const char *what) {
    if (code != 0) {
        fprintf(stderr, "%s: %d (%s)\n", what, code, cudaGetErrorString((cudaError_t)code));
        exit(1);
    }
}
#define CHECK(call) check((int)(call), #call)

static double milliseconds(const std::function<void()> &work) {
    auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

static double median_of(int rounds, const std::function<void()> &work) {
    work(); // the first round does not count
    std::vector<double> times;
    for (int n = 0; n < rounds; n++)
        times.push_back(milliseconds(work));
    return median(times);
}

static cudaStream_t streams[2];

static void wait_for_both() {
    for (auto stream : streams)
        CHECK(cudaStreamSynchronize(stream));
}

#if CUDART_VERSION >= 13000
static cudaMemLocation device(int gpu) {
    cudaMemLocation location = {};
    location.type = cudaMemLocationTypeDevice;
    location.id = gpu;
    return location;
}
#else
static int device(int gpu) { return gpu; }
#endif

static void prefetch(void *memory, size_t bytes, int gpu) {
#if CUDART_VERSION >= 13000
    CHECK(cudaMemPrefetchAsync(memory, bytes, device(gpu), 0, streams[gpu]));
#else
    CHECK(cudaMemPrefetchAsync(memory, bytes, device(gpu), streams[gpu]));
#endif
}

static void line(const char *what, double ms, double bytes) {
    printf("%-58s %9.2f ms %7.1f GB/s\n", what, ms, bytes / ms / 1e6);
}

// New values for a copy on the host and one on each of two GPUs.
static void replicated(size_t bytes, int rounds) {
    printf("\na copy on the host and on two GPUs, %zu MiB; GB/s over all three\n", bytes >> 20);
    char *values = (char *)malloc(bytes), *host, *gpus[2], *managed;
    memset(values, 7, bytes);
    CHECK(cudaMallocHost(&host, bytes));
    for (int gpu = 0; gpu < 2; gpu++) {
        CHECK(cudaSetDevice(gpu));
        CHECK(cudaMalloc(&gpus[gpu], bytes));
    }
    auto both = [&](const char *from) {
        for (int gpu = 0; gpu < 2; gpu++)
            CHECK(cudaMemcpyAsync(gpus[gpu], from, bytes, cudaMemcpyHostToDevice, streams[gpu]));
        wait_for_both();
    };
    double all = 3.0 * bytes;
    line("memcpy to pinned memory, then cudaMemcpyAsync to both", median_of(rounds, [&] {
             memcpy(host, values, bytes);
             both(host);
         }),
         all);
    line("the same, GPU to GPU for the second", median_of(rounds, [&] {
             memcpy(host, values, bytes);
             CHECK(cudaMemcpyAsync(gpus[0], host, bytes, cudaMemcpyHostToDevice, streams[0]));
             CHECK(cudaMemcpyPeerAsync(gpus[1], 1, gpus[0], 0, bytes, streams[0]));
             wait_for_both();
         }),
         all);
    CHECK(cudaMallocManaged(&managed, bytes));
    CHECK(cudaMemAdvise(managed, bytes, cudaMemAdviseSetReadMostly, device(0)));
    std::vector<double> writes, fetches;
    for (int n = 0; n <= rounds; n++) {
        double write = milliseconds([&] { memcpy(managed, values, bytes); });
        double fetch = milliseconds([&] {
            prefetch(managed, bytes, 0);
            prefetch(managed, bytes, 1);
            wait_for_both();
        });
        if (n == 0)
            continue;
        writes.push_back(write);
        fetches.push_back(fetch);
    }
    line("managed, read-mostly: the CPU's writes", median(writes), bytes);
    line("managed, read-mostly: prefetch to both", median(fetches), 2.0 * bytes);
    line("managed, read-mostly: together", median(writes) + median(fetches), all);
    CHECK(cudaFree(managed));
    for (auto gpu : gpus)
        CHECK(cudaFree(gpu));
    CHECK(cudaFreeHost(host));
    free(values);
}

static double one_cudaMalloc(int rounds, size_t bytes) {
    return median_of(rounds, [&] {
        void *memory;
        CHECK(cudaMalloc(&memory, bytes));
        CHECK(cudaFree(memory));
    });
}

// cuMemCreate, cuMemMap, cuMemSetAccess for `gpus` GPUs, and all of it given back.
static double one_vmm(int rounds, size_t bytes, int gpus) {
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = 0;
    CUmemAccessDesc access[2] = {};
    for (int gpu = 0; gpu < 2; gpu++) {
        access[gpu].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        access[gpu].location.id = gpu;
        access[gpu].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    return median_of(rounds, [&] {
        CUdeviceptr address;
        CUmemGenericAllocationHandle handle;
        CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
        CHECK(cuMemCreate(&handle, bytes, &properties, 0));
        CHECK(cuMemMap(address, bytes, 0, handle, 0));
        CHECK(cuMemSetAccess(address, bytes, access, gpus));
        CHECK(cuMemUnmap(address, bytes));
        CHECK(cuMemRelease(handle));
        CHECK(cuMemAddressFree(address, bytes));
    });
}

static void grants(int rounds) {
    const size_t bytes = 64 << 20;
    printf("\n64 MiB of GPU 0, allocated and freed\n");
    CHECK(cudaSetDevice(0));
    printf("%-58s %9.3f ms\n", "cudaMalloc, no peer", one_cudaMalloc(rounds, bytes));
    printf("%-58s %9.3f ms\n", "VMM calls, for GPU 0", one_vmm(rounds, bytes, 1));
    printf("%-58s %9.3f ms\n", "VMM calls, for both", one_vmm(rounds, bytes, 2));
    std::vector<void *> held(128);
    for (int full = 0; full < 2; full++) {
        CHECK(cudaSetDevice(0));
        for (auto &memory : held)
            if (full)
                CHECK(cudaMalloc(&memory, bytes));
        CHECK(cudaSetDevice(1));
        double on = milliseconds([] { CHECK(cudaDeviceEnablePeerAccess(0, 0)); });
        double off = milliseconds([] { CHECK(cudaDeviceDisablePeerAccess(0)); });
        printf("cudaDeviceEnablePeerAccess with %d GiB there: %.2f ms, disable %.2f ms\n", full * 8, on, off);
    }
    for (auto memory : held)
        CHECK(cudaFree(memory));
    CHECK(cudaDeviceEnablePeerAccess(0, 0));
    CHECK(cudaSetDevice(0));
    printf("%-58s %9.3f ms\n", "cudaMalloc, GPU 1 has peer access", one_cudaMalloc(rounds, bytes));
}

int main(int argc, char **argv) {
    size_t mib = argc > 1 ? strtoull(argv[1], nullptr, 0) : 1024;
    int rounds = std::max(argc > 2 ? atoi(argv[2]) : 5, 1);
    int gpus = 0, reach = 0;
    CHECK(cudaGetDeviceCount(&gpus));
    if (gpus >= 2)
        CHECK(cudaDeviceCanAccessPeer(&reach, 1, 0));
    if (mib == 0 || !reach) {
        fprintf(stderr, "peers [MIB] [ROUNDS] needs two GPUs that reach each other\n");
        return 1;
    }
    for (int gpu = 1; gpu >= 0; gpu--) {
        CHECK(cudaSetDevice(gpu));
        CHECK(cudaFree(nullptr));
        CHECK(cudaStreamCreate(&streams[gpu]));
    }
    // First, while no GPU has peer access.
    grants(std::max(rounds, 21));
    replicated(mib << 20, rounds);
    return 0;
}
