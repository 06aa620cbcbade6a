"""For tests of policies: the conformance suite that an author subclasses, and a simulated mesh.

>>> from mesh_supervision import OneForAll
>>> from mesh_supervision.testing import Rehearsal
>>> mesh = Rehearsal(OneForAll(intensity=3, period=60.0), size=4)
>>> mesh.kill(2)
>>> mesh.advance(1.0)
>>> mesh.restarts
[Began(at=0.05, ranks=(0, 1, 2, 3))]
"""

from mesh_core.testing import rewrite_asserts
from mesh_supervision.testing._rehearsal import Began, PassedOn, Rehearsal

rewrite_asserts("mesh_supervision.testing._suite")

from mesh_supervision.testing._suite import PolicyConformance  # noqa: E402 - rewritten as it is imported

__all__ = ["Began", "PassedOn", "PolicyConformance", "Rehearsal"]
