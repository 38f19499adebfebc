/* The part that all stub libraries share: a log of calls, and failures on demand.
 * The types are written from the CUDA documentation, not from the Rust code. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include <fcntl.h>
#include <unistd.h>

static pthread_mutex_t stub_lock = PTHREAD_MUTEX_INITIALIZER;
static char stub_text[1 << 16];
static size_t stub_length;
static struct { char name[64]; int code; } stub_failure;

/* The calls so far, one a line. */
const char *stub_log(void) { return stub_text; }

void stub_clear(void) {
    pthread_mutex_lock(&stub_lock);
    stub_length = 0;
    stub_text[0] = 0;
    pthread_mutex_unlock(&stub_lock);
}

/* From now on `name` does nothing and returns `code`. */
void stub_fail(const char *name, int code) {
    pthread_mutex_lock(&stub_lock);
    snprintf(stub_failure.name, sizeof stub_failure.name, "%s", name);
    stub_failure.code = code;
    pthread_mutex_unlock(&stub_lock);
}

/* Never comes back, where STUB_HANG says `where`. */
static void stub_hang(const char *where) {
    const char *value = getenv("STUB_HANG");
    if (!value || strcmp(value, where) != 0) return;
    dprintf(2, "the stub hangs: %s\n", where);
    for (;;) pause();
}

/* The process ends, or the library is given up. */
__attribute__((destructor)) static void stub_end(void) { stub_hang("at the end"); }

/* Logs a call; the code that it is to fail with, or 0. */
__attribute__((format(printf, 2, 3), unused))
static int stub_call(const char *name, const char *format, ...) {
    int code = 0;
    stub_hang(name);
    pthread_mutex_lock(&stub_lock);
    if (stub_length < sizeof stub_text - 512) {
        va_list arguments;
        va_start(arguments, format);
        stub_length += (size_t)snprintf(stub_text + stub_length, 64, "%s", name);
        stub_length += (size_t)vsnprintf(stub_text + stub_length, 400, format, arguments);
        stub_length += (size_t)snprintf(stub_text + stub_length, 2, "\n");
        va_end(arguments);
    }
    if (strcmp(stub_failure.name, name) == 0) code = stub_failure.code;
    pthread_mutex_unlock(&stub_lock);
    return code;
}

/* CALL("cuX", " size=%zu", size): logs, and returns where the call is to fail. */
#define CALL(name, ...)                                \
    do {                                               \
        int failure_ = stub_call(name, __VA_ARGS__);   \
        if (failure_) return failure_;                 \
    } while (0)

/* An integer from the environment. */
__attribute__((unused)) static int stub_setting(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

typedef struct {
    enum { location_invalid = 0, location_device = 1 } type;
    int id;
} Location;

typedef struct {
    Location location;
    enum { access_none = 0, access_read = 1, access_readwrite = 3 } flags;
} AccessDesc;

typedef struct {
    enum { pool_pinned = 1 } allocType;
    enum { pool_handle_none = 0, pool_handle_fabric = 8 } handleTypes;
    Location location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned short usage;
    unsigned char reserved[54];
} PoolProps;

typedef struct { unsigned char reserved[64]; } PoolPtrExportData;
typedef struct { unsigned char reserved[64]; } IpcEventHandle;

__attribute__((unused)) static int stub_zero(const unsigned char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i]) return 0;
    return 1;
}
