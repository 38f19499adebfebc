// Which GPUs reach each other's memory: by the driver's P2P attributes, and by a grant that is tried.
//
//     c++ -std=c++17 peers.cpp $(pkg-config --cflags --libs egmem) -ldl -o peers
#include <cstdio>
#include <dlfcn.h>
#include <egmem.hpp>

// CUdevice_P2PAttribute of cuda.h
enum { performance_rank = 1, access_supported = 2, native_atomics = 3, array_access = 4 };
using get_attribute = int (*)(int *value, int attribute, int from, int to);
using get_device = int (*)(int *device, int ordinal);

int main()
try {
    auto driver = egm::driver::open_or_simulated("h200x8");
    auto gpus = egm::topology(driver).gpus();
    void *cuda = driver.is_simulated() ? nullptr : dlopen("libcuda.so.1", RTLD_NOW);
    auto attribute = cuda ? (get_attribute)dlsym(cuda, "cuDeviceGetP2PAttribute") : nullptr;
    auto device = cuda ? (get_device)dlsym(cuda, "cuDeviceGet") : nullptr;
    if (driver.is_simulated())
        std::puts("SIMULATED: there is no GPU here, so there are no attributes");
    for (std::size_t from = 0; from < gpus.size() && from < 2; from++) {
        for (std::size_t to = 0; to < gpus.size(); to++) {
            if (from == to)
                continue;
            // Memory of GPU `to`, granted to it and to GPU `from`.
            egm_grant grants[] = {{egm::device(to), EGM_ACCESS_READ_WRITE}, {egm::device(from), EGM_ACCESS_READ_WRITE}};
            auto options = egm::options<egm_buffer_options>();
            options.location = egm::device(to);
            options.bytes = 2 << 20;
            options.grants = grants;
            options.grant_count = 2;
            egm_buffer *made = nullptr;
            auto status = egm_buffer_create(driver.get(), &options, &made);
            egm_buffer_destroy(made);
            std::printf("GPU %zu reaches GPU %zu: %s", from, to, egm_status_name(status));
            if (attribute && device) {
                int a = 0, b = 0, access = 0, atomics = 0, arrays = 0, rank = 0;
                if (device(&a, from) || device(&b, to) || attribute(&access, access_supported, a, b) ||
                    attribute(&atomics, native_atomics, a, b) || attribute(&arrays, array_access, a, b) ||
                    attribute(&rank, performance_rank, a, b))
                    return std::puts("the driver does not say"), 1;
                std::printf(", access %d, native atomics %d, arrays %d, rank %d", access, atomics, arrays, rank);
                if ((access != 0) != (status == EGM_OK))
                    return std::puts("\nthe grant and the attribute differ"), 1;
            }
            std::puts("");
        }
    }
    return 0;
} catch (const std::exception &error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
}
