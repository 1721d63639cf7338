"""The native backend: one C++ library for both families (csrc/), and its operator for autograd."""
