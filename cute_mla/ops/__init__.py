"""Ops: everything between a public function and a launch. protocol.py says what a module of an op has."""
