"""Statistics of attention heads as plain functions on arrays.

Nothing here opens a file, a database or a model. Axes are named ``layer``, ``head``, ``kv_head``,
``d_model`` and ``d_head`` throughout; a head writes ``T x`` with ``T = O V^T``, ``O`` and ``V`` of
shape ``(d_model, d_head)``, and ``T`` itself is never formed.

``stats.registry`` and ``stats.errors`` import without torch, so that a command which only reads
declarations starts quickly.
"""
