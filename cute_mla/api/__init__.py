"""Public functions: signatures and reference pages, and nothing else. The bodies are in ops/."""
