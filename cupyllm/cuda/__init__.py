"""The CUDA kernels, each with its launch module beside it, and what compiles and runs them (see README.md)."""
