"""Features on top of the core: the debugger, logs, traces, synced workspaces, substitutes for tests. `_bundle` attaches them."""
