/* A program that launches kernels in a loop, by functions that it finds in one of several ways.
 *
 *     launcher WAY WHAT MS [THREADS [LIMIT]]
 *
 * WAY: dlsym, main (dlsym of the program itself), default (RTLD_DEFAULT), v1, v2 (cuGetProcAddress),
 * own (the same, for the variants of the thread's own stream), linked (with -lcuda).
 * WHAT: kernel, ex, cooperative, graph, all (in turn), fork (all, in a child after some in the
 * parent), mixed (290 short kernels and then ten that are 100 times as long, again and again),
 * capture (kernels while streams capture), once (each launch once), cost (ns of a launch).
 * It prints what it did: launches, refusals, and the mode of the thread.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct config {
    unsigned grid[3], block[3], bytes;
    void *stream;
    void *attributes;
    unsigned count;
};

typedef int kernel_t(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     void *, void **, void **);
typedef int ex_t(const struct config *, void *, void **, void **);
typedef int cooperative_t(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, void *, void **);
typedef int graph_t(void *, void *);
typedef int address_t(const char *, void **, int, uint64_t);
typedef int address_v2_t(const char *, void **, int, uint64_t, int *);

static kernel_t *kernel;
static ex_t *ex;
static cooperative_t *cooperative;
static graph_t *graph;
static const char *what;
static uint64_t end, limit, launches, refused;

#ifdef LINKED
kernel_t cuLaunchKernel;
ex_t cuLaunchKernelEx;
cooperative_t cuLaunchCooperativeKernel;
graph_t cuGraphLaunch;
#endif

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void fail(const char *why)
{
    fprintf(stderr, "launcher: %s: %s\n", why, dlerror());
    exit(2);
}

static void *needed(void *found, const char *name)
{
    if (!found) fail(name);
    return found;
}

static void find(const char *way)
{
    void *all = strcmp(way, "linked") ? dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!strcmp(way, "linked")) {
#ifdef LINKED
        kernel = cuLaunchKernel, ex = cuLaunchKernelEx, cooperative = cuLaunchCooperativeKernel;
        graph = cuGraphLaunch;
#endif
        return;
    }
    if (!all) fail(way);
    if (!strcmp(way, "dlsym") || !strcmp(way, "main") || !strcmp(way, "default")) {
        void *in = !strcmp(way, "dlsym") ? all : !strcmp(way, "main") ? dlopen(NULL, RTLD_NOW)
                                                                      : RTLD_DEFAULT;
        if (in != all) dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        kernel = needed(dlsym(in, "cuLaunchKernel"), "cuLaunchKernel");
        ex = needed(dlsym(in, "cuLaunchKernelEx"), "cuLaunchKernelEx");
        cooperative = needed(dlsym(in, "cuLaunchCooperativeKernel"), "cuLaunchCooperativeKernel");
        graph = needed(dlsym(in, "cuGraphLaunch"), "cuGraphLaunch");
        return;
    }
    static const char *names[] = {"cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel",
                                  "cuGraphLaunch"};
    void *found[4] = {0}, *self = NULL;
    uint64_t flags = strcmp(way, "own") ? 0 : 2;
    if (!strcmp(way, "v1")) {
        address_t *ask = needed(dlsym(all, "cuGetProcAddress"), way);
        if (ask("cuGetProcAddress", &self, 11030, 0)) fail("asking for itself");
        ask = self;
        for (int i = 0; i < 4; i++) if (ask(names[i], found + i, 11030, flags)) fail(names[i]);
    } else {
        int status = 7;
        address_v2_t *ask = needed(dlsym(all, "cuGetProcAddress_v2"), way);
        if (ask("cuGetProcAddress", &self, 12000, 0, NULL)) fail("asking for itself");
        ask = self;
        for (int i = 0; i < 4; i++)
            if (ask(names[i], found + i, 12000, flags, &status) || status) fail(names[i]);
        void *none = &none;
        if (ask("cuNoSuchThing", &none, 12000, 0, &status) != 500 || none || status != 1)
            fail("what is not there");
    }
    kernel = found[0], ex = found[1], cooperative = found[2], graph = found[3];
}

static int launch(int turn, void *f)
{
    void **arguments = (void **)0x1234, **extra = (void **)0x5678, *stream = (void *)0x9abc;
    struct config config = {{1, 2, 3}, {4, 5, 6}, 7, stream, NULL, 0};
    switch (turn % 4) {
    case 0: return kernel(f, 1, 2, 3, 4, 5, 6, 7, NULL, arguments, extra);
    case 1: return ex(&config, f, arguments, extra);
    case 2: return cooperative(f, 1, 2, 3, 4, 5, 6, 7, stream, arguments);
    default: return graph(f, stream);
    }
}

static void *loop(void *unused)
{
    static const char *turns[] = {"kernel", "ex", "cooperative", "graph"};
    int turn = -1;
    for (int i = 0; i < 4; i++) if (!strcmp(what, turns[i]) || !strcmp(what, "capture")) turn = i;
    int mixed = !strcmp(what, "mixed");
    if (mixed || !strcmp(what, "capture")) turn = 0;
    for (uint64_t i = 0; now() < end && (!limit || i < limit); i++) {
        void *f = mixed && i % 300 >= 290 ? (void *)0x109 : (void *)1;
        if (launch(turn < 0 ? (int)(i % 4) : turn, f))
            __atomic_add_fetch(&refused, 1, __ATOMIC_RELAXED);
        __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    }
    return unused;
}

int main(int count, char **words)
{
    if (count < 4) return 2;
    what = words[2];
    int threads = count > 4 ? atoi(words[4]) : 1;
    limit = count > 5 ? strtoull(words[5], NULL, 10) : 0;
    find(words[1]);
    if (!strcmp(what, "once")) {
        for (int i = 0; i < 4; i++) printf("%d ", launch(i, (void *)1));
        for (int i = 0; i < 4; i++) printf("%d ", launch(i, (void *)0xbad));
        printf("%d\n", ex(NULL, NULL, NULL, NULL));
        return 0;
    }
    if (!strcmp(what, "cost")) {
        uint64_t n = 1000000, best = UINT64_MAX;
        for (int part = 0; part < 10; part++) {
            uint64_t start = now();
            for (uint64_t i = 0; i < n / 10; i++) launch(0, (void *)1);
            if (now() - start < best) best = now() - start;
        }
        printf("%.1f\n", (double)best / (n / 10));
        return 0;
    }
    if (!strcmp(what, "fork")) {
        what = "all";
        for (int i = 0; i < 40; i++) launch(i, (void *)1);
        pid_t child = fork();
        int status = 0;
        if (child) {
            printf("parent %d child %d\n", getpid(), child);
            fflush(stdout);
            waitpid(child, &status, 0);
            return WEXITSTATUS(status);
        }
    }
    void (*capture)(int) = NULL;
    if (!strcmp(what, "capture")) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        capture = (void (*)(int))dlsym(driver, "standin_capture");
        capture(1);
    }
    end = now() + strtoull(words[3], NULL, 10) * 1000000;
    pthread_t others[64];
    for (int i = 1; i < threads; i++) pthread_create(others + i, NULL, loop, NULL);
    loop(NULL);
    for (int i = 1; i < threads; i++) pthread_join(others[i], NULL);
    int (*mode)(void) = (int (*)(void))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "standin_mode");
    printf("launches %lu refused %lu mode %d\n", launches, refused, mode ? mode() : -1);
    return 0;
}
