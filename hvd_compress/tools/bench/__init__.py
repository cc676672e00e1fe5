"""The commands ``methods``, ``vnmse`` and ``bench``: the methods, their error and their speed."""
