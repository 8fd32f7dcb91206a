"""Running a launch: the machine, its scheduling policies, and the report."""
