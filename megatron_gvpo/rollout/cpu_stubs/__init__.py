"""Import stand-ins for two packages that SGLang imports and, on a CPU, never calls.

This folder goes on the PYTHONPATH of a CPU server only (`rollout.server` does it). `sgl_kernel` exists for CUDA alone;
PyPI's `torchvision` wheels are CUDA builds whose operators do not load beside a CPU torch. A server on GPUs uses the real ones.
"""
