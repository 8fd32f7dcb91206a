"""Asynchronous units: TMA boxes, wgmma pipes, the tensor core and its queue."""
