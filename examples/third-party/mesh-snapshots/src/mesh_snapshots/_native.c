/* Writes files on threads that never take the interpreter's lock, and finishes a promise of Mesh from there. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <mesh_core/promise.h>

struct job {
    const struct mesh_promise *promise;
    char *path;
    char *part;
    char *folder; /* in memory of its own, as dirname() changes what it is given */
    void *data;   /* a copy: the Python object may be gone before the write is done */
    size_t size;
};

static void free_job(struct job *job) {
    if (job == NULL) return;
    free(job->path);
    free(job->part);
    free(job->folder);
    free(job->data);
    free(job);
}

static struct job *new_job(const char *path, const void *data, size_t size) {
    struct job *job = calloc(1, sizeof *job);
    if (job == NULL) return NULL;
    job->path = strdup(path);
    job->folder = strdup(path);
    job->data = malloc(size ? size : 1);
    job->size = size;
    if (asprintf(&job->part, "%s.part", path) < 0) job->part = NULL;
    if (!job->path || !job->folder || !job->data || !job->part) {
        free_job(job);
        return NULL;
    }
    memcpy(job->data, data, size);
    return job;
}

/* Both return 0 or an errno. */

static int write_all(int fd, const char *data, size_t size) {
    while (size) {
        ssize_t n = write(fd, data, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno;
        data += n;
        size -= (size_t)n;
    }
    return fsync(fd) ? errno : 0;
}

static int write_whole(struct job *job) {
    int status, folder;
    int fd = open(job->part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return errno;
    status = write_all(fd, job->data, job->size);
    if (close(fd) && !status) status = errno;
    if (!status && rename(job->part, job->path)) status = errno;
    if (status) {
        unlink(job->part);
        return status;
    }
    /* The new name is on disk only once its folder is. */
    folder = open(dirname(job->folder), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return errno;
    if (fsync(folder)) status = errno;
    close(folder);
    return status;
}

static void *run(void *argument) {
    struct job *job = argument;
    const struct mesh_promise *promise = job->promise;
    int status = write_whole(job);
    free_job(job);
    promise->finish(promise, status);
    promise->release(promise);
    return NULL;
}

static int start(struct job *job) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    int status = pthread_attr_init(&attributes);
    if (status) return status;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* Signals are for the threads of Python. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    status = pthread_create(&thread, &attributes, run, job);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return status;
}

static PyObject *write_file(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *capsule, *path;
    Py_buffer data;
    const struct mesh_promise *promise;
    struct job *job;
    int status;
    if (!PyArg_ParseTuple(arguments, "OO&y*:write", &capsule, PyUnicode_FSConverter, &path, &data)) return NULL;
    promise = PyCapsule_GetPointer(capsule, MESH_PROMISE_CAPSULE);
    if (promise != NULL && promise->version != MESH_PROMISE_VERSION) {
        PyErr_Format(PyExc_RuntimeError, "mesh_snapshots speaks version %d of native promises, got version %u",
                     MESH_PROMISE_VERSION, promise->version);
        promise = NULL;
    }
    if (promise == NULL) {
        Py_DECREF(path);
        PyBuffer_Release(&data);
        return NULL;
    }
    job = new_job(PyBytes_AsString(path), data.buf, (size_t)data.len);
    Py_DECREF(path);
    PyBuffer_Release(&data);
    if (job == NULL) return PyErr_NoMemory();
    /* For the thread, which releases it; the capsule may go as soon as this returns. */
    promise->retain(promise);
    job->promise = promise;
    status = start(job);
    if (status) {
        free_job(job);
        promise->release(promise);
        errno = status;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"write", write_file, METH_VARARGS,
     "write(promise, path, data): write a file whole or not at all, on a thread of its own; then finish the promise with 0 or "
     "an errno."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "mesh_snapshots._native", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
