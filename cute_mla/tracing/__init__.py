"""Ops of torch: torch.ops.cute_mla has one for each public function, and public functions call it while they are traced.

schema.py       signature of a function -> arguments of an op in torch's notation
register.py     TorchOp, the description of an op, and its registration with torch
public.py       decorator of the public functions: registers the op, and generates the function's body from the signature
detection.py    detection of tracing
other modules   the ops of each kind: eager body, fake and gradient
"""
