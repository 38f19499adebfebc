/* Pools, and memory between two ends of a Unix socket. */
#define _DEFAULT_SOURCE /* mkdtemp */
#include <pthread.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static void pools(void)
{
    egm_driver *driver = simulated("gh200x4");
    egm_stream *stream, *second;
    OK(egm_stream_create(driver, 1, &stream));
    OK(egm_stream_create(driver, 1, &second));
    egm_pool *pool;
    int32_t gpus[] = {1, 2};
    egm_pool_options options = {sizeof options, {EGM_LOCATION_HOST_NUMA, 1}, gpus, 2, 0, UINT64_MAX, 0, 0, "pool"};
    OK(egm_pool_create(driver, &options, &pool));
    egm_buffer *buffer = NULL, *other = NULL;
    FAILS(EGM_INVALID_ARGUMENT, egm_pool_alloc(pool, 0, stream, &buffer));
    FAILS(EGM_INVALID_ARGUMENT, egm_pool_alloc(pool, 1, NULL, &buffer));
    OK(egm_pool_alloc(pool, 64 << 10, stream, &buffer));
    OK(egm_pool_alloc(pool, 64 << 10, stream, &other));
    OK(egm_buffer_write(buffer, 0, "pool", 5));
    int32_t access;
    egm_location gpu = {EGM_LOCATION_DEVICE, 3};
    OK(egm_buffer_access(buffer, gpu, &access));
    CHECK(access == EGM_ACCESS_NONE);
    OK(egm_buffer_use_on(buffer, second));
    egm_pool_stats stats;
    OK(egm_pool_get_stats(pool, &stats));
    CHECK(stats.used >= 128 << 10 && stats.reserved >= stats.used);
    egm_driver *stranger = simulated("gh200");
    egm_stream *foreign;
    OK(egm_stream_create(stranger, 0, &foreign));
    FAILS(EGM_INVALID_ARGUMENT, egm_buffer_free_on(buffer, foreign));
    OK(egm_stream_destroy(foreign));
    OK(egm_driver_destroy(stranger));
    OK(egm_buffer_free_on(buffer, second));
    OK(egm_pool_destroy(pool)); /* its buffers keep its memory */
    OK(egm_buffer_fill(other, 0, 64 << 10, 1));
    OK(egm_buffer_destroy(other));
    OK(egm_stream_destroy(stream));
    OK(egm_stream_destroy(second));
    options.flags = EGM_DEBUG;
    FAILS(EGM_INVALID_ARGUMENT, egm_pool_create(driver, &options, &pool));
    OK(egm_driver_destroy(driver));
}

struct end {
    egm_channel *channel;
    egm_driver *driver;
};

/* Receives a buffer and a block, writes to both, and confirms that it is done. */
static void *receive(void *argument)
{
    struct end *end = argument;
    char text[6];
    for (int i = 0; i < 2; i++) {
        egm_buffer *buffer;
        uint64_t size;
        OK(egm_channel_receive(end->channel, end->driver, &buffer));
        OK(egm_buffer_size(buffer, &size));
        CHECK(size == (i ? 3000 : 3 << 20));
        OK(egm_buffer_read(buffer, 16, text, sizeof text));
        CHECK(strcmp(text, "there") == 0);
        OK(egm_buffer_write(buffer, 16, "back!", 6));
        FAILS(EGM_INVALID_ARGUMENT, egm_channel_send(end->channel, buffer, EGM_ACCESS_READ));
        OK(egm_buffer_destroy(buffer));
    }
    return NULL;
}

static void channels(void)
{
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    egm_driver *driver = simulated("gh200");
    struct end far = {NULL, simulated("gh200")};
    egm_channel *channel;
    OK(egm_channel_from_fd(fds[0], &channel));
    OK(egm_channel_from_fd(fds[1], &far.channel));
    FAILS(EGM_INVALID_ARGUMENT, egm_channel_from_fd(-1, &channel));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, receive, &far) == 0);

    egm_buffer *buffer, *private_buffer;
    egm_buffer_options options = {sizeof options, {EGM_LOCATION_HOST_NUMA, 0}, 3 << 20, NULL, 0, 0, 0, EGM_SHAREABLE, NULL, 0, 0};
    OK(egm_buffer_create(driver, &options, &buffer));
    OK(egm_buffer_near(driver, 0, 4096, &private_buffer));
    CHECK(egm_channel_send(channel, private_buffer, EGM_ACCESS_READ) != EGM_OK);
    FAILS(EGM_INVALID_ARGUMENT, egm_channel_send(channel, buffer, 2));
    OK(egm_buffer_write(buffer, 16, "there", 6));
    OK(egm_channel_send(channel, buffer, EGM_ACCESS_READ_WRITE));

    egm_heap *heap = heap_with(driver, 64 << 20, EGM_SHAREABLE);
    char *block;
    OK(egm_heap_alloc(heap, 3000, 0, (void **)&block));
    memcpy(block + 16, "there", 6);
    FAILS(EGM_INVALID_ARGUMENT, egm_channel_send_block(channel, heap, block + 16, EGM_ACCESS_READ_WRITE));
    OK(egm_channel_send_block(channel, heap, block, EGM_ACCESS_READ_WRITE));
    CHECK(pthread_join(thread, NULL) == 0);

    char text[6];
    OK(egm_buffer_read(buffer, 16, text, sizeof text));
    CHECK(strcmp(text, "back!") == 0 && strcmp(block + 16, "back!") == 0);
    FAILS(EGM_STILL_HELD, egm_heap_destroy(heap));
    OK(egm_heap_free(heap, block));
    OK(egm_heap_destroy(heap));
    OK(egm_channel_set_timeout(channel, 20));
    FAILS(EGM_TIMED_OUT, egm_channel_receive(channel, driver, &private_buffer));
    FAILS(EGM_INVALID_ARGUMENT, egm_channel_set_timeout(channel, 0));
    OK(egm_channel_destroy(far.channel));
    FAILS(EGM_PEER_LOST, egm_channel_receive(channel, driver, &private_buffer));
    OK(egm_channel_destroy(channel));
    OK(egm_buffer_destroy(buffer));
    OK(egm_buffer_destroy(private_buffer));
    OK(egm_driver_destroy(driver));
    OK(egm_driver_destroy(far.driver));
}

/* The other process: its GPU work waits for this one's, and the other way, by events alone. */
static void importer(int fd, pid_t exporter)
{
    int status;
    egm_driver *driver = simulated("gh200");
    egm_channel *channel;
    egm_buffer *buffer;
    egm_event *theirs, *ours;
    egm_stream *stream;
    OK(egm_channel_from_fd(fd, &channel));
    OK(egm_channel_receive(channel, driver, &buffer));
    OK(egm_channel_receive_event(channel, driver, &theirs));
    OK(egm_event_create_interprocess(driver, 0, &ours));
    OK(egm_stream_create(driver, 0, &stream));
    OK(egm_stream_wait_event(stream, theirs));
    OK(egm_event_record(ours, stream));
    OK(egm_channel_send_event(channel, ours));
    OK(egm_event_destroy(ours)); /* kept for the other process */
    egm_event *none;
    FAILS(EGM_PEER_LOST, egm_channel_receive_event(channel, driver, &none));
    CHECK(waitpid(exporter, &status, 0) == exporter && status == 0);
    FAILS(EGM_SYSTEM, egm_stream_wait_event(stream, theirs));
    OK(egm_event_synchronize(theirs)); /* its work was done before */
    OK(egm_event_destroy(theirs));
    OK(egm_stream_destroy(stream));
    OK(egm_buffer_destroy(buffer));
    OK(egm_channel_destroy(channel));
    OK(egm_driver_destroy(driver));
}

/* Runs before any driver is opened: a child cannot use its parent's. */
static void events(void)
{
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    pid_t exporter = fork();
    if (exporter != 0) {
        close(fds[0]);
        importer(fds[1], exporter);
        return;
    }
    close(fds[1]);
    egm_driver *driver = simulated("gh200");
    egm_channel *channel;
    egm_buffer *buffer;
    egm_event *event, *plain, *theirs = NULL;
    egm_stream *stream;
    egm_buffer_options options = {sizeof options, {EGM_LOCATION_HOST_NUMA, 0}, 2 << 20, NULL, 0, 0, 0, EGM_SHAREABLE, NULL, 0, 0};
    OK(egm_channel_from_fd(fds[0], &channel));
    OK(egm_buffer_create(driver, &options, &buffer));
    OK(egm_stream_create(driver, 0, &stream));
    OK(egm_event_create(driver, 0, &plain));
    OK(egm_event_create_interprocess(driver, 0, &event));
    FAILS(EGM_INVALID_ARGUMENT, egm_channel_send_event(channel, plain));
    FAILS(EGM_INVALID_ARGUMENT, egm_channel_send_event(channel, NULL));
    OK(egm_channel_send(channel, buffer, EGM_ACCESS_READ_WRITE));
    OK(egm_channel_send_event(channel, event));
    OK(egm_event_record(event, stream));
    OK(egm_channel_receive_event(channel, driver, &theirs));
    OK(egm_stream_wait_event(stream, theirs));
    OK(egm_stream_synchronize(stream));
    _exit(0); /* as a process that is killed: nothing is destroyed */
}

static void listeners(void)
{
    char folder[] = "/tmp/egmem-c-XXXXXX", path[64];
    CHECK(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/socket", folder);
    egm_listener *listener;
    egm_channel *channel = NULL, *accepted;
    FAILS(EGM_UNREACHABLE, egm_channel_connect(path, &channel));
    OK(egm_listener_bind(path, &listener));
    FAILS(EGM_TIMED_OUT, egm_listener_accept(listener, 10, &accepted));
    OK(egm_channel_connect(path, &channel));
    OK(egm_listener_accept(listener, 10000, &accepted));
    OK(egm_channel_destroy(channel));
    OK(egm_channel_destroy(accepted));
    OK(egm_listener_destroy(listener));
    CHECK(access(path, F_OK) != 0);
    egm_client *client = NULL;
    egm_driver *driver = simulated("gh200");
    FAILS(EGM_INVALID_ARGUMENT, egm_client_connect(driver, "nowhere", NULL, &client));
    egm_client_options options = {sizeof options, "/no/ca", NULL, NULL, NULL, NULL, 0, 0, 0, NULL};
    FAILS(EGM_INVALID_ARGUMENT, egm_client_connect(driver, "unix:/no/socket", &options, &client));
    FAILS(EGM_UNREACHABLE, egm_client_connect(driver, "unix:/no/socket", NULL, &client));
    FAILS(EGM_INSECURE, egm_client_connect(driver, "tcp://192.0.2.1:7", NULL, &client));
    OK(egm_driver_destroy(driver));
    rmdir(folder);
}

int main(void)
{
    events();
    pools();
    channels();
    listeners();
    return 0;
}
