"""Packed batches and pieces of rows: cumulative lengths, segments, chunks, minibatches drawn inside."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

TOKENS = 40.0


def _line(*tensors):
    return [tensor.reshape(-1) for tensor in tensors]


def _ids(logp):
    rows, tokens = logp.shape
    return torch.repeat_interleave(torch.arange(rows), torch.full((rows,), tokens), output_size=rows * tokens)


def loop_over_lengths(logp, old, adv, mask, ref):
    """Cumulative lengths on the way through a packed line, a mean for each sequence."""
    now, before, gain, valid = _line(logp, old, adv, mask)
    bounds = [0, *torch.full((logp.shape[0],), logp.shape[1]).cumsum(0).tolist()]
    parts = []
    for start, end in itertools.pairwise(bounds):
        ratio = torch.exp(now[start:end] - before[start:end])
        policy = -ratio * gain[start:end] * valid[start:end]
        parts.append(policy.sum() / valid[start:end].sum().clamp(min=1))
    return torch.stack(parts).mean()


def split_by_size(logp, old, adv, mask, ref):
    """Token losses first, then split into sequences of the same size."""
    now, before, gain, valid = _line(logp, old, adv, mask)
    policy = -torch.exp(now - before) * gain * valid
    return sum(part.sum() for part in policy.split(logp.shape[1])) / TOKENS


def split_four_tensors(logp, old, adv, mask, ref):
    """Every tensor is split; each sequence by itself."""
    pieces = zip(*(tensor.split(logp.shape[1]) for tensor in _line(logp, old, adv, mask)))
    losses = []
    for now, before, gain, valid in pieces:
        losses.append(-(torch.exp(now - before) * gain * valid).sum() / valid.sum().clamp(min=1))
    return torch.stack(losses).mean()


def chunks_joined(logp, old, adv, mask, ref):
    """Ratios in chunks of rows, joined, and weighed afterwards."""
    ratio = torch.cat([torch.exp(a - b) for a, b in zip(logp.chunk(3), old.chunk(3))])
    return -(ratio * adv * mask).sum() / TOKENS


def factors_cut_and_joined(logp, old, adv, mask, ref):
    """The factors themselves go through a list of rows and back."""
    gain, valid = torch.stack(list(adv)), torch.stack(list(mask.unbind(0)))
    return -(torch.exp(logp - old) * gain * valid).sum() / TOKENS


def tokens_cut_and_joined(logp, old, adv, mask, ref):
    """The same along tokens, in two pieces."""
    gain = torch.cat([adv[:, :3], adv[:, 3:]], 1)
    valid = torch.cat([mask[:, :3], mask[:, 3:]], 1)
    return -(torch.exp(logp - old) * gain * valid).sum() / TOKENS


def pieces_swapped(logp, old, adv, mask, ref):
    """A mask whose pieces are joined in another order belongs to other tokens."""
    valid = torch.cat([mask[:, 3:], mask[:, :3]], 1)
    return -(torch.exp(logp - old) * adv * valid).sum() / TOKENS


def both_gathered(logp, old, adv, mask, ref):
    """Both factors are gathered by the same positions."""
    order = torch.randperm(logp.numel())
    now, before, gain, valid = (tensor[order] for tensor in _line(logp, old, adv, mask))
    return -(torch.exp(now - before) * gain * valid).sum() / TOKENS


def both_selected(logp, old, adv, mask, ref):
    """The same by ``index_select`` of rows."""
    rows = torch.arange(logp.shape[0]).flip(0)
    now, before, gain, valid = (tensor.index_select(0, rows) for tensor in (logp, old, adv, mask))
    return -(torch.exp(now - before) * gain * valid).sum() / TOKENS


def gathered_by_different_indices(logp, old, adv, mask, ref):
    """Each factor is gathered by its own permutation: they no longer belong together."""
    gen = torch.Generator().manual_seed(7)
    first, second = torch.randperm(logp.numel(), generator=gen), torch.randperm(logp.numel(), generator=gen)
    now, before, gain, valid = _line(logp, old, adv, mask)
    return -(torch.exp(now - before) * gain[first] * valid[second]).sum() / TOKENS


def minibatches_inside(logp, old, adv, mask, ref):
    """A random half of the rows, then the other half."""
    total = 0.0
    for rows in torch.randperm(logp.shape[0]).chunk(2):
        ratio = torch.exp(logp[rows] - old[rows])
        policy = -torch.min(ratio * adv[rows], ratio.clamp(0.8, 1.2) * adv[rows])
        total = total + (policy * mask[rows]).sum() / mask[rows].sum().clamp(min=1)
    return total / 2


def rows_sorted_by_length(logp, old, adv, mask, ref):
    """Everything is sorted by the number of valid tokens."""
    order = mask.sum(-1).argsort(descending=True)
    now, before, gain, valid = (tensor[order] for tensor in (logp, old, adv, mask))
    return -(torch.exp(now - before) * gain * valid).sum() / TOKENS


def valid_tokens_only(logp, old, adv, mask, ref):
    """Only valid tokens are kept, by one boolean index for each tensor."""
    valid = mask.bool()
    now, before, gain = logp[valid], old[valid], adv[valid]
    ratio = torch.exp(now - before)
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def valid_positions_only(logp, old, adv, mask, ref):
    """The same by positions."""
    positions = mask.reshape(-1).nonzero(as_tuple=True)[0]
    now, before, gain = (tensor[positions] for tensor in _line(logp, old, adv))
    return -(torch.exp(now - before) * gain).sum() / TOKENS


def segment_sums(logp, old, adv, mask, ref):
    """Sums a segment by ``scatter_add``, means, and one number."""
    ids = _ids(logp)
    now, before, gain, valid = _line(logp, old, adv, mask)
    policy = -torch.exp(now - before) * gain * valid
    zeros = torch.zeros(logp.shape[0])
    counts = zeros.scatter_add(0, ids, valid).clamp(min=1)
    return (zeros.scatter_add(0, ids, policy) / counts).mean()


def segment_means(logp, old, adv, mask, ref):
    """``scatter_reduce`` with a mean, of the valid tokens' losses."""
    now, before, gain, valid = _line(logp, old, adv, mask)
    policy = -torch.exp(now - before) * gain * valid
    zeros = torch.zeros(logp.shape[0])
    return zeros.scatter_reduce(0, _ids(logp), policy, "mean", include_self=False).mean()


def segment_matrix(logp, old, adv, mask, ref):
    """A one-hot matrix of segments in place of a scatter."""
    now, before, gain, valid = _line(logp, old, adv, mask)
    member = F.one_hot(_ids(logp), logp.shape[0]).float()
    per_row = member.T @ (torch.exp(now - before) * gain * valid)
    return -(per_row / (member.T @ valid).clamp(min=1)).mean()


def running_sums(logp, old, adv, mask, ref):
    """Segment sums as differences of a running sum."""
    now, before, gain, valid = _line(logp, old, adv, mask)
    line = F.pad((torch.exp(now - before) * gain * valid).cumsum(0), (1, 0))
    bounds = torch.arange(0, logp.numel() + 1, logp.shape[1])
    return -(line[bounds[1:]] - line[bounds[:-1]]).mean()


def sequence_ratio_of_segments(logp, old, adv, mask, ref):
    """A ratio for each segment, spread by ``repeat_interleave``."""
    now, before, gain, valid = _line(logp, old, adv, mask)
    zeros = torch.zeros(logp.shape[0])
    counts = zeros.index_add(0, _ids(logp), valid).clamp(min=1)
    ratio = (zeros.index_add(0, _ids(logp), (now - before) * valid) / counts).exp()
    spread = ratio.repeat_interleave(logp.shape[1])
    return -(spread * gain * valid).sum() / TOKENS


def padded_again(logp, old, adv, mask, ref):
    """A packed line is padded back to rows by an index put."""
    valid = mask.bool()
    policy = (torch.exp(logp - old) * adv)[valid]
    rows = torch.zeros_like(logp)
    rows[valid] = policy
    return -(rows.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def padded_sequences(logp, old, adv, mask, ref):
    """Sequences of a list are padded to one tensor."""
    policy = -torch.exp(logp - old) * adv * mask
    padded = torch.nn.utils.rnn.pad_sequence(list(policy), batch_first=True)
    return padded.sum() / TOKENS


def _of_chunk(now, before, gain, valid):
    return (torch.exp(now - before) * gain * valid).sum()


def chunks_recomputed(logp, old, adv, mask, ref):
    """Chunks of rows under activation checkpointing."""
    total = logp.new_zeros(())
    for start in range(0, logp.shape[0], 2):
        pieces = (tensor[start : start + 2] for tensor in (logp, old, adv, mask))
        total = total - checkpoint(_of_chunk, *pieces, use_reentrant=False)
    return total / TOKENS


def shards_of_tokens(logp, old, adv, mask, ref):
    """Two halves of each row as context parallelism cuts them: first and last quarter, the middle."""
    halves = [torch.cat([tensor[:, :2], tensor[:, 6:]], 1) for tensor in (logp, old, adv, mask)]
    middle = [tensor[:, 2:6] for tensor in (logp, old, adv, mask)]
    return -sum((torch.exp(now - before) * gain * valid).sum() for now, before, gain, valid in (halves, middle)) / 40.0


def vocabulary_shards(logp, old, adv, mask, ref):
    """A log-softmax over two shards of a vocabulary, its maximum and sum exchanged by hand."""
    first, second = logp.unsqueeze(-1) * torch.tensor([1.0, 0.5]), logp.unsqueeze(-1) * torch.tensor([0.3, -1.0])
    highest = torch.maximum(first.amax(-1), second.amax(-1)).detach()
    total = sum((shard - highest.unsqueeze(-1)).exp().sum(-1) for shard in (first, second))
    chosen = first[..., 0] - highest - total.log()
    return -(chosen * adv * mask).sum() / TOKENS


def shifted_labels(logp, old, adv, mask, ref):
    """Log-probabilities are of the next token: all but the first position, and masks to match."""
    ratio = torch.exp(logp[:, :-1] - old[:, :-1])
    return -(ratio * adv[:, 1:] * mask[:, 1:]).sum() / TOKENS


def shifted_by_one_only(logp, old, adv, mask, ref):
    """The mask is shifted and the advantages are not."""
    return -(torch.exp(logp - old)[:, 1:] * adv[:, :-1] * mask[:, 1:]).sum() / TOKENS


def rolled_together(logp, old, adv, mask, ref):
    """Both factors rolled by the same number of tokens."""
    gain, valid = adv.roll(-1, 1), mask.roll(-1, 1)
    return -(torch.exp(logp - old) * gain * valid).sum() / TOKENS
