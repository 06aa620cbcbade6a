"""Building blocks on top of actors: pools, queues, pipelines, sandboxes, and other programs under limits. Features: the kernel does not import them."""
