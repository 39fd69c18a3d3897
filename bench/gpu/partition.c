// SM partitions of the current device as streams, for measure.py: the group of `count` SMs, or what is left
// of the GPU without it. Two processes that split alike get parts that do not overlap.
#include <cuda.h>
#include <stdio.h>

#define TRY(call)                                                                         \
    do {                                                                                  \
        CUresult r = (call);                                                              \
        if (r != CUDA_SUCCESS) {                                                          \
            const char *text = 0;                                                         \
            cuGetErrorString(r, &text);                                                   \
            fprintf(stderr, "partition: %s: %s\n", #call, text ? text : "unknown error"); \
            return -1;                                                                    \
        }                                                                                 \
    } while (0)

// Number of SMs of the part, or -1. `stream` is then a stream confined to it.
int partition(int device, unsigned count, int rest, void **stream) {
    CUdevice dev;
    CUdevResource all, group, left;
    CUdevResourceDesc desc;
    CUgreenCtx ctx;
    unsigned groups = 1;
    TRY(cuDeviceGet(&dev, device));
    TRY(cuDeviceGetDevResource(dev, &all, CU_DEV_RESOURCE_TYPE_SM));
    TRY(cuDevSmResourceSplitByCount(&group, &groups, &all, &left, 0, count));
    TRY(cuDevResourceGenerateDesc(&desc, rest ? &left : &group, 1));
    TRY(cuGreenCtxCreate(&ctx, desc, dev, CU_GREEN_CTX_DEFAULT_STREAM));
    TRY(cuGreenCtxStreamCreate((CUstream *)stream, ctx, CU_STREAM_NON_BLOCKING, 0));
    return (int)(rest ? left.sm.smCount : group.sm.smCount);
}
