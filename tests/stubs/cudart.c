/* A libcudart on the stub libcuda: as the real one, it works in the context that is current, which
 * it finds through the driver. */
#include "stub.h"
#include <dlfcn.h>

typedef struct pool *Pool;
typedef struct stream *Stream;

static int current_device(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    int (*get)(void);
    *(void **)&get = driver ? dlsym(driver, "stub_current_device") : NULL;
    return get ? get() : -2;
}

static __thread int last_error;

int cudaGetLastError(void) {
    int code = last_error;
    last_error = 0;
    return stub_call("cudaGetLastError", " of=%d", code), code;
}

/* A context is current, or the runtime would make device 0's current for good. */
#define RUN(name, format, ...)                                                     \
    do {                                                                           \
        int device_ = current_device();                                            \
        if (device_ < 0) return 201;                                               \
        int code_ = stub_call(name, " gpu%d" format, device_ __VA_OPT__(,) __VA_ARGS__); \
        if (!code_) code_ = stub_setting("STUB_RUNTIME_CODE", 0);                  \
        if (code_) return last_error = code_;                                      \
    } while (0)

int cudaRuntimeGetVersion(int *version) {
    *version = stub_setting("STUB_RUNTIME_VERSION", 13000);
    return 0;
}
int cudaMemPoolCreate(Pool *pool, const PoolProps *p) {
    RUN("cudaMemPoolCreate",
        " type=%d handles=%d location=%d:%d win32=%p max=%zu usage=%d reserved=%d", p->allocType,
        p->handleTypes, p->location.type, p->location.id, p->win32SecurityAttributes, p->maxSize,
        p->usage, !stub_zero(p->reserved, sizeof p->reserved));
    *pool = (Pool)0x3000;
    return 0;
}
int cudaMemPoolDestroy(Pool pool) {
    RUN("cudaMemPoolDestroy", " pool=%p", (void *)pool);
    return 0;
}
int cudaMemPoolSetAttribute(Pool pool, int attribute, void *value) {
    RUN("cudaMemPoolSetAttribute", " pool=%p attribute=%d value=%llu", (void *)pool, attribute,
        attribute < 4 ? (unsigned long long)*(int *)value : *(unsigned long long *)value);
    return 0;
}
int cudaMemPoolGetAttribute(Pool pool, int attribute, void *value) {
    RUN("cudaMemPoolGetAttribute", " pool=%p attribute=%d", (void *)pool, attribute);
    if (attribute < 4) *(int *)value = 1;
    else *(uint64_t *)value = 77;
    return 0;
}
int cudaMemPoolTrimTo(Pool pool, size_t keep) {
    RUN("cudaMemPoolTrimTo", " pool=%p keep=%zu", (void *)pool, keep);
    return 0;
}
int cudaMemPoolSetAccess(Pool pool, const AccessDesc *desc, size_t count) {
    RUN("cudaMemPoolSetAccess", " pool=%p count=%zu first=%d:%d=%d", (void *)pool, count,
        desc[0].location.type, desc[0].location.id, desc[0].flags);
    return 0;
}
int cudaMemPoolGetAccess(unsigned *flags, Pool pool, Location *location) {
    RUN("cudaMemPoolGetAccess", " pool=%p %d:%d", (void *)pool, location->type, location->id);
    *flags = 3;
    return 0;
}
int cudaMemPoolExportToShareableHandle(void *out, Pool pool, unsigned type, unsigned flags) {
    RUN("cudaMemPoolExportToShareableHandle", " pool=%p type=%u flags=%u", (void *)pool, type, flags);
    *(int *)out = dup(1);
    return 0;
}
int cudaMemPoolImportFromShareableHandle(Pool *pool, void *handle, unsigned type, unsigned flags) {
    RUN("cudaMemPoolImportFromShareableHandle", " open=%d type=%u flags=%u",
        fcntl((int)(uintptr_t)handle, F_GETFD) != -1, type, flags);
    *pool = (Pool)0x3001;
    return 0;
}
int cudaMemPoolExportPointer(PoolPtrExportData *data, void *ptr) {
    RUN("cudaMemPoolExportPointer", " ptr=%p", ptr);
    memset(data, 9, sizeof *data);
    return 0;
}
int cudaMemPoolImportPointer(void **ptr, Pool pool, PoolPtrExportData *data) {
    RUN("cudaMemPoolImportPointer", " pool=%p first=%d last=%d", (void *)pool, data->reserved[0],
        data->reserved[63]);
    *ptr = (void *)0x40000;
    return 0;
}
int cudaMallocFromPoolAsync(void **ptr, size_t size, Pool pool, Stream stream) {
    RUN("cudaMallocFromPoolAsync", " size=%zu pool=%p stream=%p", size, (void *)pool, (void *)stream);
    *ptr = (void *)0x50000;
    return 0;
}
int cudaMallocAsync(void **ptr, size_t size, Stream stream) {
    RUN("cudaMallocAsync", " size=%zu stream=%p", size, (void *)stream);
    *ptr = (void *)0x60000;
    return 0;
}
int cudaFreeAsync(void *ptr, Stream stream) {
    RUN("cudaFreeAsync", " ptr=%p stream=%p", ptr, (void *)stream);
    return 0;
}
int cudaDeviceGetDefaultMemPool(Pool *pool, int device) {
    RUN("cudaDeviceGetDefaultMemPool", " device=%d", device);
    *pool = (Pool)0x3002;
    return 0;
}
int cudaDeviceGetMemPool(Pool *pool, int device) {
    RUN("cudaDeviceGetMemPool", " device=%d", device);
    *pool = (Pool)0x3003;
    return 0;
}
int cudaDeviceSetMemPool(int device, Pool pool) {
    RUN("cudaDeviceSetMemPool", " device=%d pool=%p", device, (void *)pool);
    return 0;
}
