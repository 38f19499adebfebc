// Standard containers whose elements lie in Extended GPU Memory: std::pmr::vector on a heap of egmem.
//
//     c++ -std=c++17 examples/c/vector.cpp $(pkg-config --cflags --libs egmem) -o vector
//
// On the first GPU's node; where there is no GPU, on a simulated machine.
#include <egmem.hpp>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

int main()
try {
    auto driver = egm::driver::open_or_simulated("gh200");
    egm::topology topology(driver);
    egm::heap heap(driver, egm::host_node(topology.gpu(0).host_node));
    egm::heap_resource resource(heap);

    // The CPU fills it; a kernel would get numbers.data(), which is the same address there.
    std::pmr::vector<float> numbers(1 << 20, &resource);
    std::iota(numbers.begin(), numbers.end(), 0.0f);

    // Strings in it lie in the heap too: pmr's containers hand their resource on.
    std::pmr::vector<std::pmr::string> names(&resource);
    for (int i = 0; i < 100; i++)
        names.emplace_back("a name that is too long for the string itself " + std::to_string(i));

    auto stats = heap.stats();
    std::cout << numbers.size() << " numbers and " << names.size() << " names in " << stats.live_blocks << " blocks, "
              << (stats.live >> 10) << " KiB\n";
    return 0;
} catch (const egm::error &error) {
    std::cerr << error.what() << "; " << error.remedy() << '\n';
    return 1;
} catch (const egm::out_of_memory &error) {
    std::cerr << error.what() << "; " << error.reason().remedy() << '\n';
    return 1;
}
