/* Checks for the tests in C and C++. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "egmem.h"

/* Ends the test unless the condition holds. */
#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                   \
            exit(1);                                                                                                  \
        }                                                                                                             \
    } while (0)

/* Ends the test unless the call succeeds. */
#define OK(call) check_status(call, EGM_OK, #call, __FILE__, __LINE__)

/* Ends the test unless the call fails with this status, a message and, except for an argument, a remedy. */
#define FAILS(expected, call) check_status(call, expected, #call, __FILE__, __LINE__)

static inline void check_status(egm_status status, egm_status expected, const char *call, const char *file, int line)
{
    if (status != expected) {
        fprintf(stderr, "%s:%d: %s returned %s, not %s: %s; %s\n", file, line, call, egm_status_name(status),
                egm_status_name(expected), egm_last_error_message(), egm_last_error_remedy());
        exit(1);
    }
    if (expected != EGM_OK &&
        (!*egm_last_error_message() || (!*egm_last_error_remedy() && status != EGM_INVALID_ARGUMENT))) {
        fprintf(stderr, "%s:%d: %s left no message\n", file, line, call);
        exit(1);
    }
}

static inline egm_driver *simulated(const char *machine)
{
    egm_driver *driver = NULL;
    OK(egm_driver_simulated(machine, &driver));
    return driver;
}

static inline egm_heap *heap_with(const egm_driver *driver, uint64_t limit, uint32_t flags)
{
    egm_heap *heap = NULL;
    egm_heap_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.location.kind = EGM_LOCATION_HOST_NUMA;
    options.limit = limit;
    options.flags = flags;
    OK(egm_heap_create(driver, &options, &heap));
    return heap;
}

#endif
