"""What pytest leaves alone here: programs that the tests run as processes of their own."""

collect_ignore_glob = ["stress/*"]
