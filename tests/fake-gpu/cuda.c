/* A library in the place of NVIDIA's libcuda.so.1 with one invented GPU of 132 multiprocessors and 8 GiB,
 * that knows the one kernel of the self-test and keeps the limits of MPS where a daemon runs.
 * `cc -shared -fPIC -o libcuda.so.1 cuda.c`, then ROOMMATE_CUDA_LIBRARY=<path>.
 *
 * FAKE_CUDA in the environment makes it worse: `absent` (there is no GPU), `lax` (limits are not kept),
 * `deaf` (those of the MPS control are not), `wrong` (the kernel's results are), `broken` (the kernel does
 * not run).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { OK = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, LAUNCH_FAILED = 719 };
enum { SMS = 132 };

static const uint64_t total = 8ULL << 30;

static int is(const char *what)
{
    const char *how = getenv("FAKE_CUDA");
    return how && !strcmp(how, what);
}

/* Whether a daemon of MPS is where the environment says, and limits are kept. */
static int limited(void)
{
    char path[4096];
    struct stat found;
    const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    snprintf(path, sizeof path, "%s/control", folder ? folder : "");
    return !is("lax") && stat(path, &found) == 0 && S_ISSOCK(found.st_mode);
}

/* What the control of MPS allows: `fake-limits` in the folder of pipes. */
static void allowed(double *percent, unsigned long long *mib)
{
    char path[4096];
    const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    snprintf(path, sizeof path, "%s/fake-limits", folder ? folder : "");
    FILE *file = is("deaf") ? NULL : fopen(path, "r");
    *percent = 100;
    *mib = total >> 20;
    if (file && fscanf(file, "%lf %llu", percent, mib) < 2) *mib = total >> 20;
    if (file) fclose(file);
}

/* A variable only lowers what the control allows. */
static unsigned sms(void)
{
    double percent;
    unsigned long long mib;
    const char *own = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    allowed(&percent, &mib);
    if (own && atof(own) < percent) percent = atof(own);
    return limited() ? SMS * percent / 100 : SMS;
}

static uint64_t most(void)
{
    double percent;
    unsigned long long mib, own;
    const char *limit = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    allowed(&percent, &mib);
    if (limit && sscanf(limit, "0=%lluM", &own) == 1 && own < mib) mib = own;
    return limited() && mib << 20 < total ? mib << 20 : total;
}

int cuInit(unsigned flags) { (void)flags; return is("absent") ? NO_DEVICE : OK; }

int cuDeviceGet(int *device, int number) { *device = number; return number == 0 ? OK : INVALID_DEVICE; }

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == 16 ? (int)sms() : 0;
    return OK;
}

/* Groups of eight do not come out even: fifteen fit into 132. */
int cuDeviceGetDevResource(int device, void *resource, int kind)
{
    (void)device;
    memset(resource, 0, 144);
    return kind == 1 ? OK : 1;
}
int cuDevSmResourceSplitByCount(void *groups, unsigned *count, const void *whole, void *rest, unsigned flags, unsigned each)
{
    (void)groups, (void)whole, (void)rest, (void)flags;
    *count = sms() / each - 1;
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = &sms; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
int cuCtxSetCurrent(void *context) { (void)context; return OK; }
int cuCtxSynchronize(void) { return is("broken") ? LAUNCH_FAILED : OK; }

int cuMemGetInfo_v2(size_t *free, size_t *all) { *free = *all = most(); return OK; }

/* Taken from nobody: only the memory of the kernel is ever used. */
int cuMemAlloc_v2(uint64_t *address, size_t size)
{
    if (size > most()) return OUT_OF_MEMORY;
    *address = (uint64_t)(uintptr_t)calloc(1, size < 1 << 20 ? size : 1 << 20);
    return OK;
}
int cuMemFree_v2(uint64_t address) { free((void *)(uintptr_t)address); return OK; }

int cuMemcpyDtoH_v2(void *into, uint64_t from, size_t size)
{
    memcpy(into, (void *)(uintptr_t)from, size);
    return OK;
}

int cuModuleLoadData(void **module, const void *text)
{
    *module = (void *)text;
    return strstr(text, ".entry probe(") ? OK : 218;
}
int cuModuleUnload(void *module) { (void)module; return OK; }

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = module;
    return strcmp(name, "probe") ? 500 : OK;
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra)
{
    (void)function, (void)y, (void)z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared, (void)stream, (void)extra;
    uint32_t *into = (uint32_t *)(uintptr_t) * (uint64_t *)arguments[0];
    for (uint32_t block = 0; block < x; block++) {
        into[2 * block] = block % sms();
        into[2 * block + 1] = is("wrong") ? 0 : block * block + 7;
    }
    return OK;
}

int cuGetErrorName(int code, const char **name)
{
    switch (code) {
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return OK;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; return OK;
    case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; return OK;
    }
    *name = NULL;
    return 1;
}
