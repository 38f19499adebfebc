"""A small decoder-only transformer of torch.nn modules."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Attention and a feed-forward network, each with its norm before and its sum behind."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.after = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def projected(self, x):
        """Return queries, keys and values, each of (rows, heads, tokens, width of a head)."""
        rows, tokens, width = x.shape
        split = self.qkv(self.before(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        return split.permute(2, 0, 3, 1, 4)

    def rest(self, x, attended):
        """Return the block's output from its input and the result of attention."""
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.after(x))

    def forward(self, x):
        """Return the output for whole sequences."""
        q, k, v = self.projected(x)
        return self.rest(x, functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    def extended(self, x, caches):
        """Return the output for the next tokens of some sequences, and add their keys and values to `caches`."""
        q, k, v = self.projected(x)
        attended = []
        for row, cache in enumerate(caches):
            keys, values = k[row : row + 1], v[row : row + 1]
            if cache:
                keys, values = torch.cat([cache[0], keys], 2), torch.cat([cache[1], values], 2)
            else:
                # Copies, for views would keep the queries as well.
                keys, values = keys.contiguous(), values.contiguous()
            cache[:] = keys, values
            query = q[row : row + 1]
            causal = query.shape[2] > 1
            attended.append(functional.scaled_dot_product_attention(query, keys, values, is_causal=causal))
        return self.rest(x, torch.cat(attended))


class Model(nn.Module):
    """Tokens and places in, the next token's chances out."""

    def __init__(self, vocabulary, width, heads, layers, longest):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def loss(self, tokens, wanted, again=0):
        """Return the loss. Of each `again` blocks, one is computed again in the backward pass."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for number, block in enumerate(self.blocks):
            if again and number % again == 0:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def cache(self):
        """Return the cache of a sequence without tokens: one list a block."""
        return [[] for _ in self.blocks]

    def next(self, tokens, caches):
        """Return a next token for each row of `tokens`, whose earlier ones are in `caches`."""
        places = []
        for cache in caches:
            first = cache[0][0].shape[2] if cache[0] else 0
            places.append(torch.arange(first, first + tokens.shape[1]))
        x = self.token(tokens) + self.place(torch.stack(places).to(tokens.device))
        for number, block in enumerate(self.blocks):
            x = block.extended(x, [cache[number] for cache in caches])
        logits = self.head(self.norm(x[:, -1])).float()
        best, which = logits.topk(50)
        chosen = torch.multinomial(best.softmax(-1), 1)
        return which.gather(1, chosen)
