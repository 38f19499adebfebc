/* Mistakes: the status, a part of the message and a part of the remedy of each, "" where the message says what is valid. */
#include <unistd.h>

#include "check.h"

/* Words that a program in C does not know: Rust's, Python's, and options of the command line. */
static const char *const foreign[] = {"::", "(true)", " --", "`--", "=True", "egmem.simulated", "Options"};

static unsigned rows, wrong;

static void check_row(egm_status status, egm_status expected, const char *message, const char *remedy, const char *call,
                      int line)
{
    const char *said = egm_last_error_message(), *advised = egm_last_error_remedy();
    int right = status == expected && strstr(said, message) && (*remedy ? !!strstr(advised, remedy) : !*advised);
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        right = right && !strstr(said, foreign[i]) && !strstr(advised, foreign[i]);
    if (!right) {
        fprintf(stderr, "%s:%d: %s\n  is %s, not %s\n  says \"%s\", not \"%s\"\n  advises \"%s\", not \"%s\"\n", __FILE__, line,
                call, egm_status_name(status), egm_status_name(expected), said, message, advised, remedy);
        wrong++;
    }
    rows++;
}

/* A row of the table. */
#define ROW(call, expected, message, remedy) check_row(call, expected, message, remedy, #call, __LINE__)

static const egm_location node = {EGM_LOCATION_HOST_NUMA, 0};

static egm_buffer_options buffer_options(uint64_t bytes)
{
    egm_buffer_options options = {sizeof options, node, bytes, NULL, 0, 0, 0, 0, NULL, 0, 0};
    return options;
}

static void drivers(void)
{
    egm_driver *driver = NULL;
    egm_topology *topology = NULL;
    egm_gpu gpu;
    egm_node found;
    egm_stream *stream = NULL;
    egm_event *event = NULL;
    char *text;
    size_t count;
    ROW(egm_driver_simulated("gh300", &driver), EGM_INVALID_ARGUMENT, "gh300", "");
    ROW(egm_driver_simulated("{\"gpus\": 3}", &driver), EGM_INVALID_ARGUMENT, "integer `3`", "");
    ROW(egm_driver_simulated("\xff", &driver), EGM_INVALID_ARGUMENT, "UTF-8", "");
    ROW(egm_driver_simulated(NULL, &driver), EGM_INVALID_ARGUMENT, "null pointer", "");
    ROW(egm_driver_simulated("gh200", NULL), EGM_INVALID_ARGUMENT, "invalid out", "");
    if (egm_driver_open(&driver) != EGM_OK)
        ROW(egm_driver_open(&driver), EGM_NO_DRIVER, "no CUDA driver", "egm_driver_simulated");
    ROW(egm_driver_open(NULL), EGM_INVALID_ARGUMENT, "invalid out", "");
    driver = simulated("gh200x4");
    ROW(egm_topology_discover(NULL, &topology), EGM_INVALID_ARGUMENT, "invalid driver", "");
    OK(egm_topology_discover(driver, &topology));
    ROW(egm_topology_gpu(topology, 4, &gpu), EGM_NO_SUCH_GPU, "this machine has 4", "egmem topo");
    ROW(egm_topology_gpu(topology, -1, &gpu), EGM_NO_SUCH_GPU, "no GPU -1", "egmem topo");
    ROW(egm_topology_gpu(topology, 0, NULL), EGM_INVALID_ARGUMENT, "invalid out", "");
    ROW(egm_topology_gpu_count(NULL, &count), EGM_INVALID_ARGUMENT, "invalid topology", "");
    ROW(egm_topology_node_count(topology, NULL), EGM_INVALID_ARGUMENT, "invalid out", "");
    ROW(egm_topology_node(topology, 4, &found), EGM_INVALID_ARGUMENT, "no host node 4; valid: 0 to 3", "");
    ROW(egm_topology_json(NULL, &text), EGM_INVALID_ARGUMENT, "invalid topology", "");
    ROW(egm_capabilities_json(NULL, &text), EGM_INVALID_ARGUMENT, "invalid driver", "");
    ROW(egm_stream_create(driver, 9, &stream), EGM_NO_SUCH_GPU, "no GPU 9", "egmem topo");
    ROW(egm_stream_create(NULL, 0, &stream), EGM_INVALID_ARGUMENT, "invalid driver", "");
    ROW(egm_stream_borrow(driver, 9, NULL, &stream), EGM_NO_SUCH_GPU, "no GPU 9", "egmem topo");
    ROW(egm_stream_synchronize(NULL), EGM_INVALID_ARGUMENT, "invalid stream", "");
    ROW(egm_event_create(driver, 9, &event), EGM_NO_SUCH_GPU, "no GPU 9", "egmem topo");
    OK(egm_event_create(driver, 0, &event));
    ROW(egm_event_record(event, NULL), EGM_INVALID_ARGUMENT, "invalid stream", "");
    OK(egm_stream_create(driver, 1, &stream));
    ROW(egm_event_record(NULL, stream), EGM_INVALID_ARGUMENT, "invalid event", "");
    ROW(egm_event_record(event, stream), EGM_DRIVER_FAILED, "cuEventRecord failed", "check the arguments of the call");
    OK(egm_stream_destroy(stream));
    OK(egm_event_destroy(event));
    OK(egm_topology_destroy(topology));
    OK(egm_driver_destroy(driver));
}

static void buffers(void)
{
    egm_driver *driver = simulated("gh200x4");
    egm_buffer *buffer = NULL;
    egm_buffer_options options = buffer_options(0);
    char bytes[8] = {0};
    void *at;
    uint64_t size;
    int32_t access;
    ROW(egm_buffer_create(driver, NULL, &buffer), EGM_INVALID_ARGUMENT, "invalid options: it is a null pointer", "");
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_INVALID_ARGUMENT, "1 byte or more", "");
    options = buffer_options(4096);
    options.struct_size = 0;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_INVALID_ARGUMENT, "set it to the size of the structure", "");
    options = buffer_options(4096);
    options.location.id = 9;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_NO_SUCH_NODE, "no host NUMA node 9", "egmem topo");
    options.location.id = 4;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_NO_SUCH_NODE, "GPU 0's own memory", "egmem topo");
    options.location.kind = 7;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_INVALID_ARGUMENT, "EGM_LOCATION_DEVICE", "");
    options.location.kind = EGM_LOCATION_DEVICE;
    options.location.id = 9;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_NO_SUCH_GPU, "this machine has 4", "egmem topo");
    options = buffer_options(UINT64_MAX);
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_NODE_TOO_FULL, "16.00 EiB requested", "ask for less");
    options = buffer_options((uint64_t)1 << 50);
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_NODE_TOO_FULL, "1 PiB requested", "`EGM_OVERCOMMIT`");
    options.flags = EGM_OVERCOMMIT;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_OUT_OF_MEMORY, "out of memory: 1 PiB", "choose another node");
    options = buffer_options(4096);
    options.flags = EGM_DEBUG;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_INVALID_ARGUMENT, "the bits 0x20 mean nothing here", "");
    options = buffer_options(4096);
    options.handle_types = 2;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_INVALID_ARGUMENT, "the bits 0x2", "");
    options = buffer_options(4096);
    options.chunk = 4096;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_INVALID_ARGUMENT, "a multiple of 2 MiB", "");
    options = buffer_options(4096);
    options.backing = 4;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_INVALID_ARGUMENT, "4 is none of EGM_BACKING_DEFAULT, _DRIVER", "");
    options.backing = EGM_BACKING_REGISTERED;
    options.location = (egm_location){EGM_LOCATION_DEVICE, 0};
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_INVALID_ARGUMENT,
        "registered memory needs a host node; valid: driver, or auto to have it chosen", "");
    options = buffer_options(4096);
    options.label = "\xff";
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_INVALID_ARGUMENT, "invalid label: it is not UTF-8", "");
    egm_grant grants[] = {{{EGM_LOCATION_DEVICE, 9}, EGM_ACCESS_READ}, {{EGM_LOCATION_HOST, 0}, 2}};
    options = buffer_options(4096);
    options.grants = grants;
    options.grant_count = 1;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_NO_SUCH_GPU, "no GPU 9", "egmem topo");
    options.grant_count = 2;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_INVALID_ARGUMENT, "EGM_ACCESS_NONE, _READ", "");
    options.grants = NULL;
    ROW(egm_buffer_create(driver, &options, &buffer), EGM_INVALID_ARGUMENT, "invalid grants", "");
    ROW(egm_buffer_near(driver, 9, 4096, &buffer), EGM_NO_SUCH_GPU, "no GPU 9", "egmem topo");
    ROW(egm_buffer_near(driver, 0, 0, &buffer), EGM_INVALID_ARGUMENT, "1 byte or more", "");
    ROW(egm_buffer_near(NULL, 0, 4096, &buffer), EGM_INVALID_ARGUMENT, "invalid driver", "");

    OK(egm_buffer_near(driver, 0, 4096, &buffer));
    ROW(egm_buffer_ptr(NULL, &at), EGM_INVALID_ARGUMENT, "invalid buffer", "");
    ROW(egm_buffer_ptr(buffer, NULL), EGM_INVALID_ARGUMENT, "invalid out", "");
    ROW(egm_buffer_size(NULL, &size), EGM_INVALID_ARGUMENT, "invalid buffer", "");
    ROW(egm_buffer_backing(NULL, &access, NULL), EGM_INVALID_ARGUMENT, "invalid buffer", "");
    ROW(egm_buffer_backing(buffer, NULL, NULL), EGM_INVALID_ARGUMENT, "invalid out", "");
    ROW(egm_buffer_location(buffer, NULL), EGM_INVALID_ARGUMENT, "invalid out", "");
    egm_location gpu = {EGM_LOCATION_DEVICE, 9};
    ROW(egm_buffer_access(buffer, gpu, &access), EGM_NO_SUCH_GPU, "no GPU 9", "egmem topo");
    ROW(egm_buffer_write(buffer, 4090, bytes, 8), EGM_OUT_OF_RANGE, "8 bytes at offset 4090", "within the memory's size");
    ROW(egm_buffer_write(buffer, UINT64_MAX, bytes, 8), EGM_OUT_OF_RANGE, "outside memory of 4096", "within the memory's size");
    ROW(egm_buffer_write(buffer, 0, NULL, 8), EGM_INVALID_ARGUMENT, "invalid from", "");
    ROW(egm_buffer_read(buffer, 4097, bytes, 1), EGM_OUT_OF_RANGE, "at offset 4097", "within the memory's size");
    ROW(egm_buffer_read(buffer, 0, NULL, 1), EGM_INVALID_ARGUMENT, "invalid to", "");
    ROW(egm_buffer_fill(buffer, 0, 4097, 1), EGM_OUT_OF_RANGE, "4097 bytes at offset 0", "within the memory's size");
    egm_grant none = {{EGM_LOCATION_HOST, 0}, EGM_ACCESS_NONE};
    OK(egm_buffer_set_access(buffer, &none, 1));
    ROW(egm_buffer_write(buffer, 0, bytes, 8), EGM_NOT_ACCESSIBLE, "no access", "`egm_buffer_set_access`");
    ROW(egm_buffer_read(buffer, 0, bytes, 8), EGM_NOT_ACCESSIBLE, "no access", "`egm_buffer_set_access`");
    ROW(egm_buffer_set_access(buffer, NULL, 1), EGM_INVALID_ARGUMENT, "invalid grants", "");
    ROW(egm_buffer_set_access(NULL, &none, 1), EGM_INVALID_ARGUMENT, "invalid buffer", "");
    ROW(egm_buffer_use_on(buffer, NULL), EGM_INVALID_ARGUMENT, "invalid stream", "");
    egm_stream *stream;
    OK(egm_stream_create(driver, 0, &stream));
    ROW(egm_buffer_use_on(buffer, stream), EGM_INVALID_ARGUMENT, "pool", "");
    ROW(egm_buffer_free_on(buffer, stream), EGM_INVALID_ARGUMENT, "pool", "");
    ROW(egm_buffer_free_on(buffer, NULL), EGM_INVALID_ARGUMENT, "invalid stream", "");
    OK(egm_stream_destroy(stream));
    OK(egm_buffer_destroy(buffer));
    OK(egm_driver_destroy(driver));
}

static void heaps(void)
{
    egm_driver *driver = simulated("gh200"), *stranger = simulated("gh200");
    egm_heap *heap = NULL, *other;
    egm_heap_options options = {sizeof options, node, NULL, 0, 0, 0, 0, 0, 0, 0, 0, NULL, 0, 0};
    egm_heap_stats stats = {0};
    egm_stream *foreign_stream;
    void *block = NULL, *second = NULL;
    uint64_t given;
    size_t size;
    int32_t chosen;
    bool was;
    options.location.id = 9;
    ROW(egm_heap_create(driver, &options, &heap), EGM_NO_SUCH_NODE, "no host NUMA node 9", "egmem topo");
    options.location.id = 0;
    options.flags = EGM_READ_ONLY;
    ROW(egm_heap_create(driver, &options, &heap), EGM_INVALID_ARGUMENT, "the bits 0x80", "");
    options.flags = 0;
    options.limit = 4 << 20;
    options.reserve = 64 << 20;
    ROW(egm_heap_create(driver, &options, &heap), EGM_INVALID_ARGUMENT, "invalid reserve", "");
    options.reserve = 0;
    options.limit = (uint64_t)1 << 62;
    ROW(egm_heap_create(driver, &options, &heap), EGM_INVALID_ARGUMENT, "invalid limit", "");
    options.limit = 4 << 20;
    options.reserved = 1;
    ROW(egm_heap_create(driver, &options, &heap), EGM_INVALID_ARGUMENT, "invalid reserved", "");
    options.reserved = 0;
    options.backing = 4;
    ROW(egm_heap_create(driver, &options, &heap), EGM_INVALID_ARGUMENT, "4 is none of EGM_BACKING_DEFAULT, _DRIVER", "");
    options.backing = EGM_BACKING_REGISTERED;
    options.location = (egm_location){EGM_LOCATION_DEVICE, 0};
    ROW(egm_heap_create(driver, &options, &heap), EGM_INVALID_ARGUMENT,
        "registered memory needs a host node; valid: driver, or auto to have it chosen", "");
    ROW(egm_heap_create(driver, NULL, &heap), EGM_INVALID_ARGUMENT, "invalid options", "");
    heap = heap_with(driver, 8 << 20, 0);
    other = heap_with(driver, 8 << 20, 0);
    ROW(egm_heap_backing(NULL, &chosen, NULL), EGM_INVALID_ARGUMENT, "invalid heap", "");
    ROW(egm_heap_backing(heap, NULL, NULL), EGM_INVALID_ARGUMENT, "invalid out", "");
    ROW(egm_heap_alloc(heap, 0, 0, &block), EGM_INVALID_ARGUMENT, "1 byte or more", "");
    ROW(egm_heap_alloc(heap, 10, 3, &block), EGM_INVALID_ARGUMENT, "3 is not a power of two", "");
    ROW(egm_heap_alloc(heap, SIZE_MAX, 1, &block), EGM_INVALID_ARGUMENT, "size", "");
    ROW(egm_heap_alloc(heap, (size_t)1 << 50, 1, &block), EGM_INVALID_ARGUMENT, "at most", "");
    ROW(egm_heap_alloc(heap, 64 << 20, 1, &block), EGM_HEAP_FULL, "its limit does not allow that much", "a larger limit");
    ROW(egm_heap_alloc(NULL, 10, 1, &block), EGM_INVALID_ARGUMENT, "invalid heap", "");
    ROW(egm_heap_alloc(heap, 10, 1, NULL), EGM_INVALID_ARGUMENT, "invalid out", "");
    ROW(egm_heap_alloc_zeroed(heap, 0, 0, &block), EGM_INVALID_ARGUMENT, "1 byte or more", "");
    ROW(egm_heap_reserve(heap, (uint64_t)1 << 40), EGM_HEAP_FULL, "1 TiB", "a larger limit");
    OK(egm_heap_alloc(heap, 1000, 0, &block));
    OK(egm_heap_alloc(heap, 1000, 0, &second));
    ROW(egm_heap_free(other, block), EGM_INVALID_ARGUMENT, "no block", "");
    ROW(egm_heap_free(heap, (char *)block + 16), EGM_INVALID_ARGUMENT, "no block", "");
    ROW(egm_heap_free(heap, &size), EGM_INVALID_ARGUMENT, "no block", "");
    OK(egm_heap_free(heap, second));
    ROW(egm_heap_free(heap, second), EGM_INVALID_ARGUMENT, "no block", "");
    ROW(egm_heap_free(NULL, block), EGM_INVALID_ARGUMENT, "invalid heap", "");
    OK(egm_stream_create(stranger, 0, &foreign_stream));
    ROW(egm_heap_free_after(heap, block, foreign_stream), EGM_INVALID_ARGUMENT, "driver", "");
    ROW(egm_heap_free_after(heap, block, NULL), EGM_INVALID_ARGUMENT, "invalid stream", "");
    ROW(egm_heap_free_after_cuda_stream(heap, block, 9, NULL), EGM_NO_SUCH_GPU, "no GPU 9", "egmem topo");
    ROW(egm_heap_free_after_event(heap, block, NULL), EGM_INVALID_ARGUMENT, "invalid event", "");
    ROW(egm_heap_resize(heap, &size, 10, &was), EGM_INVALID_ARGUMENT, "no block", "");
    ROW(egm_heap_resize(heap, block, 10, NULL), EGM_INVALID_ARGUMENT, "invalid out", "");
    ROW(egm_heap_usable_size(heap, &size, &size), EGM_INVALID_ARGUMENT, "no block", "");
    ROW(egm_heap_trim(NULL, 0, &given), EGM_INVALID_ARGUMENT, "invalid heap", "");
    ROW(egm_heap_collect(NULL, true), EGM_INVALID_ARGUMENT, "invalid heap", "");
    ROW(egm_heap_get_stats(heap, &stats), EGM_INVALID_ARGUMENT, "struct_size", "");
    ROW(egm_heap_get_stats(heap, NULL), EGM_INVALID_ARGUMENT, "null pointer", "");
    ROW(egm_heap_check(heap), EGM_INVALID_ARGUMENT, "without debug mode", "");
    ROW(egm_heap_destroy(heap), EGM_STILL_HELD, "1 of its blocks", "free the blocks with egm_heap_free");
    OK(egm_heap_free(heap, block));
    OK(egm_heap_destroy(heap));
    OK(egm_heap_destroy(other));
    OK(egm_stream_destroy(foreign_stream));

    OK(egm_driver_destroy(driver));
    OK(egm_driver_destroy(stranger));
}

static void pools(void)
{
    egm_driver *driver = simulated("gh200x4"), *stranger = simulated("gh200");
    egm_pool *pool = NULL;
    egm_stream *stream, *foreign_stream;
    egm_buffer *buffer = NULL;
    egm_pool_stats stats;
    int32_t gpus[] = {9};
    egm_pool_options options = {sizeof options, {EGM_LOCATION_HOST_NUMA, 9}, NULL, 0, 0, 0, 0, 0, NULL};
    OK(egm_stream_create(driver, 0, &stream));
    OK(egm_stream_create(stranger, 0, &foreign_stream));
    ROW(egm_pool_create(driver, &options, &pool), EGM_NO_SUCH_NODE, "no host NUMA node 9", "egmem topo");
    options.location.id = 0;
    options.gpus = gpus;
    options.gpu_count = 1;
    ROW(egm_pool_create(driver, &options, &pool), EGM_NO_SUCH_GPU, "no GPU 9", "egmem topo");
    options.gpus = NULL;
    ROW(egm_pool_create(driver, &options, &pool), EGM_INVALID_ARGUMENT, "invalid gpus", "");
    options.gpu_count = 0;
    options.flags = EGM_DEBUG;
    ROW(egm_pool_create(driver, &options, &pool), EGM_INVALID_ARGUMENT, "mean nothing here", "");
    options.flags = 0;
    OK(egm_pool_create(driver, &options, &pool));
    ROW(egm_pool_alloc(pool, 0, stream, &buffer), EGM_INVALID_ARGUMENT, "1 byte or more", "");
    ROW(egm_pool_alloc(pool, (uint64_t)1 << 50, stream, &buffer), EGM_NODE_TOO_FULL, "1 PiB", "`EGM_OVERCOMMIT`");
    ROW(egm_pool_alloc(pool, 10, NULL, &buffer), EGM_INVALID_ARGUMENT, "invalid stream", "");
    ROW(egm_pool_alloc(pool, 10, foreign_stream, &buffer), EGM_INVALID_ARGUMENT, "driver", "");
    ROW(egm_pool_alloc(NULL, 10, stream, &buffer), EGM_INVALID_ARGUMENT, "invalid pool", "");
    ROW(egm_pool_get_stats(pool, NULL), EGM_INVALID_ARGUMENT, "invalid out", "");
    ROW(egm_pool_get_stats(NULL, &stats), EGM_INVALID_ARGUMENT, "invalid pool", "");
    ROW(egm_pool_trim(NULL, 0), EGM_INVALID_ARGUMENT, "invalid pool", "");
    OK(egm_pool_alloc(pool, 10, stream, &buffer));
    ROW(egm_buffer_free_on(buffer, foreign_stream), EGM_INVALID_ARGUMENT, "driver", "");
    ROW(egm_buffer_use_on(buffer, foreign_stream), EGM_INVALID_ARGUMENT, "driver", "");
    egm_grant grant = {{EGM_LOCATION_HOST, 0}, EGM_ACCESS_READ};
    ROW(egm_buffer_set_access(buffer, &grant, 1), EGM_INVALID_ARGUMENT, "invalid buffer", "");
    OK(egm_buffer_destroy(buffer));
    OK(egm_pool_destroy(pool));
    OK(egm_stream_destroy(stream));
    OK(egm_stream_destroy(foreign_stream));
    OK(egm_driver_destroy(driver));
    OK(egm_driver_destroy(stranger));
}

static void others(void)
{
    egm_driver *driver = simulated("gh200");
    egm_channel *channel = NULL;
    egm_listener *listener = NULL;
    egm_client *client = NULL;
    egm_buffer *buffer = NULL;
    egm_entry entry;
    char *text;
    ROW(egm_listener_bind(NULL, &listener), EGM_INVALID_ARGUMENT, "invalid path", "");
    ROW(egm_listener_bind("/no/such/folder/socket", &listener), EGM_SYSTEM, "/no/such/folder", "does not exist");
    ROW(egm_listener_accept(NULL, 1, &channel), EGM_INVALID_ARGUMENT, "invalid listener", "");
    ROW(egm_channel_connect("/no/such/socket", &channel), EGM_UNREACHABLE, "/no/such/socket", "no socket is there");
    ROW(egm_channel_connect(NULL, &channel), EGM_INVALID_ARGUMENT, "invalid path", "");
    ROW(egm_channel_from_fd(-1, &channel), EGM_INVALID_ARGUMENT, "-1", "");
    ROW(egm_channel_receive(NULL, driver, &buffer), EGM_INVALID_ARGUMENT, "invalid channel", "");
    ROW(egm_client_connect(driver, "nowhere", NULL, &client), EGM_INVALID_ARGUMENT, "unix:/path", "");
    ROW(egm_client_connect(driver, "unix:/no/socket", NULL, &client), EGM_UNREACHABLE, "/no/socket", "no socket is there");
    ROW(egm_client_connect(driver, "tcp://192.0.2.1:7", NULL, &client), EGM_INSECURE, "192.0.2.1:7", "`EGM_PLAIN_ANYWHERE`");
    egm_client_options options = {sizeof options, "/no/ca", NULL, NULL, NULL, NULL, 0, 0, 0, NULL};
    ROW(egm_client_connect(driver, "unix:/no", &options, &client), EGM_INVALID_ARGUMENT, "ca, cert and key go together", "");
    options.cert = options.key = "/no/file";
    ROW(egm_client_connect(driver, "unix:/no", &options, &client), EGM_TLS, "/no/", "path");
    options.flags = EGM_DEBUG;
    options.ca = options.cert = options.key = NULL;
    ROW(egm_client_connect(driver, "unix:/no", &options, &client), EGM_INVALID_ARGUMENT, "mean nothing here", "");
    options.flags = 0;
    options.expect_owner = "no owner";
    ROW(egm_client_connect(driver, "unix:/no", &options, &client), EGM_INVALID_ARGUMENT, "DNS name", "");
    ROW(egm_client_connect(NULL, "unix:/no", NULL, &client), EGM_INVALID_ARGUMENT, "invalid driver", "");
    ROW(egm_client_fetch(NULL, "name", &buffer), EGM_INVALID_ARGUMENT, "invalid client", "");
    ROW(egm_client_create(NULL, "name", 1, NULL, &entry), EGM_INVALID_ARGUMENT, "invalid client", "");
    ROW(egm_client_delete(NULL, "name", 1), EGM_INVALID_ARGUMENT, "invalid client", "");
    ROW(egm_client_wait(NULL, "name", 1, &entry), EGM_INVALID_ARGUMENT, "invalid client", "");
    ROW(egm_client_list_json(NULL, "", &text), EGM_INVALID_ARGUMENT, "invalid client", "");
    ROW(egm_client_peer_name(NULL, &text), EGM_INVALID_ARGUMENT, "invalid client", "");
    OK(egm_driver_destroy(driver));
}

int main(void)
{
    drivers();
    buffers();
    heaps();
    pools();
    others();
    printf("%u mistakes, %u of them wrong\n", rows, wrong);
    return wrong != 0;
}
