"""What a process comes with beside the kernel: the debugger, logs, traces, synced workspaces, substitutes for tests. `_bundle` attaches them."""
