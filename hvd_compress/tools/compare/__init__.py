"""The command ``hvd-compress compare``: train with each method, judge what it gains, and report it."""
