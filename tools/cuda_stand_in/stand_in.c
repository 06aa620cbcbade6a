/* A stand-in for libcuda.so.1, for tests on machines without a GPU. It is no emulator: it has the functions that mesh-rdma and its tests
 * call, over memory of the processor, and is strict where the real driver is, or is undefined:
 *
 * - Addresses of "GPU" memory lie in pages that nobody can touch. What reads or writes them other than by the driver crashes.
 * - Work of a stream is carried out when somebody waits for it, and not before. What is not waited for has not happened.
 * - To free an allocation that another process has open ends the process, as does any call in a forked copy.
 *
 * Functions fail as MESH_CUDA_STAND_IN_FAIL says, such as "cuIpcOpenMemHandle_v2=217,cuMemHostAlloc=2", or standInFail() at run time.
 * MESH_CUDA_STAND_IN_DEVICES is the list of devices that the process sees, such as "1" or "0,1".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    DEVICE_LOST = 719,
    NOT_SUPPORTED = 801,
};

#define PAGE 4096
#define ALLOCATION 65536 /* allocations are multiples of it, as the driver's are of 2 MiB */
#define MOST 4096
#define OPENERS 64

/* The first page of each allocation's file, which all processes that have it open share. */
struct head {
    char magic[16];
    unsigned char nonce[16];
    uint64_t size;
    int device;
    _Atomic int openers[OPENERS];
};

struct allocation {
    CUdeviceptr at;
    size_t size;
    int device;
    int fd;
    int shareable;
    int imported; /* how often this process has opened it */
    uint64_t id;
    struct head *head;
    char *memory; /* where the bytes are */
};

struct handle {
    char magic[8];
    int pid;
    int fd;
    uint64_t size;
    unsigned char nonce[16];
    char rest[24];
};
_Static_assert(sizeof(struct handle) == 64, "as CUipcMemHandle");

struct work {
    char *to, *from;
    size_t width, rows, to_pitch, from_pitch;
    struct work *next;
};

struct stream {
    struct work *first, *last;
    uint64_t given, done;
    int device;
    int held; /* by a test: its work does not end */
};

struct event {
    struct stream *stream;
    uint64_t place;
    int looked; /* it is not ready the first time that anybody looks */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int started_in; /* pid */
static int devices[16], device_count;
static int contexts[16]; /* as primary contexts: their addresses */
static int active[16];
static struct allocation allocations[MOST];
static uint64_t next_id = 1;
static struct stream user_streams[3]; /* the default streams: 0 and 1, and 2 */
static int open_handles, live_streams, live_events, live_pinned;
static char failing[32][64];
static int failing_with[32], failing_after[32], failings;

static __thread int *stack[64];
static __thread int depth;

/* Of tests. */

void standInFail(const char *function, int code, int after) {
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < failings && strcmp(failing[at], function)) at++;
    if (at == failings && failings < 31) failings++;
    snprintf(failing[at], sizeof failing[at], "%s", function);
    failing_with[at] = code;
    failing_after[at] = after;
    pthread_mutex_unlock(&lock);
}

/* What is open, in this order: memory of other processes, streams, events, pinned memory. */
void standInCounts(int counts[4]) {
    pthread_mutex_lock(&lock);
    counts[0] = open_handles, counts[1] = live_streams, counts[2] = live_events, counts[3] = live_pinned;
    pthread_mutex_unlock(&lock);
}

void standInHold(struct stream *stream, int held) {
    pthread_mutex_lock(&lock);
    if ((uintptr_t)stream < 3) stream = &user_streams[(uintptr_t)stream];
    stream->held = held;
    pthread_mutex_unlock(&lock);
}

static int fails(const char *function) {
    for (int at = 0; at < failings; at++)
        if (!strcmp(failing[at], function) && failing_with[at]) {
            if (failing_after[at] > 0) failing_after[at]--;
            else return failing_with[at];
        }
    return OK;
}

static void die(const char *why) {
    fprintf(stderr, "CUDA stand-in: %s\n", why);
    abort();
}

/* At the beginning of each function but cuInit: takes the lock. */
static CUresult enter(const char *function) {
    if (started_in && started_in != getpid()) die("called in a forked copy of the process");
    if (!started_in) return NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    CUresult code = fails(function);
    if (code) pthread_mutex_unlock(&lock);
    return code;
}

static CUresult leave(CUresult code) {
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER                                \
    do {                                     \
        CUresult code_ = enter(__func__);    \
        if (code_) return code_;             \
    } while (0)
#define IN_CONTEXT                                        \
    ENTER;                                                \
    if (!depth || !stack[depth - 1]) return leave(INVALID_CONTEXT)

static struct allocation *find(CUdeviceptr at) {
    for (int n = 0; n < MOST; n++)
        if (allocations[n].at && at >= allocations[n].at && at < allocations[n].at + allocations[n].size)
            return &allocations[n];
    return NULL;
}

CUresult cuInit(unsigned flags) {
    if (started_in && started_in != getpid()) die("called in a forked copy of the process");
    pthread_mutex_lock(&lock);
    if (!started_in) {
        const char *list = getenv("MESH_CUDA_STAND_IN_FAIL");
        char text[1024];
        snprintf(text, sizeof text, "%s", list ? list : "");
        for (char *rest = text, *one; (one = strsep(&rest, ","));) {
            char *equals = strchr(one, '=');
            if (!equals || failings > 30) continue;
            *equals = 0;
            snprintf(failing[failings], sizeof failing[failings], "%s", one);
            failing_with[failings++] = atoi(equals + 1);
        }
        const char *seen = getenv("MESH_CUDA_STAND_IN_DEVICES");
        snprintf(text, sizeof text, "%s", seen ? seen : "0,1");
        for (char *rest = text, *one; (one = strsep(&rest, ","));)
            if (*one && device_count < 16) devices[device_count++] = atoi(one);
    }
    CUresult code = flags ? INVALID_VALUE : fails(__func__);
    if (!code && !device_count) code = 100;
    if (!code) started_in = getpid();
    return leave(code);
}

CUresult cuGetErrorName(CUresult code, const char **text) {
    switch (code) {
    case INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; return OK;
    case OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; return OK;
    case 100: *text = "CUDA_ERROR_NO_DEVICE"; return OK;
    case INVALID_CONTEXT: *text = "CUDA_ERROR_INVALID_CONTEXT"; return OK;
    case PEER_ACCESS_UNSUPPORTED: *text = "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"; return OK;
    case DEVICE_LOST: *text = "CUDA_ERROR_LAUNCH_FAILED"; return OK;
    case NOT_SUPPORTED: *text = "CUDA_ERROR_NOT_SUPPORTED"; return OK;
    default: *text = NULL; return INVALID_VALUE;
    }
}

CUresult cuGetErrorString(CUresult code, const char **text) {
    CUresult known = cuGetErrorName(code, text);
    if (!known) *text = code == OUT_OF_MEMORY ? "out of memory" : "the stand-in was told to fail, or was used wrongly";
    return known;
}

CUresult cuDeviceGetCount(int *count) {
    ENTER;
    *count = device_count;
    return leave(OK);
}

CUresult cuDeviceGet(int *device, int ordinal) {
    ENTER;
    *device = ordinal;
    return leave(ordinal < device_count ? OK : INVALID_DEVICE);
}

CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], int device) {
    ENTER;
    memset(uuid, 0xd0 + devices[device], 16);
    return leave(OK);
}

CUresult cuDeviceGetName(char *name, int length, int device) {
    ENTER;
    snprintf(name, (size_t)length, "stand-in %d", devices[device]);
    return leave(OK);
}

CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    ENTER;
    *flags = 0;
    *is_active = active[device];
    return leave(OK);
}

CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER;
    active[device]++;
    *context = &contexts[device];
    return leave(OK);
}

CUresult cuCtxPushCurrent_v2(void *context) {
    ENTER;
    int device = (int)((int *)context - contexts);
    if (device < 0 || device >= device_count || !active[device] || depth == 64) return leave(INVALID_CONTEXT);
    stack[depth++] = context;
    return leave(OK);
}

CUresult cuCtxPopCurrent_v2(void **context) {
    ENTER;
    if (!depth) return leave(INVALID_CONTEXT);
    *context = stack[--depth];
    return leave(OK);
}

static int current(void) { return (int)(stack[depth - 1] - contexts); }

CUresult cuPointerGetAttribute(void *into, int attribute, CUdeviceptr at) {
    ENTER;
    struct allocation *found = find(at);
    if (!found) return leave(INVALID_VALUE);
    switch (attribute) {
    case 2: *(unsigned *)into = 2; return leave(OK);
    case 7: *(uint64_t *)into = found->id; return leave(OK);
    case 9: *(int *)into = found->device; return leave(OK);
    case 10: *(int *)into = found->shareable; return leave(OK);
    default: return leave(INVALID_VALUE);
    }
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr at) {
    ENTER;
    struct allocation *found = find(at);
    if (!found) return leave(INVALID_VALUE);
    *base = found->at;
    *size = found->size;
    return leave(OK);
}

static struct allocation *place(int fd, size_t size, int device) {
    struct allocation *free = NULL;
    for (int n = 0; n < MOST && !free; n++)
        if (!allocations[n].at) free = &allocations[n];
    if (!free) return NULL;
    char *file = mmap(NULL, PAGE + size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (file == MAP_FAILED || at == MAP_FAILED) return NULL;
    *free = (struct allocation){.at = (CUdeviceptr)at, .size = size, .device = device, .fd = fd, .id = next_id++};
    free->head = (struct head *)file;
    free->memory = file + PAGE;
    return free;
}

static CUresult allocate(CUdeviceptr *at, size_t size, int shareable) {
    if (!size) return INVALID_VALUE;
    size = (size + ALLOCATION - 1) / ALLOCATION * ALLOCATION;
    int fd = memfd_create("cuda-stand-in", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)(PAGE + size))) return OUT_OF_MEMORY;
    struct allocation *made = place(fd, size, current());
    if (!made) return OUT_OF_MEMORY;
    memcpy(made->head->magic, "cuda-stand-in", 14);
    if (getrandom(made->head->nonce, 16, 0) != 16) return OUT_OF_MEMORY;
    made->head->size = size;
    made->head->device = devices[made->device];
    made->shareable = shareable;
    *at = made->at;
    return OK;
}

CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t size) {
    IN_CONTEXT;
    return leave(allocate(at, size, 1));
}

/* Memory of a pool, which cannot be shared by handles. */
CUresult cuMemAllocAsync(CUdeviceptr *at, size_t size, void *stream) {
    (void)stream;
    IN_CONTEXT;
    return leave(allocate(at, size, 0));
}

static void drop(struct allocation *one) {
    munmap(one->head, PAGE + one->size);
    munmap((void *)one->at, one->size);
    if (one->fd >= 0) close(one->fd);
    memset(one, 0, sizeof *one);
}

CUresult cuMemFree_v2(CUdeviceptr at) {
    IN_CONTEXT;
    struct allocation *found = find(at);
    if (!found || found->at != at || found->imported) return leave(INVALID_VALUE);
    for (int n = 0; n < OPENERS; n++) {
        int pid = found->head->openers[n];
        if (pid && !kill(pid, 0)) {
            /* A process that has ended, but was not waited for, has nothing open. */
            char path[64], state = 0;
            snprintf(path, sizeof path, "/proc/%d/stat", pid);
            FILE *file = fopen(path, "r");
            if (file && fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 0;
            if (file) fclose(file);
            if (state && state != 'Z' && state != 'X') die("memory is freed that another process has open");
        }
    }
    drop(found);
    return leave(OK);
}

CUresult cuIpcGetMemHandle(struct handle *handle, CUdeviceptr at) {
    IN_CONTEXT;
    struct allocation *found = find(at);
    if (!found || !found->shareable || found->imported) return leave(INVALID_VALUE);
    *handle = (struct handle){.pid = getpid(), .fd = found->fd, .size = found->size};
    memcpy(handle->magic, "standin", 8);
    memcpy(handle->nonce, found->head->nonce, 16);
    return leave(OK);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *at, struct handle handle, unsigned flags) {
    (void)flags;
    IN_CONTEXT;
    if (memcmp(handle.magic, "standin", 8)) return leave(INVALID_VALUE);
    /* As the real one: not in the process that has exported it. */
    if (handle.pid == getpid()) return leave(INVALID_CONTEXT);
    for (int n = 0; n < MOST; n++)
        if (allocations[n].imported && !memcmp(allocations[n].head->nonce, handle.nonce, 16)) {
            allocations[n].imported++;
            open_handles++;
            *at = allocations[n].at;
            return leave(OK);
        }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat stat;
    if (fd < 0) return leave(INVALID_VALUE);
    if (fstat(fd, &stat) || (uint64_t)stat.st_size != PAGE + handle.size) return close(fd), leave(INVALID_VALUE);
    struct allocation *made = place(fd, handle.size, current());
    if (!made) return close(fd), leave(OUT_OF_MEMORY);
    if (memcmp(made->head->nonce, handle.nonce, 16)) return drop(made), leave(INVALID_VALUE);
    if (made->head->device != devices[current()]) return drop(made), leave(PEER_ACCESS_UNSUPPORTED);
    made->imported = 1;
    open_handles++;
    for (int n = 0; n < OPENERS; n++) {
        int nobody = 0;
        if (atomic_compare_exchange_strong(&made->head->openers[n], &nobody, getpid())) break;
    }
    *at = made->at;
    return leave(OK);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
    IN_CONTEXT;
    struct allocation *found = find(at);
    if (!found || found->at != at || !found->imported) return leave(INVALID_VALUE);
    open_handles--;
    if (--found->imported) return leave(OK);
    for (int n = 0; n < OPENERS; n++)
        if (found->head->openers[n] == getpid()) {
            found->head->openers[n] = 0;
            break;
        }
    drop(found);
    return leave(OK);
}

/* Streams, which are carried out as they are waited for. */

CUresult cuStreamCreate(struct stream **stream, unsigned flags) {
    (void)flags;
    IN_CONTEXT;
    *stream = calloc(1, sizeof **stream);
    (*stream)->device = current();
    live_streams++;
    return leave(OK);
}

static CUresult carry_out(struct stream *stream, uint64_t place) {
    while (stream->first && stream->done < place) {
        struct work *work = stream->first;
        for (size_t row = 0; row < work->rows; row++)
            memmove(work->to + row * work->to_pitch, work->from + row * work->from_pitch, work->width);
        stream->first = work->next;
        if (!stream->first) stream->last = NULL;
        stream->done++;
        free(work);
    }
    return OK;
}

CUresult cuStreamDestroy_v2(struct stream *stream) {
    IN_CONTEXT;
    if (stream->first) die("a stream is destroyed whose work nobody has waited for");
    free(stream);
    live_streams--;
    return leave(OK);
}

static struct stream *real(struct stream *stream) {
    return (uintptr_t)stream < 3 ? &user_streams[(uintptr_t)stream] : stream;
}

CUresult cuStreamSynchronize(struct stream *stream) {
    IN_CONTEXT;
    return leave(carry_out(real(stream), UINT64_MAX));
}

CUresult cuEventCreate(struct event **event, unsigned flags) {
    (void)flags;
    IN_CONTEXT;
    *event = calloc(1, sizeof **event);
    live_events++;
    return leave(OK);
}

CUresult cuEventDestroy_v2(struct event *event) {
    IN_CONTEXT;
    free(event);
    live_events--;
    return leave(OK);
}

CUresult cuEventRecord(struct event *event, struct stream *stream) {
    IN_CONTEXT;
    event->stream = real(stream);
    event->place = event->stream->given;
    event->looked = 0;
    return leave(OK);
}

CUresult cuEventQuery(struct event *event) {
    IN_CONTEXT;
    if (!event->stream) return leave(OK);
    if (event->stream->held || !event->looked++) return leave(NOT_READY);
    return leave(carry_out(event->stream, event->place));
}

CUresult cuEventSynchronize(struct event *event) {
    IN_CONTEXT;
    if (!event->stream) return leave(OK);
    while (event->stream->held) {
        pthread_mutex_unlock(&lock);
        usleep(1000);
        pthread_mutex_lock(&lock);
    }
    return leave(carry_out(event->stream, event->place));
}

/* Where the bytes at an address are; it is the processor's own if no allocation has it. */
static char *bytes(CUdeviceptr at, size_t reach) {
    struct allocation *found = find(at);
    if (!found) return (char *)at;
    if (at - found->at + reach > found->size) return NULL;
    return found->memory + (at - found->at);
}

static CUresult give(struct stream *stream, struct work work) {
    if (!work.rows || !work.width) return OK;
    size_t last = work.rows - 1;
    work.to = bytes((CUdeviceptr)work.to, last * work.to_pitch + work.width);
    work.from = bytes((CUdeviceptr)work.from, last * work.from_pitch + work.width);
    if (!work.to || !work.from) return INVALID_VALUE;
    struct work *made = malloc(sizeof *made);
    *made = work;
    made->next = NULL;
    stream = real(stream);
    if (stream->last) stream->last->next = made;
    else stream->first = made;
    stream->last = made;
    stream->given++;
    return OK;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t length, struct stream *stream) {
    IN_CONTEXT;
    return leave(give(stream, (struct work){(char *)to, (char *)from, length, 1, length, length, NULL}));
}

struct copy {
    size_t from_x, from_y;
    unsigned from_type;
    const void *from_host;
    CUdeviceptr from;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    unsigned to_type;
    void *to_host;
    CUdeviceptr to;
    void *to_array;
    size_t to_pitch, width, height;
};

CUresult cuMemcpy2DAsync_v2(const struct copy *copy, struct stream *stream) {
    IN_CONTEXT;
    if (copy->from_type != 4 || copy->to_type != 4 || copy->from_x || copy->from_y || copy->to_x || copy->to_y)
        return leave(INVALID_VALUE);
    if (copy->to_pitch < copy->width || copy->from_pitch < copy->width) return leave(INVALID_VALUE);
    if (copy->to_pitch > 0x7fffffff || copy->from_pitch > 0x7fffffff) return leave(INVALID_VALUE);
    return leave(give(stream, (struct work){(char *)copy->to, (char *)copy->from, copy->width, copy->height,
                                            copy->to_pitch, copy->from_pitch, NULL}));
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t length) {
    IN_CONTEXT;
    char *there = bytes(to, length);
    if (!there || !find(to)) return leave(INVALID_VALUE);
    memcpy(there, from, length);
    return leave(OK);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t length) {
    IN_CONTEXT;
    char *there = bytes(from, length);
    if (!there || !find(from)) return leave(INVALID_VALUE);
    memcpy(to, there, length);
    return leave(OK);
}

CUresult cuMemHostAlloc(void **at, size_t length, unsigned flags) {
    (void)flags;
    IN_CONTEXT;
    live_pinned++;
    return leave(posix_memalign(at, PAGE, length) ? OUT_OF_MEMORY : OK);
}

CUresult cuMemFreeHost(void *at) {
    IN_CONTEXT;
    live_pinned--;
    free(at);
    return leave(OK);
}

/* What stands for a dma-buf: a socket with one message in it, which has the file of the allocation, where in it the range begins, and how
 * long it is. As with a real one, nothing can be read from the descriptor itself, it keeps the memory, and each has its own range. Devices
 * are told of it by `ibverbs.c`. */
struct dma_buf {
    char magic[8];
    uint64_t offset, size;
};

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr at, size_t size, int type, unsigned long long flags) {
    IN_CONTEXT;
    struct allocation *found = find(at);
    if (!found || type != 1 || flags || !size || at % PAGE || size % PAGE || at + size > found->at + found->size)
        return leave(INVALID_VALUE);
    struct dma_buf told = {"dma-buf", PAGE + (at - found->at), size};
    struct iovec bytes = {&told, sizeof told};
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {.head = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    memcpy(CMSG_DATA(&control.head), &found->fd, sizeof(int));
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) return leave(OUT_OF_MEMORY);
    ssize_t sent = sendmsg(ends[1], &message, 0);
    close(ends[1]);
    if (sent < 0) return close(ends[0]), leave(OUT_OF_MEMORY);
    *(int *)handle = ends[0];
    return leave(OK);
}
