/* The rest of the stub libcuda: allocators, pools, streams, events and launches. */

int cuMemAlloc_v2(DevicePtr *ptr, size_t size) {
    IN_CONTEXT("cuMemAlloc_v2", " size=%zu", size);
    *ptr = 0x10000;
    return 0;
}
int cuMemFree_v2(DevicePtr ptr) {
    IN_CONTEXT("cuMemFree_v2", " ptr=%#llx", (unsigned long long)ptr);
    return 0;
}
int cuMemHostAlloc(void **ptr, size_t size, unsigned flags) {
    IN_CONTEXT("cuMemHostAlloc", " size=%zu flags=%u", size, flags);
    *ptr = (void *)0x20000;
    return 0;
}
int cuMemHostRegister_v2(void *ptr, size_t size, unsigned flags) {
    IN_CONTEXT("cuMemHostRegister_v2", " ptr=%p size=%zu flags=%u", ptr, size, flags);
    return 0;
}
int cuMemHostUnregister(void *ptr) {
    IN_CONTEXT("cuMemHostUnregister", " ptr=%p", ptr);
    return 0;
}
int cuMemHostGetDevicePointer_v2(DevicePtr *device, void *ptr, unsigned flags) {
    IN_CONTEXT("cuMemHostGetDevicePointer_v2", " ptr=%p flags=%u", ptr, flags);
    /* Another address, so that a test sees whose it gets, unless it is to be the CPU's. */
    *device = (DevicePtr)(uintptr_t)ptr + (getenv("STUB_SAME_POINTER") ? 0 : 1);
    return 0;
}
int cuMemAllocManaged(DevicePtr *ptr, size_t size, unsigned flags) {
    IN_CONTEXT("cuMemAllocManaged", " size=%zu flags=%u", size, flags);
    *ptr = 0x30000;
    return 0;
}
int cuMemFreeHost(void *ptr) {
    IN_CONTEXT("cuMemFreeHost", " ptr=%p", ptr);
    return 0;
}

typedef struct pool *Pool;
typedef struct stream *Stream;
typedef struct event *Event;

int cuMemPoolCreate(Pool *pool, const PoolProps *p) {
    CALL("cuMemPoolCreate", " type=%d handles=%d location=%d:%d win32=%p max=%zu usage=%d reserved=%d",
         p->allocType, p->handleTypes, p->location.type, p->location.id, p->win32SecurityAttributes,
         p->maxSize, p->usage, !stub_zero(p->reserved, sizeof p->reserved));
    *pool = (Pool)0x3000;
    return 0;
}
int cuMemPoolDestroy(Pool pool) {
    CALL("cuMemPoolDestroy", " pool=%p", (void *)pool);
    return 0;
}
int cuMemPoolSetAttribute(Pool pool, int attribute, void *value) {
    CALL("cuMemPoolSetAttribute", " pool=%p attribute=%d value=%llu", (void *)pool, attribute,
         attribute < 4 ? (unsigned long long)*(int *)value : *(unsigned long long *)value);
    return 0;
}
int cuMemPoolGetAttribute(Pool pool, int attribute, void *value) {
    CALL("cuMemPoolGetAttribute", " pool=%p attribute=%d", (void *)pool, attribute);
    if (attribute < 4) *(int *)value = 1;
    else *(uint64_t *)value = 0xffffffffffffffff;
    return 0;
}
int cuMemPoolTrimTo(Pool pool, size_t keep) {
    CALL("cuMemPoolTrimTo", " pool=%p keep=%zu", (void *)pool, keep);
    return 0;
}
int cuMemPoolSetAccess(Pool pool, const AccessDesc *desc, size_t count) {
    CALL("cuMemPoolSetAccess", " pool=%p count=%zu first=%d:%d=%d last=%d:%d=%d", (void *)pool, count,
         desc[0].location.type, desc[0].location.id, desc[0].flags, desc[count - 1].location.type,
         desc[count - 1].location.id, desc[count - 1].flags);
    return 0;
}
int cuMemPoolGetAccess(unsigned *flags, Pool pool, Location *location) {
    CALL("cuMemPoolGetAccess", " pool=%p %d:%d", (void *)pool, location->type, location->id);
    *flags = 1;
    return 0;
}
int cuMemPoolExportToShareableHandle(void *out, Pool pool, unsigned type, unsigned long long flags) {
    CALL("cuMemPoolExportToShareableHandle", " pool=%p type=%u flags=%llu", (void *)pool, type, flags);
    if (type == 1) *(int *)out = dup(1);
    else memset(out, 7, 64);
    return 0;
}
int cuMemPoolImportFromShareableHandle(Pool *pool, void *handle, unsigned type,
                                       unsigned long long flags) {
    CALL("cuMemPoolImportFromShareableHandle", " open=%d type=%u flags=%llu",
         is_open((int)(uintptr_t)handle), type, flags);
    *pool = (Pool)0x3001;
    return 0;
}
int cuMemPoolExportPointer(PoolPtrExportData *data, DevicePtr ptr) {
    CALL("cuMemPoolExportPointer", " ptr=%#llx", (unsigned long long)ptr);
    memset(data, 9, sizeof *data);
    return 0;
}
int cuMemPoolImportPointer(DevicePtr *ptr, Pool pool, PoolPtrExportData *data) {
    CALL("cuMemPoolImportPointer", " pool=%p first=%d last=%d", (void *)pool, data->reserved[0],
         data->reserved[63]);
    *ptr = 0x40000;
    return 0;
}
int cuMemAllocFromPoolAsync(DevicePtr *ptr, size_t size, Pool pool, Stream stream) {
    IN_CONTEXT("cuMemAllocFromPoolAsync", " size=%zu pool=%p stream=%p", size, (void *)pool,
               (void *)stream);
    *ptr = 0x50000;
    return 0;
}
int cuMemAllocAsync(DevicePtr *ptr, size_t size, Stream stream) {
    IN_CONTEXT("cuMemAllocAsync", " size=%zu stream=%p", size, (void *)stream);
    *ptr = 0x60000;
    return 0;
}
int cuMemFreeAsync(DevicePtr ptr, Stream stream) {
    IN_CONTEXT("cuMemFreeAsync", " ptr=%#llx stream=%p", (unsigned long long)ptr, (void *)stream);
    return 0;
}
int cuDeviceGetDefaultMemPool(Pool *pool, Device device) {
    CALL("cuDeviceGetDefaultMemPool", " device=%d", device);
    *pool = (Pool)0x3002;
    return 0;
}
int cuDeviceGetMemPool(Pool *pool, Device device) {
    CALL("cuDeviceGetMemPool", " device=%d", device);
    *pool = (Pool)0x3003;
    return 0;
}
int cuDeviceSetMemPool(Device device, Pool pool) {
    CALL("cuDeviceSetMemPool", " device=%d pool=%p", device, (void *)pool);
    return 0;
}

int cuStreamCreate(Stream *stream, unsigned flags) {
    IN_CONTEXT("cuStreamCreate", " flags=%u", flags);
    *stream = (Stream)0x8000;
    return 0;
}
int cuStreamDestroy_v2(Stream stream) {
    IN_CONTEXT("cuStreamDestroy_v2", " stream=%p", (void *)stream);
    return 0;
}
int cuStreamSynchronize(Stream stream) {
    IN_CONTEXT("cuStreamSynchronize", " stream=%p", (void *)stream);
    return 0;
}
int cuStreamQuery(Stream stream) {
    IN_CONTEXT("cuStreamQuery", " stream=%p", (void *)stream);
    return 0;
}
int cuStreamWaitEvent(Stream stream, Event event, unsigned flags) {
    IN_CONTEXT("cuStreamWaitEvent", " stream=%p event=%p flags=%u", (void *)stream, (void *)event, flags);
    return 0;
}
int cuStreamIsCapturing(Stream stream, unsigned *status) {
    /* Driver 580 finds the context by the stream, but for default streams. */
    if ((uintptr_t)stream > 2 && !stub_setting("STUB_STREAMS_WANT_CONTEXTS", 0))
        CALL("cuStreamIsCapturing", " stream=%p", (void *)stream);
    else
        IN_CONTEXT("cuStreamIsCapturing", " stream=%p", (void *)stream);
    *status = (uintptr_t)stream & 3; /* 1: capturing, 2: the capture is invalid */
    return 0;
}
int cuThreadExchangeStreamCaptureMode(unsigned *mode) {
    static __thread unsigned current_mode;
    CALL("cuThreadExchangeStreamCaptureMode", " mode=%u", *mode);
    unsigned before = current_mode;
    current_mode = *mode;
    *mode = before;
    return 0;
}
int cuCtxSynchronize(void) {
    IN_CONTEXT("cuCtxSynchronize", "");
    return 0;
}
int cuEventCreate(Event *event, unsigned flags) {
    IN_CONTEXT("cuEventCreate", " flags=%u", flags);
    *event = (Event)(uintptr_t)(0x9000 + flags);
    return 0;
}
int cuEventDestroy_v2(Event event) {
    IN_CONTEXT("cuEventDestroy_v2", " event=%p", (void *)event);
    return 0;
}
int cuEventRecord(Event event, Stream stream) {
    IN_CONTEXT("cuEventRecord", " event=%p stream=%p", (void *)event, (void *)stream);
    return 0;
}
int cuEventSynchronize(Event event) {
    IN_CONTEXT("cuEventSynchronize", " event=%p", (void *)event);
    return 0;
}
int cuEventQuery(Event event) {
    IN_CONTEXT("cuEventQuery", " event=%p", (void *)event);
    return 0;
}
int cuEventElapsedTime(float *milliseconds, Event start, Event end) {
    IN_CONTEXT("cuEventElapsedTime", " start=%p end=%p", (void *)start, (void *)end);
    *milliseconds = 1.5F;
    return 0;
}
int cuIpcGetEventHandle(IpcEventHandle *handle, Event event) {
    IN_CONTEXT("cuIpcGetEventHandle", " event=%p", (void *)event);
    memset(handle->reserved, 0x77, sizeof handle->reserved);
    return 0;
}
int cuIpcOpenEventHandle(Event *event, IpcEventHandle handle) {
    IN_CONTEXT("cuIpcOpenEventHandle", " first=%#x last=%#x", handle.reserved[0], handle.reserved[63]);
    *event = (Event)(uintptr_t)0x9100;
    return 0;
}
int cuMemcpyAsync(DevicePtr dst, DevicePtr src, size_t bytes, Stream stream) {
    IN_CONTEXT("cuMemcpyAsync", " dst=%#llx src=%#llx bytes=%zu stream=%p", (unsigned long long)dst,
               (unsigned long long)src, bytes, (void *)stream);
    return 0;
}
// The signature of CUDA 12.8.
int cuMemcpyBatchAsync(DevicePtr *dsts, DevicePtr *srcs, size_t *sizes, size_t count, void *attributes,
                       size_t *indices, size_t attribute_count, size_t *failed, Stream stream) {
    int *words = attributes; // order, two locations of two words each, flags
    IN_CONTEXT("cuMemcpyBatchAsync", " count=%zu last=%#llx,%#llx,%zu attributes=%zu,%zu,%d,%d,%d,%d stream=%p", count,
               (unsigned long long)dsts[count - 1], (unsigned long long)srcs[count - 1], sizes[count - 1],
               attribute_count, indices[0], words[0], words[1], words[3], words[5], (void *)stream);
    *failed = 0;
    return 0;
}
int cuMemsetD8Async(DevicePtr dst, unsigned char value, size_t bytes, Stream stream) {
    IN_CONTEXT("cuMemsetD8Async", " dst=%#llx value=%d bytes=%zu stream=%p", (unsigned long long)dst,
               value, bytes, (void *)stream);
    return 0;
}
int cuModuleLoadData(void **module, const void *image) {
    IN_CONTEXT("cuModuleLoadData", " image=%.8s", (const char *)image);
    *module = (void *)0xa000;
    return 0;
}
int cuModuleUnload(void *module) {
    IN_CONTEXT("cuModuleUnload", " module=%p", module);
    return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    IN_CONTEXT("cuModuleGetFunction", " module=%p name=%s", module, name);
    *function = (void *)0xb000;
    return 0;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, Stream stream, void **params, void **extra) {
    IN_CONTEXT("cuLaunchKernel", " function=%p grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%p"
               " first=%#llx last=%#llx extra=%p", function, gx, gy, gz, bx, by, bz, shared,
               (void *)stream, *(unsigned long long *)params[0], *(unsigned long long *)params[4], (void *)extra);
    return 0;
}

/* The other calls of cudarc. */
int cuCtxSetCurrent(Context context) {
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    return stub_call("cuCtxSetCurrent", " ");
}
int cuMemcpyDtoHAsync_v2(void *dst, DevicePtr src, size_t bytes, Stream stream) {
    IN_CONTEXT("cuMemcpyDtoHAsync_v2", " src=%#llx bytes=%zu stream=%p", (unsigned long long)src, bytes,
               (void *)stream);
    memset(dst, 1, bytes);
    return 0;
}
int cuMemcpyHtoDAsync_v2(DevicePtr dst, const void *src, size_t bytes, Stream stream) {
    IN_CONTEXT("cuMemcpyHtoDAsync_v2", " dst=%#llx first=%d bytes=%zu stream=%p", (unsigned long long)dst,
               *(const int *)src, bytes, (void *)stream);
    return 0;
}
int cuMemcpyDtoDAsync_v2(DevicePtr dst, DevicePtr src, size_t bytes, Stream stream) {
    IN_CONTEXT("cuMemcpyDtoDAsync_v2", " dst=%#llx src=%#llx bytes=%zu stream=%p", (unsigned long long)dst,
               (unsigned long long)src, bytes, (void *)stream);
    return 0;
}
