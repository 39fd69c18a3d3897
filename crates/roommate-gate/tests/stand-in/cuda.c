/* A library in the place of NVIDIA's libcuda.so.1, with what the gate and its tests call. Kernels
 * are times: each takes the invented GPU so long, one after the other, and an event has happened
 * once the time has come.
 *
 * It writes into the file that STANDIN_LOG names, which all processes share, what it saw; see
 * `struct log`. STANDIN_KERNEL_US is the length of a kernel, of which function 0x109 takes 100 (0 = done at once, and nothing is
 * logged, to measure the cost of a call), STANDIN_FAIL the name of a function that fails.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
       LAUNCH_FAILED = 719, IMPLICIT = 906, UNKNOWN = 999 };
enum { RELAXED = 2, PER_THREAD = 2 };
enum { TIMES = 1 << 20 };

struct log {
    uint64_t launches, captured, most_in_flight, events, violations, sum;
    uint64_t times[TIMES];
};

struct config {
    unsigned grid[3], block[3], bytes;
    void *stream;
    void *attributes;
    unsigned count;
};

static struct log *seen, spare;
static uint64_t kernel_ns, free_at;
static const char *fails = "";
static int capturing;
static __thread int mode;
static __thread int is_ready;

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("STANDIN_LOG"), *us = getenv("STANDIN_KERNEL_US");
    int file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
    seen = &spare;
    if (file >= 0 && !ftruncate(file, sizeof *seen))
        seen = mmap(0, sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    kernel_ns = us ? atoll(us) * 1000 : 0;
    if (getenv("STANDIN_FAIL")) fails = getenv("STANDIN_FAIL");
}

static void add(uint64_t *count, uint64_t n)
{
    __atomic_add_fetch(count, n, __ATOMIC_RELAXED);
}

static int failed(const char *name)
{
    return *fails && !strcmp(fails, name);
}

/* One launch, with a figure made of its arguments. */
static int launch(void *function, uint64_t figure, unsigned kernels)
{
    if (function == (void *)0xbad) return LAUNCH_FAILED;
    if (!kernel_ns) return OK;
    if (function == (void *)0x109) kernels *= 100;
    add(&seen->sum, figure);
    if (capturing) {
        add(&seen->captured, 1);
        return OK;
    }
    uint64_t start = now(), old = __atomic_load_n(&free_at, __ATOMIC_RELAXED), end;
    do end = (old > start ? old : start) + kernels * kernel_ns;
    while (!__atomic_compare_exchange_n(&free_at, &old, end, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    uint64_t flight = (end - start + kernel_ns - 1) / kernel_ns;
    if (flight > __atomic_load_n(&seen->most_in_flight, __ATOMIC_RELAXED))
        __atomic_store_n(&seen->most_in_flight, flight, __ATOMIC_RELAXED);
    uint64_t at = __atomic_fetch_add(&seen->launches, 1, __ATOMIC_RELAXED);
    if (at < TIMES) seen->times[at] = start;
    /* About what the real driver takes. */
    while (now() < start + 2000) {}
    return OK;
}

static uint64_t figure(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned bytes, void *stream, void *arguments, void *extra)
{
    uint64_t parts[] = {gx, gy, gz, bx, by, bz, bytes, (uintptr_t)stream, (uintptr_t)arguments,
                        (uintptr_t)extra}, sum = 0;
    for (int i = 0; i < 10; i++) sum = sum * 31 + parts[i];
    return sum;
}

#define KERNEL(name, salt) \
    int name(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
             unsigned bytes, void *stream, void **arguments, void **extra) \
    { return launch(f, salt + figure(gx, gy, gz, bx, by, bz, bytes, stream, arguments, extra), 1); }
#define COOPERATIVE(name, salt) \
    int name(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
             unsigned bytes, void *stream, void **arguments) \
    { return launch(f, salt + figure(gx, gy, gz, bx, by, bz, bytes, stream, arguments, 0), 1); }
#define KERNEL_EX(name, salt) \
    int name(const struct config *c, void *f, void **arguments, void **extra) \
    { \
        if (!c) return INVALID_VALUE; \
        return launch(f, salt + figure(c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], \
                      c->block[2], c->bytes, c->stream, arguments, extra), 1); \
    }
#define GRAPH(name, salt) \
    int name(void *graph, void *stream) { return launch(graph, salt + (uintptr_t)stream, 10); }

KERNEL(cuLaunchKernel, 1)
KERNEL(cuLaunchKernel_ptsz, 2)
KERNEL_EX(cuLaunchKernelEx, 3)
KERNEL_EX(cuLaunchKernelEx_ptsz, 4)
COOPERATIVE(cuLaunchCooperativeKernel, 5)
COOPERATIVE(cuLaunchCooperativeKernel_ptsz, 6)
GRAPH(cuGraphLaunch, 7)
GRAPH(cuGraphLaunch_ptsz, 8)

/* What cuGetProcAddress returns need not be what the library exports. */
static KERNEL(inner_kernel, 1)
static KERNEL(inner_kernel_ptsz, 2)

int cuInit(unsigned flags)
{
    is_ready = 1;
    return flags ? INVALID_VALUE : OK;
}

int cuCtxGetCurrent(void **context)
{
    *context = failed("cuCtxGetCurrent") ? NULL : &free_at;
    return OK;
}

int cuStreamIsCapturing(void *stream, int *status)
{
    (void)stream;
    if (failed("cuStreamIsCapturing")) return IMPLICIT;
    *status = capturing;
    return OK;
}

int cuThreadExchangeStreamCaptureMode(int *with)
{
    int old = mode;
    if (failed("cuThreadExchangeStreamCaptureMode")) return UNKNOWN;
    mode = *with;
    *with = old;
    return OK;
}

int cuEventCreate(uint64_t **event, unsigned flags)
{
    if (failed("cuEventCreate")) return UNKNOWN;
    if (flags != 2 || mode != RELAXED) add(&seen->violations, 1);
    *event = calloc(1, sizeof **event);
    return OK;
}

int cuEventRecord(uint64_t *event, void *stream)
{
    (void)stream;
    if (failed("cuEventRecord")) return INVALID_HANDLE;
    if (capturing || mode != RELAXED) add(&seen->violations, 1);
    __atomic_store_n(event, __atomic_load_n(&free_at, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    add(&seen->events, 1);
    return OK;
}

int cuEventQuery(uint64_t *event)
{
    if (failed("cuEventQuery")) return UNKNOWN;
    if (mode != RELAXED) add(&seen->violations, 1);
    return now() < __atomic_load_n(event, __ATOMIC_RELAXED) ? NOT_READY : OK;
}

/* The mode that a thread is left with, and whether streams capture: for the test program. */
int standin_mode(void) { return mode; }
void standin_capture(int is) { capturing = is; }

int cuGetProcAddress(const char *, void **, int, uint64_t);
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

static void *address(const char *name, int version, uint64_t flags)
{
    int own = (flags & PER_THREAD) != 0;
    if (!strcmp(name, "cuLaunchKernel")) return own ? inner_kernel_ptsz : inner_kernel;
    if (!strcmp(name, "cuLaunchKernelEx")) return own ? cuLaunchKernelEx_ptsz : cuLaunchKernelEx;
    if (!strcmp(name, "cuLaunchCooperativeKernel"))
        return own ? cuLaunchCooperativeKernel_ptsz : cuLaunchCooperativeKernel;
    if (!strcmp(name, "cuGraphLaunch")) return own ? cuGraphLaunch_ptsz : cuGraphLaunch;
    if (!strcmp(name, "cuGetProcAddress"))
        return version < 12000 ? (void *)cuGetProcAddress : (void *)cuGetProcAddress_v2;
    return strcmp(name, "cuInit") ? NULL : cuInit;
}

int cuGetProcAddress(const char *name, void **into, int version, uint64_t flags)
{
    *into = address(name, version, flags);
    return *into ? OK : NOT_FOUND;
}

int cuGetProcAddress_v2(const char *name, void **into, int version, uint64_t flags, int *status)
{
    *into = address(name, version, flags);
    if (status) *status = *into ? 0 : 1;
    return *into ? OK : NOT_FOUND;
}
