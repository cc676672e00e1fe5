"""Check the package on a GPU; see `gpu_check.__main__`."""
