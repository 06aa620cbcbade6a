"""mesh-core's own doctor checks. What they read has defaults that tests replace, to simulate other machines."""
