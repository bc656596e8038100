"""AReaL's packed tree training as a variant. (Separate module: alone needs areal.)

AReaL's own trie, packing, mask and gathering of outputs, with logits at every position.
Its attention is a Triton kernel or flex attention, both for GPUs; here it is PyTorch's
sdpa with AReaL's dense mask, as for the other packed variant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from bench.variants import RunCounts, Variant
from bench.workloads import Work

_MULTIPLE = 128  # of tokens, for AReaL's block masks


class ArealPacked(Variant):
    """Runs AReaL's packed trees, one call each."""

    def run(self, work: Work) -> RunCounts:
        from areal.api.cli_args import MicroBatchSpec
        from areal.models.tree_attn.tree import build_packed_tree_batch

        lengths = torch.tensor(work.lengths)
        num_tokens = max(1, work.tree.num_tree_tokens)
        tokens_BS = pad_sequence(work.tokens, batch_first=True)
        mask_BS = torch.arange(tokens_BS.shape[1])[None] < lengths[:, None]
        batch = build_packed_tree_batch(
            {"input_ids": tokens_BS, "attention_mask": mask_BS.to(work.device)},
            MicroBatchSpec(max_tokens_per_mb=-(-num_tokens // _MULTIPLE) * _MULTIPLE),
            pad_to_maximum=True,  # as AReaL demands
        )
        for packed in batch.mbs:
            self._train(work, packed)
        sizes = [packed["input_ids"].numel() for packed in batch.mbs]
        return RunCounts(len(sizes), sum(sizes))

    def _train(self, work: Work, packed: dict[str, Any]) -> None:
        from areal.models.tree_attn.functional import (
            gather_packed_tree_logprobs_entropy,
        )
        from areal.models.tree_attn.tree import build_attention_mask_from_trie

        trie, tokens_S = packed["trie_node"], packed["input_ids"].flatten()
        dtype = self._model.dtype
        sees_SS = build_attention_mask_from_trie(trie, len(tokens_S), work.device)
        mask_SS = torch.zeros(sees_SS.shape, dtype=dtype, device=work.device)
        mask_SS.masked_fill_(~sees_SS, torch.finfo(dtype).min)
        logits_SV = self._model(
            input_ids=tokens_S[None],
            position_ids=packed["position_ids"].reshape(1, -1),
            attention_mask=mask_SS[None, None],
            use_cache=False,
        ).logits[0]
        logprobs, entropies = gather_packed_tree_logprobs_entropy(
            logits_SV, trie, tokens_S
        )
        del logits_SV
        ids = trie.all_sequence_ids
        sizes = [len(work.tokens[i]) for i in ids]
        parts = zip(ids, logprobs.split(sizes), entropies.split(sizes), strict=True)
        losses = [work.loss(i, x[:-1], y[:-1]) for i, x, y in parts]
        torch.stack(losses).sum().backward()
