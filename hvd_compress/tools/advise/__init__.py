"""Step times of methods on a cluster that one does not have, from a cost model.

With n ranks, each on a link of B bits a second, a step of a method takes::

    step   = compute + encode + decode(n) + exchange - hidden

    exchange = sum over collectives of
                   8 * wire(n) / (efficiency * B)                                  the link, or a GPU's bus if slower
                 + latency * hops                                                  the link, too
                 + wire(n) * byte + halves * half + (messages) * hop + cycle       the host

``compute`` is what the user has measured. ``encode`` and ``decode`` are measured on this CPU; a GPU is assumed
to need as many passes over its memory. The bytes on the wire are counted in one exchange of the method itself, see
`hvd_compress.tools.bench.traffic`. The rest are `hvd_compress.tools.advise.constants`. docs/advise.md has the formulas
and their limits.
"""
