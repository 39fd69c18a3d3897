/* A library in the place of NVIDIA's libnvidia-ml.so.1, with two invented GPUs: what the program asks of
 * it and no more. `cc -shared -fPIC -o libnvidia-ml.so.1 nvml.c`, then ROOMMATE_NVML_LIBRARY=<path>.
 *
 * What the GPUs do is read at every call from a file beside the library, `<library>.state`, one thing to
 * a line. Write it whole (rename), for it is read while it changes.
 *
 *   count 2             how many GPUs there are (0 to 2)
 *   fail init           this call fails: init, count, name, memory, processes or gpm
 *   0 used 1500         GPU 0 holds so many MiB
 *   0 process 71 1000   a process and the MiB that it holds
 *   0 client 72 500     the same for a client of MPS
 *   0 mig 1             it is cut into instances
 *   0 mode 3            its compute mode
 *   0 sm 80             a counter, in percent or MiB/s: graphics, sm, occupancy, tensor, dram, tx, rx
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9, UNKNOWN = 999 };
enum { GPUS = 2, METRICS = 7, MOST = 32 };

struct process { unsigned pid, mib; };

struct gpu {
    unsigned used, mig, mode, processes, clients;
    struct process process[MOST], client[MOST];
    double metric[METRICS];
};

struct state { unsigned count; char fail[256]; struct gpu gpu[GPUS]; };

static const char *const names[] = {"NVIDIA H200", "NVIDIA A100-SXM4-80GB"};
static const unsigned cores[] = {132 * 128, 108 * 64};
static const unsigned long long memory[] = {143771ULL << 20, 81920ULL << 20};
static const char *const metric_names[] = {"graphics", "sm", "occupancy", "tensor", "dram", "tx", "rx"};
static const unsigned metric_ids[] = {1, 2, 3, 5, 10, 20, 21};

static struct state read_state(void)
{
    struct state s = {.count = GPUS};
    char path[4096], line[256], key[32];
    unsigned gpu, a, b;
    Dl_info here;
    dladdr((void *)read_state, &here);
    snprintf(path, sizeof path, "%s.state", here.dli_fname);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        b = 0;
        if (sscanf(line, "count %u", &a) == 1) {
            s.count = a < GPUS ? a : GPUS;
        } else if (sscanf(line, "fail %31s", key) == 1) {
            strcat(strcat(s.fail, " "), key);
        } else if (sscanf(line, "%u %31s %u %u", &gpu, key, &a, &b) >= 3 && gpu < GPUS) {
            struct gpu *g = &s.gpu[gpu];
            if (!strcmp(key, "used")) g->used = a;
            else if (!strcmp(key, "mig")) g->mig = a;
            else if (!strcmp(key, "mode")) g->mode = a;
            else if (!strcmp(key, "process") && g->processes < MOST)
                g->process[g->processes++] = (struct process){a, b};
            else if (!strcmp(key, "client") && g->clients < MOST)
                g->client[g->clients++] = (struct process){a, b};
            for (int m = 0; m < METRICS; m++)
                if (!strcmp(key, metric_names[m])) g->metric[m] = a;
        }
    }
    if (file) fclose(file);
    return s;
}

static int fails(const struct state *s, const char *what) { return strstr(s->fail, what) != NULL; }

/* A handle is the number of the GPU plus one, so that none is null. */
static unsigned number(void *device) { return (unsigned)(size_t)device - 1; }

int nvmlInit_v2(void)
{
    struct state s = read_state();
    return fails(&s, "init") ? NOT_LOADED : OK;
}
int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "an invented error"; }

int nvmlSystemGetDriverVersion(char *into, unsigned size)
{
    snprintf(into, size, "580.159.01");
    return OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    struct state s = read_state();
    *count = s.count;
    return fails(&s, "count") ? UNKNOWN : OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    if (index >= read_state().count) return NOT_FOUND;
    *device = (void *)(size_t)(index + 1);
    return OK;
}

int nvmlDeviceGetUUID(void *device, char *into, unsigned size)
{
    unsigned n = number(device);
    snprintf(into, size, "GPU-%08u-fa4e-0000-0000-%012u", n, n);
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    char own[64];
    for (size_t n = 1; n <= read_state().count; n++) {
        nvmlDeviceGetUUID((void *)n, own, sizeof own);
        if (!strcmp(uuid, own)) { *device = (void *)n; return OK; }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(void *device, char *into, unsigned size)
{
    struct state s = read_state();
    snprintf(into, size, "%s", names[number(device)]);
    return fails(&s, "name") ? UNKNOWN : OK;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
    *major = number(device) == 0 ? 9 : 8;
    *minor = 0;
    return OK;
}

int nvmlDeviceGetNumGpuCores(void *device, unsigned *count)
{
    *count = cores[number(device)];
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, void *into)
{
    struct { unsigned version; unsigned long long total, reserved, free, used; } *info = into;
    struct state s = read_state();
    if (fails(&s, "memory")) return UNKNOWN;
    info->total = memory[number(device)];
    info->reserved = 0;
    info->used = (unsigned long long)s.gpu[number(device)].used << 20;
    info->free = info->total - info->used;
    return OK;
}

int nvmlDeviceGetComputeMode(void *device, unsigned *mode)
{
    *mode = read_state().gpu[number(device)].mode;
    return OK;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending)
{
    *current = *pending = read_state().gpu[number(device)].mig;
    return OK;
}

struct process_info { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

static int list(const struct process *from, unsigned count, unsigned *size, struct process_info *into)
{
    unsigned room = *size;
    *size = count;
    if (room < count) return TOO_SMALL;
    for (unsigned i = 0; i < count; i++)
        into[i] = (struct process_info){from[i].pid, (unsigned long long)from[i].mib << 20, ~0u, ~0u};
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *size, struct process_info *into)
{
    struct state s = read_state();
    const struct gpu *g = &s.gpu[number(device)];
    return fails(&s, "processes") ? UNKNOWN : list(g->process, g->processes, size, into);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *size, struct process_info *into)
{
    struct state s = read_state();
    const struct gpu *g = &s.gpu[number(device)];
    return fails(&s, "processes") ? UNKNOWN : list(g->client, g->clients, size, into);
}

/* GPM, on the first GPU only. A sample is sums that grow with every look, so that figures come from the
 * difference of two samples as they do on a GPU. */
struct sample { double looks, sum[METRICS]; };

int nvmlGpmQueryDeviceSupport(void *device, void *into)
{
    struct { unsigned version, supported; } *answer = into;
    answer->supported = number(device) == 0;
    return OK;
}

int nvmlGpmSampleAlloc(void **sample)
{
    *sample = calloc(1, sizeof(struct sample));
    return OK;
}
int nvmlGpmSampleFree(void *sample) { free(sample); return OK; }

int nvmlGpmSampleGet(void *device, void *into)
{
    static struct sample so_far;
    struct state s = read_state();
    if (number(device) != 0) return NOT_SUPPORTED;
    if (fails(&s, "gpm")) return UNKNOWN;
    so_far.looks += 1;
    for (int m = 0; m < METRICS; m++) so_far.sum[m] += s.gpu[0].metric[m];
    *(struct sample *)into = so_far;
    return OK;
}

struct metric { unsigned id; int code; double value; const char *words[3]; };
struct metrics_get { unsigned version, count; struct sample *first, *second; struct metric metric[]; };

int nvmlGpmMetricsGet(struct metrics_get *get)
{
    double looks = get->second->looks - get->first->looks;
    if (looks <= 0) return UNKNOWN;
    for (unsigned i = 0; i < get->count; i++) {
        get->metric[i].code = NOT_SUPPORTED;
        for (int m = 0; m < METRICS; m++) {
            if (get->metric[i].id != metric_ids[m]) continue;
            get->metric[i].code = OK;
            get->metric[i].value = (get->second->sum[m] - get->first->sum[m]) / looks;
        }
    }
    return OK;
}
