// Pairs of allocation and free in the order of a stream, by RMM's resources and PyTorch's allocator: the same work as
// `measure-heap --part streams`. Each thread has a stream of its own; no work is submitted to it. Millions of pairs per
// second of all threads together, medians of five turns of 100 ms.
//
//   g++ -O2 -std=c++20 -I RMM/include -I RMM/include/rapids -I CUDA/include stream-pairs.cpp -o stream-pairs
//       -L RMM/lib64 -lrmm -lrapids_logger -lcudart -lpthread
//
// With -DWITH_TORCH, PyTorch's include folder and -lc10_cuda -lc10, its allocator takes part.

#include <cuda_runtime_api.h>
#include <rmm/cuda_stream_view.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pinned_host_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#ifdef WITH_TORCH
#include <c10/cuda/CUDACachingAllocator.h>
#endif

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Pair = std::function<void(std::size_t, cudaStream_t)>;

struct Contestant {
  std::string name;
  Pair pair;
};

double turn(const Pair& pair, std::size_t bytes, int threads) {
  std::vector<double> rates(threads);
  std::vector<std::thread> running;
  std::barrier start(threads);
  for (int index = 0; index < threads; ++index) {
    running.emplace_back([&, index] {
      cudaStream_t stream;
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      pair(bytes, stream);
      start.arrive_and_wait();
      auto const began = Clock::now();
      double seconds = 0;
      long pairs = 0;
      while (seconds < 0.1) {
        for (int i = 0; i < 100; ++i) pair(bytes, stream);
        pairs += 100;
        seconds = std::chrono::duration<double>(Clock::now() - began).count();
      }
      rates[index] = pairs / seconds;
      cudaStreamSynchronize(stream);
    });
  }
  for (auto& thread : running) thread.join();
  double sum = 0;
  for (double rate : rates) sum += rate;
  return sum;
}

template <class Resource>
Pair pair_of(Resource& resource) {
  return [&resource](std::size_t bytes, cudaStream_t stream) {
    cuda::stream_ref const on{stream};
    void* block = resource.allocate(on, bytes, 256);
    resource.deallocate(on, block, bytes, 256);
  };
}

}  // namespace

int main() {
  constexpr std::size_t reserve = std::size_t{2} << 30;
  cudaFree(nullptr);
  rmm::mr::cuda_memory_resource device;
  rmm::mr::pinned_host_memory_resource pinned;
  rmm::mr::pool_memory_resource device_pool{device, reserve};
  rmm::mr::pool_memory_resource pinned_pool{pinned, reserve};
  rmm::mr::cuda_async_memory_resource async{reserve};
  std::vector<Contestant> all{
      {"RMM pool of GPU memory", pair_of(device_pool)},
      {"RMM pool of pinned memory", pair_of(pinned_pool)},
      {"RMM cuda_async", pair_of(async)},
  };
#ifdef WITH_TORCH
  c10::cuda::CUDACachingAllocator::init(1);
  all.push_back({"PyTorch's caching allocator", [](std::size_t bytes, cudaStream_t stream) {
                   namespace allocator = c10::cuda::CUDACachingAllocator;
                   allocator::raw_delete(allocator::raw_alloc_with_stream(bytes, stream));
                 }});
#endif
  for (std::size_t bytes : {std::size_t{64} << 10, std::size_t{1} << 20}) {
    for (int threads : {1, 2, 16}) {
      std::vector<std::vector<double>> rates(all.size());
      for (std::size_t round = 0; round < 5; ++round)
        for (std::size_t i = 0; i < all.size(); ++i) {
          std::size_t const which = (round + i) % all.size();
          rates[which].push_back(turn(all[which].pair, bytes, threads));
        }
      for (std::size_t i = 0; i < all.size(); ++i) {
        std::sort(rates[i].begin(), rates[i].end());
        std::printf("%-28s %8zu bytes %3d threads %10.3f M/s\n", all[i].name.c_str(), bytes, threads, rates[i][2] / 1e6);
      }
    }
  }
  return 0;
}
