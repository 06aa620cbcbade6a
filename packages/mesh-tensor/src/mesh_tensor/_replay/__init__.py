"""A process's part of recorded steps: how it replays and compiles them."""
