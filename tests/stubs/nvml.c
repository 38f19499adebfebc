/* A libnvidia-ml with one GPU, whose processes are this one and one that does not exist. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu, compute; } Process;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;

static int gpu;

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 1, 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = &gpu;
    return index ? 2 : 0;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-00112233-4455-6677-8899-aabbccddeeff");
    return device == &gpu ? 0 : 2;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, Memory *info) {
    info->reserved = 600ull << 20;
    return device == &gpu && info->version == (sizeof *info | 2 << 24) ? 0 : 2;
}

static int list(unsigned *count, Process *into, const Process *from, unsigned have) {
    unsigned room = *count;
    *count = have;
    if (room < have) return 7; /* INSUFFICIENT_SIZE */
    memcpy(into, from, have * sizeof *from);
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *into) {
    Process all[] = {{getpid(), 512ull << 20, 0, 0}, {4194304, -1ull, 0, 0}};
    return device == &gpu ? list(count, into, all, 2) : 2;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, Process *into) {
    return device == &gpu ? list(count, into, NULL, 0) : 2;
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *count, Process *into) {
    Process client = {getpid(), 100 << 20, 0, 0};
    return device == &gpu ? list(count, into, &client, 1) : 2;
}
