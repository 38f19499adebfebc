/*
 * Two processes use one buffer: the parent shares it over a Unix socket, the child writes into it.
 *
 *     cc examples/c/share.c $(pkg-config --cflags --libs egmem) -o share
 *
 * On the first GPU's node; where there is no GPU, each process simulates a machine, and the memory is shared all the same.
 */
#include <egmem.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void check(egm_status status)
{
    if (status != EGM_OK) {
        fprintf(stderr, "%s: %s; %s\n", egm_status_name(status), egm_last_error_message(), egm_last_error_remedy());
        exit(1);
    }
}

static egm_driver *open_driver(void)
{
    egm_driver *driver;
    if (egm_driver_open(&driver) != EGM_OK)
        check(egm_driver_simulated("gh200", &driver));
    return driver;
}

static void child(int fd)
{
    egm_driver *driver = open_driver();
    egm_channel *channel;
    egm_buffer *buffer;
    check(egm_channel_from_fd(fd, &channel));
    check(egm_channel_receive(channel, driver, &buffer));
    check(egm_buffer_write(buffer, 0, "written by the child", 21));
    check(egm_buffer_destroy(buffer));
    check(egm_channel_destroy(channel));
    check(egm_driver_destroy(driver));
}

int main(void)
{
    int fds[2], status;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds))
        return perror("socketpair"), 1;
    pid_t pid = fork(); /* before a driver is opened: a child cannot use its parent's */
    if (pid == 0) {
        close(fds[0]);
        child(fds[1]);
        return 0;
    }
    close(fds[1]);
    egm_driver *driver = open_driver();
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
    egm_buffer *buffer;
    egm_channel *channel;
    check(egm_buffer_create(driver, &options, &buffer));
    check(egm_channel_from_fd(fds[0], &channel));
    check(egm_channel_send(channel, buffer, EGM_ACCESS_READ_WRITE));
    if (waitpid(pid, &status, 0) != pid || status != 0)
        return 1;

    char text[21];
    check(egm_buffer_read(buffer, 0, text, sizeof text));
    printf("the buffer has: %s\n", text);
    check(egm_channel_destroy(channel));
    check(egm_buffer_destroy(buffer));
    check(egm_topology_destroy(topology));
    check(egm_driver_destroy(driver));
    return strcmp(text, "written by the child") != 0;
}
