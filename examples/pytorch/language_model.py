"""Train a word-level LSTM on any text, with compressed gradients, and tell its perplexity.

Run::

    horovodrun --gloo -np 2 python examples/pytorch/language_model.py text.txt --compression dgc:ratio=0.01,momentum=0.5
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_compress.torch import Compression

parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path, help="a file in UTF-8; its last tenth is what the model is tested on")
parser.add_argument("--compression", default="topk:ratio=0.01", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--vocabulary", default=10_000, type=int, help="words; default: %(default)s")
parser.add_argument("--hidden", default=200, type=int, help="size of the LSTM; default: %(default)s")
parser.add_argument("--batch", default=20, type=int, help="of all ranks; default: %(default)s")
parser.add_argument("--length", default=35, type=int, help="words of a step; default: %(default)s")
parser.add_argument("--lr", default=20.0, type=float, help="learning rate; default: %(default)s")
parser.add_argument("--epochs", default=4, type=int, help="default: %(default)s")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)


def read() -> Tensor:
    """The text as numbers of words; those that are rare are all 0."""
    words = args.text.read_text().split()
    numbers = {word: 1 + number for number, (word, _) in enumerate(Counter(words).most_common(args.vocabulary - 1))}
    return torch.tensor([numbers.get(word, 0) for word in words])


class LanguageModel(nn.Module):
    """Two layers of LSTM; the embedding is the output's matrix, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(args.vocabulary, args.hidden)
        self.lstm = nn.LSTM(args.hidden, args.hidden, num_layers=2)
        self.bias = nn.Parameter(torch.zeros(args.vocabulary))
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)

    def forward(self, words: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Scores of the next word, of shape ``(length, batch, vocabulary)``, and the state after the last."""
        y, state = self.lstm(self.embed(words), state)
        return nn.functional.linear(y, self.embed.weight, self.bias), state


def pieces(numbers: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Words and those that follow them, of shape ``(length, batch)``: each rank reads other parts of the text."""
    columns = numbers[: len(numbers) // batch * batch].view(batch, -1).t()[:, hvd.rank() :: hvd.size()]
    for begin in range(0, len(columns) - 1, args.length):
        end = min(begin + args.length, len(columns) - 1)
        yield columns[begin:end], columns[begin + 1 : end + 1]


def perplexity(numbers: Tensor) -> float:
    """Return the perplexity, averaged over the ranks."""
    state, total, count = None, 0.0, 0
    with torch.no_grad():
        for words, following in pieces(numbers, hvd.size()):
            scores, state = model(words, state)
            total += float(nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="sum"))
            count += following.numel()
    return math.exp(float(hvd.allreduce(torch.tensor(total / count), name="perplexity")))


numbers = read()
train, test = numbers[: -len(numbers) // 10], numbers[-len(numbers) // 10 :]
model = LanguageModel()
compression = Compression.parse(args.compression)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(args.epochs):
    state = None
    for words, following in pieces(train, args.batch):
        optimizer.zero_grad()
        scores, state = model(words, state)
        state = (state[0].detach(), state[1].detach())
        nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten()).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with optimizer.skip_synchronize():
            optimizer.step()
    reached = perplexity(test)
    if hvd.rank() == 0:
        print(f"epoch={epoch + 1} perplexity={reached:.1f} ratio={compression.stats().ratio:.1f}", flush=True)
if hvd.rank() == 0:
    print(compression.stats())
