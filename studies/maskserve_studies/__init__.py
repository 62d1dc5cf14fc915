"""Studies: reproductions of papers, questions that were asked once, and the training of the demo
models. The wheel leaves them out; only tests import from here.
"""
