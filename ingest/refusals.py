"""Families that are known and cannot be read, by ``model_type``, and why."""

from __future__ import annotations

from collections.abc import Mapping

WINDOWED = "its layers attend within windows, through tensors that no row of the tables describes"

REFUSED: Mapping[str, str] = {
    "big_bird": "its attention is block-sparse, with random and global blocks",
    "bigbird_pegasus": "its attention is block-sparse, with random and global blocks",
    "diffllama": "differential attention joins the halves of two heads' values, so that no head is O V^T",
    "funnel": "its blocks pool the sequence within attention",
    "jetmoe": "queries and outputs belong to experts that each token is routed to, so that no head is O V^T",
    "led": "local and global attention have projections of their own in one layer",
    "longformer": "local and global attention have projections of their own in one layer",
    "longt5": "its attention is local or over summaries of blocks",
    "reformer": "queries and keys share a projection, and hashing decides which tokens attend",
    "swin": WINDOWED,
    "swinv2": WINDOWED,
    "xlnet": "content and position streams share a layer's heads",
    "zamba": "a shared block reads the stream and the embedding side by side, so that T is not square",
    "zamba2": "a shared block reads the stream and the embedding side by side, so that T is not square",
}
