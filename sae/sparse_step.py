"""The TopK training loss of sae-lens, computed sparsely.

sae-lens multiplies (tokens × width) matrices that are nearly all zero, forward and backward, which on a CPU takes most
of its time. Here only the encoder is a dense product. Loss and gradients are the same, up to rounding, as those of
`TopKTrainingSAE.training_forward_pass`.

With `rescale_acts_by_decoder_norm` the norm of a decoder row only takes part in ranking: sae-lens multiplies a kept
pre-activation by it and divides by it again before decoding, so it cancels from the reconstruction and its gradients.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from sae_lens.saes.topk_sae import TopKTrainingSAE


def sparse_topk_loss(sae: TopKTrainingSAE, x: Tensor, k: int, dead: Tensor) -> tuple[Tensor, Tensor]:
    """The training loss of `sae` on activations x (tokens, d_model), and which features fired: bool (width,).

    `dead` is a bool mask (width,) of the features that the auxiliary loss is for.
    """
    out, kept, values = cast(
        "tuple[Tensor, Tensor, Tensor]",
        _SparseTopK.apply(x, sae.W_enc, sae.b_enc, sae.W_dec, sae.b_dec, k, sae.cfg),  # type: ignore[no-untyped-call]
    )
    loss = (out - x).pow(2).sum(dim=-1).mean()
    fired = torch.zeros_like(dead)
    fired[kept[values > 0]] = True
    if bool(dead.any()) and sae.cfg.aux_loss_coefficient > 0:
        loss = loss + dead_feature_loss(sae, x, (x - out).detach(), dead)
    return loss, fired


def dead_feature_loss(sae: TopKTrainingSAE, x: Tensor, residual: Tensor, dead: Tensor) -> Tensor:
    """What the best d_model / 2 dead features of every token fail to explain of `residual` (Gao et al. 2024, A.2).

    Equal to `TopKTrainingSAE.calculate_topk_aux_loss`, but computed on the dead features alone.
    """
    which = dead.nonzero()[:, 0]
    aimed_at = x.shape[-1] // 2
    w_dec = sae.W_dec[which]
    centred = x - sae.b_dec if sae.cfg.apply_b_dec_to_input else x
    pre = torch.addmm(sae.b_enc[which], centred, sae.W_enc.index_select(1, which))
    if len(which) > aimed_at:
        ranked = pre.detach() * w_dec.detach().norm(dim=-1) if sae.cfg.rescale_acts_by_decoder_norm else pre.detach()
        kept = ranked.topk(aimed_at, dim=-1, sorted=False).indices
        pre = torch.zeros_like(pre).scatter(-1, kept, pre.gather(-1, kept))
    error: Tensor = (pre @ w_dec - residual).pow(2).sum(dim=-1).mean()
    coefficient: float = sae.cfg.aux_loss_coefficient * min(len(which) / aimed_at, 1.0)
    return coefficient * error


class _SparseTopK(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, x: Tensor, w_enc: Tensor, b_enc: Tensor, w_dec: Tensor, b_dec: Tensor, k: int, cfg: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        centred = x - b_dec if cfg.apply_b_dec_to_input else x
        pre = torch.addmm(b_enc, centred, w_enc)
        ranked = pre * w_dec.norm(dim=-1) if cfg.rescale_acts_by_decoder_norm else pre
        kept = ranked.topk(k, dim=-1, sorted=False).indices
        values = pre.gather(1, kept).relu_()
        ctx.save_for_backward(centred, kept, values, w_enc, w_dec)
        ctx.centres = cfg.apply_b_dec_to_input
        ctx.mark_non_differentiable(kept, values)
        return functional.embedding_bag(kept, w_dec, per_sample_weights=values, mode="sum") + b_dec, kept, values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        centred, kept, values, w_enc, w_dec = ctx.saved_tensors
        by_feature = _ByFeature(kept, width=len(w_dec))
        grad_values = _products_at(kept, grad, w_dec) * (values > 0)
        grad_b_enc = torch.zeros_like(w_enc[0]).index_add_(0, kept.flatten(), grad_values.flatten())
        grad_b_dec = grad.sum(dim=0)
        if ctx.centres:
            grad_b_dec = grad_b_dec - w_enc @ grad_b_enc
        grad_w_enc = by_feature.times(grad_values, centred).T
        return None, grad_w_enc, grad_b_enc, by_feature.times(values, grad), grad_b_dec, None, None


def _products_at(kept: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` where `kept` (tokens, k) points, and nowhere else: (tokens, k)."""
    tokens, k = kept.shape
    ends = torch.arange(0, tokens * k + 1, k, device=kept.device)
    pattern = _csr(ends, kept.flatten(), left.new_zeros(tokens * k), (tokens, len(right)))
    products: Tensor = torch.sparse.sampled_addmm(pattern, left, right.T, beta=0.0)
    return products.values().view(tokens, k)


def _csr(ends: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(ends, columns, values, shape, check_invariants=False)


class _ByFeature:
    """The sparse (tokens × width) matrix of what TopK kept, transposed: one compressed row per feature."""

    def __init__(self, kept: Tensor, *, width: int) -> None:
        features = kept.flatten()
        self._order = features.argsort(stable=True)
        self._tokens = self._order // kept.shape[1]
        counts = torch.bincount(features, minlength=width)
        self._ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self._shape = (width, kept.shape[0])

    def times(self, values: Tensor, dense: Tensor) -> Tensor:
        """The transposed matrix with `values` (tokens, k), times `dense` (tokens, d_model): (width, d_model)."""
        return _csr(self._ends, self._tokens, values.flatten()[self._order], self._shape) @ dense
