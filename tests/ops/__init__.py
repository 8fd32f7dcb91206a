"""Tests of the operations, one folder each, from the public function down to kernels on the simulated device."""
