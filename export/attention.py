"""THE SEAM: the one attention function that every exported model goes through.

When run it is plain PyTorch, and the reference that the exported graph is held against. While exporting it emits the
fused operator `com.microsoft.MultiHeadAttention`. Emitted, not found: pattern matching on the finished graph fuses
nothing on today's exporter. Our own encoder calls `attend`; transformers calls it through its registry, under the
name `ATTENTION`.

`torch.onnx.ops.symbolic` has no implementation and answers zeros in eager mode without a word, and some transformers
models ignore the registry with no more than a warning. So nothing here is trusted: whoever exports counts the fused
nodes and compares the numbers (graph.py, verify.py).

Packed form. Rows of all sequences stand back to back (T, E). Attention alone needs (B, S, E), so rows are gathered into
slots on the way in and back on the way out. Unused slots hold a row of their own sequence: as keys they are masked by
`lengths`, as queries they are dropped. A masked value still counts 0 times, and 0 x NaN is NaN: another sequence's row
would bring its NaN along.

GroupQueryAttention was tried in the place of MultiHeadAttention: it skips padded keys and takes fewer heads of keys as
they are. Whole runs on one thread of ONNX Runtime 1.32 took 0.95 to 1.02 times as long on batches of like lengths,
which are what the scheduler makes, fp32 and int8 (MiniLM-L6, width 768, GPT-2, Qwen3), and 0.79 to 0.93 times where
lengths are from 5 to 120. It copies keys and values out for a decoder, and CUDA has it for 16 bits only, by its
documentation: one graph could not serve both devices in fp32. So it stays out.

What depends on where two tokens stand (a local window, a relative position bias) is a `bias` that is added to the
scores. It is made from `Packing.columns`, so a hole in a sequence counts as the distance that it had when padded.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

ATTENTION = "mhsa_packed"
OPERATOR_DOMAIN, OPERATOR = "com.microsoft", "MultiHeadAttention"

# Scores of masked keys are set to (eager) or lowered by (fused) this much. Not -inf: a row without any visible key
# would be NaN. Not the operator's default of -10000: logits can be that large.
_MASKED = torch.finfo(torch.float32).min

# What some transformers models hand to attention and this seam does not do. Ignoring one would give wrong numbers.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """How T rows fill B x S slots: pad_index (B, S) and unpad_index (T,) int64, lengths (B,) int32.

    `position_ids` (T,) int64, the column each row had, is there for attention that depends on distances.
    """

    pad_index: Tensor
    unpad_index: Tensor
    lengths: Tensor
    position_ids: Tensor | None = None
    # One bias per window size in a graph, however many layers share it.
    _windows: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def pad(self, rows: Tensor) -> Tensor:
        """(T, E) -> (B, S, E). An embedding lookup, because that is what becomes one Gather on axis 0."""
        return nn.functional.embedding(self.pad_index, rows)

    def unpad(self, slots: Tensor) -> Tensor:
        """(B, S, E) -> (T, E)."""
        return nn.functional.embedding(self.unpad_index, slots.flatten(0, 1))

    def is_real(self) -> Tensor:
        """(B, S) bool: which slots hold a token of their own."""
        return torch.arange(self.pad_index.shape[1], device=self.lengths.device) < self.lengths.unsqueeze(1)

    def pad_ids(self, ids: Tensor) -> Tensor:
        """(T,) int64 -> (B, S)."""
        return self.pad(ids.unsqueeze(1)).squeeze(2)

    def columns(self) -> Tensor:
        """(B, S) int64: the column of each slot's token. Unused slots stand where their sequence's first token does."""
        if self.position_ids is None:
            raise ValueError("attention that depends on distances needs position_ids in its packing")
        columns = self.pad_ids(self.position_ids)
        return torch.where(self.is_real(), columns, columns[:, :1])

    def window_bias(self, window: int) -> Tensor:
        """(B, 1, S, S): 0 where two columns are less than `window` apart, all but minus infinity elsewhere."""
        if window not in self._windows:
            columns = self.columns()
            distance = (columns.unsqueeze(2) - columns.unsqueeze(1)).abs()  # (B, S, S)
            self._windows[window] = torch.where(distance < window, 0.0, _MASKED).unsqueeze(1)
        return self._windows[window]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_heads: int,
    scale: float | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    bias: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """Concat(head_1..head_H) with head = softmax(Q K^T x scale + bias) V.

    Padded form: query, key, value (B, S, E), `mask` (B, S) bool, True where a key is real. Packed form: (T, E) with
    `packing`, which says what is real. In both, `bias` is (B or 1, H or 1, S, S), finite, and 0 for most models.
    `scale` is 1/sqrt(E/H) unless given. Source: Vaswani et al. 2017, 3.2.
    """
    if scale is None:
        scale = (query.shape[-1] // num_heads) ** -0.5
    if packing is None:
        return _attend_padded(query, key, value, num_heads, scale, mask, is_causal, bias)
    if mask is not None:
        raise ValueError("mask and packing are both given; a packed batch holds real tokens only")
    query, key, value = packing.pad(query), packing.pad(key), packing.pad(value)  # (B, S, E) each
    if torch.onnx.is_in_onnx_export():
        return packing.unpad(_emit_fused(query, key, value, num_heads, scale, is_causal, packing.lengths, bias))
    return packing.unpad(_attend_padded(query, key, value, num_heads, scale, packing.is_real(), is_causal, bias))


def _attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
    bias: Tensor | None,
) -> Tensor:
    q, k, v = (x.view(*x.shape[:-1], num_heads, -1).transpose(1, 2) for x in (query, key, value))  # (B, H, S, D)
    scores = q @ k.transpose(-2, -1) * scale  # (B, H, S, S)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], _MASKED)
    if is_causal:
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(is_later, _MASKED)
    attended: Tensor = scores.softmax(-1) @ v  # (B, H, S, D)
    return attended.transpose(1, 2).flatten(2)  # (B, S, E)


def _emit_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    scale: float,
    is_causal: bool,
    lengths: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """The fused operator on (B, S, E), with lengths as its 1-D mask and the bias as its attention_bias.

    Causal attention goes without the mask: no earlier slot of a real query is ever unused, and ONNX Runtime has a
    history of getting the two together wrong (onnxruntime#14363).
    """
    return torch.onnx.ops.symbolic(
        f"{OPERATOR_DOMAIN}::{OPERATOR}",
        (query, key, value, None, None if is_causal else lengths, bias),
        {"num_heads": num_heads, "scale": scale, "mask_filter_value": _MASKED, "unidirectional": int(is_causal)},
        dtype=query.dtype,
        shape=query.shape,
        version=1,
    )


def register_with_transformers() -> None:
    """Make `attn_implementation=ATTENTION` known to transformers; needed by its models only, so imported here."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _transformers_attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _no_mask(*_args: object, **_kwargs: object) -> None:
    """A packed batch needs no mask tensor: `lengths` travels in `packing`."""


def _transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The signature that transformers calls, on (1, H, T, D); `packing` is a keyword that was given to the model.

    Keys and values may have fewer heads, each of which serves as many heads of the query one after another.
    A token sees those less than `sliding_window` columns away. Source: transformers' masking_utils, where a causal
    window is that and a bidirectional one includes its bound; ModernBERT therefore adds 1 before it calls attention.
    """
    if unsupported := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} asks for {', '.join(unsupported)}, which packed attention lacks")
    if packing is None or attention_mask is not None or dropout:
        raise ValueError(f"{type(module).__name__}: packed attention takes `packing`, no mask and no dropout")
    num_heads = query.shape[1]
    key, value = (_repeat_heads(heads, num_heads // heads.shape[1]) for heads in (key, value))  # (1, H, T, D)
    rows = [heads.transpose(1, 2).reshape(-1, num_heads * heads.shape[-1]) for heads in (query, key, value)]  # (T, E)
    is_causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    bias = None if sliding_window is None else packing.window_bias(sliding_window)
    attended = attend(*rows, num_heads=num_heads, scale=scaling, is_causal=is_causal, bias=bias, packing=packing)
    return attended.view(1, -1, num_heads, value.shape[-1]), None  # (1, T, H, D)


def _repeat_heads(heads: Tensor, times: int) -> Tensor:
    """(1, H, T, D) -> (1, H x times, T, D), the repeats of a head side by side."""
    if times == 1:
        return heads
    return heads.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)
