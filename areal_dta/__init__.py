"""areal_dta: RL training of language models on prefix trees, on top of AReaL.

Imports stay light on purpose: ``import areal_dta.tree`` needs numpy alone and
``import areal_dta.executor`` needs torch and transformers, never areal.
"""

__version__ = "0.2.0.dev0"
