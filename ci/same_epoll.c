// ThreadSanitizer, preloaded: the standard library duplicates an fd by fcntl, which ThreadSanitizer does not look at, so that it
// takes the duplicate for another file. mio registers at a duplicate of the epoll fd that it waits at: what one thread
// wrote before it registered then looks like a race with the one that waits. dup tells it that both are one.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>

int fcntl(int fd, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (command != F_DUPFD_CLOEXEC)
        return fcntl64(fd, command, argument);
    int copy = dup(fd);
    if (copy != -1)
        fcntl64(copy, F_SETFD, FD_CLOEXEC);
    return copy;
}
