"""Every statistic by brute force: T as a dense d_model x d_model matrix, in numpy and SciPy."""

from __future__ import annotations

import numpy as np
import scipy.linalg

Array = np.ndarray


def closure(t: Array) -> float:
    square = t @ t
    return float((square * t).sum() ** 2 / ((square**2).sum() * (t**2).sum()))


def alpha(t: Array) -> float:
    return float((t @ t * t).sum() / (t**2).sum())


def action(product: Array, base: Array) -> tuple[float, float]:
    """Closure and coefficient of ``product ~ alpha base``."""
    inner = (product * base).sum()
    return float(inner**2 / ((product**2).sum() * (base**2).sum())), float(inner / (base**2).sum())


def head(o: Array, v: Array) -> dict[str, float | Array]:
    """Statistics of ``T = O V^T`` by their registered names."""
    k = o.shape[1]
    t = o @ v.T
    sigma = np.linalg.svd(t, compute_uv=False)[:k]
    cosine = np.cos(scipy.linalg.subspace_angles(o, v))[::-1]
    eigenvalue = np.linalg.eigvals(t)
    eigenvalue = eigenvalue[np.argsort(-np.abs(eigenvalue))][:k]
    power = sigma**2
    return {
        "closure": closure(t),
        "alpha": alpha(t),
        "norm": float(np.linalg.norm(t)),
        "trace": float(np.trace(t)),
        "trace_rank": float(np.trace(t)) / alpha(t),
        "rank": k,
        "sigma_max": sigma[0],
        "sigma_min": sigma[-1],
        "participation": power.sum() ** 2 / (power**2).sum(),
        "stable_rank": power.sum() / power[0],
        "condition": sigma[0] / sigma[-1],
        "isometry": power.sum() ** 2 / (power**2).sum() / k,
        "cos_max": cosine.max(),
        "cos_mean": cosine.mean(),
        "cos_min": cosine.min(),
        "spectral_radius": np.abs(eigenvalue).max(),
        "copying": eigenvalue.real.sum() / np.abs(eigenvalue).sum(),
        "null_scale": (power**3).sum() / power.sum() ** 3,
        "sigma": sigma,
        "cosine": np.sort(cosine)[::-1],
        "sigma_o": np.linalg.svd(o, compute_uv=False),
        "sigma_v": np.linalg.svd(v, compute_uv=False),
    }


def query_key(q: Array, key: Array) -> dict[str, float | Array]:
    """Statistics of ``B = W_Q W_K^T`` by their registered names."""
    k = q.shape[1]
    b = q @ key.T
    sigma = np.linalg.svd(b, compute_uv=False)[:k]
    cosine = np.sort(np.cos(scipy.linalg.subspace_angles(q, key)))[::-1]
    symmetric = (b + b.T) / 2

    def participation(values: Array) -> float:
        return float((values**2).sum() ** 2 / (values**4).sum())

    return {
        "norm": float(np.linalg.norm(b)),
        "sigma_max": sigma[0],
        "sigma_min": sigma[-1],
        "participation": participation(sigma),
        "symmetric_share": float((symmetric**2).sum() / (b**2).sum()),
        "cos_max": cosine[0],
        "cos_mean": cosine.mean(),
        "participation_q": participation(np.linalg.svd(q, compute_uv=False)),
        "participation_k": participation(np.linalg.svd(key, compute_uv=False)),
        "sigma": sigma,
        "cosine": cosine,
    }
