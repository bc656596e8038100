"""Reports on rollouts: what they share, where sharing is lost, what training costs.

``python -m areal_dta.inspect FILE...`` (docs/inspect.md). Needs numpy, scipy, rich,
tokenizers and jinja2; neither torch nor areal nor a GPU.

* ``rollouts``: files to sequences, with a tokenizer where they hold texts.
* ``corpus``: the sequences as one prefix tree, with what is known of each.
* ``lost_sharing``, ``alignment``, ``causes``: forks that need not be there.
* ``prediction``, ``models``: seconds and bytes of the ways to train the batch.
* ``analysis``: the report as plain data; ``table`` and ``page`` show it.
"""
