"""Stand-in for SGLang's CUDA kernels; the CPU server's torch_native attention calls none of them."""

from absent_package import stand_in

stand_in(__name__)
