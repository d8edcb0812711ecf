"""What comes after the encoder: one vector for each sequence.

A head has two forms that share their weights and nothing else. `forward` is the packed one, which is exported.
`reference` is what it is held against: one sequence, in plain PyTorch, written from the formula or left to the library
whose head it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from export.attention import Packing
from export.pooling import keep_nan, normalize, pool
from service.bundle import Pooling


class Head(nn.Module, ABC):
    """(T, E) -> (B, N). `pooling` is how the rows of a sequence become one."""

    pooling: Pooling
    normalize: bool

    @abstractmethod
    def output_size(self, hidden_size: int) -> int:
        """N, on an encoder of width E."""

    @abstractmethod
    def forward(self, rows: Tensor, packing: Packing, token_ids: Tensor) -> Tensor:
        """Rows and ids of a packed batch, (T, E) and (T,) -> (B, N)."""

    @abstractmethod
    def reference(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Rows and ids of one sequence, (L, E) and (L,) -> (N,)."""


class Dense(nn.Module):
    """sentence-transformers' Dense: a linear layer and an activation, on pooled vectors."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, activation: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation = activation

    def forward(self, vectors: Tensor) -> Tensor:
        projected: Tensor = self.activation(self.linear(vectors))
        return projected


class EmbeddingHead(Head):
    """Pooling, then any `dense` layers, then division by the L2 norm if `normalize`."""

    def __init__(self, pooling: Pooling, normalize: bool, dense: Sequence[Dense] = ()) -> None:
        super().__init__()
        self.pooling = pooling
        self.normalize = normalize
        self.dense = nn.Sequential(*dense)

    def output_size(self, hidden_size: int) -> int:
        widths = [layer.linear.out_features for layer in self.dense if isinstance(layer, Dense)]
        return widths[-1] if widths else hidden_size

    def forward(self, rows: Tensor, packing: Packing, _token_ids: Tensor) -> Tensor:
        pooled = pool(rows, packing, self.pooling)
        projected = keep_nan(self.dense(pooled), pooled) if len(self.dense) else pooled
        return normalize(projected) if self.normalize else projected

    def reference(self, rows: Tensor, _token_ids: Tensor) -> Tensor:
        vector: Tensor = self.dense(_POOL_ONE[self.pooling](rows))
        return nn.functional.normalize(vector, dim=-1) if self.normalize else vector


_POOL_ONE = {
    "mean": lambda rows: rows.mean(0),
    "cls": lambda rows: rows[0],
    "last": lambda rows: rows[-1],
    "max": lambda rows: rows.amax(0),
    "mean_sqrt_len": lambda rows: rows.sum(0) / len(rows) ** 0.5,
}
