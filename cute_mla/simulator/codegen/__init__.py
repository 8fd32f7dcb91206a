"""Instructions to Python functions: control flow, batches, translation, the loaded module."""
