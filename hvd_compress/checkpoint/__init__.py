"""State of the ranks of a job: in files, dealt out to other ranks, and agreed on by those that go on with it."""
