"""A transformers model behind the calling convention of `export.encoder.Encoder`, packed and padded."""

from torch import Tensor, nn
from transformers import PreTrainedModel

from export.attention import ATTENTION, Packing, register_with_transformers
from export.families.family import Positions, keep_columns


class TransformersEncoder(nn.Module):
    """A transformers model behind the calling convention of `export.encoder.Encoder`.

    `packed` runs packed batches on the same weights where the model's own code cannot: see `Family`.
    """

    def __init__(
        self, model: PreTrainedModel, positions: Positions = keep_columns, packed: nn.Module | None = None
    ) -> None:
        super().__init__()
        register_with_transformers()
        self.model = model
        self._positions = positions
        self._packed = packed

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Packed, (T,) -> (T, E), through the seam; or padded, (B, S) -> (B, S, E), in transformers' own attention.

        `position_ids` are columns. Padded they are left to transformers unless given.
        """
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        if packing is None:
            return self._forward_padded(token_ids, position_ids, mask, types)
        if position_ids is None:
            raise ValueError("a packed batch needs position_ids: sequences stand back to back")
        positions = self._positions(self.model.config, token_ids, position_ids, packing)
        if self._packed is not None:
            return self._packed(token_ids, positions, token_type_ids, packing)  # type: ignore[no-any-return]  # nn.Module
        self.model.set_attn_implementation(ATTENTION)
        inputs = {"input_ids": token_ids, "position_ids": positions} | types
        packed = self.model(**{name: ids.unsqueeze(0) for name, ids in inputs.items()}, packing=packing)  # (1, T) each
        return packed.last_hidden_state.squeeze(0)  # type: ignore[no-any-return]  # transformers returns untyped outputs

    def _forward_padded(
        self, token_ids: Tensor, position_ids: Tensor | None, mask: Tensor | None, types: dict[str, Tensor]
    ) -> Tensor:
        self.model.set_attn_implementation("eager")
        # A model that counts its own positions goes by the token ids; the columns say nothing to it.
        positions = (
            {"position_ids": position_ids} if self._positions is keep_columns and position_ids is not None else {}
        )
        mask = None if mask is None else mask.long()
        padded = self.model(input_ids=token_ids, attention_mask=mask, **positions, **types)
        return padded.last_hidden_state  # type: ignore[no-any-return]  # as above
