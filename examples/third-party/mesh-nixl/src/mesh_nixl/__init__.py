"""A transport for buffers on NVIDIA's NIXL: the owner's agent moves the bytes, one-sidedly, into and out of memory of the reader.

NXL-1: the owner checks each request, and moves the bytes itself, so that no key to its memory ever leaves it.
NXL-2: a reader has registered memory of its own for that, and never its caller's: what still comes for a transfer that was
    given up hits nothing. A place there is used again once the owner's thread has ended the connection.
NXL-3: memory that is withdrawn is not in use: a request works under the lock of its export.
"""

from mesh_nixl._plugin import NIXL, mesh_register_transports

__all__ = ["NIXL", "mesh_register_transports"]
