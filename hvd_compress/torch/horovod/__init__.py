"""Connection to Horovod: its calling frames, the carriers that it reduces instead of gradients, and its collectives."""
