"""The hot loops behind the primitives, each in one pass over memory; plain numpy stays what they are compared with."""
