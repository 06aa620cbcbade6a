"""These tests need RDMA devices. `test_soft_roce.py` runs them in a virtual machine that has some; elsewhere they are not collected."""

import os

if "SOFT_ROCE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
