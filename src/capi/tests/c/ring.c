/* Rings, within a process and between two, one of which is killed. */
#define _DEFAULT_SOURCE
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define LATER 600000

static egm_ring_options options(uint64_t records, uint32_t flags)
{
    egm_ring_options options = {sizeof options, {EGM_LOCATION_HOST_NUMA, 0}, 24, records, NULL, 0, flags, "ring"};
    return options;
}

/* Commits `count` records, which begin with `first`, `first + 1`, … */
static void push(egm_ring_side *side, uint64_t first, size_t count)
{
    uint64_t *room = NULL;
    OK(egm_ring_reserve(side, count, LATER, (void **)&room));
    CHECK(room);
    for (size_t i = 0; i < count; i++)
        room[3 * i] = first + i, room[3 * i + 2] = ~(first + i);
    OK(egm_ring_commit(side, count));
}

/* Takes a record. */
static void pop(egm_ring_side *side, uint64_t expected)
{
    const uint64_t *found;
    size_t count;
    OK(egm_ring_peek(side, 1, LATER, (const void **)&found, &count));
    CHECK(count == 1 && found[0] == expected && found[2] == ~expected);
    OK(egm_ring_release(side, 1));
}

static void one_process(void)
{
    egm_driver *driver = simulated("gh200");
    egm_ring_options wrong = options(4, EGM_DEBUG), right = options(4, 0);
    egm_ring_side *producer = NULL, *consumer = NULL;
    FAILS(EGM_INVALID_ARGUMENT, egm_ring_create(driver, &wrong, &producer, &consumer));
    wrong = options(4, 0), wrong.record_bytes = 0;
    FAILS(EGM_INVALID_ARGUMENT, egm_ring_create(driver, &wrong, &producer, &consumer));
    OK(egm_ring_create(driver, &right, &producer, &consumer));
    void *room;
    const void *found;
    size_t count;
    bool alone;
    push(producer, 1, 3);
    OK(egm_ring_reserve(producer, 2, 1, &room));
    CHECK(!room);
    FAILS(EGM_INVALID_ARGUMENT, egm_ring_reserve(producer, 5, 0, &room));
    FAILS(EGM_INVALID_ARGUMENT, egm_ring_commit(producer, 2));
    FAILS(EGM_INVALID_ARGUMENT, egm_ring_peek(producer, 1, 0, &found, &count));
    FAILS(EGM_INVALID_ARGUMENT, egm_ring_reserve(consumer, 1, 0, &room));
    FAILS(EGM_INVALID_ARGUMENT, egm_ring_release(consumer, 4));
    size_t both = 0; /* one place for two results: one of them overwrites the other */
    OK(egm_ring_peek(consumer, 2, 0, (const void **)&both, &both));
    CHECK(both == 2);
    pop(consumer, 1);
    egm_ring_info info;
    OK(egm_ring_get_info(producer, &info));
    CHECK(info.record_bytes == 24 && info.records == 4 && info.count == 3);
    void *ring = NULL, *others = NULL;
    OK(egm_ring_to_gpu(consumer, &ring));
    OK(egm_ring_to_gpu(producer, &others));
    CHECK(ring && ring == others);
    FAILS(EGM_INVALID_ARGUMENT, egm_ring_peek(consumer, 1, 0, &found, &count));
    OK(egm_ring_to_cpu(consumer));
    OK(egm_ring_to_cpu(producer));
    OK(egm_ring_is_alone(consumer, &alone));
    CHECK(!alone);
    OK(egm_ring_destroy(producer));
    OK(egm_ring_is_alone(consumer, &alone));
    CHECK(alone);
    pop(consumer, 2);
    pop(consumer, 3);
    OK(egm_ring_peek(consumer, 9, LATER, &found, &count)); /* the producer is gone: no wait */
    CHECK(count == 0);
    OK(egm_ring_destroy(consumer));
    OK(egm_ring_destroy(NULL));
    OK(egm_driver_destroy(driver));
}

/* The CPU cannot have a side of a ring in a GPU's memory; the GPU keeps it. */
static void on_a_gpu(void)
{
    egm_driver *driver = simulated("gh200");
    egm_ring_options here = options(4, 0);
    egm_ring_side *producer = NULL, *consumer = NULL;
    here.location = (egm_location){EGM_LOCATION_DEVICE, 0};
    OK(egm_ring_create(driver, &here, &producer, &consumer));
    void *ring = NULL;
    OK(egm_ring_to_gpu(producer, &ring));
    for (int i = 0; i < 2; i++)
        FAILS(EGM_NOT_ACCESSIBLE, egm_ring_to_cpu(producer));
    OK(egm_ring_to_gpu(producer, &ring));
    OK(egm_ring_destroy(producer));
    OK(egm_ring_destroy(consumer));
    OK(egm_driver_destroy(driver));
}

/* Pushes records until it is killed. */
static void produce(int fd)
{
    egm_driver *driver = simulated("gh200");
    egm_channel *channel;
    egm_ring_side *side;
    egm_ring_info info;
    OK(egm_channel_from_fd(fd, &channel));
    FAILS(EGM_INVALID_ARGUMENT, egm_ring_receive(channel, driver, 3, &side));
    OK(egm_ring_receive(channel, driver, EGM_RING_PRODUCER, &side));
    OK(egm_ring_get_info(side, &info));
    for (uint64_t next = info.count;; next += 2)
        push(side, next, 2);
}

/* Two producers, one after the other: each is killed, and the next goes on. */
static void two_processes(void)
{
    egm_driver *driver = NULL;
    egm_ring_side *consumer = NULL;
    uint64_t next = 0;
    for (int i = 0; i < 2; i++) {
        int fds[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            close(fds[0]);
            produce(fds[1]);
        }
        close(fds[1]);
        if (!driver) {
            egm_ring_options shareable = options(100, EGM_SHAREABLE);
            driver = simulated("gh200");
            OK(egm_ring_create(driver, &shareable, NULL, &consumer));
        }
        egm_channel *channel;
        OK(egm_channel_from_fd(fds[0], &channel));
        OK(egm_ring_share(consumer, channel));
        FAILS(EGM_STILL_HELD, egm_ring_share(consumer, channel));
        for (int n = 0; n < 1000; n++)
            pop(consumer, next++);
        CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
        for (;;) {
            const void *found;
            size_t count;
            OK(egm_ring_peek(consumer, 1, LATER, &found, &count));
            if (!count)
                break;
            pop(consumer, next++);
        }
        bool alone;
        OK(egm_ring_is_alone(consumer, &alone));
        CHECK(alone && next % 2 == 0); /* whole batches */
        OK(egm_channel_destroy(channel));
    }
    OK(egm_ring_destroy(consumer));
    OK(egm_driver_destroy(driver));
}

int main(void)
{
    two_processes(); /* first: it forks */
    one_process();
    on_a_gpu();
    return 0;
}
