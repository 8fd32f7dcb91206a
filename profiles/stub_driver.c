/* Stub of libcuda without a device: enough of the driver API for the runtime to load a cubin, encode a tensor map and launch, with a
 * record of the last launch. Built by host_cost.py. */
#include <stdint.h>
#include <string.h>

typedef int CUresult;
typedef int CUdevice;

enum { INVALID_VALUE = 1, NOT_FOUND = 500 };
enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, SM_COUNT = 16 };

typedef struct {
    unsigned id;
    unsigned pad;
    unsigned char value[64];
} Attribute;

typedef struct {
    unsigned grid[3], block[3], smem;
    void *stream;
    Attribute *attributes;
    unsigned count;
} Config;

/* Record of the last launch, read back by tests. */
struct {
    int launches;
    unsigned grid[3], block[3], smem;
    uint64_t stream;
    unsigned attributes;
    Attribute attribute[4];
    uint64_t map_bytes[16];
    uint64_t argument[64];
    int smem_limit;
    uint64_t library_bytes;
    int encode_calls, encode_misaligned;
} stub_record;

int stub_capability[2] = {9, 0};
int stub_arguments = 0; /* number of arguments to copy at a launch; the first is a tensor map */

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuGetErrorName(CUresult code, const char **name) {
    *name = code == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : NULL;
    return *name ? 0 : INVALID_VALUE;
}
CUresult cuDriverGetVersion(int *version) { *version = 13020; return 0; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return 0; }
CUresult cuDeviceGetName(char *name, int length, CUdevice device) { strncpy(name, "Stub", length); return 0; }
CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device) { *context = (void *)0xC0; return 0; }
CUresult cuCtxPushCurrent_v2(void *context) { return 0; }
CUresult cuCtxPopCurrent_v2(void **context) { return 0; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return 0; }
CUresult cuThreadExchangeStreamCaptureMode(int *mode) { *mode = 0; return 0; }

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    switch (attribute) {
        case CAPABILITY_MAJOR: *value = stub_capability[0]; return 0;
        case CAPABILITY_MINOR: *value = stub_capability[1]; return 0;
        case SM_COUNT: *value = 132; return 0;
        default: return INVALID_VALUE;
    }
}

CUresult cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    memcpy(&stub_record.library_bytes, code, 8);
    *library = (void *)0x11B;
    return 0;
}

CUresult cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    if (library != (void *)0x11B || strstr(name, "_0") == NULL) return NOT_FOUND;
    *kernel = (void *)0x4E1;
    return 0;
}

CUresult cuKernelSetAttribute(int attribute, int value, void *kernel, CUdevice device) {
    if (attribute == 8) stub_record.smem_limit = value;
    return 0;
}

CUresult cuKernelGetFunction(void **function, void *kernel) { *function = (void *)0xF0; return 0; }
CUresult cuFuncLoad(void *function) { return function == (void *)0xF0 ? 0 : INVALID_VALUE; }

CUresult cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
                                const unsigned *box, const unsigned *steps, int interleave, int swizzle, int promotion, int fill) {
    stub_record.encode_calls++;
    if ((uintptr_t)map % 64) {
        stub_record.encode_misaligned++;
        return INVALID_VALUE;
    }
    uint64_t words[16] = {(uint64_t)(uintptr_t)address, (uint64_t)type, rank};
    for (unsigned i = 0; i < rank; i++) {
        words[3 + i] = dims[i];
        words[8 + i] = i + 1 < rank ? strides[i] : 0;
    }
    memcpy(map, words, sizeof words);
    return 0;
}

CUresult cuLaunchKernelEx(const Config *config, void *kernel, void **arguments, void **extra) {
    if (kernel != (void *)0x4E1) return INVALID_VALUE;
    stub_record.launches++;
    memcpy(stub_record.grid, config->grid, sizeof stub_record.grid);
    memcpy(stub_record.block, config->block, sizeof stub_record.block);
    stub_record.smem = config->smem;
    stub_record.stream = (uint64_t)(uintptr_t)config->stream;
    stub_record.attributes = config->count;
    if (config->count) memcpy(stub_record.attribute, config->attributes, config->count * sizeof(Attribute));
    if (stub_arguments) memcpy(stub_record.map_bytes, arguments[0], 128);
    for (int i = 1; i < stub_arguments; i++) memcpy(&stub_record.argument[i], arguments[i], 8);
    return 0;
}

#define ENTRY(name, function) if (!strcmp(symbol, name)) { *address = (void *)function; return 0; }

CUresult cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status) {
    if (status) *status = 0;
    ENTRY("cuGetProcAddress", cuGetProcAddress_v2)
    ENTRY("cuGetProcAddress_v2", cuGetProcAddress_v2)
    ENTRY("cuInit", cuInit)
    ENTRY("cuDriverGetVersion", cuDriverGetVersion)
    ENTRY("cuDeviceGetCount", cuDeviceGetCount)
    ENTRY("cuDeviceGetName", cuDeviceGetName)
    ENTRY("cuDeviceGetAttribute", cuDeviceGetAttribute)
    ENTRY("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain)
    ENTRY("cuCtxPushCurrent", cuCtxPushCurrent_v2)
    ENTRY("cuCtxPopCurrent", cuCtxPopCurrent_v2)
    ENTRY("cuCtxGetDevice", cuCtxGetDevice)
    ENTRY("cuThreadExchangeStreamCaptureMode", cuThreadExchangeStreamCaptureMode)
    ENTRY("cuLibraryLoadData", cuLibraryLoadData)
    ENTRY("cuLibraryGetKernel", cuLibraryGetKernel)
    ENTRY("cuKernelSetAttribute", cuKernelSetAttribute)
    ENTRY("cuKernelGetFunction", cuKernelGetFunction)
    ENTRY("cuFuncLoad", cuFuncLoad)
    ENTRY("cuTensorMapEncodeTiled", cuTensorMapEncodeTiled)
    ENTRY("cuLaunchKernelEx", cuLaunchKernelEx)
    *address = NULL;
    if (status) *status = 1;
    return NOT_FOUND;
}
