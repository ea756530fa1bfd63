"""Key-value cache with a length per row.

Keys and values live in preallocated slots, one per position. New ones are written at each row's
own offset; what attention sees is decided by the mask. Rolling back is therefore nothing: the loop
keeps shorter lengths, and the next tokens overwrite what was rejected. The last slot is a bin for
columns that hold no token.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class RowLayer(CacheLayerMixin):
    """One layer's slots, stored [slots, B, heads, dim]: what attention sees is a prefix of them,
    by rows or, in a packed forward, as one row."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: RowCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # zeros, not empty: a masked slot still multiplies its value by 0, and 0 * nan is nan
        self.keys, self.values = (
            x.new_zeros(self.cache.num_slots, self.cache.batch, x.shape[1], x.shape[3])
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, heads, W, dim] at the current slots; return the visible slots, same order.

        Packed: [1, heads, T, dim], and the visible slots of all rows.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write = self.cache.write_index(key_states.device)
        visible = self.cache.visible
        out = []
        for slots, new in ((self.keys, key_states), (self.values, value_states)):
            if isinstance(write, slice):
                slots[write] = new.permute(2, 0, 1, 3)
            else:
                slots.flatten(0, 1).index_copy_(0, write, new.transpose(1, 2).flatten(0, 1))
            if self.cache.packed:
                out.append(slots[:visible].flatten(0, 1)[None].transpose(1, 2))
            else:
                out.append(slots[:visible].permute(1, 2, 0, 3))
        return out[0], out[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return self.cache.visible * (self.cache.batch if self.cache.packed else 1)

    def get_max_length(self) -> int:
        return self.cache.num_slots


class RowCache(Cache):
    """Slots of all layers, and where the next forward writes.

    Args:
        batch: how many rows.
        capacity: how many positions a row may hold.
        num_layers: of the model.
    """

    def __init__(self, batch: int, capacity: int, num_layers: int):
        self.batch = batch
        self.num_slots = capacity + 1
        self.visible = 0
        self.packed = False
        self._write: torch.Tensor | slice = slice(0, 0)
        super().__init__(layers=[RowLayer(self) for _ in range(num_layers)])

    def set_slots(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        visible: int,
        *,
        packed: bool = False,
        uniform_start: int | None = None,
    ) -> None:
        """Say where the next forward writes.

        Args:
            rows, slots: int64, [B, W] or packed [T] together: the row and slot of each token;
                ``bin`` for columns without a token.
            visible: attention sees slots [0, visible).
            packed: the tokens of all rows are one row.
            uniform_start: set if every row writes at [start, start + W): one plain copy.
        """
        self.visible = visible
        self.packed = packed
        if uniform_start is not None:
            self._write = slice(uniform_start, uniform_start + slots.shape[1])
        else:
            self._write = (slots * self.batch + rows).flatten()

    def write_index(self, device: torch.device) -> torch.Tensor | slice:
        if isinstance(self._write, torch.Tensor) and self._write.device != device:
            return self._write.to(device)  # layers of one model may sit on several devices
        return self._write

    @property
    def bin(self) -> int:
        return self.num_slots - 1

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these (a finished row needs no more forwards)."""
        self.batch = len(rows)
        for layer in self.layers:
            if layer.is_initialized:
                index = torch.tensor(rows, device=layer.keys.device)
                layer.keys = layer.keys.index_select(1, index)
                layer.values = layer.values.index_select(1, index)
