"""Publishing weights: immutable versions of a set of tensors, and readers that have leases on them."""
