// A heap of egmem as a memory resource of CCCL and RMM: buffers of both come from Extended GPU Memory, and go back
// when the stream's work has run.
//
//     nvcc -std=c++17 examples/c/rmm-resource.cu $(pkg-config --cflags --libs egmem) [-lrmm] -o rmm-resource
//
// Needs a GPU. RMM's part is compiled where its headers are.
#define LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE // cuda::mr in CCCL before 3.2
#include <cstdio>

#include <cuda_runtime_api.h>

#include <cuda/memory_resource>
#include <cuda/stream_ref>

#include <egmem.hpp>

#if __has_include(<rmm/device_buffer.hpp>)
#include <rmm/device_buffer.hpp>
#define HAS_RMM 1
#endif

static_assert(cuda::mr::resource_with<egm::device_resource, cuda::mr::device_accessible, cuda::mr::host_accessible>);

// Any function that takes a resource by CCCL's concept.
template <class Resource>
static bool use(Resource &resource, cudaStream_t stream)
{
    cuda::stream_ref on(stream);
    void *block = resource.allocate(on, 1 << 20, 256);
    bool done = cudaMemsetAsync(block, 7, 1 << 20, stream) == cudaSuccess;
    resource.deallocate(on, block, 1 << 20, 256); // once the memset has run
    return done;
}

int main()
try {
    auto driver = egm::driver::open();
    egm::topology topology(driver);
    egm::heap heap(driver, egm::host_node(topology.gpu(0).host_node));
    egm::device_resource resource(heap, 0);
    cudaStream_t stream;
    if (cudaSetDevice(0) != cudaSuccess || cudaStreamCreate(&stream) != cudaSuccess)
        return std::fprintf(stderr, "no stream\n"), 1;

    if (!use(resource, stream))
        return std::fprintf(stderr, "cudaMemsetAsync failed\n"), 1;
#ifdef HAS_RMM
    {
        rmm::device_buffer buffer(64 << 10, cuda::stream_ref(stream), resource);
        cudaMemsetAsync(buffer.data(), 1, buffer.size(), stream);
        cudaStreamSynchronize(stream);
        std::printf("RMM's buffer: %d as the CPU reads it\n", static_cast<const char *>(buffer.data())[100]);
    }
#endif
    auto stats = heap.stats();
    std::printf("%llu blocks in use, %llu wait for the stream\n", static_cast<unsigned long long>(stats.live_blocks),
                static_cast<unsigned long long>(stats.deferred_blocks));
    cudaStreamSynchronize(stream);
    heap.collect(true);
    cudaStreamDestroy(stream);
    return stats.live_blocks != 0;
} catch (const std::exception &error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
}
