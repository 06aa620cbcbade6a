/* Finishes a promise of Mesh from native code, on any thread, without the interpreter's lock and without linking to Mesh.
 *
 * Promise.native_handle() returns a capsule named MESH_PROMISE_CAPSULE, whose pointer is to a struct mesh_promise:
 *
 *     const struct mesh_promise *promise = PyCapsule_GetPointer(capsule, MESH_PROMISE_CAPSULE);
 *     if (promise == NULL || promise->version != MESH_PROMISE_VERSION) ...
 *     promise->retain(promise);             before the capsule goes; each retain needs one release
 *     ...
 *     promise->finish(promise, 0);          on any thread
 *     promise->release(promise);
 *
 * All three functions may be called on any thread, also after the interpreter has ended. A promise of which all handles and
 * the Promise itself have gone without an outcome is broken.
 */

#ifndef MESH_CORE_PROMISE_H
#define MESH_CORE_PROMISE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MESH_PROMISE_CAPSULE "mesh_core.promise"
#define MESH_PROMISE_VERSION 1

/* What finish() returns. */
#define MESH_PROMISE_FINISHED 0        /* with this status */
#define MESH_PROMISE_HAD_AN_OUTCOME 1 /* before; this status is dropped */
#define MESH_PROMISE_FORKED (-1)       /* this is a copy in a forked child, which finishes nothing */

struct mesh_promise {
    uint32_t version; /* MESH_PROMISE_VERSION */
    int32_t (*finish)(const struct mesh_promise *promise, int32_t status);
    void (*retain)(const struct mesh_promise *promise);
    void (*release)(const struct mesh_promise *promise);
};

#ifdef __cplusplus
}
#endif

#endif
