// Owners, errors, std::pmr and standard containers on a heap, and the resource for CCCL by its functions.
#include <deque>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <unordered_map>
#include <vector>

#include "self.h"
#include "egmem.hpp"

static void owners()
{
    auto driver = egm::driver::simulated("gh200x4");
    CHECK(driver.is_simulated());
    egm::topology topology(driver);
    CHECK(topology.gpus().size() == 4 && topology.nodes().size() == 4 && topology.gpu(2).host_node == 2);
    CHECK(topology.json().find("GH200") != std::string::npos);
    CHECK(driver.capabilities().find("\"works\":true") != std::string::npos);

    auto buffer = egm::buffer::near(driver, 1, 4 << 20);
    float values[] = {1, 2, 3}, found[3];
    buffer.write(64, values, sizeof values);
    buffer.read(64, found, sizeof found);
    CHECK(found[2] == 3 && buffer.data<float>()[17] == 2 && buffer.size() == 4 << 20);

    egm::stream stream(driver, 0);
    auto options = egm::options<egm_pool_options>();
    options.location = egm::host_node(0);
    egm::pool pool(driver, options);
    auto first = pool.allocate(4096, stream), second = pool.allocate(4096, stream);
    first.free_on(stream);
    stream.synchronize();
    auto moved = std::move(second);
    CHECK(moved.get() && !second.get());
}

static void errors()
{
    auto driver = egm::driver::simulated("gh200");
    try {
        egm::topology(driver).gpu(7);
        CHECK(!"no exception");
    } catch (const egm::error &error) {
        CHECK(error.status() == EGM_NO_SUCH_GPU && *error.what() && !error.remedy().empty() && error.cuda_code() == 0);
    }
    auto options = egm::options<egm_heap_options>();
    options.location = egm::host_node(0);
    options.limit = 2 << 20;
    options.backing = EGM_BACKING_REGISTERED;
    egm::heap heap(driver, options);
    CHECK(heap.backing() == EGM_BACKING_REGISTERED && heap.backing_reason() == "the program asked for it");
    try {
        heap.allocate(4 << 20);
        CHECK(!"no exception");
    } catch (const std::bad_alloc &error) {
        auto full = dynamic_cast<const egm::out_of_memory *>(&error);
        CHECK(full && full->reason().status() == EGM_HEAP_FULL && *error.what());
    }
}

static void containers()
{
    auto driver = egm::driver::simulated("gh200");
    egm::heap heap(driver, egm::host_node(0));
    egm::heap_resource resource(heap), same(heap);
    egm::heap other(driver, egm::host_node(0));
    CHECK(resource.is_equal(same) && !resource.is_equal(egm::heap_resource(other)));
    CHECK(!resource.is_equal(*std::pmr::new_delete_resource()));
    {
        std::pmr::vector<int> numbers(&resource);
        std::pmr::unordered_map<int, std::pmr::string> names(&resource);
        for (int i = 0; i < 5000; i++) {
            numbers.push_back(i);
            names.emplace(i, std::string(40, 'x'));
        }
        CHECK(numbers[4999] == 4999 && names.at(7).size() == 40 && heap.stats().live_blocks > 5000);

        std::vector<double, egm::allocator<double>> more(1000, 0.5, egm::allocator<double>(heap));
        auto copy = more;
        CHECK(copy.get_allocator() == more.get_allocator() && copy[999] == 0.5);

        // A vector that was moved from stays usable, and frees its own elements.
        auto moved = std::move(more);
        more.push_back(2);
        CHECK(moved.size() == 1000 && more.size() == 1 && more.get_allocator() == moved.get_allocator());
        std::deque<int, egm::allocator<int>> queue(2000, 7, egm::allocator<int>(heap));
        auto other_queue = std::move(queue);
        queue.push_back(1);
        CHECK(other_queue.size() == 2000 && queue.size() == 1);
    }
    CHECK(heap.stats().live_blocks == 0 && heap.trim() > 0);
}

static void device_resources()
{
    auto driver = egm::driver::simulated("gh200");
    egm::heap heap(driver, egm::host_node(0));
    egm::device_resource resource(heap), same(heap);
    CHECK(resource == same);
    egm::stream stream(driver, 0);
    struct stream_ref {
        void *handle;
        void *get() const { return handle; }
    } on{stream.handle()};
    void *block = resource.allocate(on, 100 << 10);
    CHECK(reinterpret_cast<std::uintptr_t>(block) % 256 == 0);
    resource.deallocate(on, block, 100 << 10);
    CHECK(heap.stats().live_blocks == 0 && heap.stats().deferred_blocks == 1);
    heap.collect(true);
    block = resource.allocate_async(4096, 4096, stream.handle());
    resource.deallocate_async(block, 4096, 4096, stream.handle());
    block = resource.allocate_sync(10);
    resource.deallocate_sync(block, 10);
    block = resource.allocate(10, 16);
    resource.deallocate(block, 10, 16);
    CHECK(heap.stats().live_blocks == 0);
}

static void channels()
{
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    auto near = egm::channel::of_fd(fds[0]), far = egm::channel::of_fd(fds[1]);
    auto driver = egm::driver::simulated("gh200");
    auto options = egm::options<egm_buffer_options>();
    options.location = egm::host_node(0);
    options.bytes = 2 << 20;
    options.handle_types = EGM_HANDLE_POSIX_FD;
    options.backing = EGM_BACKING_REGISTERED;
    egm::buffer buffer(driver, options);
    CHECK(buffer.backing() == EGM_BACKING_REGISTERED && buffer.backing_reason() == "the program asked for it");
    near.send(buffer);
    auto received = far.receive(driver);
    buffer.write(8, "both", 5);
    CHECK(std::string(received.data<char>() + 8) == "both");
}

static void rings()
{
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    auto near = egm::channel::of_fd(fds[0]), far = egm::channel::of_fd(fds[1]);
    auto driver = egm::driver::simulated("gh200");
    auto options = egm::options<egm_ring_options>();
    options.location = egm::host_node(0);
    options.record_bytes = sizeof(int);
    options.flags = EGM_SHAREABLE;
    auto producer = egm::ring_side::create(driver, EGM_RING_PRODUCER, options);
    CHECK(producer.is_alone());
    producer.share(near);
    auto consumer = egm::ring_side::receive(far, driver, EGM_RING_CONSUMER);
    CHECK(!producer.is_alone() && consumer.info().record_bytes == sizeof(int));
    auto room = static_cast<int *>(producer.reserve(2));
    room[0] = 7, room[1] = 8;
    producer.commit(2);
    auto found = consumer.peek(9);
    CHECK(found.count == 2 && static_cast<const int *>(found.first)[1] == 8);
    consumer.release(1);
    CHECK(consumer.info().count == 1 && consumer.to_gpu());
    consumer.to_cpu();
    auto both = egm::ring_side::create_both(driver, options);
    CHECK(!both.first.is_alone() && !both.second.peek(1).count);
}

/// The lines of the program, also through default arguments and a constructor that calls another. The pointers are static,
/// where a leak checker finds the memory.
constexpr int heap_line = __LINE__ + 5, buffer_line = heap_line + 3, pool_line = buffer_line + 3;

void leave_memory()
{
    auto driver = egm::driver::simulated("gh200");
    static auto heap = new egm::heap(driver, egm::host_node(0));
    CHECK(heap->allocate(3000));

    static auto buffer = new egm::buffer(egm::buffer::near(driver, 0, 4096));
    egm::stream stream(driver, 0);
    egm::pool pool(driver, {sizeof(egm_pool_options), egm::host_node(0), nullptr, 0, 0, 0, 0, 0, nullptr});
    static auto pooled = new egm::buffer(pool.allocate(4096, stream));
    CHECK(buffer && pooled);
}

void leaks()
{
    static char told[1 << 16];
    self child = run_self("leaves", "EGMEM_LEAKS");
    end_self(&child, told, sizeof told);
    expect_word(told, "still allocated at exit: 3 allocations");
    for (int line : {heap_line, buffer_line, pool_line})
        expect_word(told, ("cpp.cpp:" + std::to_string(line) + "\n").c_str());
}

static int32_t throwing(void *, const void *, void *, size_t)
{
    throw std::runtime_error("of the program's function");
}

static void gather()
{
    auto driver = egm::driver::simulated("gh200");
    egm_ranks ranks = {};
    ranks.size = 2;
    ranks.all_gather = throwing;
    egm_buffer *all[2] = {};
    try {
        egm_group_gather(driver.get(), nullptr, &ranks, all);
    } catch (const std::exception &) {
    }
}

/// An exception of a function that the library calls ends the process, and does not unwind the library.
static void thrown()
{
    static char told[1 << 16];
    self child = run_self("throws", "EGMEM_THROWS");
    CHECK(wait_for_self(&child, told, sizeof told) == SIGABRT);
}

/// Memory that `egmem serve` creates: see names.c.
static void names(const char *address)
{
    auto driver = egm::driver::simulated("gh200");
    egm::client client(driver, address);
    auto name = client.peer_name() + "/vector";
    auto options = egm::options<egm_create_options>();
    options.flags = EGM_EXIST_OK;
    CHECK(client.create(name.c_str(), 2 << 20, &options).bytes == 2 << 20);
    CHECK(client.create(name.c_str(), 2 << 20, &options).leases == 0);
    CHECK(client.wait(name.c_str()).bytes == 2 << 20 && client.list("uid:").find(name) != std::string::npos);
    client.fetch(name.c_str()).write(8, "both", 5);
    client.remove(name.c_str());
    try {
        client.fetch(name.c_str());
        CHECK(!"no exception");
    } catch (const egm::error &error) {
        CHECK(error.status() == EGM_REFUSED);
    }
}

int main(int count, char **arguments)
{
    if (count > 1) {
        std::string role = arguments[1];
        role == "leaves" ? leave_memory() : role == "throws" ? gather() : names(arguments[1]);
        return 0;
    }
    owners();
    errors();
    containers();
    device_resources();
    channels();
    rings();
    leaks();
    thrown();
}
