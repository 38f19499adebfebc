/*
 * The ranks of an MPI program map each other's memory.
 *
 *     mpicc examples/c/group.c $(pkg-config --cflags --libs egmem) -o group
 *     mpirun -n 4 ./group
 *
 * On the first GPU's node; where there is no GPU, each process simulates a machine, and the memory is shared all the same.
 */
#include <egmem.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static void check(egm_status status)
{
    if (status != EGM_OK) {
        fprintf(stderr, "%s: %s; %s\n", egm_status_name(status), egm_last_error_message(), egm_last_error_remedy());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static int32_t all_gather(void *communicator, const void *own, void *all, size_t bytes)
{
    int count = (int)bytes; /* a few KiB */
    return MPI_Allgather(own, count, MPI_BYTE, all, count, MPI_BYTE, *(MPI_Comm *)communicator);
}

int main(int argc, char **argv)
{
    int rank, size;
    MPI_Comm communicator = MPI_COMM_WORLD;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(communicator, &rank);
    MPI_Comm_size(communicator, &size);

    egm_driver *driver;
    if (egm_driver_open(&driver) != EGM_OK)
        check(egm_driver_simulated("gh200", &driver));
    egm_topology *topology;
    egm_gpu gpu;
    check(egm_topology_discover(driver, &topology));
    check(egm_topology_gpu(topology, 0, &gpu));
    egm_buffer_options options = {
        .struct_size = sizeof options,
        .location = {EGM_LOCATION_HOST_NUMA, gpu.host_node},
        .bytes = 2 << 20,
        .flags = EGM_SHAREABLE,
    };
    egm_buffer *own;
    check(egm_buffer_create(driver, &options, &own));

    egm_ranks ranks = {.rank = rank, .size = size, .all_gather = all_gather, .context = &communicator};
    egm_buffer **memories = calloc(size, sizeof *memories);
    if (memories == NULL)
        MPI_Abort(communicator, 1);
    check(egm_group_gather(driver, own, &ranks, memories));

    /* Each rank leaves its mark in all memories. */
    for (int other = 0; other < size; other++)
        if (other != rank)
            check(egm_buffer_write(memories[other], rank * sizeof rank, &rank, sizeof rank));
    MPI_Barrier(communicator); /* no rank reads before all have written */
    for (int other = 0; other < size; other++) {
        int found;
        check(egm_buffer_read(own, other * sizeof found, &found, sizeof found));
        if (other != rank && found != other)
            MPI_Abort(communicator, 1);
    }
    printf("rank %d of %d mapped the others' memory\n", rank, size);

    for (int other = 0; other < size; other++)
        check(egm_buffer_destroy(memories[other]));
    free(memories);
    check(egm_buffer_destroy(own));
    check(egm_topology_destroy(topology));
    check(egm_driver_destroy(driver));
    MPI_Finalize();
    return 0;
}
