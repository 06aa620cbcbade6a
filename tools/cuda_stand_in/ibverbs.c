/* libibverbs with a device that takes the stand-in's dma-bufs. Soft-RoCE's driver takes none: the range is mapped, and the mapping is
 * registered as the processor's memory by the address that was asked for. Everything else is the real library's, which this is linked to:
 * who looks for a function that is not here finds it there.
 *
 * It refuses what the kernel refuses: ranges that the dma-buf does not have, and addresses that lie otherwise on their pages.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define PAGE 4096
#define MOST 8192

/* libibverbs' own. */
struct ibv_pd;
struct ibv_mr;
struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *at, size_t length, uint64_t iova, int access);
int ibv_dereg_mr(struct ibv_mr *mr);

struct dma_buf {
    char magic[8];
    uint64_t offset, size;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    struct ibv_mr *mr;
    void *at;
    size_t length;
} mapped[MOST];

/* Looks at a dma-buf, and leaves it as it is; returns the file that its memory is in. */
static int look(int fd, struct dma_buf *told) {
    struct iovec bytes = {told, sizeof *told};
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(fd, &message, MSG_PEEK | MSG_CMSG_CLOEXEC) != sizeof *told) return -1;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (!head || head->cmsg_type != SCM_RIGHTS || memcmp(told->magic, "dma-buf", 8)) return -1;
    int file;
    memcpy(&file, CMSG_DATA(head), sizeof file);
    return file;
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    struct dma_buf told;
    int file = look(fd, &told);
    if (file < 0) return errno = EBADF, NULL;
    if (!length || offset > told.size || length > told.size - offset || offset % PAGE != iova % PAGE)
        return close(file), errno = EINVAL, NULL;
    uint64_t start = told.offset + offset, first = start / PAGE * PAGE;
    size_t reach = start - first + length;
    char *at = mmap(NULL, reach, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)first);
    close(file);
    if (at == MAP_FAILED) return NULL;
    /* A forked copy has nothing of it, as the processor has nothing of a GPU's memory. */
    madvise(at, reach, MADV_DONTFORK);
    struct ibv_mr *mr = ibv_reg_mr_iova(pd, at + (start - first), length, iova, access);
    if (!mr) {
        int why = errno;
        return munmap(at, reach), errno = why, NULL;
    }
    pthread_mutex_lock(&lock);
    for (int n = 0; n < MOST; n++)
        if (!mapped[n].mr) {
            mapped[n].mr = mr, mapped[n].at = at, mapped[n].length = reach;
            break;
        }
    pthread_mutex_unlock(&lock);
    return mr;
}

int ibv_dereg_mr(struct ibv_mr *mr) {
    void *real = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*dereg)(struct ibv_mr *) = (int (*)(struct ibv_mr *))dlsym(real, "ibv_dereg_mr");
    /* Another thread may be given the same pointer as soon as this one is let go. */
    pthread_mutex_lock(&lock);
    int code = dereg(mr);
    for (int n = 0; n < MOST && !code; n++)
        if (mapped[n].mr == mr) {
            munmap(mapped[n].at, mapped[n].length);
            mapped[n].mr = NULL;
            break;
        }
    pthread_mutex_unlock(&lock);
    dlclose(real);
    return code;
}
