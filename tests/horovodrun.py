"""Horovod's launcher without its first question: it loads TensorFlow to learn which controllers were built in.

This project's Horovod has both. A launch takes half as long so; examples and the commands of documents ask.
"""

from __future__ import annotations

from horovod.runner import launch


def built(verbose: bool = False) -> bool:
    """Answer for Gloo and for MPI."""
    return True


if __name__ == "__main__":
    launch.gloo_built = launch.mpi_built = built
    launch.run_commandline()
