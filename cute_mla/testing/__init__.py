"""Cases, suites, the comparison and the runner that decide whether a kernel is right, on a GPU or on the simulated device."""
