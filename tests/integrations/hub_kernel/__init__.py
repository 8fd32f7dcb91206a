"""Tests of the folder of a Hugging Face kernel with the package kernels: `make test-transformers`."""
