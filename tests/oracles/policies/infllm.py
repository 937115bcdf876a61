"""InfLLM (arXiv:2402.04617): the distant past in blocks, found by representative keys, read without positions."""

import torch

from .base import Method
from .choices import highest


class InfLLM(Method):
    """Drops nothing; queries read the first tokens, the blocks most relevant to their chunk, and a local window.

    Chunks. The prompt is cut every `chunk` tokens from its start; each decode step is a chunk of one. Let s be the
    position of a chunk's first query.

    Blocks. All tokens, generated ones too, from position `initial` on: block j is positions
    [initial + j * block_size, initial + (j + 1) * block_size). It is complete for a chunk, and a candidate, if it ends
    at or before s - local (its end exclusive): it is then outside the window of every query of the chunk.

    Representatives. A token's score, for each KV head, is the mean attention (over the group's query heads, too) that
    it receives from the `local` queries that have it in their window, itself the first; the attention is the weight in
    the softmax over all that the query reads. A block's representatives are its `representatives` tokens with the
    highest scores, the smaller position among equals; its representative key is the mean of their keys at position 0.

    Relevance. The mean of the chunk's queries at position `local`, for each query head, times the representative key
    of its KV head, summed over all query heads: one list of blocks for a layer. The `num_blocks` most relevant are
    read, the earlier among equals.

    Reading. A query at position i reads, in one softmax,
    * with keys at position 0 and itself at position `local`: positions [0, initial), the chosen blocks, and what is in
      no complete block and has left its window, that is, from the end of the last complete block to i - local;
    * with ordinary positions: its window (i - local, i].
    While all fits, i < max(initial + local, b(P)), it reads everything with ordinary positions instead.

    Budget. num_blocks = max(1, floor((b(P) - initial - local) / block_size)); the option counts if the budget is empty.
    Below initial + local + block_size, more is read than the budget says.

    Differs from the authors' code: representatives and scores are per KV head, not per query head, and short contexts
    are exact, where theirs puts every token beyond `local` at that distance.
    """

    def __init__(self, budget, *, block_size=128, representatives=4, initial=128, local=4096, num_blocks=32, chunk=512):
        super().__init__(budget)
        self.block_size, self.representatives, self.num_blocks = block_size, representatives, num_blocks
        self.initial, self.local, self.chunk = initial, local, chunk

    def feed_prompt(self, prompt):
        self.exact_length = self.initial + self.local
        if self.budget:
            budget = self.limit(self.prompt_length)
            self.num_blocks = max(1, (budget - self.exact_length) // self.block_size)
            self.exact_length = max(self.exact_length, budget)
        for start in range(0, len(prompt), self.chunk):
            tokens = prompt[start : start + self.chunk]
            log_probs = self.decoder.feed(tokens, start, self.attend_step)
        self.num_seen = len(prompt)
        return log_probs[-1]

    def attend_step(self, index, query, key, value, first):
        """Attention of a chunk of queries that begins at position `first`."""
        heads = self.layers[index].heads
        for head, entries in enumerate(heads):
            for offset in range(key.shape[1]):
                self.append(entries, key[head, offset], value[head, offset], first + offset)
        num_complete = max(0, first - self.local - self.initial) // self.block_size
        far = {*range(self.initial), *self.chosen_tokens(heads, query.mean(1), num_complete)}
        remainder = self.initial + num_complete * self.block_size
        outputs = torch.empty_like(query)
        for head, entries in enumerate(heads):
            for offset in range(query.shape[1]):
                position = first + offset
                outside = max(0, position - self.local + 1)  # the window begins here
                distant = sorted(far | {*range(remainder, outside)})
                if position < self.exact_length:
                    distant, near = [], list(range(position + 1))
                else:
                    near = list(range(outside, position + 1))
                rows = slice(head * self.decoder.group, (head + 1) * self.decoder.group)
                outputs[rows, offset] = self.attend_one(entries, query[rows, offset], position, distant, near)
        return outputs

    def chosen_tokens(self, heads, query, num_complete):
        """Positions of the blocks that a chunk reads, given the mean of its queries [query_heads, head_dim]."""
        blocks = [
            range(self.initial + number * self.block_size, self.initial + (number + 1) * self.block_size)
            for number in range(num_complete)
        ]
        relevance = [0.0] * num_complete
        for head, entries in enumerate(heads):
            queries = self.decoder.rotate(self.queries_of(query, head), self.local)
            for number, block in enumerate(blocks):
                representative = self.representative_key([entries[position] for position in block])
                relevance[number] += float((queries @ representative).sum())
        return [position for number in highest(relevance, self.num_blocks) for position in blocks[number]]

    def representative_key(self, block):
        best = highest([entry.mean_received for entry in block], self.representatives)
        return torch.stack([self.decoder.rotate(block[number].raw_key, 0) for number in best]).mean(0)

    def attend_one(self, entries, query, position, distant, near):
        """Output of a group's query heads [group, head_dim] at one position."""
        keys = torch.stack([entries[number].key for number in near])
        scores = self.decoder.rotate(query, position) @ keys.T
        if distant:
            keys = torch.stack([self.decoder.rotate(entries[number].raw_key, 0) for number in distant])
            scores = torch.cat((self.decoder.rotate(query, self.local) @ keys.T, scores), -1)
        weights = (scores * self.decoder.scaling).softmax(-1)
        for column, number in enumerate(near, start=len(distant)):
            if number > position - self.local:
                self.record(entries[number], weights[:, column, None])
        return weights @ torch.stack([entries[number].value for number in distant + near])
