"""``hvd-compress doctor``: can compression work on this machine, and what to do if it cannot.

`facts` finds out what there is, `rules` judges it, `trials` tries it out, `command` prints the answer.
"""
