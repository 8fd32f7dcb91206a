"""Tests of the vLLM adapter against vLLM itself; `make test-vllm` runs them."""
