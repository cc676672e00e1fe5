"""State of the ranks of a job: in files, resharded to other ranks, and verified by the ranks that resume from it."""
