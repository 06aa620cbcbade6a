/* How large parts of messages get from one host to another past the gateways: what a package that can do that offers.
 *
 * create() of a mesh_core.plugins.BypassPlugin returns a capsule named MESH_BYPASS_CAPSULE, whose pointer is to a struct
 * mesh_bypass that stays valid until the process ends. All functions are called on any thread, without the interpreter's
 * lock, and must not take it. Those that mesh-core gives, freed() and done(), may be called on any thread too, also within the
 * call that they were given to.
 */

#ifndef MESH_CORE_BYPASS_H
#define MESH_CORE_BYPASS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MESH_BYPASS_CAPSULE "mesh_core.bypass"
#define MESH_BYPASS_VERSION 1

struct mesh_bypass {
    uint32_t version; /* MESH_BYPASS_VERSION */

    /* Offers memory of this process to whoever has the ticket, for reading. Writes the ticket, of at most `room` bytes, and a
     * number for withdraw(); returns the ticket's length, or 0 if the memory is not offered. From then on the memory stays
     * as it is until freed(arg), which is called once, and never where 0 was returned. */
    uint32_t (*offer)(const struct mesh_bypass *self, const void *data, uint64_t length, uint8_t *ticket, uint32_t room,
                      uint64_t *number, void (*freed)(void *arg), void *arg);

    /* Offers it no longer. freed() is called as soon as nobody reads it any more. */
    void (*withdraw)(const struct mesh_bypass *self, uint64_t number);

    /* Fills `length` bytes at `into` with what a ticket is to. done(arg, 0) says that all are there, any other status that they
     * are not, and will not be: nobody writes to the memory from then on. It is called once. */
    void (*fetch)(const struct mesh_bypass *self, const uint8_t *ticket, uint32_t size, void *into, uint64_t length,
                  void (*done)(void *arg, int32_t status), void *arg);
};

#ifdef __cplusplus
}
#endif

#endif
