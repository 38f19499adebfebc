// Thrust sorts numbers where they lie: in Extended GPU Memory, which the CPU has filled and reads afterwards.
//
//     nvcc -std=c++17 examples/c/thrust-sort.cu $(pkg-config --cflags --libs egmem) -o thrust-sort
//
// Without nvcc, with CCCL's headers alone, Thrust runs on the CPU:
//
//     c++ -std=c++17 -x c++ -DTHRUST_DEVICE_SYSTEM=THRUST_DEVICE_SYSTEM_CPP -I CCCL examples/c/thrust-sort.cu …
//
// On the first GPU's node; where there is no GPU, on a simulated machine.
#include <cstdio>
#include <random>
#include <vector>

#include <thrust/device_ptr.h>
#include <thrust/execution_policy.h>
#include <thrust/reduce.h>
#include <thrust/sort.h>

#include <egmem.hpp>

int main()
try {
    constexpr std::size_t count = 1 << 22;
    auto driver = egm::driver::open_or_simulated("gh200");
    egm::topology topology(driver);
    egm::heap heap(driver, egm::host_node(topology.gpu(0).host_node));

    // The CPU fills a vector whose elements lie in the heap. No copy follows.
    std::vector<unsigned, egm::allocator<unsigned>> numbers(count, 0, egm::allocator<unsigned>(heap));
    std::mt19937 random(7);
    unsigned long long sum = 0;
    for (auto &number : numbers)
        sum += number = random() % 1000000;

    auto first = thrust::device_pointer_cast(numbers.data());
    thrust::sort(thrust::device, first, first + count);
    auto found = thrust::reduce(thrust::device, first, first + count, 0ULL);
    // Thrust has waited for the GPU: the CPU reads the same bytes.
    for (std::size_t i = 1; i < count; i++)
        if (numbers[i - 1] > numbers[i])
            return std::fprintf(stderr, "not sorted at %zu\n", i), 1;
    if (found != sum)
        return std::fprintf(stderr, "the sum is %llu, not %llu\n", found, sum), 1;
    std::printf("%zu numbers sorted in place, from %u to %u; the CPU and Thrust agree on their sum\n", count, numbers.front(),
                numbers.back());
    return 0;
} catch (const std::exception &error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
}
