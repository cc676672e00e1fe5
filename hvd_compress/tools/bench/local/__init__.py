"""Speed in one process, without Horovod: of the kernels, and of whole methods."""
