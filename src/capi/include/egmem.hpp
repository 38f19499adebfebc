/*
 * egmem for C++17: owners of egmem.h's handles, memory resources for std::pmr and for CCCL and RMM, and an allocator.
 *
 * Functions throw egm::error, and egm::out_of_memory, a std::bad_alloc, where memory is short. Destructors throw nothing.
 * egmem.h says which threads may call a function and how long its results are valid. docs/c.md is the guide.
 */
#ifndef EGMEM_HPP
#define EGMEM_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "egmem.h"

#if !defined(EGMEM_NO_CCCL) && defined(__has_include)
#if __has_include(<cuda/memory_resource>) && __has_include(<cuda_runtime_api.h>)
#include <cuda/memory_resource>
// Before CCCL 3.2 a program has to ask for cuda::mr.
#if CCCL_VERSION >= 3002000 || defined(LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE)
#define EGMEM_HAS_CCCL 1
#endif
#endif
#endif

namespace egm {

/// A failed call: what() gives its message with the cause, remedy() its remedy.
class error : public std::runtime_error {
public:
    explicit error(egm_status status)
        : std::runtime_error(egm_last_error_message()), status_(status), remedy_(egm_last_error_remedy()),
          cuda_code_(egm_last_error_cuda_code())
    {
    }

    egm_status status() const noexcept { return status_; }
    const std::string &remedy() const noexcept { return remedy_; }
    /// The result (CUresult) of the driver call behind it, or 0.
    std::int32_t cuda_code() const noexcept { return cuda_code_; }

private:
    egm_status status_;
    std::string remedy_;
    std::int32_t cuda_code_;
};

/// A call that failed for lack of memory.
class out_of_memory : public std::bad_alloc {
public:
    explicit out_of_memory(egm_status status) : reason_(std::make_shared<const error>(status)) {}

    const char *what() const noexcept override { return reason_->what(); }
    const error &reason() const noexcept { return *reason_; }

private:
    std::shared_ptr<const error> reason_; // copying it must not throw
};

/// Throws unless a call has succeeded.
inline void check(egm_status status)
{
    switch (status) {
    case EGM_OK: return;
    case EGM_OUT_OF_MEMORY:
    case EGM_NODE_TOO_FULL:
    case EGM_HEAP_FULL: throw out_of_memory(status);
    default: throw error(status);
    }
}

/// The line of a call, which the ledger shows (`egmem ps`, EGMEM_LEAKS=1). As a default argument it is the caller's.
class call_site {
public:
    static call_site here(const char *file = __builtin_FILE(), std::uint32_t line = __builtin_LINE(),
                          const char *function = __builtin_FUNCTION()) noexcept
    {
        return call_site(file, line, function);
    }

    /// Tells it to the library, for the thread's next call.
    void tell() const noexcept { egm_call_site(file_, line_, function_); }

private:
    call_site(const char *file, std::uint32_t line, const char *function) noexcept
        : file_(file), line_(line), function_(function)
    {
    }
    const char *file_;
    std::uint32_t line_;
    const char *function_;
};

namespace detail {

template <class T, egm_status (*Destroy)(T *)>
struct destroy {
    void operator()(T *object) const noexcept { (void)Destroy(object); }
};

template <class T, egm_status (*Destroy)(T *)>
using owner = std::unique_ptr<T, destroy<T, Destroy>>;

/// Calls `make` with a place for a new handle.
template <class Owner, class Make>
Owner made(Make &&make)
{
    typename Owner::pointer object = nullptr;
    check(make(&object));
    return Owner(object);
}

inline std::string taken(char *text)
{
    std::unique_ptr<char, destroy<char, egm_string_free>> owned(text);
    return std::string(text);
}

/// Calls `make` with a place for a new text.
template <class Make>
std::string text(Make &&make)
{
    char *made = nullptr;
    check(make(&made));
    return taken(made);
}

} // namespace detail

inline egm_location host_node(std::int32_t id) noexcept { return {EGM_LOCATION_HOST_NUMA, id}; }
inline egm_location device(std::int32_t ordinal) noexcept { return {EGM_LOCATION_DEVICE, ordinal}; }
inline egm_location host() noexcept { return {EGM_LOCATION_HOST, 0}; }

/// Options with everything 0 but their size.
template <class Options>
Options options() noexcept
{
    Options made{};
    made.struct_size = sizeof made;
    return made;
}

/// A driver: CUDA's or a simulated one.
class driver {
public:
    static driver open() { return driver(detail::made<owner>([](auto out) { return egm_driver_open(out); })); }

    static driver simulated(const char *machine)
    {
        return driver(detail::made<owner>([=](auto out) { return egm_driver_simulated(machine, out); }));
    }

    /// Opens CUDA's driver or, where there is none, simulates a machine.
    static driver open_or_simulated(const char *machine)
    {
        egm_driver *opened = nullptr;
        return egm_driver_open(&opened) == EGM_OK ? driver(owner(opened)) : simulated(machine);
    }

    bool is_simulated() const
    {
        bool is = false;
        check(egm_driver_is_simulated(get(), &is));
        return is;
    }

    /// The capabilities of this machine, as JSON.
    std::string capabilities() const
    {
        char *text = nullptr;
        check(egm_capabilities_json(get(), &text));
        return detail::taken(text);
    }

    egm_driver *get() const noexcept { return owned_.get(); }

private:
    using owner = detail::owner<egm_driver, egm_driver_destroy>;
    explicit driver(owner owned) : owned_(std::move(owned)) {}
    owner owned_;
};

/// The GPUs and host nodes of a machine.
class topology {
public:
    explicit topology(const driver &of)
        : owned_(detail::made<owner>([&](auto out) { return egm_topology_discover(of.get(), out); }))
    {
    }

    std::vector<egm_gpu> gpus() const
    {
        std::size_t count = 0;
        check(egm_topology_gpu_count(get(), &count));
        std::vector<egm_gpu> all(count);
        for (std::size_t i = 0; i < count; i++)
            check(egm_topology_gpu(get(), static_cast<std::int32_t>(i), &all[i]));
        return all;
    }

    std::vector<egm_node> nodes() const
    {
        std::size_t count = 0;
        check(egm_topology_node_count(get(), &count));
        std::vector<egm_node> all(count);
        for (std::size_t i = 0; i < count; i++)
            check(egm_topology_node(get(), i, &all[i]));
        return all;
    }

    egm_gpu gpu(std::int32_t ordinal) const
    {
        egm_gpu found;
        check(egm_topology_gpu(get(), ordinal, &found));
        return found;
    }

    std::string json() const
    {
        char *text = nullptr;
        check(egm_topology_json(get(), &text));
        return detail::taken(text);
    }

    egm_topology *get() const noexcept { return owned_.get(); }

private:
    using owner = detail::owner<egm_topology, egm_topology_destroy>;
    owner owned_;
};

class channel;
class stream;

/// A point in a stream's work.
class event {
public:
    event(const driver &of, std::int32_t gpu)
        : owned_(detail::made<owner>([&](auto out) { return egm_event_create(of.get(), gpu, out); }))
    {
    }

    /// An event that `channel::send` lends to another process.
    static event interprocess(const driver &of, std::int32_t gpu)
    {
        return event(detail::made<owner>([&](auto out) { return egm_event_create_interprocess(of.get(), gpu, out); }));
    }

    void record(const stream &behind) const;
    void synchronize() const { check(egm_event_synchronize(get())); }
    egm_event *get() const noexcept { return owned_.get(); }

private:
    friend class channel;
    using owner = detail::owner<egm_event, egm_event_destroy>;
    explicit event(owner owned) : owned_(std::move(owned)) {}
    owner owned_;
};

/// A stream of a GPU, or a name for one of the program's own.
class stream {
public:
    stream(const driver &of, std::int32_t gpu)
        : owned_(detail::made<owner>([&](auto out) { return egm_stream_create(of.get(), gpu, out); }))
    {
    }

    /// Wraps a CUstream or cudaStream_t, which outlives the result and all memory allocated on it.
    static stream borrow(const driver &of, std::int32_t gpu, void *handle)
    {
        return stream(detail::made<owner>([&](auto out) { return egm_stream_borrow(of.get(), gpu, handle, out); }));
    }

    void synchronize() const { check(egm_stream_synchronize(get())); }
    /// Makes later work on the stream wait for the event's last record; returns at once.
    void wait(const event &before) const { check(egm_stream_wait_event(get(), before.get())); }

    void *handle() const
    {
        void *found = nullptr;
        check(egm_stream_handle(get(), &found));
        return found;
    }

    egm_stream *get() const noexcept { return owned_.get(); }

private:
    using owner = detail::owner<egm_stream, egm_stream_destroy>;
    explicit stream(owner owned) : owned_(std::move(owned)) {}
    owner owned_;
};

inline void event::record(const stream &behind) const { check(egm_event_record(get(), behind.get())); }

/// Memory at one address for the CPU and the GPUs.
class buffer {
public:
    buffer(const driver &of, const egm_buffer_options &options, call_site from = call_site::here())
        : owned_(detail::made<owner>([&](auto out) {
              from.tell();
              return egm_buffer_create(of.get(), &options, out);
          }))
    {
    }

    /// Takes a handle over.
    explicit buffer(egm_buffer *handle) noexcept : owned_(handle) {}

    /// Allocates on the host node of a GPU, for the CPU and every GPU.
    static buffer near(const driver &of, std::int32_t gpu, std::uint64_t bytes, call_site from = call_site::here())
    {
        egm_buffer *made = nullptr;
        from.tell();
        check(egm_buffer_near(of.get(), gpu, bytes, &made));
        return buffer(made);
    }

    /// The address, for the CPU and every GPU.
    template <class T = void>
    T *data() const
    {
        void *found = nullptr;
        check(egm_buffer_ptr(get(), &found));
        return static_cast<T *>(found);
    }

    std::uint64_t size() const
    {
        std::uint64_t bytes = 0;
        check(egm_buffer_size(get(), &bytes));
        return bytes;
    }

    /// EGM_BACKING_DRIVER or EGM_BACKING_REGISTERED, of memory that was allocated here.
    std::int32_t backing() const
    {
        std::int32_t found = 0;
        check(egm_buffer_backing(get(), &found, nullptr));
        return found;
    }

    /// Why the memory is what it is.
    std::string backing_reason() const
    {
        std::int32_t found = 0;
        char *text = nullptr;
        check(egm_buffer_backing(get(), &found, &text));
        return detail::taken(text);
    }

    void write(std::uint64_t offset, const void *from, std::size_t len) { check(egm_buffer_write(get(), offset, from, len)); }
    void read(std::uint64_t offset, void *to, std::size_t len) const { check(egm_buffer_read(get(), offset, to, len)); }

    /// Frees a pool's memory after the work submitted to a stream so far.
    void free_on(const stream &after)
    {
        auto status = egm_buffer_free_on(get(), after.get());
        if (status != EGM_INVALID_ARGUMENT)
            (void)owned_.release();
        check(status);
    }

    egm_buffer *get() const noexcept { return owned_.get(); }

private:
    using owner = detail::owner<egm_buffer, egm_buffer_destroy>;
    owner owned_;
};

/// A stream-ordered pool.
class pool {
public:
    pool(const driver &of, const egm_pool_options &options)
        : owned_(detail::made<owner>([&](auto out) { return egm_pool_create(of.get(), &options, out); }))
    {
    }

    buffer allocate(std::uint64_t bytes, const stream &on, call_site from = call_site::here()) const
    {
        egm_buffer *made = nullptr;
        from.tell();
        check(egm_pool_alloc(get(), bytes, on.get(), &made));
        return buffer(made);
    }

    egm_pool *get() const noexcept { return owned_.get(); }

private:
    using owner = detail::owner<egm_pool, egm_pool_destroy>;
    owner owned_;
};

/// A heap. Copies are the same heap, which is destroyed with the last one; if blocks are in use then, its memory
/// stays.
class heap {
public:
    heap(const driver &of, const egm_heap_options &options, call_site from = call_site::here())
    {
        egm_heap *made = nullptr;
        from.tell();
        check(egm_heap_create(of.get(), &options, &made));
        owned_ = std::shared_ptr<egm_heap>(made, detail::destroy<egm_heap, egm_heap_destroy>());
    }

    /// A heap with default options.
    heap(const driver &of, egm_location where, call_site from = call_site::here()) : heap(of, at(where), from) {}

    void *allocate(std::size_t bytes, std::size_t align = 0) const
    {
        void *block = nullptr;
        check(egm_heap_alloc(get(), bytes, align, &block));
        return block;
    }

    void deallocate(void *block) const { check(egm_heap_free(get(), block)); }
    void free_after(void *block, const stream &after) const { check(egm_heap_free_after(get(), block, after.get())); }

    bool resize(void *block, std::size_t bytes) const
    {
        bool done = false;
        check(egm_heap_resize(get(), block, bytes, &done));
        return done;
    }

    void reserve(std::uint64_t bytes) const { check(egm_heap_reserve(get(), bytes)); }
    void collect(bool wait) const { check(egm_heap_collect(get(), wait)); }

    std::uint64_t trim(std::uint64_t keep = 0) const
    {
        std::uint64_t given = 0;
        check(egm_heap_trim(get(), keep, &given));
        return given;
    }

    /// EGM_BACKING_DRIVER or EGM_BACKING_REGISTERED.
    std::int32_t backing() const
    {
        std::int32_t found = 0;
        check(egm_heap_backing(get(), &found, nullptr));
        return found;
    }

    /// Why the memory is what it is.
    std::string backing_reason() const
    {
        std::int32_t found = 0;
        char *text = nullptr;
        check(egm_heap_backing(get(), &found, &text));
        return detail::taken(text);
    }

    egm_heap_stats stats() const
    {
        auto found = options<egm_heap_stats>();
        check(egm_heap_get_stats(get(), &found));
        return found;
    }

    egm_heap *get() const noexcept { return owned_.get(); }
    friend bool operator==(const heap &a, const heap &b) noexcept { return a.get() == b.get(); }
    friend bool operator!=(const heap &a, const heap &b) noexcept { return !(a == b); }

private:
    static egm_heap_options at(egm_location where) noexcept
    {
        auto made = egm::options<egm_heap_options>();
        made.location = where;
        return made;
    }

    std::shared_ptr<egm_heap> owned_;
};

/// A heap for std::pmr's containers. No GPU writes their elements.
class heap_resource : public std::pmr::memory_resource {
public:
    explicit heap_resource(heap from) noexcept : heap_(std::move(from)) {}
    const heap &upstream() const noexcept { return heap_; }

private:
    void *do_allocate(std::size_t bytes, std::size_t align) override { return heap_.allocate(bytes ? bytes : 1, align); }
    void do_deallocate(void *block, std::size_t, std::size_t) noexcept override { (void)egm_heap_free(heap_.get(), block); }

    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override
    {
        auto same = dynamic_cast<const heap_resource *>(&other);
        return same && same->heap_ == heap_;
    }

    heap heap_;
};

/// An allocator of standard containers on a heap.
template <class T>
class allocator {
public:
    using value_type = T;
    explicit allocator(heap from) noexcept : heap_(std::move(from)) {}
    // Copied where it would be moved: containers that were moved from keep their allocator.
    allocator(const allocator &) = default;
    allocator &operator=(const allocator &) = default;
    template <class U>
    allocator(const allocator<U> &other) noexcept : heap_(other.upstream())
    {
    }

    T *allocate(std::size_t count)
    {
        if (count > SIZE_MAX / sizeof(T))
            throw std::bad_array_new_length();
        return static_cast<T *>(heap_.allocate(count ? count * sizeof(T) : 1, alignof(T)));
    }

    void deallocate(T *block, std::size_t) noexcept { (void)egm_heap_free(heap_.get(), block); }
    const heap &upstream() const noexcept { return heap_; }

    template <class U>
    friend bool operator==(const allocator &a, const allocator<U> &b) noexcept
    {
        return a.upstream() == b.upstream();
    }
    template <class U>
    friend bool operator!=(const allocator &a, const allocator<U> &b) noexcept
    {
        return !(a == b);
    }

private:
    heap heap_;
};

/// A heap for CCCL (cuda::mr) and RMM: blocks that GPUs use, freed when a stream's work has run.
///
/// A block may be used at once, by any stream. `gpu` is the GPU whose streams are given.
class device_resource {
public:
    explicit device_resource(heap from, std::int32_t gpu = 0) noexcept : heap_(std::move(from)), gpu_(gpu) {}

    /// `Stream` is a cudaStream_t, or a class with get(), such as cuda::stream_ref.
    template <class Stream, class = std::enable_if_t<!std::is_integral_v<Stream>>>
    void *allocate(Stream, std::size_t bytes, std::size_t align = 256)
    {
        return allocate_sync(bytes, align);
    }

    template <class Stream, class = std::enable_if_t<!std::is_integral_v<Stream>>>
    void deallocate(Stream on, void *block, std::size_t, std::size_t = 256) noexcept
    {
        void *raw;
        if constexpr (std::is_pointer_v<Stream>)
            raw = static_cast<void *>(on);
        else
            raw = static_cast<void *>(on.get());
        // A block that cannot be freed after the work stays in use: better than to hand it out too early.
        (void)egm_heap_free_after_cuda_stream(heap_.get(), block, gpu_, raw);
    }

    void *allocate_sync(std::size_t bytes, std::size_t align = 256) { return heap_.allocate(bytes ? bytes : 1, align); }
    void deallocate_sync(void *block, std::size_t, std::size_t = 256) noexcept { (void)egm_heap_free(heap_.get(), block); }

    // The names before CCCL 3.2.
    void *allocate(std::size_t bytes, std::size_t align = 256) { return allocate_sync(bytes, align); }
    void deallocate(void *block, std::size_t bytes, std::size_t align = 256) noexcept { deallocate_sync(block, bytes, align); }
    template <class Stream>
    void *allocate_async(std::size_t bytes, std::size_t align, Stream on)
    {
        return allocate(on, bytes, align);
    }
    template <class Stream>
    void deallocate_async(void *block, std::size_t bytes, std::size_t align, Stream on) noexcept
    {
        deallocate(on, block, bytes, align);
    }

    const heap &upstream() const noexcept { return heap_; }
    friend bool operator==(const device_resource &a, const device_resource &b) noexcept { return a.heap_ == b.heap_; }
    friend bool operator!=(const device_resource &a, const device_resource &b) noexcept { return !(a == b); }

#ifdef EGMEM_HAS_CCCL
    friend constexpr void get_property(const device_resource &, ::cuda::mr::device_accessible) noexcept {}
    friend constexpr void get_property(const device_resource &, ::cuda::mr::host_accessible) noexcept {}
#endif

private:
    heap heap_;
    std::int32_t gpu_;
};

/// A connection to another process of this user.
class channel {
public:
    static channel connect(const char *path)
    {
        return channel(detail::made<owner>([=](auto out) { return egm_channel_connect(path, out); }));
    }

    /// Takes a connected Unix socket over.
    static channel of_fd(int fd)
    {
        return channel(detail::made<owner>([=](auto out) { return egm_channel_from_fd(fd, out); }));
    }

    void send(const buffer &what, std::int32_t access = EGM_ACCESS_READ_WRITE) { check(egm_channel_send(get(), what.get(), access)); }

    buffer receive(const driver &into, call_site from = call_site::here())
    {
        egm_buffer *made = nullptr;
        from.tell();
        check(egm_channel_receive(get(), into.get(), &made));
        return buffer(made);
    }

    /// Lends an event made by `event::interprocess` to the other process.
    void send(const event &what) { check(egm_channel_send_event(get(), what.get())); }

    event receive_event(const driver &into)
    {
        return event(detail::made<event::owner>([&](auto out) { return egm_channel_receive_event(get(), into.get(), out); }));
    }

    egm_channel *get() const noexcept { return owned_.get(); }

private:
    friend class listener;
    using owner = detail::owner<egm_channel, egm_channel_destroy>;
    explicit channel(owner owned) : owned_(std::move(owned)) {}
    owner owned_;
};

/// One side of a ring: a bounded queue of records between threads and kernels, also of two processes. One thread at a time.
class ring_side {
public:
    /// Creates a ring, of which this process has one side: `which` is EGM_RING_PRODUCER or EGM_RING_CONSUMER. share() sends the
    /// other one.
    static ring_side create(const driver &on, std::int32_t which, const egm_ring_options &options, call_site from = call_site::here())
    {
        from.tell();
        return ring_side(detail::made<owner>([&](auto out) {
            bool produces = which == EGM_RING_PRODUCER;
            return egm_ring_create(on.get(), &options, produces ? out : nullptr, produces ? nullptr : out);
        }));
    }

    /// Creates a ring of which this process has both sides, the producer's first.
    static std::pair<ring_side, ring_side> create_both(const driver &on, const egm_ring_options &options,
                                                       call_site from = call_site::here())
    {
        egm_ring_side *producer = nullptr, *consumer = nullptr;
        from.tell();
        check(egm_ring_create(on.get(), &options, &producer, &consumer));
        return {ring_side(owner(producer)), ring_side(owner(consumer))};
    }

    /// Waits for a side from another process.
    static ring_side receive(channel &from, const driver &into, std::int32_t which, call_site at = call_site::here())
    {
        at.tell();
        return ring_side(detail::made<owner>([&](auto out) { return egm_ring_receive(from.get(), into.get(), which, out); }));
    }

    /// The records that were found, one behind the other.
    struct records {
        const void *first;
        std::size_t count;
    };

    /// Null if there was no room in time, or the consumer is gone.
    void *reserve(std::size_t count, std::uint64_t timeout_ms = 0)
    {
        void *first = nullptr;
        check(egm_ring_reserve(get(), count, timeout_ms, &first));
        return first;
    }

    void commit(std::size_t count) { check(egm_ring_commit(get(), count)); }

    records peek(std::size_t most, std::uint64_t timeout_ms = 0)
    {
        records found{nullptr, 0};
        check(egm_ring_peek(get(), most, timeout_ms, &found.first, &found.count));
        return found;
    }

    void release(std::size_t count) { check(egm_ring_release(get(), count)); }

    /// Whether the other side was destroyed, or its process has ended.
    bool is_alone() const
    {
        bool is = false;
        check(egm_ring_is_alone(get(), &is));
        return is;
    }

    egm_ring_info info() const
    {
        egm_ring_info found{};
        check(egm_ring_get_info(get(), &found));
        return found;
    }

    /// Sends the other side, which nobody has.
    void share(channel &to) { check(egm_ring_share(get(), to.get())); }

    /// Hands the side to kernels, which take the result.
    void *to_gpu()
    {
        void *ring = nullptr;
        check(egm_ring_to_gpu(get(), &ring));
        return ring;
    }

    void to_cpu() { check(egm_ring_to_cpu(get())); }

    egm_ring_side *get() const noexcept { return owned_.get(); }

private:
    using owner = detail::owner<egm_ring_side, egm_ring_destroy>;
    explicit ring_side(owner owned) : owned_(std::move(owned)) {}
    owner owned_;
};

/// A Unix socket that processes of this user connect to.
class listener {
public:
    explicit listener(const char *path) : owned_(detail::made<owner>([=](auto out) { return egm_listener_bind(path, out); })) {}

    channel accept(std::uint64_t timeout_ms)
    {
        return channel(detail::made<channel::owner>([&](auto out) { return egm_listener_accept(owned_.get(), timeout_ms, out); }));
    }

private:
    using owner = detail::owner<egm_listener, egm_listener_destroy>;
    owner owned_;
};

/// A connection to a server, from which memory is fetched by name, and which creates memory.
class client {
public:
    client(const driver &into, const char *address, const egm_client_options *options = nullptr)
        : owned_(detail::made<owner>([&](auto out) { return egm_client_connect(into.get(), address, options, out); }))
    {
    }

    buffer fetch(const char *name, call_site from = call_site::here()) const
    {
        egm_buffer *made = nullptr;
        from.tell();
        check(egm_client_fetch(owned_.get(), name, &made));
        return buffer(made);
    }

    /// Has the server create memory; fetch() it afterwards. The names must begin with peer_name() and a slash, unless the
    /// server is configured otherwise.
    egm_entry create(const char *name, std::uint64_t bytes, const egm_create_options *options = nullptr) const
    {
        egm_entry made{};
        check(egm_client_create(owned_.get(), name, bytes, options, &made));
        return made;
    }

    /// Deletes memory that this peer has created, and waits for its holders.
    void remove(const char *name, std::uint64_t timeout_ms = 10000) const
    {
        check(egm_client_delete(owned_.get(), name, timeout_ms));
    }

    /// Waits until there is memory under a name.
    egm_entry wait(const char *name, std::uint64_t timeout_ms = 60000) const
    {
        egm_entry found{};
        check(egm_client_wait(owned_.get(), name, timeout_ms, &found));
        return found;
    }

    /// The names that begin with a prefix, as JSON.
    std::string list(const char *prefix = "") const
    {
        return detail::text([&](auto out) { return egm_client_list_json(owned_.get(), prefix, out); });
    }

    /// The server's name for this client.
    std::string peer_name() const
    {
        return detail::text([&](auto out) { return egm_client_peer_name(owned_.get(), out); });
    }

private:
    using owner = detail::owner<egm_client, egm_client_destroy>;
    owner owned_;
};

} // namespace egm

#endif
