"""Memory of one process to many, and of many to one."""
