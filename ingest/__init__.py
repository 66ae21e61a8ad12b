"""Reading attention heads out of checkpoints and measuring them, one layer at a time.

``open_checkpoint`` finds the files, ``plan_checkpoint`` decides from headers alone what will be
read, and ``measure`` yields one measured layer after another. Nothing here knows about the store.
"""
