/* A libcuda without a GPU: it answers plausibly, logs what it was asked, keeps a context stack for
 * each thread as the real one does, and fails on demand. A test that wants a symbol to be absent
 * renames it on the compiler's command line (-DcuMemCreate=absent). */
#include "stub.h"

#ifndef STUB_DEVICES
#define STUB_DEVICES 2
#endif
enum { devices = STUB_DEVICES, handle_of_device_0 = 7 };
typedef struct context { char unused; } *Context;
typedef int Device; /* not the ordinal, to see whether cuDeviceGet is asked */
typedef uint64_t DevicePtr, Handle;

static struct context primary[devices];
static int retained[devices], released[devices], destroyed[devices], generation[devices];
static __thread Context stack[16];
static __thread int depth;

int stub_depth(void) { return depth; }
int stub_retained(int i) { return retained[i]; }
int stub_released(int i) { return released[i]; }
static Context current(void) { return depth ? stack[depth - 1] : NULL; }
static int device_of(Context context) { return (int)(context - primary); }
/* As cuDevicePrimaryCtxReset, and as a library that makes the context anew. */
void stub_reset(int i) { destroyed[i] = 1; }
void stub_make_anew(int i) { destroyed[i] = 0; generation[i]++; }
static int is_destroyed(Context context) {
    for (int i = 0; i < devices; i++)
        if (context == &primary[i]) return destroyed[i];
    return 0;
}
int stub_current_device(void) { return current() ? device_of(current()) : -1; }
static int known(Device d) { return d >= handle_of_device_0 && d < handle_of_device_0 + devices; }

/* Calls that work in the current context: without one they say INVALID_CONTEXT. */
#define IN_CONTEXT(name, format, ...)                                                 \
    do {                                                                              \
        if (!current() || is_destroyed(current())) return 201;                        \
        CALL(name, " gpu%d" format, device_of(current()) __VA_OPT__(,) __VA_ARGS__);    \
    } while (0)

int cuInit(unsigned flags) {
    CALL("cuInit", " flags=%u", flags);
    return stub_setting("STUB_INIT", 0);
}
int cuDriverGetVersion(int *version) {
    CALL("cuDriverGetVersion", " ");
    *version = stub_setting("STUB_VERSION", 13000);
    return 0;
}
int cuDeviceGetCount(int *count) {
    CALL("cuDeviceGetCount", " ");
    *count = stub_setting("STUB_COUNT", devices);
    return stub_setting("STUB_COUNT_CODE", 0);
}
int cuDeviceGet(Device *device, int ordinal) {
    CALL("cuDeviceGet", " ordinal=%d", ordinal);
    if (ordinal < 0 || ordinal >= devices) return 101;
    *device = handle_of_device_0 + ordinal;
    return 0;
}
int cuDeviceGetName(char *name, int len, Device device) {
    CALL("cuDeviceGetName", " device=%d", device);
    memset(name, 'x', (size_t)len); /* no NUL, and not UTF-8 */
    name[1] = (char)0xff;
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char uuid[16], Device device) {
    CALL("cuDeviceGetUuid_v2", " device=%d", device);
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(0xf0 + i);
    return 0;
}
int cuDeviceGetUuid(unsigned char uuid[16], Device device) {
    CALL("cuDeviceGetUuid", " device=%d", device);
    memset(uuid, 1, 16);
    return 0;
}
int cuDeviceGetPCIBusId(char *id, int len, Device device) {
    CALL("cuDeviceGetPCIBusId", " device=%d", device);
    int ordinal = device - handle_of_device_0;
    snprintf(id, (size_t)len, "0000:%02x:00.0", device + ordinal * stub_setting("STUB_BUSES_BETWEEN", 0));
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, Device device) {
    CALL("cuDeviceTotalMem_v2", " device=%d", device);
    *bytes = (size_t)96 << 30;
    return 0;
}
/* STUB_ATTRIBUTE_134="0,1" sets HOST_NUMA_ID of devices 0 and 1. */
static int attribute_of(int attribute, int ordinal) {
    char name[32];
    snprintf(name, sizeof name, "STUB_ATTRIBUTE_%d", attribute);
    const char *values = getenv(name);
    for (; values && ordinal > 0; ordinal--) values = strchr(values, ',') ? strchr(values, ',') + 1 : NULL;
    if (values) return atoi(values);
    return attribute == 134 ? -1 : attribute;
}
int cuDeviceGetAttribute(int *value, int attribute, Device device) {
    CALL("cuDeviceGetAttribute", " attribute=%d device=%d", attribute, device);
    if (attribute < 1 || attribute > 142) return 1; /* an older driver's INVALID_VALUE */
    *value = attribute_of(attribute, device - handle_of_device_0);
    return known(device) ? 0 : 101;
}
int cuDeviceCanAccessPeer(int *can, Device device, Device peer) {
    CALL("cuDeviceCanAccessPeer", " device=%d peer=%d", device, peer);
    *can = device != peer;
    return 0;
}
int cuDeviceGetP2PAttribute(int *value, int attribute, Device device, Device peer) {
    CALL("cuDeviceGetP2PAttribute", " attribute=%d device=%d peer=%d", attribute, device, peer);
    if (attribute < 1 || attribute > 4) return 1; /* an older driver's INVALID_VALUE */
    *value = 10 * attribute;
    return device == peer ? 101 : 0;
}

int cuDevicePrimaryCtxRetain(Context *context, Device device) {
    CALL("cuDevicePrimaryCtxRetain", " device=%d", device);
    if (!known(device)) return 101;
    __atomic_add_fetch(&retained[device - handle_of_device_0], 1, __ATOMIC_SEQ_CST);
    usleep(20000); /* long enough for threads to meet here */
    *context = &primary[device - handle_of_device_0];
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(Device device) {
    CALL("cuDevicePrimaryCtxRelease_v2", " device=%d", device);
    __atomic_add_fetch(&released[device - handle_of_device_0], 1, __ATOMIC_SEQ_CST);
    return 0;
}
int cuDevicePrimaryCtxGetState(Device device, unsigned *flags, int *active) {
    CALL("cuDevicePrimaryCtxGetState", " device=%d", device);
    *flags = 0;
    *active = !destroyed[device - handle_of_device_0];
    return 0;
}
int cuCtxGetId(Context context, uint64_t *id) {
    CALL("cuCtxGetId", " ");
    if (is_destroyed(context)) return stub_setting("STUB_DESTROYED_CODE", 709);
    *id = (uint64_t)(context - primary) + devices * generation[context - primary];
    return 0;
}
int cuCtxPushCurrent_v2(Context context) {
    CALL("cuCtxPushCurrent_v2", " ");
    if (is_destroyed(context)) return 201;
    if (depth == 16) return 999;
    stack[depth++] = context;
    return stub_setting("STUB_PUSH_CODE", 0); /* pushed all the same */
}
int cuCtxPopCurrent_v2(Context *context) {
    if (!depth) return 201;
    *context = stack[--depth];
    return stub_call("cuCtxPopCurrent_v2", " "); /* popped all the same */
}
int cuCtxGetCurrent(Context *context) {
    CALL("cuCtxGetCurrent", " ");
    *context = current();
    return 0;
}
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    IN_CONTEXT("cuMemGetInfo_v2", "");
    *free_bytes = 1000;
    *total = 2000;
    return 0;
}

typedef struct {
    enum { type_invalid = 0, type_pinned = 1 } type;
    enum { handle_none = 0, handle_fd = 1, handle_fabric = 8 } requestedHandleTypes;
    Location location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} AllocationProp;

#define PROP " type=%d handles=%d location=%d:%d win32=%p compression=%d rdma=%d usage=%d reserved=%d"
#define PROP_OF(p)                                                                          \
    p->type, p->requestedHandleTypes, p->location.type, p->location.id,                    \
    p->win32HandleMetaData, p->allocFlags.compressionType, p->allocFlags.gpuDirectRDMACapable, \
    p->allocFlags.usage, !stub_zero(p->allocFlags.reserved, 4)

int cuMemGetAllocationGranularity(size_t *granularity, const AllocationProp *p, unsigned option) {
    CALL("cuMemGetAllocationGranularity", PROP " option=%u", PROP_OF(p), option);
    *granularity = (size_t)2 << 20;
    return 0;
}
int cuMemCreate(Handle *handle, size_t size, const AllocationProp *p, unsigned long long flags) {
    CALL("cuMemCreate", " size=%zu" PROP " flags=%llu", size, PROP_OF(p), flags);
    *handle = 0xabcdef0123456789;
    return 0;
}
int cuMemRelease(Handle handle) {
    CALL("cuMemRelease", " handle=%#llx", (unsigned long long)handle);
    return 0;
}
int cuMemAddressReserve(DevicePtr *ptr, size_t size, size_t alignment, DevicePtr addr,
                        unsigned long long flags) {
    CALL("cuMemAddressReserve", " size=%zu alignment=%zu addr=%#llx flags=%llu", size, alignment,
         (unsigned long long)addr, flags);
    *ptr = 0x700000000000;
    return 0;
}
int cuMemAddressFree(DevicePtr ptr, size_t size) {
    CALL("cuMemAddressFree", " ptr=%#llx size=%zu", (unsigned long long)ptr, size);
    return 0;
}
int cuMemMap(DevicePtr ptr, size_t size, size_t offset, Handle handle, unsigned long long flags) {
    CALL("cuMemMap", " ptr=%#llx size=%zu offset=%zu handle=%#llx flags=%llu",
         (unsigned long long)ptr, size, offset, (unsigned long long)handle, flags);
    return 0;
}
int cuMemUnmap(DevicePtr ptr, size_t size) {
    CALL("cuMemUnmap", " ptr=%#llx size=%zu", (unsigned long long)ptr, size);
    return 0;
}
int cuMemSetAccess(DevicePtr ptr, size_t size, const AccessDesc *desc, size_t count) {
    char text[256] = "";
    for (size_t i = 0, n = 0; i < count; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, " %d:%d=%d", desc[i].location.type,
                              desc[i].location.id, desc[i].flags);
    CALL("cuMemSetAccess", " ptr=%#llx size=%zu%s", (unsigned long long)ptr, size, text);
    return 0;
}
int cuMemGetAccess(unsigned long long *flags, const Location *location, DevicePtr ptr) {
    CALL("cuMemGetAccess", " %d:%d ptr=%#llx", location->type, location->id,
         (unsigned long long)ptr);
    *flags = (unsigned long long)stub_setting("STUB_ACCESS", 3);
    return 0;
}
int cuMemExportToShareableHandle(void *out, Handle handle, unsigned type, unsigned long long flags) {
    CALL("cuMemExportToShareableHandle", " handle=%#llx type=%u flags=%llu",
         (unsigned long long)handle, type, flags);
    if (type == 1) {
        int pipes[2];
        int fixed = stub_setting("STUB_EXPORT_FD", 0);
        if (!fixed && pipe(pipes) != 0) return 304;
        if (!fixed) close(pipes[1]);
        *(int *)out = fixed ? fixed : pipes[0]; /* stays open in a child program */
    } else {
        for (int i = 0; i < 64; i++) ((unsigned char *)out)[i] = (unsigned char)i;
    }
    return 0;
}
static int is_open(int fd) { return fcntl(fd, F_GETFD) != -1; }
int cuMemImportFromShareableHandle(Handle *handle, void *os_handle, unsigned type) {
    if (type == 1) {
        CALL("cuMemImportFromShareableHandle", " open=%d type=%u",
             is_open((int)(uintptr_t)os_handle), type);
    } else {
        const unsigned char *bytes = os_handle;
        CALL("cuMemImportFromShareableHandle", " first=%d last=%d type=%u", bytes[0], bytes[63], type);
    }
    *handle = 5;
    return 0;
}
int cuMemGetAllocationPropertiesFromHandle(AllocationProp *p, Handle handle) {
    CALL("cuMemGetAllocationPropertiesFromHandle", " handle=%#llx", (unsigned long long)handle);
    memset(p, 0, sizeof *p);
    p->type = type_pinned;
    p->requestedHandleTypes = (int)0x49; /* with a bit that nobody knows yet */
    p->location.type = stub_setting("STUB_LOCATION_TYPE", 3);
    p->location.id = 2;
    p->allocFlags.gpuDirectRDMACapable = 1;
    return 0;
}
int cuMemRetainAllocationHandle(Handle *handle, void *addr) {
    CALL("cuMemRetainAllocationHandle", " addr=%p", addr);
    *handle = 6;
    return 0;
}
int cuPointerGetAttribute(void *data, int attribute, DevicePtr ptr) {
    IN_CONTEXT("cuPointerGetAttribute", " attribute=%d ptr=%#llx", attribute,
               (unsigned long long)ptr);
    if (attribute == 9) *(int *)data = -2;
    else if (attribute == 2 || attribute == 13) *(unsigned *)data = 1;
    else *(uint64_t *)data = 0xfedcba9876543210;
    return 0;
}
int cuMemGetAddressRange_v2(DevicePtr *base, size_t *size, DevicePtr ptr) {
    CALL("cuMemGetAddressRange_v2", " ptr=%#llx", (unsigned long long)ptr);
    *base = ptr - 16;
    *size = 64;
    return 0;
}
static int fd_to_give = -1;
void stub_give_fd(int fd) { fd_to_give = fd; }
int cuMemGetHandleForAddressRange(void *handle, DevicePtr ptr, size_t size, int type,
                                  unsigned long long flags) {
    CALL("cuMemGetHandleForAddressRange", " ptr=%#llx size=%zu type=%d flags=%llu",
         (unsigned long long)ptr, size, type, flags);
    *(int *)handle = fd_to_give;
    return 0;
}
#include "cuda_work.c"
