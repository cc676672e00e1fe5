"""What is Horovod's own: who calls, what it reduces in the place of gradients, and its collectives."""
