/* A queue between two processes: the child pushes records, the parent takes them, and learns at once that the child is gone.
 *     cc examples/c/ring.c $(pkg-config --cflags --libs egmem) -o ring
 */
#include <egmem.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void check(egm_status status)
{
    if (status != EGM_OK)
        fprintf(stderr, "%s\n", egm_last_error_message()), exit(1);
}

static egm_driver *open_driver(void)
{
    egm_driver *driver;
    if (egm_driver_open(&driver) != EGM_OK) /* no GPU: each process simulates a machine */
        check(egm_driver_simulated("gh200", &driver));
    return driver;
}

int main(void)
{
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds)) return 1;
    pid_t child = fork(); /* before a driver is opened: a child cannot use its parent's */
    close(fds[child ? 1 : 0]);
    egm_driver *driver = open_driver();
    egm_channel *channel;
    egm_ring_side *side;
    bool alone;
    check(egm_channel_from_fd(fds[child ? 0 : 1], &channel));
    if (child == 0) {
        check(egm_ring_receive(channel, driver, EGM_RING_PRODUCER, &side));
        for (double n = 0; n < 100000; n++) {
            void *room; /* for the CPU and for GPUs; kernels push with egmem_ring.cuh */
            do {
                check(egm_ring_is_alone(side, &alone));
                check(egm_ring_reserve(side, 1, 10000, &room));
            } while (!room && !alone);
            if (!room) _exit(1); /* nobody takes records any more */
            double *record = room;
            record[0] = n, record[1] = n * n;
            check(egm_ring_commit(side, 1));
        }
        _exit(0); /* as if it had been killed: nothing is given back */
    }
    egm_ring_options options = {.struct_size = sizeof options, .location = {EGM_LOCATION_HOST_NUMA, 0},
                                .record_bytes = 2 * sizeof(double), .records = 1000, .flags = EGM_SHAREABLE};
    check(egm_ring_create(driver, &options, NULL, &side)); /* the producer's side is for the child */
    check(egm_ring_share(side, channel));
    size_t count, taken = 0;
    double sum = 0;
    do {
        const void *found;
        check(egm_ring_is_alone(side, &alone)); /* first: records that were committed before are still there */
        check(egm_ring_peek(side, 1000, 10000, &found, &count));
        const double *records = found;
        for (size_t i = 0; i < count; i++)
            sum += records[2 * i];
        check(egm_ring_release(side, count));
        taken += count;
    } while (!alone || count > 0);
    printf("%zu records, sum %.0f, and the child is gone\n", taken, sum);
    return waitpid(child, NULL, 0) != child || sum != 99999.0 * 50000 || egm_ring_destroy(side) != EGM_OK;
}
