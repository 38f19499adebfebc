/*
 * The chain create -> reserve -> map -> set access -> unmap -> release -> free, in plain C, the
 * baseline for egmem's types. It builds without CUDA's toolkit:
 *
 *     cc -O2 -Wall -Wextra -shared -fPIC -o libegmchain.so benches/c/chain.c -ldl
 *
 * Not thread-safe; one caller.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Prototypes from the CUDA driver API's documentation, as of CUDA 12.2. */
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;

typedef struct {
    int type; /* 1 device, 2 host, 3 host NUMA node */
    int id;
} CUmemLocation;

typedef struct {
    int type; /* 1 pinned */
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags; /* 3 read-write */
} CUmemAccessDesc;

_Static_assert(sizeof(CUmemAllocationProp) == 32, "as in cuda.h");
_Static_assert(sizeof(CUmemAccessDesc) == 12, "as in cuda.h");

static CUresult (*Init)(unsigned);
static CUresult (*Create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                          unsigned long long);
static CUresult (*Release)(CUmemGenericAllocationHandle);
static CUresult (*AddressReserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
static CUresult (*AddressFree)(CUdeviceptr, size_t);
static CUresult (*Map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
                       unsigned long long);
static CUresult (*Unmap)(CUdeviceptr, size_t);
static CUresult (*SetAccess)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);

/* Loads `library` (libcuda.so.1 if null). 0, or -1 without it, -2 without one of its functions,
 * or cuInit's code. */
int egm_chain_open(const char *library)
{
    static const struct {
        const char *name;
        void *slot;
    } wanted[] = {
        {"cuInit", &Init},
        {"cuMemCreate", &Create},
        {"cuMemRelease", &Release},
        {"cuMemAddressReserve", &AddressReserve},
        {"cuMemAddressFree", &AddressFree},
        {"cuMemMap", &Map},
        {"cuMemUnmap", &Unmap},
        {"cuMemSetAccess", &SetAccess},
    };
    void *cuda = dlopen(library ? library : "libcuda.so.1", RTLD_NOW);
    if (!cuda)
        return -1;
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *function = dlsym(cuda, wanted[i].name);
        if (!function)
            return -2;
        memcpy(wanted[i].slot, &function, sizeof function);
    }
    return Init(0);
}

/* One chain of `size` bytes (a multiple of 2 MiB) on host NUMA node `node`, read-write for the host
 * and `count` GPUs, at most 16. 0, or the first failing call's code; objects made before it are given back. */
int egm_chain_c(int node, const int *gpus, size_t count, size_t size)
{
    CUmemAllocationProp prop;
    CUmemAccessDesc access[17];
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    CUresult code, undo;

    if (count > 16)
        return 1;
    memset(&prop, 0, sizeof prop);
    prop.type = 1;
    prop.location.type = 3;
    prop.location.id = node;
    if ((code = Create(&handle, size, &prop, 0)))
        return code;
    if ((code = AddressReserve(&address, size, 0, 0, 0)))
        goto release;
    if ((code = Map(address, size, 0, handle, 0)))
        goto free_address;
    access[0].location = prop.location;
    access[0].flags = 3;
    for (size_t i = 0; i < count; i++) {
        access[i + 1].location.type = 1;
        access[i + 1].location.id = gpus[i];
        access[i + 1].flags = 3;
    }
    code = SetAccess(address, size, access, count + 1);

    if ((undo = Unmap(address, size)) && !code)
        code = undo;
free_address:
    if ((undo = AddressFree(address, size)) && !code)
        code = undo;
release:
    if ((undo = Release(handle)) && !code)
        code = undo;
    return code;
}
