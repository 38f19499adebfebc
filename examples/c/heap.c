/*
 * Blocks of a heap: allocated in nanoseconds on the first GPU's node, written by the CPU, and freed once a stream's work
 * that uses them has run.
 *
 *     cc examples/c/heap.c $(pkg-config --cflags --libs egmem) -o heap
 *
 * Where there is no GPU, on a simulated machine.
 */
#include <egmem.h>
#include <stdio.h>
#include <stdlib.h>

/* Ends the program where a call has failed, and says why and what to do. */
static void check(egm_status status)
{
    if (status != EGM_OK) {
        fprintf(stderr, "%s: %s; %s\n", egm_status_name(status), egm_last_error_message(), egm_last_error_remedy());
        exit(1);
    }
}

int main(void)
{
    egm_driver *driver;
    if (egm_driver_open(&driver) != EGM_OK)
        check(egm_driver_simulated("gh200x4", &driver));
    egm_topology *topology;
    egm_gpu gpu;
    check(egm_topology_discover(driver, &topology));
    check(egm_topology_gpu(topology, 0, &gpu));

    egm_heap_options options = {
        .struct_size = sizeof options,
        .location = {EGM_LOCATION_HOST_NUMA, gpu.host_node},
        .limit = 1 << 30,
        .label = "examples/c/heap",
    };
    egm_heap *heap;
    check(egm_heap_create(driver, &options, &heap));
    egm_stream *stream;
    check(egm_stream_create(driver, gpu.ordinal, &stream));

    for (int step = 0; step < 1000; step++) {
        float *block;
        check(egm_heap_alloc(heap, 64 << 10, 256, (void **)&block));
        block[0] = (float)step; /* a kernel would get the same address, on this stream */
        check(egm_heap_free_after(heap, block, stream));
    }
    check(egm_stream_synchronize(stream));
    check(egm_heap_collect(heap, false));

    egm_heap_stats stats = {.struct_size = sizeof stats};
    check(egm_heap_get_stats(heap, &stats));
    printf("%llu blocks were allocated, %llu are in use; the heap has %llu MiB on node %d\n",
           (unsigned long long)stats.allocated_blocks, (unsigned long long)stats.live_blocks,
           (unsigned long long)stats.backed >> 20, gpu.host_node);

    char on_the_stack;
    if (egm_heap_free(heap, &on_the_stack) != EGM_OK)
        printf("refused: %s\n", egm_last_error_message());

    check(egm_stream_destroy(stream));
    check(egm_heap_destroy(heap));
    check(egm_topology_destroy(topology));
    check(egm_driver_destroy(driver));
    return 0;
}
