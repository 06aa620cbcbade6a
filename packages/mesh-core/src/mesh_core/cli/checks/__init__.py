"""mesh-core's own doctor checks. Each reads the machine through arguments with defaults, so that tests can stage one."""
